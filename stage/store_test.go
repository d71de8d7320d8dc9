package stage

import (
	"context"
	"errors"
	"math"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

func TestAPayloadIsReleasedWhenItsLastReaderIsDone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		mem, g := put(t, s, "k")
		a, b := claimOf("k", g, "a"), claimOf("k", wire.ID{}, "b")
		md := mustClaim(t, s, a)
		if md.Claim != a.ID || md.Generation != g || md.Ferry != nil || string(md.AgentMetadata) != "agent" || md.SenderPort != 1 {
			t.Errorf("%+v", md)
		}
		mustClaim(t, s, b)
		if !s.Done(a) || mem.isReleased() {
			t.Error("released under a reader")
		}
		if s.Done(a) {
			t.Error("a duplicate done counts")
		}
		b.Generation = g
		if !s.Done(b) || !mem.isReleased() {
			t.Error("not released after the last reader")
		}
		if _, err := s.Claim(t.Context(), a); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
		closeStore(t, s)
	})
}

func TestARepeatedClaimIsTheSameClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		mem, g := put(t, s, "k")
		c := claimOf("k", g, "a")
		mustClaim(t, s, c)
		mustClaim(t, s, c)
		if len(mem.offered) != 1 || s.Stats().Claims != 1 || s.Stats().Granted != 1 {
			t.Errorf("%d grants, %+v", len(mem.offered), s.Stats())
		}
		s.Done(c)
		closeStore(t, s)
	})
}

func TestDoneCountsOnlyForItsClaimAndGeneration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		mem, g := put(t, s, "k")
		mine := claimOf("k", g, "a")
		mustClaim(t, s, mine)
		for name, c := range map[string]Claim{
			"another claim":      claimOf("k", g, "forged"),
			"any generation":     claimOf("k", wire.ID{}, "a"),
			"another generation": claimOf("k", wire.NewID(), "a"),
			"another key":        claimOf("x", g, "a"),
			"an owner":           {Key: "k", Generation: g, ID: wire.TextID("a"), Owner: "o"},
		} {
			if s.Done(c) || s.Fail(c) {
				t.Errorf("%s ended it", name)
			}
		}
		if mem.isReleased() || s.Stats().Claims != 1 {
			t.Error("released")
		}
		s.Done(mine)
		closeStore(t, s)
	})
}

func TestAnOwnersClaimIsNobodyElses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{Transfer: 10 * time.Second})
		mem, g := put(t, s, "k")
		own := Claim{Key: "k", Generation: g, ID: wire.TextID("a"), Owner: "conn1"}
		if md := mustClaim(t, s, own); md.Ferry == nil || md.Ferry.LeaseMS != 10000 || md.Ferry.Top != wire.TopList || md.Ferry.Try != 0 {
			t.Errorf("%+v", md.Ferry)
		}
		for _, owner := range []string{"", "conn2"} {
			c := own
			c.Owner = owner
			if _, err := s.Claim(t.Context(), c); !errors.Is(err, ErrNotFound) {
				t.Error("another reader got the claim:", err)
			}
			if s.Done(c) {
				t.Error("another reader ended the claim")
			}
		}
		s.Drop("")
		s.Drop("conn2")
		if s.Stats().Claims != 1 {
			t.Error("dropped with another connection")
		}
		s.Drop("conn1")
		synctest.Wait()
		if st := s.Stats(); st.Claims != 0 || st.Lapsed != 1 || mem.isReleased() || mem.ended["1"] {
			t.Errorf("%+v, withdrawn as idle: %v", st, mem.ended)
		}
		own.Owner = "conn3"
		mustClaim(t, s, own) // the payload is there for another
		s.Done(own)
		closeStore(t, s)
	})
}

func TestAFailedReadGivesThePayloadBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{Lease: time.Minute, RetryGrace: 20 * time.Second})
		mem, g := put(t, s, "k")
		c := claimOf("k", g, "a")
		mustClaim(t, s, c)
		time.Sleep(3 * time.Minute) // well past the lease, which does not count while it is claimed
		if !s.Fail(c) || mem.isReleased() {
			t.Fatal("a failed read destroyed the payload")
		}
		time.Sleep(19 * time.Second)
		c.ID = wire.TextID("b")
		mustClaim(t, s, c)
		s.Fail(c)
		time.Sleep(21 * time.Second)
		synctest.Wait()
		if !mem.isReleased() || s.Stats().Expired != 1 {
			t.Errorf("%+v", s.Stats())
		}
		closeStore(t, s)
	})
}

