package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// errCanceled is the cause of what a cancel operation ends.
var errCanceled = errors.New("canceled by the engine")

// turn is what the operations of one request have begun, which answers by pushes after the reply.
type turn struct {
	begin   []func()
	fetches []*fetch
}

// do carries out one operation. What takes time is left in t.
func (s *session) do(op *api.Op, r *api.Result, t *turn) (err error) {
	if err := op.Check(); err != nil {
		return err
	}
	switch op.Kind {
	case api.OpReserve:
		return s.reserve(op, r)
	case api.OpCommit:
		return s.commit(op, r)
	case api.OpDiscard:
		res, err := s.take(op)
		if err == nil {
			res.Discard()
			res.Quarantine().Settle() // of one that was resumed after its key was given up
			s.pool.clients.credit(s.client, res.blocks)
		}
		return err
	case api.OpAnnounce:
		a := s.pool.announcement(op, s.e.identity.peerHost, s.e.identity.peerPort, s.e.identity.generation)
		r.Entry, err = a.MarshalJSON()
		return err
	case api.OpFetch:
		return s.fetch(op, t)
	case api.OpCancel:
		return s.cancelAsync(op.Ref)
	case api.OpMap:
		var info ec.Info
		if r.Handle, info, err = s.pin(op.Key); err == nil {
			r.Info = &info
		}
		return err
	case api.OpRelease:
		return s.unpin(op.Handle)
	case api.OpResume:
		return s.resume(op, r)
	case api.OpRepin:
		return s.repin(op, r)
	case api.OpRestated:
		s.pool.clients.restated(s.client)
		return nil
	case api.OpLookup:
		info, state := s.pool.cache.Lookup(op.Key)
		info.Key, info.State = op.Key, state
		r.Info = &info
		return nil
	case api.OpWait:
		return s.wait(op, t)
	case api.OpList:
		return s.list(op, t)
	case api.OpRemove:
		return s.pool.cache.Remove(op.Key)
	case api.OpStats:
		st := s.pool.cache.Stats()
		r.Stats = &st
		return nil
	}
	return fmt.Errorf("%w; it speaks version %d", api.ErrUnsupported, api.Version)
}

// handle gives a new handle, never 0, never used before on this connection. Called with the lock held.
func (s *session) handle() (uint64, error) {
	if n := len(s.reservations) + len(s.pins); n >= api.MaxHandles {
		return 0, fmt.Errorf("%w: %d reservations and pins on this connection", api.ErrLimit, n)
	}
	s.handles++
	return s.handles, nil
}

