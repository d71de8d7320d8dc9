package ec

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Rotate implements Rotator.
func (a *agent) Rotate(context.Context) (end func(), err error) {
	a.all.mu.Lock()
	defer a.all.mu.Unlock()
	if a.all.fixed {
		return nil, errors.New("this plane's agents cannot be rotated")
	}
	former := a.gone
	a.all.rotations++
	a.name, a.gone = a.name+"'", make(chan struct{})
	return func() { close(former) }, nil
}

func (p *agents) rotated() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rotations
}

// rotating is a stand with a pool of 100 blocks and an agent that can be rotated.
func rotating(t *testing.T) (*stand, *agents, *agent) {
	s, plane := plainStand(t, 100)
	return s, plane, plane.byName["agent-0"]
}

func (s *stand) session(key, session, conn string) *wire.Ack {
	r := s.plain(key)
	r.Session = session
	return s.from(r, control.Source{ID: conn, Addr: "10.0.0." + conn})
}

func TestMemoryThatADeadPlainPeerNeverReadIsFreeAfterARotation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, _ := rotating(t)
		save(t, s.cache, "img", 10)
		s.session("img", "s-1", "1")
		s.producer.Left(control.Source{ID: "1"})
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if st := s.producer.Stats(); plane.rotated() != 1 || st.Burned != 1 || st.Retiring != 1 {
			t.Errorf("10 of 100 blocks burned by one source: %d rotations, %+v", plane.rotated(), st)
		}
		time.Sleep(sessionGone)
		synctest.Wait()
		info, _ := s.cache.Lookup("img")
		if st := s.producer.Stats(); st.Burned != 0 || st.AgentGone != 1 || st.Retiring != 0 || info.Pins != 0 {
			t.Errorf("%+v, %d pins", st, info.Pins)
		}
	})
}

func TestAFewBurnedBlocksAreFreedInTimeToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, _ := rotating(t)
		save(t, s.cache, "img", 1)
		s.session("img", "s-1", "1")
		s.producer.Left(control.Source{ID: "1"})
		time.Sleep(burnedTime - time.Minute)
		synctest.Wait()
		if plane.rotated() != 0 {
			t.Errorf("%d rotations for one block", plane.rotated())
		}
		time.Sleep(3 * burnedTime)
		synctest.Wait()
		if st := s.producer.Stats(); plane.rotated() != 1 || st.Burned != 0 || st.Grants != 0 {
			t.Errorf("%d rotations, %+v", plane.rotated(), st)
		}
	})
}

// rotated has a dead peer burn a tenth of the pool, so that the agent is rotated, and gives what is closed at the former one's end.
func (s *stand) rotated(plane *agents, a *agent) (former <-chan struct{}) {
	s.t.Helper()
	_, _, former = a.Agent()
	save(s.t, s.cache, "burned", 10)
	s.session("burned", "dead", "1")
	s.producer.Left(control.Source{ID: "1"})
	time.Sleep(31 * time.Second)
	synctest.Wait()
	if plane.rotated() != 1 {
		s.t.Fatalf("%d rotations", plane.rotated())
	}
	return former
}

func wait(d time.Duration) {
	time.Sleep(d + retireCheck)
	synctest.Wait()
}

func TestAnAgentOutlivesEverySessionThatMayStillReadByIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, a := rotating(t)
		save(t, s.cache, "img", 2)
		save(t, s.cache, "next", 2)
		s.session("next", "slow", "2")
		a.notify(transfer.Notification{Message: wire.Notification("slow", "next")})
		s.session("img", "slow", "2")
		former := s.rotated(plane, a)
		wait(sessionGone)
		if over(former) {
			t.Fatal("the agent ended under a peer that has not READ what it was granted there")
		}
		// The READ may be by this ack or by the former one.
		if ack := s.session("img", "slow", "2"); ack.Status != wire.OK || string(ack.AgentMetadata) != "agent-0'" || len(ack.MemDescriptor) == 0 {
			t.Fatalf("ack %+v", ack)
		}
		a.notify(transfer.Notification{Message: wire.Notification("slow", "img")})
		wait(lastReads)
		if over(former) {
			t.Fatal("the agent ended under a peer that has READ once what it was acked twice")
		}
		// This READ shows that the earlier acks were acted on.
		s.session("next", "slow", "2")
		a.notify(transfer.Notification{Message: wire.Notification("slow", "next")})
		wait(0)
		if over(former) {
			t.Fatal("the agent ended while a READ that was posted before may be in flight")
		}
		wait(lastReads)
		if !over(former) {
			t.Error("the agent is still there")
		}
		if st := s.producer.Stats(); st.Burned != 1 || st.Grants != 1 || st.Retiring != 0 { // the second ack for img may yet be acted on
			t.Errorf("%+v", st)
		}
	})
}

