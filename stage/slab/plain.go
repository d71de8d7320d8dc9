package slab

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	AddRegistrationAgent(ctx context.Context, metadata []byte) (a *nixl.PlainAgent, base uint64, err error)
}

// readPlaces reads by address: what m.Groups name, or, where there are none, what an own producer offers by nixl. The buffer's READ has
// begun, and is ended here.
func (s *Slab) readPlaces(ctx context.Context, m *wire.Metadata, into *Buffer) (string, error) {
	var plane agentPlane
	for _, w := range s.ways {
		if p, ok := w.plane.(agentPlane); ok {
			plane = p
		}
	}
	if plane == nil {
		into.end()
		return "", fmt.Errorf("%w: this one needs nixl, here are %s", ErrNoPlane, names(s.Planes()))
	}
	// A second time: the agent may have registered an address anew, which the first failure has forgotten, or READs of others have
	// failed, and this one with them.
	var over bool
	var err error
	for range 2 {
		if over, err = s.wait(ctx, s.postPlaces(ctx, plane, m, into)); !over {
			return "", fmt.Errorf("slab: plane %s: %w", plane.Name(), err)
		}
		if !errors.Is(err, transfer.ErrPeerLost) || ctx.Err() != nil {
			break
		}
	}
	into.end()
	if errors.Is(err, transfer.ErrUnreachable) {
		return "", fmt.Errorf("%w: plane %s: %w", ErrNoPlane, plane.Name(), err)
	}
	if err != nil {
		return "", fmt.Errorf("slab: plane %s: %w", plane.Name(), err)
	}
	return plane.Name(), nil
}

// postPlaces posts the READs of one payload. The agent stays known to the plane when they are over: each payload of a plain producer
// comes with other metadata of the same agent.
func (s *Slab) postPlaces(ctx context.Context, plane agentPlane, m *wire.Metadata, into *Buffer) flight {
	f := flight{into: into, over: func(bool) {}}
	agent, from, to, err := s.pair(ctx, plane, m, into)
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

// pair gives where the tensors are at the producer, and where each of these goes here. The caller closes the agent.
func (s *Slab) pair(ctx context.Context, plane agentPlane, m *wire.Metadata, into *Buffer) (agent *nixl.PlainAgent, from, to []nixl.Place, err error) {
	for i := range into.spans {
		if p := into.place(i, s.base()); p.Bytes > 0 {
			to = append(to, p)
		}
	}
	if len(m.Groups) > 0 {
		if from, err = named(m, into); err == nil {
			agent, err = plane.AddPlainAgent(ctx, m.AgentMetadata)
		}
		return agent, from, to, err
	}
	if m.Ferry != nil && len(m.Ferry.Offsets) > 0 {
		at := slices.IndexFunc(m.Ferry.Planes, func(o wire.PlaneOffer) bool { return o.Name == plane.Name() })
		spans, err := remote(m)
		if err != nil || at < 0 {
			return nil, nil, nil, errors.Join(err, fmt.Errorf("%w: what goes into device memory has to be offered by nixl", ErrNoPlane))
		}
		agent, base, err := plane.AddRegistrationAgent(ctx, m.Ferry.Planes[at].Metadata)
		return agent, addressed(spans, base), to, err
	}
	return nil, nil, nil, fmt.Errorf("%w: no descriptors", ErrNoPlane)
}

// named gives where m.Groups say that the tensors are, in the order of Specs.
func named(m *wire.Metadata, into *Buffer) ([]nixl.Place, error) {
	all := make([]nixl.Place, len(into.spans))
	for _, g := range m.Groups {
		kind, err := binding.ParseMemoryType(g.MemoryType)
		if err != nil {
			return nil, fmt.Errorf("%w: a group of %w", ErrNoPlane, err)
		}
		for _, r := range g.Regions {
			if r.Tensor < 0 || r.Tensor >= len(all) || all[r.Tensor].Bytes > 0 || r.Bytes <= 0 || r.Bytes != into.size(r.Tensor) || r.Device < 0 {
				return nil, fmt.Errorf("%w: a region of %d bytes on device %d for tensor %d", ErrMismatch, r.Bytes, r.Device, r.Tensor)
			}
			all[r.Tensor] = nixl.Place{Type: kind, Addr: r.Addr, Bytes: uint64(r.Bytes), Device: uint64(r.Device)}
		}
	}
	from := all[:0]
	for i, p := range all {
		switch {
		case p.Bytes > 0:
			from = append(from, p)
		case into.size(i) > 0:
			return nil, fmt.Errorf("%w: no region for tensor %d", ErrMismatch, i)
		}
	}
	return from, nil
}
