package nixl

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/transfer"
)

// DeviceMemory is memory, of a device usually, that the agents of a registration serve beside the registration's own, and that READs
// of PlainAgent write where it is.
type DeviceMemory struct {
	r    *Registration
	m    *memory
	once sync.Once
}

// AddDevice has the agents of the registration serve one more piece of memory, the one of now and those that come: once for all that
// ever lies in it. From then on Agent and Incarnation give agent metadata that lists it. It needs agents in this process
// (Options.Command empty), since no other one sees the memory. The caller owns the memory and keeps it until Close. ErrBadRequest: it
// overlaps memory that is registered, or the library does not take it.
func (r *Registration) AddDevice(ctx context.Context, at Place) (*DeviceMemory, error) {
	p := r.plane
	switch {
	case len(p.o.Command) > 0:
		return nil, fmt.Errorf("%w: nixl: memory of a device needs agents in this process: leave Options.Command empty", transfer.ErrBadRequest)
	case !at.valid():
		return nil, fmt.Errorf("%w: nixl: memory at %+v", transfer.ErrBadRequest, at)
	}
	d := &DeviceMemory{r: r, m: &memory{place: at}}
	p.mu.Lock()
	err := p.book(d.m)
	p.mu.Unlock()
	if err != nil {
		return nil, err
	}
	if err = r.serveDevice(ctx, d.m); err == nil {
		err = p.fetch.attach(ctx, nil, d.m)
	}
	if err != nil {
		_ = d.Close() // gives nil
		return nil, fmt.Errorf("nixl: memory of a device: %w", err)
	}
	return d, nil
}

// serveDevice attaches m to the incarnation of now.
func (r *Registration) serveDevice(ctx context.Context, m *memory) error {
	r.rotating.Lock()
	defer r.rotating.Unlock()
	r.mu.Lock()
	closed := r.closed
	r.mu.Unlock()
	if closed {
		return transfer.ErrClosed
	}
	r.devices = append(r.devices, m)
	i := r.cur.Load()
	if i == nil {
		return nil // the next one serves it
	}
	with, err := i.agent.attach(ctx, m.attachment(false))
	if err == nil {
		r.relist(i, with.metadata)
	}
	return err
}

// relist hands out other metadata of the same agent. If that has died meanwhile, the next one's is handed out.
func (r *Registration) relist(i *incarnation, metadata []byte) {
	next := *i
	next.place.metadata = metadata
	r.cur.CompareAndSwap(i, &next)
}

// Close withdraws the memory. READs into it must have ended, and so must those of peers that were told of it: to stop such a one,
// rotate the registration's agent and end the former one first. Idempotent.
func (d *DeviceMemory) Close() error {
	d.once.Do(func() {
		r := d.r
		r.rotating.Lock()
		defer r.rotating.Unlock()
		r.devices = slices.DeleteFunc(r.devices, func(m *memory) bool { return m == d.m })
		r.mu.Lock()
		for i := range r.old {
			i.agent.detach(d.m.id)
		}
		r.mu.Unlock()
		if i := r.cur.Load(); i != nil {
			i.agent.detach(d.m.id)
			if md, err := i.agent.(*engine).agent.LocalMetadata(); err == nil { // else it is over
				r.relist(i, md)
			}
		}
		r.plane.removeMemory(d.m)
	})
	return nil
}