func TestASessionThatHasReadAllThatItWasGrantedKeepsNoAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, a := rotating(t)
		save(t, s.cache, "img", 2)
		s.session("img", "idle", "2")
		a.notify(transfer.Notification{Message: wire.Notification("idle", "img")})
		former := s.rotated(plane, a)
		wait(sessionGone) // of the dead one
		if !over(former) {
			t.Error("the agent is still there")
		}
		if ack := s.session("img", "idle", "2"); ack.Status != wire.OK || string(ack.AgentMetadata) != "agent-0'" || len(ack.MemDescriptor) == 0 {
			t.Errorf("ack %+v", ack)
		}
	})
}

// A READ on a dead agent that is known ends a vLLM engine. Adding a dead one does not.
func TestASessionThatNeverReadKeepsAnAgentForLessTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, a := rotating(t)
		for _, key := range []string{"img", "next"} {
			save(t, s.cache, key, 2)
			s.session(key, "new", "2") // connected
		}
		former := s.rotated(plane, a)
		s.producer.Left(control.Source{ID: "1"})
		wait(lateFirstAck - 31*time.Second - 2*retireCheck) // of the acks
		if over(former) {
			t.Fatal("the agent ended before a new peer can have acted on its acks")
		}
		wait(retireCheck)
		if st := s.producer.Stats(); !over(former) || st.Grants != 0 || st.Retiring != 0 {
			t.Errorf("ended: %v; %+v", over(former), st)
		}
	})
}

func TestTheFirstReadOfASessionMakesItOneThatKnowsTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, a := rotating(t)
		for _, key := range []string{"img", "next"} {
			save(t, s.cache, key, 2)
			s.session(key, "slow", "2")
		}
		former := s.rotated(plane, a)
		a.notify(transfer.Notification{Message: wire.Notification("slow", "img")})
		wait(sessionGone)
		if over(former) {
			t.Error("the agent ended under a peer that knows it and has an ack that names it")
		}
	})
}

// What is forgotten is taken for the worse case.
func TestASessionThatMayHaveReadBeforeItWasForgottenKeepsTheAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, a := rotating(t)
		save(t, s.cache, "img", 2)
		for i := range maxPlainSessions + 1 {
			name := fmt.Sprint("s-", i)
			s.session("img", name, "2")
			a.notify(transfer.Notification{Message: wire.Notification(name, "img")})
		}
		s.session("img", "may be one of them", "2")
		former := s.rotated(plane, a)
		wait(sessionGone)
		if over(former) {
			t.Error("the agent ended under a peer that may know it")
		}
	})
}

// What was burned on the new agent while the former one was there is over the limit when that has gone.
func TestARotationThatEndsIsFollowedByTheNextWithoutAGap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, a := rotating(t)
		save(t, s.cache, "img", 2)
		s.session("img", "warm", "2")
		a.notify(transfer.Notification{Message: wire.Notification("warm", "img")})
		save(t, s.cache, "first", 6)
		s.session("first", "warm", "2")
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if plane.rotated() != 1 {
			t.Fatalf("%d rotations", plane.rotated())
		}
		// The same source burns as much on the new agent, then READs there, so that the former one may end.
		time.Sleep(plainReadTimeout)
		for _, key := range []string{"second", "third"} {
			save(t, s.cache, key, 6)
		}
		if ack := s.session("second", "warm", "2"); ack.Status != wire.NackNotReady {
			t.Fatalf("%v; it may be READing by the former agent", ack.Status)
		}
		time.Sleep(plainReadTimeout)
		if ack := s.session("second", "warm", "2"); ack.Status != wire.OK {
			t.Fatalf("%v", ack.Status)
		}
		s.session("img", "warm", "2")
		a.notify(transfer.Notification{Message: wire.Notification("warm", "img")})
		for range 120 {
			time.Sleep(time.Second)
			synctest.Wait()
			st := s.producer.Stats()
			if plane.rotated() == 1 {
				continue
			}
			if st.Retiring != 1 || st.Burned != 1 || st.BurnedBlocks != 6 {
				t.Errorf("%+v", st)
			}
			if ack := s.session("third", "warm", "3"); ack.Status == wire.NackMissing {
				t.Errorf("answered %v at the end of a rotation", ack.Status)
			}
			return
		}
		t.Error("no second rotation")
	})
}

// A peer that is connected, knows the agent, has an ack, and never READs again.
func TestNoSessionKeepsAnAgentLongerThanAnAckCanBeActedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane, a := rotating(t)
		save(t, s.cache, "img", 2)
		s.session("img", "silent", "2")
		a.notify(transfer.Notification{Message: wire.Notification("silent", "img")})
		s.session("img", "silent", "2")
		former := s.rotated(plane, a)
		wait(lateAck - time.Minute)
		if st := s.producer.Stats(); over(former) || st.Retiring != 1 || st.RetiringBlocks != 12 || st.RetiringFor < lateAck-2*time.Minute {
			t.Fatalf("ended: %v; %+v", over(former), st)
		}
		wait(time.Minute)
		info, _ := s.cache.Lookup("img")
		if st := s.producer.Stats(); !over(former) || st.Grants != 0 || st.Retiring != 0 || st.RetiringBlocks != 0 || info.Pins != 0 {
			t.Errorf("ended: %v, %d pins; %+v", over(former), info.Pins, st)
		}
		if plane.rotated() != 1 {
			t.Errorf("%d rotations", plane.rotated())
		}
	})
}

