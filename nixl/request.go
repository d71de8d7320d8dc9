package nixl

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// Operation of a request.
type Operation int32

const (
	Read  Operation = 0 // remote to local
	Write Operation = 1 // local to remote
)

func (o Operation) check() error {
	if o != Read && o != Write {
		return fmt.Errorf("%w: operation %d is neither Read (%d) nor Write (%d)", ErrBadArgument, int32(o), Read, Write)
	}
	return nil
}

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

// Request is one transfer. Release it when done with it; releasing one that is in progress does not stop it.
type Request struct {
	agent *Agent
	h     handle
	bytes uint64
	one   bool // it is of one pair of ranges
	uses  uses
	open  atomic.Bool // posted, and what it writes may still be written

	// What the request points to inside of the library.
	peer   *Peer
	loads  uint64 // of the peer, when the request was made
	typ    MemoryType
	local  []Range
	epoch  uint64        // of the agent, when the request was made
	closes atomic.Uint64 // of registrations, when the local ranges were last seen to be registered
}

// uses counts those who use a C object. The last one destroys it.
type uses struct {
	n      atomic.Int64 // with the owner; 0: destroyed
	closed atomic.Bool  // the owner has let go
}

func (u *uses) init() { u.n.Store(1) }

// take is false once the owner has let go; else drop must follow.
func (u *uses) take() bool {
	for !u.closed.Load() {
		n := u.n.Load()
		if n == 0 {
			return false
		}
		if u.n.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

// drop is true for the last.
func (u *uses) drop() bool { return u.n.Add(-1) == 0 }

// end is the owner's drop. It is true for one call at most.
func (u *uses) end() bool { return !u.closed.Swap(true) && u.drop() }

// NewRequest prepares a transfer between local ranges and as many remote ones, pairwise of equal length.
// All local ranges must lie in memory registered here, the remote ones in memory registered there: else it is a Status. Nothing of the lists is
// kept by reference. The caller releases the request. ErrBadArgument: an operation or memory type that is none, lists or lengths that differ, no ranges, a peer or backend of another agent;
// ErrStalePeer.
func (a *Agent) NewRequest(op Operation, local, remote Descs, peer *Peer, o RequestOptions) (*Request, error) {
	if err := op.check(); err != nil {
		return nil, err
	}
	total, err := checkRanges("local", local.Type, local.Ranges)
	if err != nil {
		return nil, err
	}
	if _, err := checkRanges("remote", remote.Type, remote.Ranges); err != nil {
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
	return a.track(h, total, peer, local.Type, slices.Clone(local.Ranges)), nil
}

func backendHandle(b *Backend) handle {
	if b == nil {
		return 0
	}
	return b.h
}

// enterFor is enter, with the peer and the backend checked; leave must follow if it gives nil.
func (a *Agent) enterFor(peer *Peer, b *Backend) error {
	if peer == nil {
		return fmt.Errorf("%w: the peer is nil", ErrBadArgument)
	}
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

func (a *Agent) track(h handle, bytes uint64, peer *Peer, t MemoryType, local []Range) *Request {
	r := &Request{
		agent: a, h: h, bytes: bytes, one: len(local) == 1,
		peer: peer, loads: peer.loads, typ: t, local: local, epoch: a.epoch.Load(),
	}
	r.uses.init()
	r.closes.Store(a.closes)
	a.mu.Lock()
	a.requests[r] = struct{}{}
	a.mu.Unlock()
	return r
}

// enter is the agent's, for a request that is not released; leave must follow if it gives nil. Until then the C request exists.
func (r *Request) enter() error {
	if err := r.agent.enter(); err != nil {
		return err
	}
	if !r.uses.take() {
		r.agent.leave()
		return fmt.Errorf("request: %w", ErrClosed)
	}
	return nil
}

func (r *Request) leave() {
	if r.uses.drop() {
		r.destroy()
	}
	r.agent.leave()
}

func (r *Request) destroy() {
	r.agent.mu.Lock()
	delete(r.agent.requests, r)
	r.agent.mu.Unlock()
	r.agent.release(r.h)
}

// fresh is nil if what the request points to inside of the library is there. It is for those who are in the gate.
func (r *Request) fresh() error {
	if err := r.peer.check(); err != nil {
		return err
	}
	if r.loads != r.peer.loads {
		return fmt.Errorf("request made before peer %s was loaded again: %w", r.peer.name, ErrStalePeer)
	}
	if closes := r.agent.closes; closes != r.closes.Load() {
		if !r.agent.covers(r.typ, r.local, r.epoch) {
			return fmt.Errorf("request: the registration of its local memory: %w", ErrClosed)
		}
		r.closes.Store(closes)
	}
	return nil
}

// Post starts the transfer and tells whether it is complete already. A request that completed may be posted again; one in progress may
// not (a Status). Over shared memory (cma) the bytes are copied inside this call. ErrStalePeer, or ErrClosed of the local memory: nothing was
// posted. After a Status see Settled.
func (r *Request) Post() (done bool, err error) {
	if err := r.enter(); err != nil {
		return false, err
	}
	defer r.leave()
	if err := r.fresh(); err != nil {
		return false, err
	}
	before := r.open.Swap(true)
	s := r.agent.c.post(r.agent.h, r.h)
	if s == StatusSuccess || s < 0 && !before && r.one {
		r.open.Store(false)
	}
	return outcome(s, "post")
}

// Status tells whether the transfer is complete. With an error the destination may be partly written, and it does not follow that it is not
// written any more: see Settled. The library learns of progress, and sends the notification, in this call.
func (r *Request) Status() (done bool, err error) {
	if err := r.enter(); err != nil {
		return false, err
	}
	defer r.leave()
	s := r.agent.c.status(r.agent.h, r.h)
	if s == StatusSuccess || s < 0 && r.one && r.peer.over == nil && r.loads == r.peer.loads {
		r.open.Store(false)
	}
	return outcome(s, "transfer")
}

// Settled tells whether nothing of this request writes its destination any more: it was never posted, or it succeeded, or it is of one pair
// of ranges and failed for its own sake. Of a request of several pairs that fails, the library forgets the pieces that it had started, which
// may still arrive; and after Peer.Close, or when the peer was replaced, an error says nothing of the transfer. Then only closing the agent
// is the end of it: until then the destination must stay mapped, and must not be used for anything else.
func (r *Request) Settled() bool { return !r.open.Load() }

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

// Wait polls until the transfer is terminal or ctx ends. With ctx's error the transfer is still in progress and may write its destination;
// Wait may be called again. Other errors are those of Status.
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
	defer r.leave()
	t, s := r.agent.c.telemetry(r.agent.h, r.h)
	return t, s.err("telemetry")
}

// Backend is the one that moves this request. ErrClosed: it was released.
func (r *Request) Backend() (*Backend, error) {
	if err := r.enter(); err != nil {
		return nil, err
	}
	defer r.leave()
	a := r.agent
	a.mu.Lock()
	var backends []*Backend
	var handles []handle
	for b := range a.backends {
		backends, handles = append(backends, b), append(handles, b.h)
	}
	a.mu.Unlock()
	h, s := a.c.requestBackend(a.h, r.h, handles)
	if s != StatusSuccess {
		return nil, s.err("backend of a request")
	}
	return backends[slices.Index(handles, h)], nil
}

// Estimate is how long the backend expects a transfer to take, and how far off that may be.
type Estimate struct{ Duration, Margin time.Duration }

// Estimate asks the backend what the transfer would take. A Status: it cannot tell, as many cannot.
func (r *Request) Estimate() (Estimate, error) {
	if err := r.enter(); err != nil {
		return Estimate{}, err
	}
	defer r.leave()
	if err := r.fresh(); err != nil {
		return Estimate{}, err
	}
	e, s := r.agent.c.estimate(r.agent.h, r.h)
	return e, s.err("estimate")
}

// Release frees the request, once no other call on it is under way. Idempotent.
func (r *Request) Release() {
	if r.agent.enter() != nil {
		return
	}
	defer r.agent.leave()
	if r.uses.end() {
		r.destroy()
	}
}

// Prepared is a list of ranges checked once and used by index in many requests.
type Prepared struct {
	agent *Agent
	peer  *Peer // nil: local memory
	h     handle
	d     Descs
	uses  uses

	// As of a Request, when the list was made.
	loads, epoch uint64
	closes       atomic.Uint64
}

// Prepare checks ranges once: of this agent's registered memory (peer nil) or of the peer's, for the given backends (none: all). Requests over
// two lists by index, see NewPreparedRequest, are cheaper to make than ones over ranges. The caller closes the list. ErrBadArgument: a range of
// address or length 0, or a memory type that is none; ErrStalePeer; a Status: a range that is not registered.
func (a *Agent) Prepare(peer *Peer, d Descs, backends ...*Backend) (*Prepared, error) {
	if _, err := checkRanges("prepare", d.Type, d.Ranges); err != nil {
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
	p := &Prepared{agent: a, peer: peer, h: h, d: Descs{d.Type, slices.Clone(d.Ranges)}, epoch: a.epoch.Load()}
	p.closes.Store(a.closes)
	if peer != nil {
		p.loads = peer.loads
	}
	p.uses.init()
	a.mu.Lock()
	a.prepared[p] = struct{}{}
	a.mu.Unlock()
	return p, nil
}

// Close frees the list, once no other call uses it. Idempotent. Requests made from it stay good.
func (p *Prepared) Close() {
	if p.agent.enter() != nil {
		return
	}
	defer p.agent.leave()
	if p.uses.end() {
		p.destroy()
	}
}

// drop follows each take of its uses, inside of the gate.
func (p *Prepared) drop() {
	if p.uses.drop() {
		p.destroy()
	}
}

func (p *Prepared) destroy() {
	p.agent.mu.Lock()
	delete(p.agent.prepared, p)
	p.agent.mu.Unlock()
	p.agent.c.releasePrepared(p.agent.h, p.h)
}

// fresh is as a Request's.
func (p *Prepared) fresh() error {
	if p.peer != nil && p.loads != p.peer.loads {
		return fmt.Errorf("list made before peer %s was loaded again: %w", p.peer.name, ErrStalePeer)
	}
	if closes := p.agent.closes; p.peer == nil && closes != p.closes.Load() {
		if !p.agent.covers(p.d.Type, p.d.Ranges, p.epoch) {
			return fmt.Errorf("list: the registration of its memory: %w", ErrClosed)
		}
		p.closes.Store(closes)
	}
	return nil
}

// NewPreparedRequest prepares a transfer between elements of two prepared lists, pairwise, by index: the local list is this agent's own
// memory, the remote one a peer's. Pairs must be of equal length. ErrBadArgument: they are not, an operation or index that is none, or a list of another
// agent or side; ErrClosed and ErrStalePeer of the lists. The caller releases the request.
func (a *Agent) NewPreparedRequest(op Operation, local *Prepared, localIndices []int32, remote *Prepared, remoteIndices []int32, o RequestOptions) (*Request, error) {
	if err := op.check(); err != nil {
		return nil, err
	}
	if local == nil || remote == nil {
		return nil, fmt.Errorf("%w: a prepared list is nil", ErrBadArgument)
	}
	if local.agent != a || remote.agent != a || local.peer != nil || remote.peer == nil {
		return nil, fmt.Errorf("%w: the first list must be this agent's own, the second a peer's", ErrBadArgument)
	}
	if len(localIndices) == 0 || len(localIndices) != len(remoteIndices) {
		return nil, fmt.Errorf("%w: %d local indices for %d remote ones", ErrBadArgument, len(localIndices), len(remoteIndices))
	}
	var total uint64
	ranges, there := local.d.Ranges, remote.d.Ranges
	mine := make([]Range, len(localIndices))
	for i, l := range localIndices {
		r := remoteIndices[i]
		if l < 0 || int(l) >= len(ranges) || r < 0 || int(r) >= len(there) || ranges[l].Len != there[r].Len {
			return nil, fmt.Errorf("%w: pair %d: local index %d of %d, remote index %d of %d, of equal length", ErrBadArgument, i, l, len(ranges), r, len(there))
		}
		mine[i] = ranges[l]
		total += ranges[l].Len
	}
	if err := a.enterFor(remote.peer, o.Backend); err != nil {
		return nil, err
	}
	defer a.leave()
	for _, p := range []*Prepared{local, remote} {
		if !p.uses.take() {
			return nil, fmt.Errorf("prepared list: %w", ErrClosed)
		}
		defer p.drop()
		if err := p.fresh(); err != nil {
			return nil, err
		}
	}
	h, s := a.c.makeRequest(a.h, preparedArgs{
		operation: op, local: local.h, remote: remote.h, localIndices: localIndices, remoteIndices: remoteIndices,
		notification: o.Notification, backend: backendHandle(o.Backend),
	})
	if s != StatusSuccess {
		return nil, s.err(fmt.Sprintf("make request of %d pairs with peer %s", len(localIndices), remote.peer.name))
	}
	return a.track(h, total, remote.peer, local.d.Type, mine), nil
}
