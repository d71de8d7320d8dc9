package nixl

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Operation of a request.
type Operation int32

const (
	Read  Operation = 0 // remote to local
	Write Operation = 1 // local to remote
)

// Descs are ranges of one memory type.
type Descs struct {
	Type   MemoryType
	Ranges []Range
}

// RequestOptions of a transfer.
type RequestOptions struct {
	Notification []byte   // delivered to the peer's agent when the transfer is complete; nil: none
	Backend      *Backend // nil: the library chooses
}

// Request is one transfer. Release it exactly when done with it; releasing one that is in progress does not stop it.
type Request struct {
	agent *Agent
	h     handle
	bytes uint64
	freed atomic.Bool
}

// NewRequest prepares a transfer between local ranges and as many remote ones, pairwise of equal length.
// All local ranges must lie in memory registered here, the remote ones in memory registered there: else an error.
func (a *Agent) NewRequest(op Operation, local, remote Descs, peer *Peer, o RequestOptions) (*Request, error) {
	total, err := checkRanges("local", local.Ranges)
	if err != nil {
		return nil, err
	}
	if _, err := checkRanges("remote", remote.Ranges); err != nil {
		return nil, err
	}
	if len(local.Ranges) != len(remote.Ranges) {
		return nil, fmt.Errorf("%w: %d local ranges for %d remote ones", ErrBadArgument, len(local.Ranges), len(remote.Ranges))
	}
	for i := range local.Ranges {
		if local.Ranges[i].Len != remote.Ranges[i].Len {
			return nil, fmt.Errorf("%w: range %d is %d bytes here, %d there", ErrBadArgument, i, local.Ranges[i].Len, remote.Ranges[i].Len)
		}
	}
	if err := a.enterFor(peer, o.Backend); err != nil {
		return nil, err
	}
	defer a.leave()
	h, s := a.c.createRequest(a.h, requestArgs{
		operation: op, peer: peer.name, localType: local.Type, remoteType: remote.Type,
		local: local.Ranges, remote: remote.Ranges, notification: o.Notification, backend: backendHandle(o.Backend),
	})
	if s != StatusSuccess {
		return nil, s.err(fmt.Sprintf("create request of %d ranges with peer %s", len(local.Ranges), peer.name))
	}
	return a.track(h, total), nil
}

func backendHandle(b *Backend) handle {
	if b == nil {
		return 0
	}
	return b.h
}

// enterFor is enter, with the peer and the backend checked; leave must follow if it gives nil.
func (a *Agent) enterFor(peer *Peer, b *Backend) error {
	if peer.agent != a || b != nil && b.agent != a {
		return fmt.Errorf("%w: the peer or the backend belongs to another agent", ErrBadArgument)
	}
	if err := a.enter(); err != nil {
		return err
	}
	if err := peer.check(); err != nil {
		a.leave()
		return err
	}
	return nil
}

func (a *Agent) track(h handle, bytes uint64) *Request {
	r := &Request{agent: a, h: h, bytes: bytes}
	a.mu.Lock()
	a.requests[r] = struct{}{}
	a.mu.Unlock()
	return r
}

// enter is the agent's, for a request that is not released; leave must follow if it gives nil.
func (r *Request) enter() error {
	if err := r.agent.enter(); err != nil {
		return err
	}
	if r.freed.Load() {
		r.agent.leave()
		return fmt.Errorf("request: %w", ErrClosed)
	}
	return nil
}

// Post starts the transfer and tells whether it is complete already. A request that completed may be posted again.
// Over shared memory (cma) the bytes are copied inside this call.
func (r *Request) Post() (done bool, err error) {
	if err := r.enter(); err != nil {
		return false, err
	}
	defer r.agent.leave()
	return outcome(r.agent.c.post(r.agent.h, r.h), "post")
}

// Status tells whether the transfer is complete; an error is terminal: the destination may be partly written, and is not written any more.
func (r *Request) Status() (done bool, err error) {
	if err := r.enter(); err != nil {
		return false, err
	}
	defer r.agent.leave()
	return outcome(r.agent.c.status(r.agent.h, r.h), "transfer")
}

func outcome(s Status, operation string) (bool, error) {
	switch s {
	case StatusSuccess:
		return true, nil
	case StatusInProgress:
		return false, nil
	}
	return true, s.err(operation)
}

// Polling of a request in progress: a few rounds at once, since small transfers end in microseconds, then at growing pauses.
const (
	pollAtOnce   = 64
	pollFirst    = 20 * time.Microsecond
	pollSlowest  = time.Millisecond
	pollGrowth   = 2
	pollPerPause = 4
)

// Wait polls until the transfer is terminal or ctx ends. With ctx's error the transfer is still in progress and may write its destination.
func (r *Request) Wait(ctx context.Context) error {
	var timer *time.Timer
	pause := pollFirst
	for round := 0; ; round++ {
		if done, err := r.Status(); done || err != nil {
			return err
		}
		if round < pollAtOnce {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("transfer of %d bytes still in progress: %w", r.bytes, err)
			}
			continue
		}
		if timer == nil {
			timer = time.NewTimer(pause)
			defer timer.Stop()
		} else {
			timer.Reset(pause)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("transfer of %d bytes still in progress: %w", r.bytes, ctx.Err())
		case <-timer.C:
		}
		if round%pollPerPause == 0 {
			pause = min(pause*pollGrowth, pollSlowest)
		}
	}
}

