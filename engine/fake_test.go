package engine

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// fakePool is a node in memory. Its hooks let a test stop it at a call.
type fakePool struct {
	info client.Pool
	lost chan struct{}

	mu       sync.Mutex
	changed  chan struct{}
	entries  map[string]*fakeEntry
	full     bool
	calls    map[string]int
	onFetch  func(ctx context.Context, p ec.Params) (<-chan client.FetchResult, error)
	announce []client.AnnounceItem
}

type fakeEntry struct {
	spec  ec.Spec
	bufs  [][]byte
	ready bool
	pins  int
}

func newFakePool(width int) *fakePool {
	return &fakePool{
		info: client.Pool{Model: "tiny-mm", Dtype: Dtype, BlockBytes: int64(2 * width), Node: "node-a", PeerHost: "127.0.0.1", PeerPort: 5601},
		lost: make(chan struct{}), changed: make(chan struct{}), entries: make(map[string]*fakeEntry), calls: make(map[string]int),
	}
}

func (p *fakePool) dial(context.Context) (Pool, error) { return p, nil }

func (p *fakePool) lock(call string) func() {
	p.mu.Lock()
	p.calls[call]++
	return p.mu.Unlock
}

func (p *fakePool) change() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *fakePool) put(key string, s ec.Spec, data []byte) {
	defer p.lock("put")()
	p.entries[key] = &fakeEntry{spec: s, bufs: [][]byte{data}, ready: true}
	p.change()
}

func (p *fakePool) Pool() client.Pool     { return p.info }
func (p *fakePool) Done() <-chan struct{} { return p.lost }
func (p *fakePool) Close() error          { return nil }

type fakeReservation struct {
	p   *fakePool
	key string
	e   *fakeEntry
}

func (p *fakePool) Reserve(_ context.Context, items ...ReserveItem) ([]ReserveResult, error) {
	defer p.lock("reserve")()
	results := make([]ReserveResult, len(items))
	for i, it := range items {
		r, err := p.reserve(it.Key, it.Spec)
		results[i] = ReserveResult{r, err}
	}
	return results, nil
}

// reserve gives two extents, so that an encoder that takes its room for one slice is found out.
func (p *fakePool) reserve(key string, s ec.Spec) (Reservation, error) {
	switch e := p.entries[key]; {
	case e != nil && (!slices.Equal(e.spec.Shape, s.Shape) || e.spec.Dtype != s.Dtype):
		return nil, ec.ErrConflict
	case e != nil && e.ready:
		return nil, ec.ErrHeld
	case e != nil:
		return nil, ec.ErrPending
	case p.full:
		return nil, ec.ErrFull
	}
	cut := s.Shape[0] / 2 * p.info.BlockBytes
	e := &fakeEntry{spec: s, bufs: [][]byte{make([]byte, cut), make([]byte, s.Bytes-cut)}}
	p.entries[key] = e
	return &fakeReservation{p, key, e}, nil
}

func (r *fakeReservation) Key() string       { return r.key }
func (r *fakeReservation) Buffers() [][]byte { return r.e.bufs }

func (p *fakePool) Commit(_ context.Context, filled ...Reservation) ([]MapResult, error) {
	defer p.lock("commit")()
	results := make([]MapResult, len(filled))
	for i, f := range filled {
		r := f.(*fakeReservation)
		r.e.ready = true
		r.e.pins++
		results[i].Mapped = &fakeMapped{p, r.e}
	}
	p.change()
	return results, nil
}

func (r *fakeReservation) Discard(context.Context) error {
	defer r.p.lock("discard")()
	delete(r.p.entries, r.key)
	r.p.change()
	return nil
}

func (p *fakePool) WaitReady(ctx context.Context, key string) error {
	for {
		unlock := p.lock("wait")
		e, changed := p.entries[key], p.changed
		ready := e != nil && e.ready
		unlock()
		switch {
		case e == nil:
			return ec.ErrMissing
		case ready:
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

type fakeMapped struct {
	p *fakePool
	e *fakeEntry
}

func (p *fakePool) Map(_ context.Context, keys ...string) ([]MapResult, error) {
	defer p.lock("map")()
	results := make([]MapResult, len(keys))
	for i, key := range keys {
		switch e := p.entries[key]; {
		case e == nil:
			results[i].Err = ec.ErrMissing
		case !e.ready:
			results[i].Err = ec.ErrNotReady
		default:
			e.pins++
			results[i].Mapped = &fakeMapped{p, e}
		}
	}
	return results, nil
}

func (m *fakeMapped) Spec() ec.Spec     { return m.e.spec }
func (m *fakeMapped) Buffers() [][]byte { return m.e.bufs }
func (m *fakeMapped) Release()          { defer m.p.lock("release")(); m.e.pins-- }

func (p *fakePool) Announce(_ context.Context, items []client.AnnounceItem) (ec.Params, error) {
	defer p.lock("announce")()
	var out ec.Params
	for _, it := range items {
		p.announce = append(p.announce, it)
		e := p.entries[it.Key]
		if e == nil {
			out.Set(it.Key, &ec.Announcement{Metadata: []byte("{}")})
			continue
		}
		out.Set(it.Key, &ec.Announcement{
			ItemIndices: it.ItemIndices, Metadata: it.Metadata, PeerHost: p.info.PeerHost, PeerPort: p.info.PeerPort,
			SizeBytes: e.spec.Bytes, Shape: []int{int(e.spec.Shape[0]), int(e.spec.Shape[1])},
		})
	}
	return out, nil
}

func (p *fakePool) Fetch(ctx context.Context, params ec.Params, _ time.Duration) (<-chan client.FetchResult, error) {
	unlock := p.lock("fetch")
	hook := p.onFetch
	unlock()
	if hook == nil {
		return nil, errors.New("no peer in this test")
	}
	return hook(ctx, params)
}

// count is the number of calls so far.
func (p *fakePool) count(call string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.calls[call]
}

// pinned is the number of pins that are left.
func (p *fakePool) pinned() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.entries {
		n += e.pins
	}
	return n
}
