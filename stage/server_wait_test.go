package stage

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/stage/wire"
)

const long = 60_000 // milliseconds, more than a test takes

func isWaiting(t *testing.T, s *Server, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("%d gets wait", n), func() bool { return s.Stats().Waiting == n })
}

// noneWatched fails if the store still has somebody who watches a key.
func noneWatched(t *testing.T, st *Store) {
	t.Helper()
	st.mu.Lock()
	defer st.mu.Unlock()
	if len(st.watchers) > 0 {
		t.Errorf("%d keys are watched", len(st.watchers))
	}
}

func TestAWaitingGetIsAnsweredByWhatHappens(t *testing.T) {
	for name, c := range map[string]struct {
		happens func(*testing.T, *Store, *Server)
		wait    int64
		want    wire.Status
	}{
		"put":    {func(t *testing.T, st *Store, _ *Server) { put(t, st, "k") }, long, wire.Found},
		"abort":  {func(_ *testing.T, st *Store, _ *Server) { st.Abort("k", "out of memory") }, long, wire.Failed},
		"time":   {func(*testing.T, *Store, *Server) {}, 50, wire.NotFound},
		"server": {func(_ *testing.T, _ *Store, s *Server) { s.Close() }, long, wire.Closing},
		"store": {func(t *testing.T, st *Store, _ *Server) {
			if err := st.Close(context.Background(), 0); err != nil {
				t.Error(err)
			}
		}, long, wire.Closing},
	} {
		t.Run(name, func(t *testing.T) {
			st, s := serve(t, Options{}, ServerOptions{})
			o := newOwn(t, s)
			o.send(wire.Get, claimOf("k", wire.ID{}, "c"), wire.FerryRequest{Try: 5, WaitMS: c.wait})
			isWaiting(t, s, 1)
			put(t, st, "another key")
			c.happens(t, st, s)
			a := receive(t, o.answers)
			if a.Status != c.want || a.Try != 5 || c.want == wire.Failed && a.Reason != "out of memory" {
				t.Errorf("%+v", a)
			}
			isWaiting(t, s, 0)
			noneWatched(t, st)
		})
	}
}

func TestAGetWaitsOverAnExpiredPayload(t *testing.T) {
	st, s := serve(t, Options{Lease: 1}, ServerOptions{})
	put(t, st, "k")
	eventually(t, "expired", func() bool { return st.Stats().Expired == 1 })
	o := newOwn(t, s)
	o.send(wire.Get, claimOf("k", wire.ID{}, "c"), wire.FerryRequest{WaitMS: long})
	isWaiting(t, s, 1)
	st.Abort("k", "r")
	if a := receive(t, o.answers); a.Status != wire.Failed {
		t.Errorf("%+v", a)
	}
}

func TestAGetOfAGenerationThatIsGoneDoesNotWait(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	o := newOwn(t, s)
	if a := o.ask(wire.Get, claimOf("k", wire.NewID(), "c"), wire.FerryRequest{WaitMS: long}); a.Status != wire.NotFound {
		t.Errorf("%+v", a)
	}
	put(t, st, "k")
	if a := o.ask(wire.Get, claimOf("k", wire.NewID(), "c"), wire.FerryRequest{WaitMS: long}); a.Status != wire.NotFound {
		t.Errorf("%+v", a)
	}
}

func TestAPlainGetNeverWaits(t *testing.T) {
	_, s := serve(t, Options{}, ServerOptions{})
	if a := newPlain(t, s).ask(wire.Get, claimOf("k", wire.ID{}, "c")); a.Status != wire.NotFound {
		t.Errorf("%+v", a)
	}
}