func TestLeasesReapOnlyWhatNobodyClaimed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{Lease: time.Minute})
		unclaimed, _ := put(t, s, "u")
		claimed, g := put(t, s, "c")
		mustClaim(t, s, claimOf("c", g, "a"))
		time.Sleep(time.Minute)
		if _, err := s.Claim(t.Context(), claimOf("u", wire.ID{}, "late")); !errors.Is(err, ErrNotFound) {
			t.Error("granted at the end of its lease:", err)
		}
		synctest.Wait()
		if !unclaimed.isReleased() || claimed.isReleased() {
			t.Error("unclaimed", unclaimed.isReleased(), "claimed", claimed.isReleased())
		}
		mustClaim(t, s, claimOf("c", g, "b")) // others may join while somebody has it
		s.Done(claimOf("c", g, "a"))
		s.Done(claimOf("c", g, "b"))
		closeStore(t, s)
	})
}

func TestAReaderThatNeverEndsIsStoppedBeforeMemoryIsReused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{Lease: 20 * time.Second, Transfer: time.Minute, Margin: time.Second, RetryGrace: time.Second})
		mem, g := put(t, s, "k")
		mem.stuck = true
		c := claimOf("k", g, "dead")
		mustClaim(t, s, c)
		time.Sleep(59 * time.Second)
		mustClaim(t, s, c) // repeated: its time starts anew
		time.Sleep(60 * time.Second)
		if s.Stats().Claims != 1 {
			t.Error("ended too early")
		}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if st := s.Stats(); st.Claims != 0 || st.Withdrawing != 1 || st.Payloads != 0 || st.Bytes != 8 || mem.isReleased() {
			t.Errorf("%+v: memory that may still be read was freed", st)
		}
		if mem.withdraw < 10 {
			t.Errorf("tried %d times", mem.withdraw)
		}
		if s.Done(c) {
			t.Error("held, says done, after the claim was ended by force")
		}
		again, g2 := put(t, s, "k") // the key is free for other memory
		mem.unstick()
		time.Sleep(retryMost)
		synctest.Wait()
		if !mem.isReleased() || again.isReleased() {
			t.Error("not released once its reader was stopped")
		}
		mustClaim(t, s, claimOf("k", g2, "x"))
		s.Done(claimOf("k", g2, "x"))
		closeStore(t, s)
	})
}

func TestAClaimedKeyIsNotReplacedAnUnclaimedOneIs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		first, g1 := put(t, s, "k")
		second, g2 := put(t, s, "k")
		if !first.isReleased() || second.isReleased() || g1 == g2 {
			t.Error("not replaced")
		}
		if _, err := s.Claim(t.Context(), claimOf("k", g1, "a")); !errors.Is(err, ErrNotFound) {
			t.Error("a claim of the replaced generation:", err)
		}
		c := claimOf("k", g2, "a")
		mustClaim(t, s, c)
		if _, err := s.Put(Put{Key: "k", Memory: newMemory(t)}); !errors.Is(err, ErrClaimed) {
			t.Error(err)
		}
		if err := s.Cleanup("k"); !errors.Is(err, ErrClaimed) || second.isReleased() {
			t.Error(err)
		}
		s.Fail(c)
		if err := s.Cleanup("k"); err != nil || !second.isReleased() {
			t.Error(err)
		}
		if err := s.Cleanup("k"); err != nil {
			t.Error(err)
		}
		closeStore(t, s)
	})
}

func TestAProducersFailureReachesWhoWaitsAndWhoAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{FailureKept: time.Minute})
		changed, stop := s.Watch("k")
		defer stop()
		s.Abort("k", "out of memory")
		select {
		case <-changed:
		default:
			t.Error("the waiting reader is not woken")
		}
		var f *FailedError
		if _, err := s.Claim(t.Context(), claimOf("k", wire.ID{}, "a")); !errors.As(err, &f) || f.Reason != "out of memory" || !errors.Is(err, ErrFailed) {
			t.Error(err)
		}
		time.Sleep(time.Minute)
		if _, err := s.Claim(t.Context(), claimOf("k", wire.ID{}, "a")); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}

		mem, g := put(t, s, "read")
		c := claimOf("read", g, "a")
		mustClaim(t, s, c)
		s.Abort("read", "aborted")
		if mem.isReleased() {
			t.Error("released under its reader")
		}
		if _, err := s.Claim(t.Context(), claimOf("read", g, "b")); !errors.Is(err, ErrFailed) {
			t.Error("given to another:", err)
		}
		s.Fail(c)
		if !mem.isReleased() {
			t.Error("an aborted payload is kept")
		}
		put(t, s, "read")
		if _, err := s.Claim(t.Context(), claimOf("read", wire.ID{}, "c")); err != nil {
			t.Error("a new put after the failure:", err)
		}
		s.Drop("nobody")
		closeLate(t, s)
	})
}