// A vLLM consumer takes the former agent away when an ack names another one, and fails what it READs from there.
func TestASessionIsToldOfAnotherAgentOnceItReadsNothing(t *testing.T) {
	for _, reads := range []bool{true, false} {
		t.Run(fmt.Sprintf("reads=%v", reads), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, plane, a := rotating(t)
				for key, blocks := range map[string]int{"burned": 6, "large": 3, "img": 1} {
					save(t, s.cache, key, blocks)
				}
				want := func(session, key, conn string, status wire.Status, agent string) {
					t.Helper()
					if ack := s.session(key, session, conn); ack.Status != status || string(ack.AgentMetadata) != agent {
						t.Errorf("%s asks for %s and is answered %v, agent %q; want %v, %q", session, key, ack.Status, ack.AgentMetadata, status, agent)
					}
				}
				want("dead", "burned", "1", wire.OK, "agent-0")
				time.Sleep(29 * time.Second)
				want("reading", "large", "2", wire.OK, "agent-0")
				want("waiting", "large", "3", wire.OK, "agent-0")
				time.Sleep(2 * time.Second)
				synctest.Wait()
				if plane.rotated() != 1 {
					t.Fatalf("%d rotations", plane.rotated())
				}
				want("reading", "img", "2", wire.NackNotReady, "")
				want("waiting", "large", "3", wire.OK, "agent-0'") // what it asks for again it does not read
				want("new", "img", "4", wire.OK, "agent-0'")
				if reads {
					a.notify(transfer.Notification{Message: wire.Notification("reading", "large")})
				} else {
					time.Sleep(plainReadTimeout - time.Millisecond)
					want("reading", "img", "2", wire.NackNotReady, "")
					time.Sleep(time.Millisecond)
				}
				want("reading", "img", "2", wire.OK, "agent-0'")
			})
		})
	}
}

// A peer acts on each ack that it was sent, also on the second one for the same key, minutes later.
func TestAGrantAckedTwiceIsNotEndedByTheFirstRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, a := rotating(t)
		save(t, s.cache, "img", 2)
		s.session("img", "s-1", "1")
		s.session("img", "s-1", "1")
		a.notify(transfer.Notification{Message: wire.Notification("s-1", "img")})
		if info, _ := s.cache.Lookup("img"); info.Pins != 1 {
			t.Errorf("%d pins after one READ of two that may come", info.Pins)
		}
		a.notify(transfer.Notification{Message: wire.Notification("s-1", "img")})
		if info, _ := s.cache.Lookup("img"); info.Pins != 0 || s.producer.Stats().Grants != 0 {
			t.Errorf("%d pins after both", info.Pins)
		}
	})
}

func TestASourceThatNeverReadsIsRefusedAndOthersAreNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, agent := rotating(t)
		save(t, s.cache, "read", 1)
		s.session("read", "greedy", "1")
		agent.notify(transfer.Notification{Message: wire.Notification("greedy", "read")})
		var statuses []wire.Status
		for i, key := range []string{"a", "b", "c", "d"} {
			save(t, s.cache, key, 6)
			statuses = append(statuses, s.session(key, "greedy", "1").Status)
			time.Sleep(31 * time.Second) // its lease ends
			synctest.Wait()
			if i == 0 && s.producer.Stats().Rotations != 1 {
				t.Error("no rotation at 6 of 100 blocks")
			}
		}
		// 6 blocks are over 5 of 100; while the first agent is retired, 12 are over 10. It may be reading what it was told of by that one.
		if want := []wire.Status{wire.OK, wire.NackNotReady, wire.OK, wire.NackMissing}; !slices.Equal(statuses, want) {
			t.Errorf("answers %v, want %v", statuses, want)
		}
		if a := s.session("d", "other", "2"); a.Status != wire.OK {
			t.Errorf("another source: %v", a.Status)
		}
	})
}

// What a source keeps in place counts, not how often it asks for it.
func TestManyGrantsOfAFewEntriesDoNotLockASourceOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _, _ := rotating(t)
		save(t, s.cache, "small", 1)
		save(t, s.cache, "other", 1)
		for i := range 2 * minGrants {
			s.session("small", fmt.Sprint("greedy-", i), "1"+fmt.Sprint(i))
		}
		if a := s.from(s.plain("other"), control.Source{ID: "victim", Addr: "10.0.0.1"}); a.Status != wire.OK {
			t.Errorf("a neighbour is answered %v", a.Status)
		}
		if st := s.producer.Stats(); st.GrantedBlocks != 2 {
			t.Errorf("%d blocks granted, want each counted once", st.GrantedBlocks)
		}
	})
}
