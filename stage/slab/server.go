package slab

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// agentRegistration is a registration that an agent serves to whoever knows it, without tokens: nixl's.
type agentRegistration interface {
	// Incarnation is the agent that serves now; false while there is none.
	Incarnation() (nixl.Incarnation, bool)
	// Rotate is that of nixl.Registration.
	Rotate(ctx context.Context) (end func(), err error)
}

const (
	rotateTimeout = 30 * time.Second // for a new incarnation to be up
	// maxFormers bounds the agents that still serve claims of before a rotation. A further rotation waits for one of them to end, which
	// it does when its last claim does: by itself, or at the Store's deadline.
	maxFormers = 4
	// maxPlain is how many gets by plain readers one incarnation serves. Each get of vLLM-Omni's connector, which adds and removes its
	// agent anew, leaves 4 sockets at the agent that it read from, for as long as the reader lives (measured, NIXL 1.3.2). Limits on
	// descriptors are rarely below 4,096.
	maxPlain = 512
)

// server stops the readers of one registration that nothing else stops.
//
// Each claim's reader is told one incarnation of the agent. When a claim lapses, its reader may READ at any later time, so the
// incarnation that it was told has to end, and its grant is stuck until then. First a new one is started and told to all claims from
// then on (rotation); the former one goes on for the claims that were told it and still live, and is ended when the last of these has
// ended. All grants that are stuck on one incarnation share its end. An agent that dies by itself frees its stuck grants at once.
//
// An incarnation that many plain readers were told is replaced in the same way, see maxPlain.
type server struct {
	reg agentRegistration
	log *slog.Logger
	ctx context.Context // ends with the slab
	end context.CancelFunc

	mu       sync.Mutex
	all      map[<-chan struct{}]*incarnation // by Gone; those that grants were told
	formers  int
	rotating bool
	turn     chan struct{} // closed and replaced after each rotation that failed
	err      error         // of that one
	work     sync.WaitGroup
}

// incarnation is one agent, as far as grants depend on it. Guarded by server.mu.
type incarnation struct {
	gone   <-chan struct{}
	live   int    // grants that were told it and are not withdrawn
	stuck  int    // grants whose memory waits for its end
	plain  int    // grants of plain readers that were told it, ever
	end    func() // nil: it is the one that is told now
	ending bool
	ended  bool
}

func newServer(reg agentRegistration, log *slog.Logger) *server {
	s := &server{reg: reg, log: log, all: map[<-chan struct{}]*incarnation{}, turn: make(chan struct{})}
	s.ctx, s.end = context.WithCancel(context.Background())
	return s
}

// tell gives the incarnation of now for g's reader, and notes that.
func (s *server) tell(g *grant, plain bool) (nixl.Incarnation, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, ok := s.reg.Incarnation()
	if !ok || isClosed(now.Gone) {
		return now, false
	}
	i := s.all[now.Gone]
	if i == nil {
		for _, former := range s.all { // that died by itself, with nothing to wait for
			s.settle(former)
		}
		i = &incarnation{gone: now.Gone}
		s.all[now.Gone] = i
	}
	for _, known := range g.told {
		if known == i {
			return now, true
		}
	}
	i.live++
	g.told = append(g.told, i)
	if plain {
		i.plain++
		s.drive(i)
	}
	return now, true
}

// leave ends a grant whose reader said that it reads no more.
func (s *server) leave(g *grant) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range g.told {
		i.live--
		s.settle(i)
	}
	g.told = nil
}

// stop returns nil when nothing can be read by what g's reader was told. Until then g stays stuck; call it again after an error.
func (s *server) stop(ctx context.Context, g *grant) error {
	if !g.stuck {
		g.stuck = true
		s.mu.Lock()
		for _, i := range g.told {
			i.live--
			i.stuck++
		}
		s.mu.Unlock()
	}
	for len(g.told) > 0 {
		i := g.told[len(g.told)-1]
		if err := s.wait(ctx, i); err != nil {
			return err
		}
		g.told = g.told[:len(g.told)-1]
		s.mu.Lock()
		i.stuck--
		s.settle(i)
		s.mu.Unlock()
	}
	return nil
}

// wait sees to i's end, and waits for it.
func (s *server) wait(ctx context.Context, i *incarnation) error {
	s.mu.Lock()
	s.drive(i)
	turn := s.turn
	s.mu.Unlock()
	select {
	case <-i.gone:
		return nil
	case <-turn:
		s.mu.Lock()
		defer s.mu.Unlock()
		return fmt.Errorf("slab: the nixl agent that a reader knows cannot be replaced: %w", s.err)
	case <-ctx.Done():
		return fmt.Errorf("slab: a reader that did not end its claim may still READ from a nixl agent that other claims need: %w", ctx.Err())
	case <-s.ctx.Done():
		return ErrClosed
	}
}

// over says whether nothing of i can be read any more.
func (i *incarnation) over() bool { return isClosed(i.gone) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// drive does what is next for the end of i: a rotation, or its end. With the lock.
func (s *server) drive(i *incarnation) {
	switch {
	case s.ctx.Err() != nil:
	case i.end == nil:
		if (i.stuck > 0 || i.plain >= maxPlain) && !i.over() && !s.rotating && s.formers < maxFormers {
			s.rotating = true
			s.work.Go(s.rotate)
		}
	case i.live == 0 && !i.ending:
		i.ending = true
		s.work.Go(func() {
			i.end()
			s.mu.Lock()
			defer s.mu.Unlock()
			i.ended = true
			s.formers--
			s.settle(i)
			for _, other := range s.all { // one may have waited for its rotation
				s.drive(other)
			}
		})
	}
}

// settle does what is next, and drops what is known of i if no grant depends on it. With the lock.
func (s *server) settle(i *incarnation) {
	s.drive(i)
	if i.live == 0 && i.stuck == 0 && (i.ended || i.end == nil && (i.plain == 0 || i.over())) {
		delete(s.all, i.gone)
	}
}

// rotate starts another incarnation, so that the one of now can end.
func (s *server) rotate() {
	ctx, cancel := context.WithTimeout(s.ctx, rotateTimeout)
	defer cancel()
	end, err := s.reg.Rotate(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rotating = false
	if err != nil {
		s.err = err
		close(s.turn)
		s.turn = make(chan struct{})
		return
	}
	s.log.Info("slab: the nixl agent that serves was replaced, since a reader did not end its claim, or many plain ones used it")
	now, _ := s.reg.Incarnation()
	found := false
	for _, i := range s.all {
		if i.gone == now.Gone || i.end != nil || i.over() {
			continue
		}
		i.end, found = end, true
		s.formers++
	}
	if !found { // nobody was told it
		s.work.Go(end)
	}
	for _, i := range s.all { // also one that was told meanwhile
		s.drive(i)
	}
}

// close ends rotations that are under way. The registration's Close, which comes next, ends all incarnations.
func (s *server) close() {
	s.mu.Lock()
	s.end() // under the lock: nothing is started after it
	s.mu.Unlock()
	s.work.Wait()
}
