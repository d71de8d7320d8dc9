package node

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// Fetches that need no answer of a peer are copies within this machine. Waking another goroutine, thread or process costs more than
// copying an encoding of the usual size. So as much as inlineBytes of one request is copied by the session's reader before it
// replies, as commit computes checksums, and reply and results are one write. What is more is copied by as many goroutines as there
// are processors, one entry after another, and their results are written together where they come close together. Only what a peer
// must be asked for has a goroutine for each key.
const (
	inlineBytes = 1 << 20
	copiedBytes = 8 << 20                // of one entry; a larger one is copied by several goroutines together
	pushPause   = 500 * time.Microsecond // between writes of results
)

// fetch is one fetch operation that was found good.
type fetch struct {
	s       *session
	op      *api.Op
	a       *ec.Announcement
	timeout time.Duration // 0: the node's
	ctx     context.Context
	cancel  context.CancelCauseFunc
}

func (s *session) fetch(op *api.Op, t *turn) error {
	a := &ec.Announcement{}
	if err := a.UnmarshalJSON(op.Entry); err != nil {
		return fmt.Errorf("%w: entry of ec_transfer_params: %w", api.ErrBadRequest, err)
	}
	ctx, cancel, err := s.enroll(op.Ref)
	if err != nil {
		return err
	}
	t.fetches = append(t.fetches, &fetch{s: s, op: op, a: a, timeout: timeoutOf(op), ctx: ctx, cancel: cancel})
	return nil
}

// over is the end of a fetch: what is left is to send p.
func (f *fetch) over(p *api.Push) *api.Push {
	p.Last = true
	f.s.release(p.Ref)
	f.cancel(nil)
	f.s.work.Done()
	return p
}

// try fetches what needs no peer's answer, up to limit bytes. nil: it must be run.
func (f *fetch) try(limit int64) *api.Push {
	if f.ctx.Err() != nil {
		return nil
	}
	res, ok := f.s.pool.consumer.TryFetch(f.op.Key, f.a, ownReservation, limit)
	if !ok {
		return nil
	}
	p := &api.Push{Ref: f.op.Ref, Event: api.EventFetched}
	if f.op.Map && res.Outcome == ec.FetchReady {
		var err error
		if p.Handle, res.Info, err = f.s.pin(f.op.Key); err != nil {
			return nil // evicted meanwhile, or over a limit
		}
	}
	return f.over(tell(p, res))
}

// run does the whole of it, and sends the result.
func (f *fetch) run() {
	ctx := f.ctx
	if f.timeout > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, f.timeout)
		defer stop()
	}
	p := &api.Push{Ref: f.op.Ref, Event: api.EventFetched}
	res := f.s.bring(ctx, f.op, f.a, p)
	if res.Outcome == ec.FetchCanceled && errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		res.Outcome, res.Err = ec.FetchTimedOut, fmt.Errorf("not there within the %v that it was given", f.timeout)
	}
	defer f.s.work.Done()
	defer f.cancel(nil)
	f.s.pushLast(tell(p, res))
}

// tell writes a result into a push.
func tell(p *api.Push, res ec.Result) *api.Push {
	p.Outcome, p.Bytes, p.Plane, p.ElapsedUS = res.Outcome.String(), res.Bytes, res.Plane, res.Elapsed.Microseconds()
	if res.Err != nil {
		p.Message = res.Err.Error()
	}
	if res.Outcome == ec.FetchReady {
		p.Info = &res.Info
	}
	return p
}

// inline does what the session's reader does itself, and gives the results.
func (t *turn) inline() (done []api.Message) {
	rest := t.fetches[:0]
	left := int64(inlineBytes)
	for _, f := range t.fetches {
		if p := f.try(left); p != nil {
			left -= p.Bytes
			done = append(done, p)
			continue
		}
		rest = append(rest, f)
	}
	t.fetches = rest
	return done
}

// run begins the rest.
func (t *turn) run(s *session) {
	for _, start := range t.begin {
		start()
	}
	if len(t.fetches) == 1 {
		go t.fetches[0].run()
		return
	}
	b := &fetchBatch{s: s, left: t.fetches}
	for range min(len(t.fetches), runtime.GOMAXPROCS(0)) {
		go b.work()
	}
}

// fetchBatch is the fetches of one request that are left to copy.
type fetchBatch struct {
	s *session

	mu   sync.Mutex
	left []*fetch
	done []api.Message // not sent yet
	sent time.Time
}

func (b *fetchBatch) work() {
	for {
		b.mu.Lock()
		if len(b.left) == 0 {
			b.flush()
			b.mu.Unlock()
			return
		}
		f := b.left[0]
		b.left = b.left[1:]
		b.mu.Unlock()
		p := f.try(copiedBytes)
		if p == nil {
			go f.run()
			continue
		}
		b.mu.Lock()
		b.done = append(b.done, p)
		if time.Since(b.sent) > pushPause {
			b.flush()
		}
		b.mu.Unlock()
	}
}

// flush sends what is done. Called with the lock held.
func (b *fetchBatch) flush() {
	if len(b.done) > 0 {
		_ = b.s.conn.Send(api.MaxReplyFrame, b.done...) // if it cannot, the connection is over, and its reader learns of it
		b.done, b.sent = nil, time.Now()
	}
}
