package stage

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/tensor"
)

func TestALeaseNeverEndsARead(t *testing.T) {
	from, to := newLink(t, 16<<20, func(o *LinkOptions) { o.Store.RetryGrace = time.Millisecond }), newLink(t, 16<<20, onlyGets)
	const lease = time.Second // in which a get that waits for the payload has to claim it, on a busy machine too
	v := bytesOf(t, 100_000, 1)
	got := make(chan *Got)
	go func() { got <- mustGet(t, to, Request{Key: "k", From: from.Endpoint(), Wait: true, InPlace: true}) }()
	eventually(t, "the get waits", func() bool { return from.Stats().Server.Waiting == 1 })
	p := mustPut(t, from, "k", v, PutOptions{Lease: lease})
	g := receive(t, got)
	// Another payload's lease, begun later and as short, is over: so is this one's.
	later := mustPut(t, from, "later", v, PutOptions{Lease: lease})
	if receive(t, later.Released()); later.Outcome() != Expired {
		t.Errorf("outcome %d", later.Outcome())
	}
	select {
	case <-p.Released():
		t.Fatal("released under its reader")
	default:
	}
	if g.Plane != "mapped" || !tensor.Equal(g.Root, v) {
		t.Errorf("by %s, other bytes than were put", g.Plane)
	}
	if err := g.Release(); err != nil {
		t.Error(err)
	}
	if receive(t, p.Released()); p.Outcome() != Read {
		t.Errorf("outcome %d", p.Outcome())
	}
}

func TestWhatNobodyClaimsExpires(t *testing.T) {
	l := newLink(t, 1<<20)
	p := mustPut(t, l, "k", bytesOf(t, 10, 1), PutOptions{Lease: time.Millisecond})
	if receive(t, p.Released()); p.Outcome() != Expired || l.Stats().Store.Expired != 1 {
		t.Errorf("outcome %d, %+v", p.Outcome(), l.Stats().Store)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := l.Get(ctx, Request{Key: "k", Metadata: p.Metadata, Wait: true}); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	idle(t, l)
}

func TestAbortReachesWhoWaits(t *testing.T) {
	from, to := newLink(t, 1<<20), newLink(t, 1<<20, onlyGets)
	failed := make(chan error)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := to.Get(ctx, Request{Key: "k", From: from.Endpoint(), Wait: true})
		failed <- err
	}()
	eventually(t, "the get waits", func() bool { return from.Stats().Server.Waiting == 1 })
	from.Abort("k", "the thinker failed")
	var why *FailedError
	if err := receive(t, failed); !errors.As(err, &why) || why.Reason != "the thinker failed" {
		t.Error(err)
	}
}

// resources are what a process may leak.
type resources struct{ goroutines, files, mappings int }

func held(t testing.TB) resources {
	t.Helper()
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return resources{runtime.NumGoroutine(), len(files), strings.Count(string(maps), "slab")}
}

func TestAThousandAbortsLeaveNothing(t *testing.T) {
	from, to := newLink(t, 16<<20, noInline), newLink(t, 16<<20, noInline, onlyGets)
	round := func(i int) {
		v := bytesOf(t, 1+i%20_000, i)
		switch key := keyOf(i); i % 4 {
		case 0: // before anybody comes
			p := mustPut(t, from, key, v, PutOptions{})
			from.Abort(key, "r")
			if receive(t, p.Released()); p.Outcome() != Aborted {
				t.Errorf("outcome %d", p.Outcome())
			}
		case 1: // while it is read
			p := mustPut(t, from, key, v, PutOptions{})
			got := mustGet(t, to, Request{Key: key, Metadata: p.Metadata, InPlace: true})
			from.Abort(key, "r")
			if !tensor.Equal(got.Root, v) {
				t.Error("other bytes")
			}
			if err := got.Release(); err != nil {
				t.Error(err)
			}
			receive(t, p.Released())
		case 2: // while somebody waits
			failed := make(chan error)
			go func() {
				_, err := to.Get(context.Background(), Request{Key: key, From: from.Endpoint(), Wait: true})
				failed <- err
			}()
			eventually(t, "the get waits", func() bool { return from.Stats().Server.Waiting == 1 })
			from.Abort(key, "r")
			if err := receive(t, failed); !errors.Is(err, ErrFailed) {
				t.Error(err)
			}
		default: // by the one who waits
			ctx, cancel := context.WithCancel(context.Background())
			over := make(chan error)
			go func() {
				_, err := to.Get(ctx, Request{Key: key, From: from.Endpoint(), Wait: true})
				over <- err
			}()
			eventually(t, "the get waits", func() bool { return from.Stats().Server.Waiting == 1 })
			cancel()
			if err := receive(t, over); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
			eventually(t, "nobody waits", func() bool { return from.Stats().Server.Waiting == 0 })
		}
	}
	for i := range 8 { // what is made once is made
		round(1000 + i)
	}
	idle(t, from)
	before := held(t)
	for i := range 1000 {
		round(i)
	}
	idle(t, from)
	idle(t, to)
	var after resources
	eventually(t, "everything is given back", func() bool {
		after = held(t)
		return after.goroutines <= before.goroutines && after.files <= before.files && after.mappings <= before.mappings
	})
	noneWatched(t, from.store)
	if st := from.Stats().Store; st.Claims+st.Payloads+st.Withdrawing != 0 || st.Bytes != 0 {
		t.Errorf("%+v", st)
	}
}