func TestAWaitingReaderIsWokenByThePut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		got := make(chan error)
		go func() {
			changed, stop := s.Watch("k")
			defer stop()
			if _, err := s.Claim(t.Context(), claimOf("k", wire.ID{}, "a")); !errors.Is(err, ErrNotFound) {
				got <- err
				return
			}
			<-changed
			_, err := s.Claim(t.Context(), claimOf("k", wire.ID{}, "a"))
			got <- err
		}()
		synctest.Wait()
		_, g := put(t, s, "k")
		if err := <-got; err != nil {
			t.Error(err)
		}
		_, stop := s.Watch("other")
		stop()
		stop()
		synctest.Wait()
		if len(s.watchers) != 0 {
			t.Errorf("%d watchers left", len(s.watchers))
		}
		s.Done(claimOf("k", g, "a"))
		closeStore(t, s)
	})
}

func TestAClaimThatEndsWhileItIsGrantedGivesNoDescriptors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		mem, g := put(t, s, "k")
		mem.entered, mem.blocked = make(chan struct{}, 1), make(chan struct{})
		c := claimOf("k", g, "a")
		got := make(chan error)
		go func() {
			_, err := s.Claim(t.Context(), c)
			got <- err
		}()
		<-mem.entered
		if !s.Done(c) { // forged, or the reader's own after it gave up
			t.Error("the claim was not recorded before descriptors were asked for")
		}
		synctest.Wait()
		if mem.isReleased() || mem.withdraw != 0 {
			t.Error("withdrawn while it is being offered")
		}
		close(mem.blocked)
		if err := <-got; !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
		if !mem.isReleased() {
			t.Error("not released")
		}
		closeStore(t, s)
	})
}

func TestAnOfferThatFailsEndsTheClaimNotThePayload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		mem, g := put(t, s, "k")
		mem.refuse = errors.New("no agent")
		if _, err := s.Claim(t.Context(), claimOf("k", g, "a")); !errors.Is(err, mem.refuse) {
			t.Error(err)
		}
		if st := s.Stats(); st.Claims != 0 || st.Withdrawing != 0 || st.Payloads != 1 {
			t.Errorf("%+v", st)
		}
		closeStore(t, s)
	})
}

func TestARepeatedClaimThatCannotBeAnsweredKeepsTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		mem, g := put(t, s, "k")
		c := claimOf("k", g, "a")
		mustClaim(t, s, c)
		mem.refuse = errors.New("no agent")
		if _, err := s.Claim(t.Context(), c); !errors.Is(err, mem.refuse) {
			t.Error(err)
		}
		if s.Stats().Claims != 1 || mem.withdraw != 0 {
			t.Error("ended under its reader")
		}
		if !s.Done(c) {
			t.Error("the claim was lost")
		}
		closeStore(t, s)
	})
}

func TestRoomHoldsProducersBackInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{MaxBytes: 100})
		room, err := s.Reserve(t.Context(), 80)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Reserve(t.Context(), 101); !errors.Is(err, ErrFull) {
			t.Error(err)
		}
		if _, err := s.Reserve(t.Context(), -1); !errors.Is(err, ErrOptions) {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := s.Reserve(ctx, 21); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		mem := newMemory(t)
		g, err := s.Put(Put{Key: "k", Memory: mem, Room: room, Metadata: wire.Metadata{Size: 80}})
		if err != nil {
			t.Fatal(err)
		}
		second := make(chan error)
		go func() {
			r, err := s.Reserve(t.Context(), 50)
			if err == nil {
				r.Close()
				r.Close()
			}
			second <- err
		}()
		synctest.Wait()
		c := claimOf("k", g, "a")
		mustClaim(t, s, c)
		s.Done(c) // frees the room
		if err := <-second; err != nil {
			t.Error(err)
		}
		all, err := s.Reserve(t.Context(), 100)
		if err != nil {
			t.Fatal(err)
		}
		all.Close()
		closeStore(t, s)
	})
}

