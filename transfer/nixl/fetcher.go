package nixl

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
)

// Back-off of starting an agent that failed to start, or that died young.
const (
	startBackoffFirst = 100 * time.Millisecond
	startBackoffMost  = 10 * time.Second
	grownUp           = time.Minute // an agent that lived so long was no failure to start
)

// backoff counts failures of one kind of agent.
type backoff struct {
	failures int
	until    time.Time
}

func (b *backoff) failed() {
	b.until = time.Now().Add(min(startBackoffFirst<<min(b.failures, 10), startBackoffMost))
	b.failures++
}

// ended is called when an agent that did start is over. The first time costs no wait.
func (b *backoff) ended(started time.Time) {
	if time.Since(started) > grownUp {
		*b = backoff{}
	}
	if b.failures == 0 {
		b.failures = 1
		return
	}
	b.failed()
}

// fetcher keeps the fetch agent: it starts when it is needed and again after it has ended, with all destinations attached.
type fetcher struct {
	plane *Plane

	mu       sync.Mutex
	closed   bool
	cur      agent
	started  time.Time
	attached map[uint32]bool
	starting chan struct{} // closed when the start under way is over; nil: none
	err      error         // of the last start
	backoff  backoff
}

func newFetcher(p *Plane) *fetcher { return &fetcher{plane: p} }

// get gives the agent, starting it if there is none. ctx bounds the wait, not the start.
func (f *fetcher) get(ctx context.Context) (agent, error) {
	for waited := false; ; waited = true {
		f.mu.Lock()
		if f.closed {
			f.mu.Unlock()
			return nil, fmt.Errorf("nixl: %w", transfer.ErrClosed)
		}
		f.checkLocked()
		if f.cur != nil {
			defer f.mu.Unlock()
			return f.cur, nil
		}
		if f.starting == nil {
			if waited {
				err := f.err
				f.mu.Unlock()
				return nil, err
			}
			if wait := time.Until(f.backoff.until); wait > 0 {
				defer f.mu.Unlock()
				return nil, fmt.Errorf("%w: nixl: the fetch agent ended or failed to start %d times, the next start is in %v", transfer.ErrPeerLost, f.backoff.failures, wait.Round(time.Millisecond))
			}
			f.starting = make(chan struct{})
			go f.start()
		}
		starting := f.starting
		f.mu.Unlock()
		select {
		case <-starting:
		case <-ctx.Done():
			return nil, fmt.Errorf("nixl: the fetch agent is starting: %w", ctx.Err())
		}
	}
}

// checkLocked lets go of an agent that has ended.
func (f *fetcher) checkLocked() {
	if f.cur == nil {
		return
	}
	select {
	case <-f.cur.over():
		f.cur = nil
		f.backoff.ended(f.started)
	default:
	}
}

func (f *fetcher) start() {
	ctx, cancel := context.WithTimeout(context.Background(), f.plane.o.StartTimeout)
	defer cancel()
	a, err := f.plane.start(ctx, roleFetch, false, nil)
	if err == nil {
		if err = f.install(ctx, a); err != nil {
			a.end()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = classify(err, transfer.ErrPeerLost)
	if err != nil && !f.closed {
		f.backoff.failed()
		f.plane.o.Log.Error("nixl: the fetch agent did not start", "err", err, "failures", f.backoff.failures)
	}
	close(f.starting)
	f.starting = nil
}

// install attaches all destinations and makes a the agent. Under the lock: memory that is registered meanwhile finds either the agent, or
// itself attached.
func (f *fetcher) install(ctx context.Context, a agent) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return fmt.Errorf("nixl: %w", transfer.ErrClosed)
	}
	f.attached = map[uint32]bool{}
	if err := f.attachAllLocked(ctx, a); err != nil {
		return err
	}
	f.cur, f.started = a, time.Now()
	return nil
}

func (f *fetcher) attachAllLocked(ctx context.Context, a agent) error {
	f.plane.mu.Lock()
	memories := append([]*memory(nil), f.plane.memories...)
	f.plane.mu.Unlock()
	for _, m := range memories {
		if !f.plane.destination(m) {
			continue
		}
		if _, err := a.attach(ctx, m.attachment(true)); err != nil {
			return fmt.Errorf("attach memory: %w", err)
		}
		f.attached[m.id] = true
	}
	return nil
}

// attach makes m a destination of a, or of the agent of now if a is nil; a no-op if there is no agent.
func (f *fetcher) attach(ctx context.Context, a agent, m *memory) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.checkLocked()
	switch {
	case a != nil && f.cur != a:
		return errEnded
	case f.cur == nil || f.attached[m.id] || !f.plane.destination(m):
		return nil
	}
	if _, err := f.cur.attach(ctx, m.attachment(true)); err != nil {
		return err
	}
	f.attached[m.id] = true
	return nil
}

func (f *fetcher) detach(m *memory) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.cur != nil && f.attached[m.id] {
		delete(f.attached, m.id)
		f.cur.detach(m.id)
	}
}

// close ends the agent. A start under way is waited for.
func (f *fetcher) close() {
	f.mu.Lock()
	f.closed = true
	starting, cur := f.starting, f.cur
	f.mu.Unlock()
	if starting != nil {
		<-starting
	}
	if cur != nil {
		cur.end()
	}
}