func (s *session) reserve(op *api.Op, r *api.Result) error {
	if op.Dtype != s.pool.Dtype {
		return fmt.Errorf("%w: dtype %s, this pool's encodings are %s", ec.ErrSpec, op.Dtype, s.pool.Dtype)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.handle()
	if err != nil {
		return err
	}
	blocks := int(min((op.Bytes-1)/s.pool.BlockBytes+1, int64(s.pool.blocks)))
	over := s.pool.clients.charge(s.client, blocks)
	if over != nil {
		if _, state := s.pool.cache.Lookup(op.Key); state == ec.Absent {
			return over
		}
		blocks = 0 // Reserve says what is there
	}
	res, err := s.pool.cache.Reserve(op.Key, ec.Spec{Dtype: op.Dtype, Shape: op.Shape, Bytes: op.Bytes}, s.client.id)
	if err == nil && over != nil { // it has gone since
		res.Discard()
		err = over
	}
	if err != nil {
		s.pool.clients.credit(s.client, blocks)
		return err
	}
	s.reservations[h] = reserved{res, blocks}
	info := res.Info()
	r.Handle, r.Info = h, &info
	return nil
}

// take ends a reservation's stay in the table: whoever takes it decides what becomes of it.
func (s *session) take(op *api.Op) (reserved, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	res, ok := s.reservations[op.Handle]
	if !ok {
		return reserved{}, fmt.Errorf("%w: no reservation %d of this connection", ec.ErrStale, op.Handle)
	}
	delete(s.reservations, op.Handle)
	return res, nil
}

func (s *session) commit(op *api.Op, r *api.Result) error {
	res, err := s.take(op)
	if err != nil {
		return err
	}
	defer s.pool.clients.credit(s.client, res.blocks)
	var sum *uint64
	switch {
	case op.HasSum:
		sum = &op.Sum
	case s.e.sums:
		v := res.Checksum()
		sum = &v
	}
	info, err := res.Commit(sum)
	if err != nil {
		res.Quarantine().Settle() // resumed after its key was given up; the engine has stopped writing
		return err
	}
	r.Info = &info
	return nil
}

// pin makes a ready entry stay for this engine, until it says release or is gone.
func (s *session) pin(key string) (handle uint64, info ec.Info, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.handle()
	if err != nil {
		return 0, ec.Info{}, err
	}
	p, err := s.pool.cache.Pin(key)
	if err != nil {
		return 0, ec.Info{}, err
	}
	p.Keep()
	s.pins[h] = p
	return h, p.Info(), nil
}

// repin pins for a client that came back what it had pinned before: the same bytes, not just the same key.
func (s *session) repin(op *api.Op, r *api.Result) error {
	h, info, err := s.pin(op.Key)
	if err != nil {
		return err
	}
	if info.Gen != op.Gen {
		_ = s.unpin(h)
		return fmt.Errorf("%w: %q is there, but in generation %d, not %d", ec.ErrStale, op.Key, info.Gen, op.Gen)
	}
	r.Handle, r.Info = h, &info
	return nil
}

// resume gives a client that came back what it had reserved before. ErrHeld: it was committed.
func (s *session) resume(op *api.Op, r *api.Result) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.handle()
	if err != nil {
		return err
	}
	res, ok := s.pool.clients.resume(s.client, op.Gen)
	if !ok {
		if i, state := s.pool.cache.Lookup(op.Key); state == ec.Ready && i.Gen == op.Gen {
			r.Info = &i
			return fmt.Errorf("%w: %q was committed", ec.ErrHeld, op.Key)
		}
		return fmt.Errorf("%w: %q of generation %d is no reservation of this client any more", ec.ErrStale, op.Key, op.Gen)
	}
	s.reservations[h] = res
	info := res.Info()
	r.Handle, r.Info = h, &info
	return nil
}

func (s *session) unpin(handle uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.pins[handle]
	if !ok {
		return fmt.Errorf("%w: no pin %d of this connection", ec.ErrStale, handle)
	}
	delete(s.pins, handle)
	p.Release()
	return nil
}

// enroll begins an operation that answers by pushes. The context ends with the connection or by a cancel. What begins with enroll
// ends with release of the ref, cancel, and work.Done.
func (s *session) enroll(ref uint64) (context.Context, context.CancelCauseFunc, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.async[ref]; taken {
		return nil, nil, fmt.Errorf("%w: ref %d is in use", api.ErrBadRequest, ref)
	}
	if len(s.async) >= api.MaxAsync {
		return nil, nil, fmt.Errorf("%w: %d fetches, waits and listings on this connection", api.ErrLimit, len(s.async))
	}
	ctx, cancel := context.WithCancelCause(s.ctx)
	s.async[ref] = cancel
	s.work.Add(1)
	return ctx, cancel, nil
}

// release makes a ref free for reuse.
func (s *session) release(ref uint64) {
	s.mu.Lock()
	delete(s.async, ref)
	s.mu.Unlock()
}

// background adds work to a turn that runs on a goroutine of its own, for timeout at most (0: for ever).
func (s *session) background(op *api.Op, t *turn, timeout time.Duration, work func(ctx context.Context)) error {
	ctx, cancel, err := s.enroll(op.Ref)
	if err != nil {
		return err
	}
	t.begin = append(t.begin, func() {
		go func() {
			defer s.work.Done()
			defer cancel(nil)
			if timeout > 0 {
				var stop context.CancelFunc
				ctx, stop = context.WithTimeout(ctx, timeout)
				defer stop()
			}
			work(ctx)
		}()
	})
	return nil
}

// timeoutOf is how long the engine allows an operation; 0: it does not say.
func timeoutOf(op *api.Op) time.Duration {
	return time.Duration(min(op.TimeoutMS, int64(24*time.Hour/time.Millisecond))) * time.Millisecond
}

// push sends; if it cannot, the connection is over, and its reader learns of it.
func (s *session) push(p *api.Push) { _ = s.conn.Send(api.MaxReplyFrame, p) }