func TestCloseRefusesNewWorkAndWaitsForReaders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		idle, _ := put(t, s, "idle")
		mem, g := put(t, s, "k")
		c := claimOf("k", g, "a")
		mustClaim(t, s, c)
		changed, stop := s.Watch("w")
		defer stop()
		closed := make(chan error)
		go func() { closed <- s.Close(t.Context(), time.Second) }()
		synctest.Wait()
		<-changed
		if !idle.isReleased() || mem.isReleased() || s.Healthy() {
			t.Error("idle", idle.isReleased(), "claimed", mem.isReleased(), "healthy", s.Healthy())
		}
		if _, err := s.Put(Put{Key: "new", Memory: newMemory(t)}); !errors.Is(err, ErrClosing) {
			t.Error(err)
		}
		if _, err := s.Claim(t.Context(), claimOf("k", g, "b")); !errors.Is(err, ErrClosing) {
			t.Error(err)
		}
		mustClaim(t, s, c) // its reply was lost
		s.Fail(c)
		if err := <-closed; err != nil || !mem.isReleased() {
			t.Error(err)
		}
	})
}

func TestCloseEndsInBoundedTimeAndNeverFreesWhatIsRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{})
		stuck, g := put(t, s, "stuck")
		stuck.stuck = true
		slow, g2 := put(t, s, "slow")
		mustClaim(t, s, claimOf("stuck", g, "a"))
		mustClaim(t, s, claimOf("slow", g2, "a"))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := s.Close(ctx, time.Second); !errors.Is(err, ErrBusy) {
			t.Error(err)
		}
		if stuck.isReleased() || !slow.isReleased() {
			t.Error("stuck", stuck.isReleased(), "slow", slow.isReleased())
		}
		if err := s.Close(t.Context(), 0); err != nil {
			t.Error("closed again:", err)
		}
	})
}

func TestBoundsAndOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{{Lease: -1}, {Transfer: -1}, {Margin: -1}, {RetryGrace: -1}, {FailureKept: -1}, {MaxBytes: -1}, {MaxPayloads: -1}, {MaxClaims: -1}} {
		if _, err := NewStore(o); !errors.Is(err, ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		s := newStore(t, Options{MaxPayloads: 2, MaxClaims: 3, MaxBytes: math.MaxInt64})
		for _, p := range []Put{{Memory: newMemory(t)}, {Key: "k"}, {Key: string(make([]byte, wire.MaxKey+1)), Memory: newMemory(t)}, {Key: "k", Memory: newMemory(t), Lease: -1}} {
			if _, err := s.Put(p); !errors.Is(err, ErrOptions) {
				t.Errorf("%d: %v", len(p.Key), err)
			}
		}
		_, g := put(t, s, "a")
		put(t, s, "b")
		if _, err := s.Put(Put{Key: "c", Memory: newMemory(t)}); !errors.Is(err, ErrFull) {
			t.Error(err)
		}
		put(t, s, "b") // replaces
		for _, id := range []string{"1", "2", "3"} {
			mustClaim(t, s, claimOf("a", g, id))
		}
		if _, err := s.Claim(t.Context(), claimOf("a", g, "4")); !errors.Is(err, ErrFull) {
			t.Error(err)
		}
		if _, err := s.Claim(t.Context(), Claim{Key: "a"}); !errors.Is(err, ErrNotFound) {
			t.Error("without an id:", err)
		}
		for i := range 10 {
			s.Abort(string(rune('p'+i)), "r")
		}
		if len(s.failures) != 2 {
			t.Errorf("%d failures are remembered", len(s.failures))
		}
		for _, id := range []string{"1", "2", "3"} {
			s.Done(claimOf("a", g, id))
		}
		closeStore(t, s)
	})
}

// Each claim that ends by Verify is remembered for a time of its own; all payloads must not be looked at for each that is over.
func TestThePayloadsAreLookedAtOnceASecondAtMost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := NewStore(Options{RetryGrace: 30 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close(context.Background(), time.Second) }()
		const seconds = 60
		looks, last := 0, time.Time{}
		for i := range seconds * 20 {
			key := strconv.Itoa(i)
			g, err := s.Put(Put{Key: key, Memory: nullMemory{}})
			if err != nil {
				t.Fatal(err)
			}
			c := Claim{Key: key, Generation: g, ID: wire.TextID(key), Owner: "o"}
			if _, err := s.Claim(context.Background(), c); err != nil {
				t.Fatal(err)
			}
			if !s.Verify(c) {
				t.Fatal("lost")
			}
			time.Sleep(time.Second / 20)
			synctest.Wait()
			s.mu.Lock()
			if !s.looked.Equal(last) {
				looks, last = looks+1, s.looked
			}
			s.mu.Unlock()
		}
		if looks > seconds {
			t.Errorf("%d looks in %d s", looks, seconds)
		}
		time.Sleep(31 * time.Second)
		s.mu.Lock()
		defer s.mu.Unlock()
		if n := len(s.verified.order); n != 0 {
			t.Errorf("%d claims are still remembered", n)
		}
	})
}
