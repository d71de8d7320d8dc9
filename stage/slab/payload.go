package slab

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Payload is a published buffer. It implements stage.Memory.
type Payload struct {
	b       *Buffer
	specs   []wire.Spec
	err     error         // specs and buffer do not match: nothing can be offered
	offsets []int64       // of the tensors that have bytes, for own readers
	cover   []region.Span // what is granted
	number  uint64        // begins the names of its grants on the planes
	slot    uint32        // in the region's table
	gen     uint64        // of the slot; 0: it has none

	mu     sync.Mutex
	grants map[string]*grant
}

// grant is what one claim's reader was given. Its fields are of whoever offers or withdraws it, one at a time; a claim that is repeated
// can be offered twice at once, so mu guards Offer.
type grant struct {
	mu    sync.Mutex
	ways  []granted
	told  []*incarnation
	stuck bool // told are to be ended: Withdraw began
}

// granted is a grant on one plane.
type granted struct {
	way   *way
	token []byte
}

// Payload offers the buffer to readers: it implements stage.Memory. specs describe the slices; not to be changed afterwards. The buffer
// is the payload's from then on: its Release frees it, and Free does nothing any more. Nobody may write it.
func (b *Buffer) Payload(specs []wire.Spec) *Payload {
	p := &Payload{b: b, specs: specs, number: b.slab.payloads.Add(1)}
	b.mu.Lock()
	if b.freed || b.owned {
		p.b, p.err = &Buffer{slab: b.slab}, fmt.Errorf("%w: a payload of a buffer that was freed or published", ErrClosed)
	}
	b.owned = true
	b.mu.Unlock()
	if p.err != nil {
		return p
	}
	if len(specs) != len(b.spans) {
		p.err = fmt.Errorf("%w: %d specs for a buffer of %d tensors", ErrMismatch, len(specs), len(b.spans))
		return p
	}
	for i, at := range b.spans {
		if n := b.size(i); specs[i].Size != n {
			p.err = fmt.Errorf("%w: tensor %d has %d bytes, its spec says %d", ErrMismatch, i, n, specs[i].Size)
			return p
		}
		if at.Length > 0 {
			p.offsets = append(p.offsets, at.Offset)
			p.cover = appendSpan(p.cover, at)
		}
	}
	if len(p.cover) > transfer.MaxSpans { // then it is in one extent, see space.place
		last := p.cover[len(p.cover)-1]
		p.cover = []region.Span{{Offset: p.cover[0].Offset, Length: last.Offset + last.Length - p.cover[0].Offset}}
	}
	if !b.OnDevice() {
		p.slot, p.gen = b.slab.slots.take(p.number, &b.holding, b.bytes)
	}
	return p
}

// appendSpan adds at, merged with the last one if they touch.
func appendSpan(spans []region.Span, at region.Span) []region.Span {
	if n := len(spans); n > 0 && spans[n-1].Offset+spans[n-1].Length == at.Offset {
		spans[n-1].Length += at.Length
		return spans
	}
	return append(spans, at)
}

// Bytes is the sum of the tensors' sizes.
func (p *Payload) Bytes() int64 { return p.b.bytes }

// Slices are the tensors' memory, not to be written, until Release.
func (p *Payload) Slices() [][]byte { return p.b.slices }

// Offer implements stage.Memory. For an own reader it fills in Ferry.Inline if the payload is small enough, else Ferry.Planes (a
// grant on each plane that the reader named), Ferry.Offsets, Ferry.Slot and Ferry.Gen. For a plain reader (ask is nil), and for any reader of a payload that
// has tensors in device memory: AgentMetadata and Groups, of the serving agent of now. Errors: ErrNoPlane, ErrMismatch, ErrClosed, and
// those of the planes.
func (p *Payload) Offer(ctx context.Context, id string, ask *wire.FerryRequest, m *wire.Metadata) error {
	switch {
	case p.err != nil:
		return p.err
	case ask == nil || m.Ferry == nil:
		return p.offerPlain(id, m)
	case p.b.OnDevice():
		if !slices.Contains(ask.Planes, transfer.NIXL) {
			return fmt.Errorf("%w: the reader takes %s, device memory needs nixl", ErrNoPlane, names(ask.Planes))
		}
		return p.offerPlain(id, m)
	case p.b.bytes <= min(max(ask.Inline, 0), wire.MaxInline):
		m.Ferry.Inline = p.inline()
		return nil
	}
	g := p.grant(id)
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, w := range p.b.slab.ways {
		if !slices.Contains(ask.Planes, w.plane.Name()) {
			continue
		}
		offer, err := p.offerOn(w, id, g)
		if err != nil {
			return err
		}
		if offer.Metadata != nil {
			m.Ferry.Planes = append(m.Ferry.Planes, offer)
		}
	}
	if len(m.Ferry.Planes) == 0 {
		return fmt.Errorf("%w: the reader takes %s, here are %s", ErrNoPlane, names(ask.Planes), names(p.b.slab.Planes()))
	}
	m.Ferry.Offsets, m.Ferry.Slot, m.Ferry.Gen = p.offsets, p.slot, p.gen
	return nil
}

