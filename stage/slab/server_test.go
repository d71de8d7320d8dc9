package slab

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// agents is a registration whose incarnations are only counted.
type agents struct {
	mu      sync.Mutex
	now     chan struct{} // Gone of the one that serves; nil: none does
	fail    error         // of Rotate
	hold    chan struct{} // Rotate waits for it, if not nil
	after   chan struct{} // Rotate waits for it with the next incarnation up, if not nil
	rotated int
	alive   map[chan struct{}]bool
	ended   map[<-chan struct{}]bool // by Rotate's end
}

func newAgents() *agents {
	a := &agents{now: make(chan struct{}), alive: map[chan struct{}]bool{}, ended: map[<-chan struct{}]bool{}}
	a.alive[a.now] = true
	return a
}

func (a *agents) Incarnation() (nixl.Incarnation, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.now == nil {
		return nixl.Incarnation{}, false
	}
	return nixl.Incarnation{Metadata: fmt.Append(nil, a.now), Gone: a.now}, true
}

func (a *agents) Rotate(ctx context.Context) (func(), error) {
	a.mu.Lock()
	hold := a.hold
	a.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	a.mu.Lock()
	if a.fail != nil {
		defer a.mu.Unlock()
		return nil, a.fail
	}
	former := a.now
	a.now = make(chan struct{})
	a.alive[a.now] = true
	a.rotated++
	a.mu.Unlock()
	if a.after != nil {
		<-a.after
	}
	if former == nil {
		return func() {}, nil
	}
	return func() { a.kill(former, true) }, nil
}

// kill ends an incarnation, because the server wanted so or by itself.
func (a *agents) kill(gone chan struct{}, wanted bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.alive[gone] {
		return
	}
	delete(a.alive, gone)
	a.ended[gone] = wanted
	close(gone)
}

// die is the end of the agent that serves, which the registration starts again.
func (a *agents) die() {
	a.mu.Lock()
	former := a.now
	a.now = make(chan struct{})
	a.alive[a.now] = true
	a.mu.Unlock()
	a.kill(former, false)
}

func (a *agents) count() (rotated, alive int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.rotated, len(a.alive)
}

// inBubble runs a server over agents in synthetic time.
func inBubble(t *testing.T, test func(t *testing.T, a *agents, s *server)) {
	synctest.Test(t, func(t *testing.T) {
		a := newAgents()
		s := newServer(a, slog.New(slog.DiscardHandler))
		defer s.close()
		test(t, a, s)
	})
}

// told is a grant whose reader knows the incarnation of now.
func told(t *testing.T, s *server) *grant {
	t.Helper()
	g := &grant{}
	if _, ok := s.tell(g, false); !ok {
		t.Fatal("nothing serves")
	}
	return g
}

// stopping calls stop elsewhere.
func stopping(t *testing.T, s *server, g *grant) <-chan error {
	done := make(chan error, 1)
	go func() { done <- s.stop(t.Context(), g) }()
	synctest.Wait()
	return done
}

func pending(t *testing.T, what string, done <-chan error) {
	t.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		t.Fatalf("%s: over, %v", what, err)
	default:
	}
}

func over(t *testing.T, what string, done <-chan error) {
	t.Helper()
	synctest.Wait()
	select {
	case err := <-done:
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	default:
		t.Fatalf("%s: not over", what)
	}
}

func TestAnAgentEndsOnlyWhenNoOtherClaimNeedsIt(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		lapsed, lives := told(t, s), told(t, s)
		done := stopping(t, s, lapsed)
		pending(t, "while another claim lives", done)
		if rotated, alive := a.count(); rotated != 1 || alive != 2 {
			t.Errorf("%d rotations, %d agents", rotated, alive)
		}
		s.leave(lives)
		over(t, "after the other claim's end", done)
		if _, alive := a.count(); alive != 1 || len(s.all) != 0 {
			t.Errorf("%d agents, %d known", alive, len(s.all))
		}
	})
}

func TestWithdrawalsShareARotation(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		a.hold = make(chan struct{})
		var done []<-chan error
		var grants []*grant
		for range 100 {
			grants = append(grants, told(t, s))
		}
		for _, g := range grants {
			done = append(done, stopping(t, s, g))
		}
		for _, d := range done {
			pending(t, "during the rotation", d)
		}
		close(a.hold)
		for _, d := range done {
			over(t, "after it", d)
		}
		if rotated, alive := a.count(); rotated != 1 || alive != 1 {
			t.Errorf("%d rotations, %d agents", rotated, alive)
		}
	})
}

