package ec

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// heirs is a plane whose registrations have taken an agent over.
type heirs struct {
	agents
	former chan struct{} // closed by end
	since  time.Duration // its process died so long ago
}

type heir struct {
	*agent
	plane *heirs
}

func (p *heirs) Register(ctx context.Context, m transfer.Memory, notify func(transfer.Notification)) (transfer.Registration, error) {
	a, err := p.agents.Register(ctx, m, notify)
	if err != nil {
		return nil, err
	}
	return heir{a.(*agent), p}, nil
}

// Formers implements Successor.
func (h heir) Formers() []transfer.Former {
	if h.plane.former == nil {
		return nil
	}
	return []transfer.Former{{Left: time.Now().Add(-h.plane.since), Gone: h.plane.former, End: func() { close(h.plane.former) }}}
}

// grantedBefore is a cache that a producer was killed on, after it had granted "read" to a plain peer that has read it and "late" to one
// that has not.
func grantedBefore(t *testing.T) (*Cache, []*Pin) {
	t.Helper()
	first, serving := plainStand(t, 100)
	serving.fixed = true // it does nothing any more, once it is dead
	for _, key := range []string{"read", "late", "asked for by nobody"} {
		save(t, first.cache, key, 2)
	}
	first.session("read", "s-1", "1")
	serving.byName["agent-0"].notify(transfer.Notification{Message: wire.Notification("s-1", "read")})
	first.session("late", "s-1", "1")
	c := first.cache
	next, adopted, err := adoptCache(t.Context(), CacheOptions{}, region.Geometry{BlockBytes: c.blockBytes, Blocks: 100, Slots: c.slots.Len()}, c.pool, c.slots)
	if err != nil {
		t.Fatal(err)
	}
	if len(adopted.Granted) != 1 || adopted.Granted[0].Info().Key != "late" {
		t.Fatalf("granted are %d entries, want the one that was not read", len(adopted.Granted))
	}
	return next, adopted.Granted
}

// inherit makes a producer that goes on with such a cache.
func inherit(t *testing.T, plane *heirs) *stand {
	t.Helper()
	next, granted := grantedBefore(t)
	s := newStand(t, 100, func(o *ProducerOptions) {
		o.Pools[0].Cache, o.Pools[0].Planes, o.Pools[0].Granted = next, []transfer.Plane{plane}, granted
	})
	s.cache = next
	return s
}

func (s *stand) pins(key string) int {
	info, _ := s.cache.Lookup(key)
	return info.Pins
}

func over(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestWhatADeadProducerGrantedStaysUntilItsAgentIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := &heirs{former: make(chan struct{})}
		s := inherit(t, plane)
		time.Sleep(sessionGone - time.Second)
		synctest.Wait()
		if over(plane.former) || s.pins("late") != 1 || s.pins("read") != 0 || s.producer.Stats().Retiring != 1 {
			t.Errorf("ended: %v; %d and %d pins", over(plane.former), s.pins("late"), s.pins("read"))
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !over(plane.former) || s.pins("late") != 0 || s.producer.Stats().Retiring != 0 {
			t.Errorf("ended: %v; %d pins", over(plane.former), s.pins("late"))
		}
	})
}

func TestASessionThatComesAgainKeepsTheAgentOfADeadProducerUntilItReadsFromTheNextOne(t *testing.T) {
	for _, reads := range []bool{true, false} {
		t.Run(fmt.Sprintf("reads=%v", reads), func(t *testing.T) { comesAgain(t, reads) })
	}
}

func comesAgain(t *testing.T, reads bool) {
	synctest.Test(t, func(t *testing.T) {
		plane := &heirs{former: make(chan struct{})}
		s := inherit(t, plane)
		if a := s.session("late", "s-1", "7"); a.Status != wire.OK || string(a.AgentMetadata) != "agent-0" {
			t.Fatalf("%+v", a)
		}
		wait(sessionGone)
		if st := s.producer.Stats(); over(plane.former) || s.pins("late") != 2 || st.RetiringBlocks != 2 {
			t.Fatalf("ended: %v; %d pins; %+v", over(plane.former), s.pins("late"), st)
		}
		if reads {
			plane.byName["agent-0"].notify(transfer.Notification{Message: wire.Notification("s-1", "late")})
			wait(0)
			if over(plane.former) {
				t.Fatal("ended while a READ that was posted before may be in flight")
			}
			wait(lastReads)
		} else {
			wait(lateAck - sessionGone)
		}
		// The session's own grant has been READ, or it was burned long ago, by an agent that is rotated in turn.
		if !over(plane.former) || s.pins("late") != 0 {
			t.Errorf("ended: %v; %d pins", over(plane.former), s.pins("late"))
		}
	})
}

func TestASessionThatComesLaterDoesNotKeepTheAgentOfADeadProducer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := &heirs{former: make(chan struct{})}
		s := inherit(t, plane)
		time.Sleep(sessionGone + time.Millisecond) // before the next look at the former agent
		s.session("late", "new", "7")
		time.Sleep(time.Minute)
		synctest.Wait()
		if !over(plane.former) || s.pins("late") != 1 {
			t.Errorf("ended: %v; %d pins", over(plane.former), s.pins("late"))
		}
	})
}