// offerOn grants on one plane. No metadata: nothing serves it there right now.
func (p *Payload) offerOn(w *way, id string, g *grant) (wire.PlaneOffer, error) {
	o := wire.PlaneOffer{Name: w.plane.Name()}
	if w.server != nil {
		// Such a plane has no tokens. What ends a reader is the end of the incarnation that it is told.
		i, ok := w.server.tell(g, false)
		if ok {
			o.Metadata = i.Metadata
		}
		return o, nil
	}
	o.Metadata = w.reg.Metadata()
	if !w.tokens {
		return o, nil // a grant would keep nobody out
	}
	at := slices.IndexFunc(g.ways, func(o granted) bool { return o.way == w })
	if at < 0 {
		token, err := w.reg.Grant(p.name(id), p.cover)
		if err != nil {
			return o, fmt.Errorf("slab: grant on plane %s: %w", o.Name, err)
		}
		at = len(g.ways)
		g.ways = append(g.ways, granted{w, token})
	}
	o.Token = g.ways[at].token
	return o, nil
}

// offerPlain tells a reader where the tensors are in the agent that serves them now: one group for each memory type.
func (p *Payload) offerPlain(id string, m *wire.Metadata) error {
	at := slices.IndexFunc(p.b.slab.ways, func(w *way) bool { return w.server != nil })
	if at < 0 {
		return fmt.Errorf("%w: plain readers need nixl, here are %s", ErrNoPlane, names(p.b.slab.Planes()))
	}
	g := p.grant(id)
	g.mu.Lock()
	defer g.mu.Unlock()
	i, ok := p.b.slab.ways[at].server.tell(g, m.Ferry == nil)
	if !ok {
		return fmt.Errorf("%w: the nixl agent that serves plain readers is being started again", ErrNoPlane)
	}
	m.AgentMetadata, m.Groups = i.Agent, nil
	for t := range p.b.spans {
		at := p.b.place(t, i.Base)
		if at.Bytes == 0 {
			continue
		}
		kind := at.Type.String()
		k := slices.IndexFunc(m.Groups, func(g wire.Group) bool { return g.MemoryType == kind })
		if k < 0 {
			k = len(m.Groups)
			m.Groups = append(m.Groups, wire.Group{MemoryType: kind})
		}
		r := wire.Region{Tensor: t, Addr: at.Addr, Bytes: int64(at.Bytes), Device: int(at.Device)}
		m.Groups[k].Regions = append(m.Groups[k].Regions, r)
	}
	return nil
}

// inline copies all tensors' bytes.
func (p *Payload) inline() []byte {
	b := make([]byte, 0, p.b.bytes)
	for _, s := range p.b.slices {
		b = append(b, s...)
	}
	return b
}

// grant gives the grant of that name.
func (p *Payload) grant(id string) *grant {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.grants[id]
	if g == nil {
		g = &grant{}
		if p.grants == nil {
			p.grants = map[string]*grant{}
		}
		p.grants[id] = g
	}
	return g
}

// name of a grant on the planes: several stores may have payloads in one slab, whose grants have the same names.
func (p *Payload) name(id string) string { return strconv.FormatUint(p.number, 36) + "." + id }

// Withdraw implements stage.Memory. Tokens are revoked. Whoever could still READ without one (a plain reader, or an own one by nixl)
// and did not end its claim itself is stopped by rotation: the serving agent that it was told is ended once no other claim needs it.
// Withdraw then waits for that until ctx is done; called again, it goes on.
func (p *Payload) Withdraw(ctx context.Context, id string, idle bool) error {
	p.mu.Lock()
	g := p.grants[id]
	p.mu.Unlock()
	if g == nil {
		return nil // inline, or never offered
	}
	for _, w := range g.ways {
		w.way.reg.Revoke(p.name(id))
	}
	g.ways = nil
	for _, w := range p.b.slab.ways {
		if w.server == nil || len(g.told) == 0 {
			continue
		}
		if idle && !g.stuck {
			w.server.leave(g)
		} else if err := w.server.stop(ctx, g); err != nil {
			return err
		}
	}
	p.mu.Lock()
	delete(p.grants, id)
	p.mu.Unlock()
	return nil
}

// Release implements stage.Memory.
func (p *Payload) Release() {
	if p.gen != 0 {
		p.b.slab.slots.give(p.slot)
	}
	p.b.mu.Lock()
	p.b.owned = false
	p.b.mu.Unlock()
	p.b.Free()
}

// Planes are the names of the planes, by preference: what a reader says that it can take (wire.FerryRequest.Planes).
func (s *Slab) Planes() []string {
	var all []string
	for _, w := range s.ways {
		all = append(all, w.plane.Name())
	}
	return all
}

func names(all []string) string {
	if len(all) == 0 {
		return "none"
	}
	return strings.Join(all, ", ")
}