func TestAnAgentThatDiedFreesItsGrantsAtOnce(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		first, second := told(t, s), told(t, s)
		a.die()
		over(t, "a grant of the dead one", stopping(t, s, first))
		if rotated, _ := a.count(); rotated != 0 {
			t.Error("rotated for a dead agent")
		}
		third := told(t, s)
		s.leave(second)
		s.leave(third)
		if len(s.all) != 0 {
			t.Errorf("%d are known", len(s.all))
		}
	})
}

// O1: what plain readers leave at an agent goes with it.
func TestAnAgentThatManyPlainReadersKnewIsReplaced(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		get := func() *grant {
			g := &grant{}
			if _, ok := s.tell(g, true); !ok {
				t.Fatal("nothing serves")
			}
			return g
		}
		reads := get()
		for range maxPlain - 2 {
			s.leave(get())
		}
		for range maxPlain { // own readers leave nothing there
			s.leave(told(t, s))
		}
		if synctest.Wait(); a.rotated != 0 {
			t.Fatal("replaced too early")
		}
		s.leave(get())
		synctest.Wait()
		if rotated, alive := a.count(); rotated != 1 || alive != 2 {
			t.Errorf("%d rotations, %d agents", rotated, alive)
		}
		s.leave(reads)
		synctest.Wait()
		if _, alive := a.count(); alive != 1 || len(s.all) != 0 {
			t.Errorf("%d agents, %d known", alive, len(s.all))
		}
		s.leave(get())
		a.die() // with nothing to wait for
		s.leave(get())
		if len(s.all) != 1 {
			t.Errorf("%d agents are known, one serves", len(s.all))
		}
	})
}

func TestARotationThatFailsIsTriedAgainByTheNextWithdrawal(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		g := told(t, s)
		a.fail = errors.New("no memory")
		if err := s.stop(t.Context(), g); !errors.Is(err, a.fail) {
			t.Errorf("error %v", err)
		}
		a.fail = nil
		over(t, "again", stopping(t, s, g))
		if len(s.all) != 0 {
			t.Errorf("%d are known", len(s.all))
		}
	})
}

func TestAWithdrawalEndsWithItsContextAndGoesOnLater(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		g, lives := told(t, s), told(t, s)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := s.stop(ctx, g); !errors.Is(err, context.Canceled) {
			t.Errorf("error %v", err)
		}
		synctest.Wait()
		s.leave(lives) // and now nobody waits
		over(t, "again", stopping(t, s, g))
	})
}

func TestFormerAgentsAreFew(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		var lives []*grant
		var done []<-chan error
		for range 3 * maxFormers {
			lives = append(lives, told(t, s))
			done = append(done, stopping(t, s, told(t, s)))
			if _, alive := a.count(); alive > maxFormers+1 {
				t.Fatalf("%d agents", alive)
			}
		}
		for _, g := range lives {
			s.leave(g)
		}
		for _, d := range done {
			over(t, "in the end", d)
		}
		if _, alive := a.count(); alive != 1 || len(s.all) != 0 || s.formers != 0 {
			t.Errorf("%d agents, %d known, %d formers", alive, len(s.all), s.formers)
		}
	})
}

func TestAClaimOfTheNextAgentThatLapsesDuringTheRotationIsNotForgotten(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		a.after = make(chan struct{})
		first := stopping(t, s, told(t, s))
		second := stopping(t, s, told(t, s)) // of the next one already
		pending(t, "of the former one", first)
		pending(t, "of the next one", second)
		close(a.after)
		over(t, "of the former one", first)
		over(t, "of the next one", second)
		if rotated, alive := a.count(); rotated != 2 || alive != 1 {
			t.Errorf("%d rotations, %d agents", rotated, alive)
		}
	})
}

// The agent that a rotation was wanted for dies while the rotation is under way, so another one is replaced.
func TestARotationThatCameTooLateLeavesNoAgentBehind(t *testing.T) {
	inBubble(t, func(t *testing.T, a *agents, s *server) {
		a.hold = make(chan struct{})
		done := stopping(t, s, told(t, s))
		a.die()
		lives := told(t, s)
		over(t, "since it died", done)
		close(a.hold)
		synctest.Wait()
		if _, alive := a.count(); alive != 2 {
			t.Errorf("%d agents", alive)
		}
		s.leave(lives)
		synctest.Wait()
		if _, alive := a.count(); alive != 1 || len(s.all) != 0 || s.formers != 0 {
			t.Errorf("%d agents, %d known, %d formers", alive, len(s.all), s.formers)
		}
	})
}

