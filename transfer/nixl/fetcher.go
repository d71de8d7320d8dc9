package nixl

import (
	"context"
	"fmt"
	"maps"
	"slices"
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
	plane    *Plane
	ctx      context.Context // ends when closed
	cancel   context.CancelFunc
	suspects suspects

	mu       sync.Mutex
	closed   bool
	cur      *fetching
	next     *fetching // destinations are being attached to it
	leaving  *fetching // retired, and not over yet
	starting *start    // under way; nil: none
	backoff  backoff   // of starts, and of agents that died with nobody to blame
	counts   Counts    // less the deaths
}

// fetching is one fetch agent. All is under the fetcher's lock, which is not held while the agent does anything.
type fetching struct {
	agent        agent
	started      time.Time
	destinations map[uint32]*destination // by the memory's id
	adding       map[string]int          // names of peers that are being added
}

// destination is memory that is attached to a fetch agent, or is being attached.
type destination struct {
	over bool // it is attached
	gone bool // it is to be detached as soon as it is attached
	done chan struct{}
	err  error // set before done is closed
}

// start is a start under way.
type start struct {
	done chan struct{}
	err  error // set before done is closed
}

func newFetcher(p *Plane) *fetcher {
	f := &fetcher{plane: p}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	return f
}

// get gives the agent, starting it if there is none. ctx bounds the wait, not the start.
func (f *fetcher) get(ctx context.Context) (agent, error) {
	for {
		a, s, err := f.lookUp()
		if a != nil || err != nil {
			return a, err
		}
		select {
		case <-s.done:
			if s.err != nil {
				return nil, s.err
			}
			// It may be over already; then it counts as one that died.
		case <-ctx.Done():
			return nil, fmt.Errorf("nixl: the fetch agent is starting: %w", ctx.Err())
		}
	}
}

// lookUp gives the agent, or the start that is to be waited for.
func (f *fetcher) lookUp() (agent, *start, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, nil, fmt.Errorf("nixl: %w", transfer.ErrClosed)
	}
	f.checkLocked()
	if f.cur != nil {
		return f.cur.agent, nil, nil
	}
	if f.starting == nil {
		if wait := time.Until(f.backoff.until); wait > 0 {
			return nil, nil, fmt.Errorf("%w: nixl: the fetch agent ended or failed to start %d times, the next start is in %v", transfer.ErrPeerLost, f.backoff.failures, wait.Round(time.Millisecond))
		}
		f.starting = &start{done: make(chan struct{})}
		go f.start(f.starting)
	}
	return nil, f.starting, nil
}

// checkLocked lets go of an agent that has ended. Only one that died with no peer to blame holds up the next.
func (f *fetcher) checkLocked() {
	g := f.cur
	if g == nil {
		return
	}
	select {
	case <-g.agent.over():
	default:
		return
	}
	f.cur = nil
	if !g.agent.died() {
		return
	}
	for name := range g.adding {
		f.suspects.blame(g.agent, name)
	}
	if !f.suspects.blamed(g.agent) {
		f.backoff.ended(g.started)
	}
}

func (f *fetcher) start(s *start) {
	a, err := f.plane.start(f.ctx, roleFetch, false, nil)
	if err == nil {
		if err = f.install(a); err != nil {
			a.end()
		}
	}
	f.mu.Lock()
	s.err = classify(err, transfer.ErrPeerLost)
	if err != nil && !f.closed {
		f.backoff.failed()
		f.plane.o.Log.Error("nixl: the fetch agent did not start", "err", err, "failures", f.backoff.failures)
	}
	f.starting, f.next = nil, nil
	f.mu.Unlock()
	close(s.done)
}

// install attaches all destinations and makes a the agent. Memory that is registered meanwhile is attached too, or finds the agent.
func (f *fetcher) install(a agent) error {
	g := &fetching{agent: a, started: time.Now(), destinations: map[uint32]*destination{}, adding: map[string]int{}}
	for {
		d, err := f.installNext(g)
		if d == nil || err != nil {
			return err
		}
		<-d.done
		f.mu.Lock()
		err, gone := d.err, d.gone
		f.mu.Unlock()
		if err != nil && !gone {
			return fmt.Errorf("attach memory: %w", err)
		}
	}
}

// installNext attaches one more destination. If there is none, g is the agent.
func (f *fetcher) installNext(g *fetching) (*destination, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, fmt.Errorf("nixl: %w", transfer.ErrClosed)
	}
	f.plane.mu.Lock()
	defer f.plane.mu.Unlock()
	for _, m := range f.plane.memories {
		if g.destinations[m.id] == nil && f.plane.destination(m) {
			f.next = g
			return f.attachLocked(g, m), nil
		}
	}
	f.cur, f.next = g, nil
	return nil, nil
}