// pushLast sends the last push of a ref, which is free for reuse from then on.
func (s *session) pushLast(p *api.Push) {
	p.Last = true
	s.release(p.Ref)
	s.push(p)
}

func (s *session) cancelAsync(ref uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	cancel, ok := s.async[ref]
	if !ok {
		return fmt.Errorf("%w: ref %d is not in flight", ec.ErrStale, ref)
	}
	cancel(errCanceled)
	return nil
}

// ownReservation is the owner of what the node itself fills: its death ends that, and nobody else writes there.
const ownReservation = 0

// maxBrings bounds how often an entry may be brought, and be evicted before it was pinned.
const maxBrings = 4

// bring fetches and, if the engine asked for it, pins. Between the two others may evict the entry, if all else is in use: then it is
// fetched once more, in what is left of the time for one fetch.
func (s *session) bring(ctx context.Context, op *api.Op, a *ec.Announcement, p *api.Push) ec.Result {
	start := time.Now()
	budget := start.Add(s.pool.consumer.Budget())
	for tries := 1; ; tries++ {
		res := s.pool.consumer.FetchUntil(ctx, op.Key, a, ownReservation, budget)
		if !op.Map || res.Outcome != ec.FetchReady {
			return res
		}
		var err error
		if p.Handle, res.Info, err = s.pin(op.Key); err == nil {
			return res
		}
		if errors.Is(err, api.ErrLimit) || tries == maxBrings {
			return ec.Result{Key: op.Key, Outcome: ec.FetchFailed, Elapsed: time.Since(start),
				Err: fmt.Errorf("it was there %d times and could not be mapped: %w", tries, err)}
		}
	}
}

// wait tells when a key is ready, or when nobody is filling it.
func (s *session) wait(op *api.Op, t *turn) error {
	key := op.Key
	return s.background(op, t, timeoutOf(op), func(ctx context.Context) {
		p := &api.Push{Ref: op.Ref, Event: api.EventWaited}
		info, err := s.waitReady(ctx, key)
		if err != nil {
			p.Code, p.Message = api.CodeOf(err), err.Error()
		} else {
			p.Info = &info
		}
		s.pushLast(p)
	})
}

func (s *session) waitReady(ctx context.Context, key string) (ec.Info, error) {
	for {
		// The channel comes first: a change after it is seen, whatever the look says.
		changed := s.pool.cache.Watch(key)
		info, state := s.pool.cache.Lookup(key)
		switch state {
		case ec.Ready:
			return info, nil
		case ec.Absent:
			return ec.Info{}, fmt.Errorf("%w: %q, and nobody is filling it", ec.ErrMissing, key)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
				return ec.Info{}, fmt.Errorf("%w: %q is still being filled", context.DeadlineExceeded, key)
			}
			return ec.Info{}, fmt.Errorf("%w: %w", context.Canceled, context.Cause(ctx))
		}
	}
}

// list pushes all entries, in pieces, as the engine reads them. A listing holds all that it has to say, and waits for an engine that
// does not read: so there is one at a time of a connection, and maxListings of all; the others have taken nothing yet.
func (s *session) list(op *api.Op, t *turn) error {
	return s.background(op, t, 0, func(ctx context.Context) {
		var entries []ec.Info
		select {
		case s.listing <- struct{}{}:
			defer func() { <-s.listing }()
		case <-ctx.Done():
		}
		select {
		case s.e.listings <- struct{}{}:
			defer func() { <-s.e.listings }()
			entries = s.pool.entries()
		case <-ctx.Done():
		}
		for len(entries) > api.MaxListChunk {
			if ctx.Err() != nil || s.conn.Room(ctx.Done()) != nil {
				break
			}
			s.push(&api.Push{Ref: op.Ref, Event: api.EventListed, Entries: entries[:api.MaxListChunk]})
			entries = entries[api.MaxListChunk:]
		}
		last := &api.Push{Ref: op.Ref, Event: api.EventListed, Entries: entries}
		if ctx.Err() != nil {
			last = &api.Push{Ref: op.Ref, Event: api.EventListed, Code: api.CodeCanceled, Message: errCanceled.Error()}
		}
		s.pushLast(last)
	})
}