// Whatever happens in whatever order, no agent that a live claim was told is ended by us, and no memory is free that an agent which
// lives could still be asked for.
func TestNoAgentEndsUnderALiveClaim(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		inBubble(t, func(t *testing.T, a *agents, s *server) {
			type claim struct {
				g    *grant
				told []<-chan struct{}
				done <-chan error
			}
			var live, ending []*claim
			check := func() {
				synctest.Wait()
				for _, c := range live {
					for _, gone := range c.told {
						if a.ended[gone] {
							rt.Error("ended under a live claim")
						}
					}
				}
				left := ending[:0]
				for _, c := range ending {
					select {
					case err := <-c.done:
						if err != nil {
							rt.Error(err)
						}
						for _, gone := range c.told {
							select {
							case <-gone:
							default:
								rt.Error("free, and its agent lives")
							}
						}
					default:
						left = append(left, c)
					}
				}
				ending = left
				if _, alive := a.count(); alive > maxFormers+1 {
					rt.Errorf("%d agents", alive)
				}
			}
			take := func(rt *rapid.T) *claim {
				i := rapid.IntRange(0, len(live)-1).Draw(rt, "which")
				c := live[i]
				live = append(live[:i], live[i+1:]...)
				return c
			}
			for range rapid.IntRange(1, 60).Draw(rt, "steps") {
				switch what := rapid.IntRange(0, 9).Draw(rt, "what"); {
				case what < 4 || len(live) == 0:
					c := &claim{g: &grant{}}
					now, _ := s.tell(c.g, false)
					c.told = append(c.told, now.Gone)
					live = append(live, c)
				case what == 4: // a claim that is repeated
					c := live[len(live)-1]
					now, _ := s.tell(c.g, false)
					c.told = append(c.told, now.Gone)
				case what < 7:
					s.leave(take(rt).g)
				case what < 9:
					c := take(rt)
					c.done = stopping(t, s, c.g)
					ending = append(ending, c)
				default:
					a.die()
				}
				check()
			}
			for len(live) > 0 {
				s.leave(take(rt).g)
			}
			check()
			if _, alive := a.count(); len(ending) > 0 || alive != 1 || len(s.all) > 0 || s.formers != 0 {
				rt.Errorf("at the end %d wait, %d agents, %d known, %d formers", len(ending), alive, len(s.all), s.formers)
			}
		})
	})
}

func TestALateReadOfAPlainReaderCanOnlyFail(t *testing.T) {
	for name, make := range nixls {
		t.Run(name, func(t *testing.T) {
			dir := transfertest.Dir(t)
			a, b := make(t), make(t)
			leaks(t, dir)
			producer, consumer := newSlab(t, dir, "a", 1<<20, a), newSlab(t, dir, "b", 1<<20, b)
			read := func(m *wire.Metadata) error {
				t.Helper()
				into, err := consumer.Alloc(patient(t), sizesOf(m.Specs))
				must(t, err)
				defer into.Free()
				_, err = consumer.Read(patient(t), m, into)
				return err
			}
			p := put(t, producer, 1, 50_000)
			late, err := offerPlain(t, p, "1")
			must(t, err)
			must(t, read(late)) // warm: it knows the agent
			own, err := offer(t, p, "2", 0, transfer.NIXL)
			must(t, err)
			must(t, read(own))
			must(t, p.Withdraw(patient(t), "2", true))
			must(t, read(own)) // idle: nothing was ended for it
			must(t, p.Withdraw(patient(t), "1", false))
			if err := read(late); !errors.Is(err, transfer.ErrPeerLost) {
				t.Errorf("a late READ: %v", err)
			}
			if err := read(own); err == nil {
				t.Error("a late READ of an own reader succeeds")
			}
			p.Release()
			p = put(t, producer, 2, 50_000)
			m, err := offerPlain(t, p, "1")
			must(t, err)
			get(t, consumer, m, 2)
			must(t, p.Withdraw(patient(t), "1", true))
			p.Release()
		})
	}
}

func TestWhileNoAgentServesPlainReadersAreToldNothing(t *testing.T) {
	dir := transfertest.Dir(t)
	f := binding.NewFake()
	plane, err := nixl.New(nixl.Options{Loaded: f.Library()})
	must(t, err)
	leaks(t, dir)
	s := newSlab(t, dir, "a", 1<<20, plane)
	reg := newAgents()
	reg.now = nil
	s.ways[0].server.reg = reg
	p := put(t, s, 1, 100)
	defer p.Release()
	if _, err := offerPlain(t, p, "1"); !errors.Is(err, ErrNoPlane) {
		t.Error(err)
	}
	if _, err := offer(t, p, "2", 0, transfer.NIXL); !errors.Is(err, ErrNoPlane) {
		t.Error(err)
	}
}
