package wire

import (
	"fmt"
	"math"

	"github.com/tensorferry/tensorferry/tensor"
)

// Check says whether m is metadata that a peer accepts, and that is within this package's limits: each tensor's size is that of
// its dtype and shape, the groups' regions are exactly the tensors that have bytes, each once and whole, at addresses that exist.
// With Ferry.Offsets or Ferry.Inline there may be no group at all: then only own ends can read it; nor has an own end's that names no
// claim, which says what there is and cannot be read. Errors wrap ErrMalformed,
// ErrLimit or ErrSchema.
func (m *Metadata) Check() error {
	if err := m.check(); err != nil {
		return fmt.Errorf("%w: %s", err.kind, err.text)
	}
	return nil
}

// fault is what is wrong with metadata.
type fault struct {
	kind error
	text string
}

func bad(format string, args ...any) *fault {
	return &fault{ErrMalformed, fmt.Sprintf(format, args...)}
}

func over(what string, n, limit int) *fault {
	return &fault{ErrLimit, fmt.Sprintf("%d %s, limit %d", n, what, limit)}
}

func (m *Metadata) check() *fault {
	if m.Kind < Tensors || m.Kind > Object {
		return &fault{ErrSchema, fmt.Sprintf("kind %d", m.Kind)}
	}
	if len(m.Specs) > MaxTensors {
		return over("tensors", len(m.Specs), MaxTensors)
	}
	total, holding := int64(0), 0
	for i := range m.Specs {
		s := &m.Specs[i]
		n, err := s.DType.Bytes(s.Shape)
		if err != nil {
			return bad("tensor %d: %v", i, err)
		}
		if n != s.Size {
			return bad("tensor %d has size %d, %v%v has %d bytes", i, s.Size, s.DType, s.Shape, n)
		}
		if total > math.MaxInt64-n {
			return bad("the tensors have over 2^63 bytes")
		}
		total += n
		if n > 0 {
			holding++
		}
	}
	if total != m.Size {
		return bad("size is %d, the tensors have %d bytes", m.Size, total)
	}
	if f := m.checkKind(); f != nil {
		return f
	}
	inOffsets, f := m.checkFerry(holding)
	if f != nil {
		return f
	}
	if (inOffsets || m.Ferry != nil && m.Claim.IsZero()) && len(m.Groups) == 0 {
		return nil
	}
	return m.checkGroups(holding)
}

// checkKind looks at the tensor that a skeleton or an object is in.
func (m *Metadata) checkKind() *fault {
	switch {
	case len(m.Specs) == 0:
		return bad("no tensor")
	case m.Kind == Tensors:
		return nil
	case m.Kind == Object && len(m.Specs) > 1:
		return bad("an object in %d tensors, want one", len(m.Specs))
	}
	if s := &m.Specs[0]; s.DType != tensor.Uint8 || len(s.Shape) != 1 || s.Size == 0 {
		return bad("a serialized value in a tensor %v%v, want torch.uint8 of one dimension", s.DType, s.Shape)
	}
	return nil
}

// checkFerry also says whether own ends find all bytes without the groups.
func (m *Metadata) checkFerry(holding int) (found bool, f *fault) {
	x := m.Ferry
	if x == nil {
		return false, nil
	}
	if len(x.Planes) > MaxPlanes {
		return false, over("planes", len(x.Planes), MaxPlanes)
	}
	if x.Top > TopTuple || x.Top == TopBare && len(m.Specs) != 1 || x.Top != TopUnknown && m.Kind != Tensors {
		return false, bad("top %d of %d tensors of kind %v", x.Top, len(m.Specs), m.Kind)
	}
	if x.Inline != nil {
		if len(x.Inline) > MaxInline {
			return false, over("bytes inline", len(x.Inline), MaxInline)
		}
		if int64(len(x.Inline)) != m.Size {
			return false, bad("%d bytes inline, the tensors have %d", len(x.Inline), m.Size)
		}
		found = true
	}
	if len(x.Offsets) == 0 {
		return found, nil
	}
	if len(x.Offsets) != holding {
		return false, bad("%d offsets for %d tensors that have bytes", len(x.Offsets), holding)
	}
	next := x.Offsets
	for i := range m.Specs {
		n := m.Specs[i].Size
		if n == 0 {
			continue
		}
		if next[0] < 0 || next[0] > math.MaxInt64-n {
			return false, bad("tensor %d of %d bytes at offset %d", i, n, next[0])
		}
		next = next[1:]
	}
	return true, nil
}

func (m *Metadata) checkGroups(holding int) *fault {
	if len(m.Groups) > MaxGroups {
		return over("groups", len(m.Groups), MaxGroups)
	}
	seen := make([]bool, len(m.Specs))
	n := 0
	for i := range m.Groups {
		g := &m.Groups[i]
		if len(g.Regions) == 0 || g.MemoryType == "" {
			return bad("group %d has no regions or no memory type", i)
		}
		for j := range g.Regions {
			r := &g.Regions[j]
			if r.Tensor < 0 || r.Tensor >= len(seen) || seen[r.Tensor] {
				return bad("tensor %d in group %d is not there, or in a group already", r.Tensor, i)
			}
			if r.Bytes <= 0 || r.Bytes != m.Specs[r.Tensor].Size {
				return bad("tensor %d has a region of %d bytes, and %d itself", r.Tensor, r.Bytes, m.Specs[r.Tensor].Size)
			}
			if r.Addr == 0 || r.Addr > math.MaxUint64-uint64(r.Bytes) || r.Device < 0 {
				return bad("tensor %d at address %#x of device %d", r.Tensor, r.Addr, r.Device)
			}
			seen[r.Tensor] = true
			n++
		}
	}
	if n != holding {
		return bad("%d regions for %d tensors that have bytes", n, holding)
	}
	if n > 0 && len(m.AgentMetadata) == 0 {
		return bad("regions without an agent")
	}
	return nil
}