func TestWhatIsGrantedIsFoundByEachAdoptionUntilItIsLetGo(t *testing.T) {
	c := newTestCache(t, 8, 4, CacheOptions{})
	save(t, c, "k", 2)
	first, err := c.Pin("k")
	if err != nil {
		t.Fatal(err)
	}
	second, err := c.Pin("k")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range []*Pin{first, second, second} {
		p.KeepGranted()
	}
	first.Release()
	for range 2 {
		next, a, err := adoptCache(t.Context(), CacheOptions{}, region.Geometry{BlockBytes: c.blockBytes, Blocks: 8, Slots: 4}, c.pool, c.slots)
		if err != nil {
			t.Fatal(err)
		}
		if len(a.Granted) != 1 || len(a.Pinned) != 0 || next.Remove("k") == nil {
			t.Errorf("%d granted, %d pinned by clients; or it could be removed", len(a.Granted), len(a.Pinned))
		}
	}
	second.Release()
	_, a, err := adoptCache(t.Context(), CacheOptions{}, region.Geometry{BlockBytes: c.blockBytes, Blocks: 8, Slots: 4}, c.pool, c.slots)
	if err != nil || len(a.Granted) != 0 {
		t.Errorf("%d granted, %v", len(a.Granted), err)
	}
}

func TestWithoutAnAgentOfADeadProducerWhatItGrantedIsFree(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inherit(t, &heirs{})
		if s.pins("late") != 0 || s.producer.Stats().Retiring != 0 {
			t.Errorf("%d pins", s.pins("late"))
		}
	})
}

func TestAProducerThatEndsLetsGoOfWhatADeadOneGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := inherit(t, &heirs{former: make(chan struct{})})
		if err := s.producer.Close(); err != nil {
			t.Fatal(err)
		}
		if s.pins("late") != 0 {
			t.Errorf("%d pins", s.pins("late"))
		}
	})
}

func TestTheTimeOfAnAgentCountsFromTheEndOfItsOwnProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := &heirs{former: make(chan struct{}), since: sessionGone - time.Minute}
		s := inherit(t, plane)
		wait(30 * time.Second)
		if over(plane.former) {
			t.Error("ended early")
		}
		wait(time.Minute)
		if !over(plane.former) || s.pins("late") != 0 {
			t.Errorf("ended: %v; %d pins", over(plane.former), s.pins("late"))
		}
	})
}

func TestAProducerThatEndsCountsAndLeavesWhatIsUnread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, serving := plainStand(t, 100)
		save(t, s.cache, "read", 2)
		s.session("read", "s-1", "1")
		s.producer.Stop()
		const most = 3 * time.Second
		settle := func() time.Duration {
			ctx, cancel := context.WithTimeout(t.Context(), most)
			defer cancel()
			start := time.Now()
			s.producer.Settle(ctx)
			return time.Since(start)
		}
		if d := settle(); d != most {
			t.Errorf("a READ was waited for for %v, want %v", d, most)
		}
		if n := s.producer.Unread(s.cache); n != 1 || s.producer.Leave(s.cache) {
			t.Errorf("%d unread, or an agent was left that cannot be", n)
		}
		serving.byName["agent-0"].notify(transfer.Notification{Message: wire.Notification("s-1", "read")})
		if d := settle(); d != 0 {
			t.Errorf("nothing was waited for for %v", d)
		}
		if n := s.producer.Unread(s.cache); n != 0 {
			t.Errorf("%d unread", n)
		}
	})
}

// tookOver is what a caller took over beside the planes.
type tookOver struct {
	formers []transfer.Former
	left    bool
}

func (s *tookOver) Formers() []transfer.Former { return s.formers }
func (s *tookOver) Leave() bool                { s.left = true; return true }

// As a node does that serves by TCP only, or by a NIXL agent in its own process, which never outlives it and so has no formers of its own.
func TestAgentsThatNoPlaneTookOverKeepWhatWasGranted(t *testing.T) {
	for _, c := range []struct {
		name  string
		plane transfer.Plane // nil: none that speaks to plain peers
		leave bool
	}{
		{"no plane for plain peers", nil, false},
		{"a plane that has taken none over", &heirs{}, false},
		{"left", nil, true},
		{"left beside a plane that leaves none", &heirs{}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cache, granted := grantedBefore(t)
				gone := make(chan struct{})
				former := &tookOver{formers: []transfer.Former{{Left: time.Now(), Gone: gone, End: func() { close(gone) }}}}
				s := newStand(t, 100, func(o *ProducerOptions) {
					o.Pools[0].Cache, o.Pools[0].Granted, o.Pools[0].Former = cache, granted, former
					if c.plane != nil {
						o.Pools[0].Planes = []transfer.Plane{c.plane}
					}
				})
				s.cache = cache
				wait(sessionGone - time.Minute)
				s.producer.Stop()
				if over(gone) || s.pins("late") != 1 || s.producer.Unread(cache) != 1 {
					t.Fatalf("ended: %v; %d pins, %d unread", over(gone), s.pins("late"), s.producer.Unread(cache))
				}
				if c.leave {
					if !s.producer.Leave(cache) || !former.left {
						t.Error("not left")
					}
					if err := s.producer.Close(); err != nil {
						t.Error(err)
					}
					if over(gone) || s.pins("late") != 1 {
						t.Errorf("ended: %v; %d pins", over(gone), s.pins("late"))
					}
					return
				}
				wait(2 * time.Minute)
				if !over(gone) || s.pins("late") != 0 || s.producer.Unread(cache) != 0 {
					t.Errorf("ended: %v; %d pins, %d unread", over(gone), s.pins("late"), s.producer.Unread(cache))
				}
			})
		})
	}
}
