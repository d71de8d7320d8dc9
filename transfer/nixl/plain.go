package nixl

import (
	"context"
	"fmt"
	"sync"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
)

// maxPlainMetadata of an agent that lists what it has registered piece by piece: 44 bytes each (NIXL 1.3.2).
const maxPlainMetadata = 2 << 20

// PlainAgent is the agent of an unmodified peer whose memory lies anywhere. All methods are safe for concurrent use.
type PlainAgent struct{ peer *peer }

// AddPlainAgent makes the agent of an unmodified peer readable by address. Metadata that is another one than before of an agent that
// is known (it has registered more since) costs no connection. The caller closes it. Errors as with AddPeer.
func (p *Plane) AddPlainAgent(ctx context.Context, agentMetadata []byte) (*PlainAgent, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(agentMetadata) > maxPlainMetadata {
		return nil, fmt.Errorf("%w: nixl: %d bytes of agent metadata, at most %d", transfer.ErrBadRequest, len(agentMetadata), maxPlainMetadata)
	}
	c, err := p.addPeer(ctx, agentMetadata, olderVersions, layout{})
	if err != nil {
		return nil, err
	}
	return &PlainAgent{c}, nil
}

// AddRegistrationAgent is AddPlainAgent for a registration of a plane of ours, by its metadata, whose memory begins at base there: for
// destinations that only Read of PlainAgent takes.
func (p *Plane) AddRegistrationAgent(ctx context.Context, metadata []byte) (a *PlainAgent, base uint64, err error) {
	if err := ctx.Err(); err != nil {
		return nil, 0, err
	}
	m, err := parseMetadata(metadata)
	if err != nil {
		return nil, 0, err
	}
	c, err := p.addPeer(ctx, m.agent, m.version, layout{})
	if err != nil {
		return nil, 0, err
	}
	return &PlainAgent{c}, m.base, nil
}

// Read posts READs of from[i], which the agent has registered, into to[i], of as many bytes, which lies in memory that is registered
// on this plane: one READ for each pair of memory types, without a notification. The outcome is that of all together. ctx bounds the
// posting only.
func (a *PlainAgent) Read(ctx context.Context, from, to []Place) (transfer.Read, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if len(from) == 0 || len(from) != len(to) || len(from) > maxPieces {
		return nil, fmt.Errorf("%w: nixl: %d places into %d, 1 to %d are possible", transfer.ErrBadRequest, len(from), len(to), maxPieces)
	}
	c := a.peer
	known, id, err := c.handle(ctx)
	if err != nil {
		return nil, err
	}
	var ops []readOp
	var near []binding.MemoryType // of each op
	for i, f := range from {
		at, ok := c.plane.findDestination(to[i])
		switch {
		case !f.valid() || f.Bytes != to[i].Bytes:
			return nil, fmt.Errorf("%w: nixl: place %d: %+v into %+v", transfer.ErrBadRequest, i, f, to[i])
		case !ok:
			return nil, fmt.Errorf("%w: nixl: the destination %+v is not registered here", transfer.ErrBadRequest, to[i])
		}
		k := 0
		for k < len(ops) && (ops[k].far != f.Type || near[k] != to[i].Type) {
			k++
		}
		if k == len(ops) {
			ops, near = append(ops, readOp{peer: id, far: f.Type}), append(near, to[i].Type)
		}
		ops[k].pieces = append(ops[k].pieces, piece{at.memory, at.offset, f.Addr, f.Bytes, f.Device})
	}
	rd, err := c.begin(known)
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	var first error
	left := len(ops)
	for _, op := range ops {
		rd.post(op, func(err error) {
			mu.Lock()
			if first == nil {
				first = err
			}
			left--
			last := left == 0
			mu.Unlock()
			if last {
				rd.end(first)
			}
		})
	}
	return rd, nil
}

// Close lets go of the agent, as Peer.Close of transfer does.
func (a *PlainAgent) Close() error { return a.peer.Close() }

func (p *Plane) findDestination(at Place) (local, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.find(at)
}