func TestCloseWaitsForReadersThenStopsThem(t *testing.T) {
	for name, patient := range map[string]bool{"in time": true, "too late": false} {
		t.Run(name, func(t *testing.T) {
			from, to := newLink(t, 16<<20), newLink(t, 16<<20, onlyGets)
			v := bytesOf(t, 100_000, 1)
			p := mustPut(t, from, "k", v, PutOptions{})
			unread := mustPut(t, from, "unread", v, PutOptions{})
			got := mustGet(t, to, Request{Key: "k", Metadata: p.Metadata, InPlace: true})
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			closed := make(chan error, 2)
			go func() { closed <- from.Close(ctx) }()
			if receive(t, unread.Released()); unread.Outcome() != Closed {
				t.Errorf("outcome %d", unread.Outcome())
			}
			if from.Healthy() {
				t.Error("healthy")
			}
			if _, err := from.Put(t.Context(), "z", v, PutOptions{}); !errors.Is(err, ErrClosing) {
				t.Error("put:", err)
			}
			if _, err := from.Get(t.Context(), Request{Key: "z", From: Endpoint{"127.0.0.1", 1}}); !errors.Is(err, ErrClosing) {
				t.Error("get:", err)
			}
			getting, end := context.WithTimeout(t.Context(), patience)
			defer end()
			if _, err := to.Get(getting, Request{Key: "k", From: from.Endpoint()}); !errors.Is(err, ErrClosing) {
				t.Error("a get of another:", err)
			}
			select {
			case err := <-closed:
				t.Fatal("closed under a reader:", err)
			default:
			}
			if patient {
				if err := got.Release(); err != nil {
					t.Error(err)
				}
			} else {
				cancel()
			}
			if err := receive(t, closed); err != nil {
				t.Error(err)
			}
			if receive(t, p.Released()); patient && p.Outcome() != Read || !patient && p.Outcome() != Closed {
				t.Errorf("outcome %d", p.Outcome())
			}
			if !patient { // it is told that what it had may be wrong
				if err := got.Release(); err == nil {
					t.Error("no error")
				}
			}
			if err := from.Close(context.Background()); err != nil {
				t.Error("again:", err)
			}
		})
	}
}

func TestCloseEndsWhatWaits(t *testing.T) {
	from, to := newLink(t, 4<<20), newLink(t, 4<<20)
	mustPut(t, from, "full", bytesOf(t, 2<<20, 1), PutOptions{})
	var all sync.WaitGroup
	all.Go(func() { // for room
		if _, err := from.Put(context.Background(), "more", bytesOf(t, 2<<20, 2), PutOptions{}); !errors.Is(err, ErrClosing) {
			t.Error("put:", err)
		}
	})
	all.Go(func() { // for a put, here and there
		if _, err := to.Get(context.Background(), Request{Key: "never", From: from.Endpoint(), Wait: true}); !errors.Is(err, ErrClosing) {
			t.Error("get:", err)
		}
	})
	all.Go(func() {
		if _, err := from.Get(context.Background(), Request{Key: "never", From: to.Endpoint(), Wait: true}); !errors.Is(err, ErrClosing) {
			t.Error("get:", err)
		}
	})
	eventually(t, "both wait", func() bool { return from.Stats().Server.Waiting+to.Stats().Server.Waiting == 2 })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := from.Close(ctx); err != nil {
		t.Error(err)
	}
	all.Wait()
}

func TestALinkWhoseLoopDiedIsNotHealthy(t *testing.T) {
	l := newLink(t, 1<<20)
	if !l.Healthy() {
		t.Error("not healthy")
	}
	if err := l.loop.Close(); err != nil {
		t.Fatal(err)
	}
	if l.Healthy() {
		t.Error("healthy")
	}
}
