package slab

import (
	"context"
	"errors"
	"fmt"
	"sync"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// agentPlane reads by address from whoever registered the memory with an agent: nixl.
type agentPlane interface {
	transfer.Plane
	AddPlainAgent(ctx context.Context, agentMetadata []byte) (*nixl.PlainAgent, error)
}

// readPlaces reads what m.Groups name. The buffer's READ has begun, and is ended here.
func (s *Slab) readPlaces(ctx context.Context, m *wire.Metadata, into *Buffer) (string, error) {
	var plane agentPlane
	for _, w := range s.ways {
		if p, ok := w.plane.(agentPlane); ok {
			plane = p
		}
	}
	if plane == nil {
		into.end()
		return "", fmt.Errorf("%w: it offers nixl only, here are %s", ErrNoPlane, names(s.planeNames()))
	}
	from, to, err := s.places(m, into)
	// A second time: the agent may have registered an address anew, which the first failure has forgotten, or READs of others have
	// failed, and this one with them.
	for range 2 {
		if err != nil && !lost(err) || ctx.Err() != nil {
			break
		}
		if err = s.wait(ctx, postPlaces(ctx, plane, m.AgentMetadata, from, to, into)); err == nil || errors.Is(err, errAbandoned) {
			break
		}
	}
	if errors.Is(err, errAbandoned) {
		return "", fmt.Errorf("slab: plane %s: %w", plane.Name(), ctx.Err())
	}
	into.end()
	if err != nil {
		return "", fmt.Errorf("slab: plane %s: %w", plane.Name(), err)
	}
	return plane.Name(), nil
}

// postPlaces posts the READs of one payload. The agent stays known to the plane when they are over: each payload of a plain producer
// comes with other metadata of the same agent.
func postPlaces(ctx context.Context, plane agentPlane, metadata []byte, from, to []nixl.Place, into *Buffer) flight {
	f := flight{into: into, over: func(bool) {}}
	agent, err := plane.AddPlainAgent(ctx, metadata)
	if err != nil {
		f.err = err
		return f
	}
	end := sync.OnceFunc(func() { _ = agent.Close() }) // gives nil
	f.over, f.force = func(bool) { end() }, end
	rd, err := agent.Read(ctx, from, to)
	if err != nil {
		f.err = err
		return f
	}
	f.reads = []transfer.Read{rd}
	return f
}

// places pairs where the tensors are at the producer with where they go here.
func (s *Slab) places(m *wire.Metadata, into *Buffer) (from, to []nixl.Place, err error) {
	seen := make([]bool, len(into.spans))
	for _, g := range m.Groups {
		kind, err := binding.ParseMemoryType(g.MemoryType)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: a group of %w", ErrNoPlane, err)
		}
		for _, r := range g.Regions {
			if r.Tensor < 0 || r.Tensor >= len(into.spans) || seen[r.Tensor] || r.Bytes <= 0 || r.Bytes != into.spans[r.Tensor].Length || r.Device < 0 {
				return nil, nil, fmt.Errorf("%w: a region of %d bytes on device %d for tensor %d", ErrMismatch, r.Bytes, r.Device, r.Tensor)
			}
			seen[r.Tensor] = true
			from = append(from, nixl.Place{Type: kind, Addr: r.Addr, Bytes: uint64(r.Bytes), Device: uint64(r.Device)})
			to = append(to, nixl.PlaceOf(into.slices[r.Tensor]))
		}
	}
	if holding := into.holding(); len(from) != holding {
		return nil, nil, fmt.Errorf("%w: %d regions for %d tensors that have bytes", ErrMismatch, len(from), holding)
	}
	return from, to, nil
}

// holding counts the tensors that have bytes.
func (b *Buffer) holding() (n int) {
	for _, at := range b.spans {
		if at.Length > 0 {
			n++
		}
	}
	return n
}