// attachLocked begins to make m a destination of g.
func (f *fetcher) attachLocked(g *fetching, m *memory) *destination {
	d := &destination{done: make(chan struct{})}
	g.destinations[m.id] = d
	go func() {
		ctx, cancel := context.WithTimeout(f.ctx, f.plane.registerTimeout(m.place.Bytes))
		defer cancel()
		_, err := g.agent.attach(ctx, m.attachment(true))
		f.mu.Lock()
		d.err, d.over = err, err == nil
		gone := d.gone
		if err != nil || gone {
			delete(g.destinations, m.id)
		}
		f.mu.Unlock()
		if err == nil && gone {
			g.agent.detach(m.id)
		}
		close(d.done)
	}()
	return d
}

// attach makes m a destination of a, or of the agent of now if a is nil; a no-op if there is no agent. ctx bounds the wait.
func (f *fetcher) attach(ctx context.Context, a agent, m *memory) error {
	f.mu.Lock()
	f.checkLocked()
	g := f.cur
	switch {
	case a != nil && (g == nil || g.agent != a):
		f.mu.Unlock()
		return errEnded
	case g == nil || !f.plane.destination(m):
		f.mu.Unlock()
		return nil
	}
	d := g.destinations[m.id]
	if d == nil {
		d = f.attachLocked(g, m)
	}
	f.mu.Unlock()
	select {
	case <-d.done:
		return d.err
	case <-ctx.Done():
		return fmt.Errorf("nixl: the fetch agent registers %d bytes: %w", m.place.Bytes, ctx.Err())
	}
}

// detach withdraws m. What it gives is to be waited for before m is closed: agents that are attaching it now.
func (f *fetcher) detach(m *memory) (attaching []<-chan struct{}) {
	var from []agent
	f.mu.Lock()
	for _, g := range []*fetching{f.cur, f.next, f.leaving} {
		if g == nil {
			continue
		}
		switch d := g.destinations[m.id]; {
		case d == nil:
		case d.over:
			delete(g.destinations, m.id)
			from = append(from, g.agent)
		default:
			d.gone = true
			attaching = append(attaching, d.done)
		}
	}
	f.mu.Unlock()
	for _, a := range from {
		a.detach(m.id)
	}
	return attaching
}

// adds counts peers of a name that are being added to a.
func (f *fetcher) adds(a agent, name string, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, g := range []*fetching{f.cur, f.leaving} {
		if g == nil || g.agent != a {
			continue
		}
		if g.adding[name] += n; g.adding[name] == 0 {
			delete(g.adding, name)
		}
	}
}

// retirePoll is how often a retired agent is looked at.
const retirePoll = 2 * time.Millisecond

// retire has another agent started for the next READ, and ends a when its READs have ended, or after Options.Drain. At most one waits for
// that: the one before is ended at once.
func (f *fetcher) retire(a agent) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts.Unsettled++
	f.checkLocked()
	g := f.cur
	if g == nil || g.agent != a {
		return // it is retired or over
	}
	f.counts.Retired++
	former := f.leaving
	f.cur, f.leaving = nil, g
	f.plane.o.Log.Warn("nixl: a READ failed, and parts of it may still write its destination: the fetch agent is replaced")
	go func() {
		if former != nil {
			former.agent.end()
		}
		f.plane.settle(a)
		a.end()
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.leaving == g {
			f.leaving = nil
		}
	}()
}

// settle waits until a has no READ that can still succeed, for Options.Drain at most.
func (p *Plane) settle(a agent) {
	for end := time.Now().Add(p.o.Drain); time.Now().Before(end); {
		p.mu.Lock()
		peers := slices.Collect(maps.Keys(p.peers))
		p.mu.Unlock()
		if !slices.ContainsFunc(peers, func(c *peer) bool { return c.reading(a) }) {
			return
		}
		select {
		case <-a.over():
			return
		case <-time.After(retirePoll):
		}
	}
}

// close ends the agent, and a start under way.
func (f *fetcher) close() {
	f.mu.Lock()
	f.closed = true
	s, agents := f.starting, []*fetching{f.cur, f.next, f.leaving}
	f.mu.Unlock()
	f.cancel()
	for _, g := range agents {
		if g != nil {
			g.agent.end()
		}
	}
	if s != nil {
		<-s.done
	}
}