// Telemetry of a completed request.
type Telemetry struct {
	Post, Transfer     time.Duration
	Bytes, Descriptors uint64
}

func microseconds(n uint64) time.Duration { return time.Duration(min(n, 1<<53)) * time.Microsecond }

// Telemetry needs AgentConfig.Telemetry; else StatusNoTelemetry.
func (r *Request) Telemetry() (Telemetry, error) {
	if err := r.enter(); err != nil {
		return Telemetry{}, err
	}
	defer r.agent.leave()
	t, s := r.agent.c.telemetry(r.agent.h, r.h)
	return t, s.err("telemetry")
}

// Release frees the request. Idempotent; must not run beside another call on the same request.
func (r *Request) Release() {
	if r.agent.enter() != nil {
		return
	}
	defer r.agent.leave()
	if !r.freed.CompareAndSwap(false, true) {
		return
	}
	r.agent.mu.Lock()
	delete(r.agent.requests, r)
	r.agent.mu.Unlock()
	r.agent.c.releaseRequest(r.agent.h, r.h)
}

// Prepared is a list of ranges checked once and used by index in many requests.
type Prepared struct {
	agent *Agent
	peer  *Peer // nil: local memory
	h     handle
	lens  []uint64
}

// Prepare checks ranges once: of this agent's registered memory (peer nil) or of the peer's.
func (a *Agent) Prepare(peer *Peer, d Descs, backends ...*Backend) (*Prepared, error) {
	if _, err := checkRanges("prepare", d.Ranges); err != nil {
		return nil, err
	}
	name := prepareLocal
	var err error
	if peer != nil {
		name = peer.name
		err = a.enterFor(peer, nil)
	} else {
		err = a.enter()
	}
	if err != nil {
		return nil, err
	}
	defer a.leave()
	handles, err := a.backendHandles(backends)
	if err != nil {
		return nil, err
	}
	h, s := a.c.prepare(a.h, name, d.Type, d.Ranges, handles)
	if s != StatusSuccess {
		return nil, s.err(fmt.Sprintf("prepare %d ranges", len(d.Ranges)))
	}
	p := &Prepared{agent: a, peer: peer, h: h, lens: make([]uint64, len(d.Ranges))}
	for i, r := range d.Ranges {
		p.lens[i] = r.Len
	}
	a.mu.Lock()
	a.prepared[p] = struct{}{}
	a.mu.Unlock()
	return p, nil
}

// Close frees the list. Idempotent. Requests made from it must be released first.
func (p *Prepared) Close() {
	if p.agent.enter() != nil {
		return
	}
	defer p.agent.leave()
	p.agent.mu.Lock()
	_, live := p.agent.prepared[p]
	delete(p.agent.prepared, p)
	p.agent.mu.Unlock()
	if live {
		p.agent.c.releasePrepared(p.agent.h, p.h)
	}
}

// NewPreparedRequest prepares a transfer between elements of two prepared lists, pairwise.
func (a *Agent) NewPreparedRequest(op Operation, local *Prepared, localIndices []int32, remote *Prepared, remoteIndices []int32, o RequestOptions) (*Request, error) {
	if local.agent != a || local.peer != nil || remote.peer == nil {
		return nil, fmt.Errorf("%w: the first list must be this agent's own, the second a peer's", ErrBadArgument)
	}
	if len(localIndices) == 0 || len(localIndices) != len(remoteIndices) {
		return nil, fmt.Errorf("%w: %d local indices for %d remote ones", ErrBadArgument, len(localIndices), len(remoteIndices))
	}
	var total uint64
	for i, l := range localIndices {
		r := remoteIndices[i]
		if l < 0 || int(l) >= len(local.lens) || r < 0 || int(r) >= len(remote.lens) || local.lens[l] != remote.lens[r] {
			return nil, fmt.Errorf("%w: pair %d: local index %d of %d, remote index %d of %d, of equal length", ErrBadArgument, i, l, len(local.lens), r, len(remote.lens))
		}
		total += local.lens[l]
	}
	if err := a.enterFor(remote.peer, o.Backend); err != nil {
		return nil, err
	}
	defer a.leave()
	a.mu.Lock()
	_, liveLocal := a.prepared[local]
	_, liveRemote := a.prepared[remote]
	a.mu.Unlock()
	if !liveLocal || !liveRemote {
		return nil, fmt.Errorf("prepared list: %w", ErrClosed)
	}
	h, s := a.c.makeRequest(a.h, preparedArgs{
		operation: op, local: local.h, remote: remote.h, localIndices: localIndices, remoteIndices: remoteIndices,
		notification: o.Notification, backend: backendHandle(o.Backend),
	})
	if s != StatusSuccess {
		return nil, s.err(fmt.Sprintf("make request of %d pairs with peer %s", len(localIndices), remote.peer.name))
	}
	return a.track(h, total), nil
}