func TestAGivenUpWaitGrantsNothing(t *testing.T) {
	for name, giveUp := range map[string]func(*own, Claim){
		"fail":       func(o *own, c Claim) { o.ask(wire.Fail, c, wire.FerryRequest{}) },
		"done":       func(o *own, c Claim) { o.ask(wire.Done, c, wire.FerryRequest{}) },
		"connection": func(o *own, _ Claim) { o.close() },
	} {
		t.Run(name, func(t *testing.T) {
			st, s := serve(t, Options{}, ServerOptions{})
			o := newOwn(t, s)
			c := claimOf("k", wire.ID{}, "c")
			o.send(wire.Get, c, wire.FerryRequest{WaitMS: long})
			isWaiting(t, s, 1)
			giveUp(o, c)
			isWaiting(t, s, 0)
			noneWatched(t, st)
			put(t, st, "k")
			if n := st.Stats().Granted; n != 0 {
				t.Errorf("%d claims granted", n)
			}
		})
	}
}

func TestAGetThatIsAskedAgainWaitsOnce(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	o := newOwn(t, s)
	c := claimOf("k", wire.ID{}, "c")
	for try := range uint64(3) {
		o.send(wire.Get, c, wire.FerryRequest{Try: try + 1, WaitMS: long})
	}
	eventually(t, "asked thrice", func() bool { return s.Stats().Gets == 3 })
	isWaiting(t, s, 1)
	put(t, st, "k")
	if a := receive(t, o.answers); a.Status != wire.Found || a.Try != 3 {
		t.Errorf("%+v", a)
	}
	if a := o.ask(wire.Verify, claimOf("k", wire.ID{}, "z"), wire.FerryRequest{Try: 4}); a.Try != 4 {
		t.Errorf("an answer too many: %+v", a)
	}
}

func TestWaitingGetsAreBounded(t *testing.T) {
	_, s := serve(t, Options{}, ServerOptions{MaxWaiting: 8})
	first := newOwn(t, s)
	for i := range 5 {
		first.send(wire.Get, claimOf(keyOf(i), wire.ID{}, "c"+keyOf(i)), wire.FerryRequest{Try: uint64(i + 1), WaitMS: long})
	}
	for range 3 { // a connection may have a quarter
		if a := receive(t, first.answers); a.Status != wire.NotFound || a.Try < 3 {
			t.Errorf("%+v", a)
		}
	}
	for n := 4; n <= 8; n += 2 {
		o := newOwn(t, s)
		for i := range 2 {
			o.send(wire.Get, claimOf("k", wire.ID{}, keyOf(i)), wire.FerryRequest{WaitMS: long})
		}
		isWaiting(t, s, n)
	}
	if a := newOwn(t, s).ask(wire.Get, claimOf("k", wire.ID{}, "c"), wire.FerryRequest{WaitMS: long}); a.Status != wire.NotFound {
		t.Errorf("%+v", a)
	}
	if st := s.Stats(); st.WaitRefused != 4 || st.Waiting != 8 {
		t.Errorf("%+v", st)
	}
}

func TestAllWhoWaitAreWokenAndAsManyAsMayReadDo(t *testing.T) {
	st, s := serve(t, Options{MaxClaims: 2}, ServerOptions{})
	var all []*own
	for i := range 4 {
		o := newOwn(t, s)
		o.send(wire.Get, claimOf("k", wire.ID{}, keyOf(i)), wire.FerryRequest{WaitMS: long})
		all = append(all, o)
	}
	isWaiting(t, s, 4)
	put(t, st, "k")
	got := map[wire.Status]int{}
	for _, o := range all {
		got[receive(t, o.answers).Status]++
	}
	if got[wire.Found] != 2 || got[wire.NotFound] != 2 || s.Stats().Woken != 2 || s.Stats().Full != 2 {
		t.Errorf("%v, %+v", got, s.Stats())
	}
}

// A put that fails leaves those who wait as they were.
func TestARefusedPutWakesNobody(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	o := newOwn(t, s)
	o.send(wire.Get, claimOf("k", wire.ID{}, "c"), wire.FerryRequest{WaitMS: long})
	isWaiting(t, s, 1)
	if _, err := st.Put(Put{Key: "k", Memory: newMemory(t), Readers: -1}); !errors.Is(err, ErrOptions) {
		t.Error(err)
	}
	isWaiting(t, s, 1)
}
