package stage

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer/faulty"
)

func TestAClaimOfAReadThatIsStillUnderWayEndsOnlyWhenItIsOver(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", full(100_000))
	hold, reading := make(chan struct{}), make(chan struct{})
	s := newSlab(t, 1<<20, faulty.Rule{Op: faulty.Complete, Hold: hold, Hit: func() { close(reading) }}, faulty.Rule{Op: faulty.Cancel, Index: faulty.Every, Drop: true})
	c := newClient(t, ClientOptions{Slab: s})
	ctx, cancel := context.WithCancel(t.Context())
	done := start(ctx, c, Request{Key: "k", From: p.endpoint()})
	receive(t, reading)
	cancel()
	if g := receive(t, done); !errors.Is(g.err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", g.err)
	}
	// The connection answers in order: what would have been sent is there before the answer to another get.
	if _, err := c.Get(within(t, patience), Request{Key: "other", From: p.endpoint()}); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	if n := len(p.asked(wire.Fail)) + len(p.asked(wire.Verify)) + len(p.asked(wire.Done)); n != 0 || p.held() != 1 || s.Used() == 0 {
		t.Errorf("while the READ is under way: %d claims were ended, %d are held, %d bytes in use", n, p.held(), s.Used())
	}
	close(hold)
	p.wants(wire.Fail, 1)
	p.free()
	eventually(t, "the destination is free", func() bool { return s.Used() == 0 })
}

// The steps of a get at which it can be called off.
const (
	stepConnect = iota
	stepAsk
	stepAlloc
	stepRead
	stepVerify
	steps
)

func TestAGetCalledOffAtAnyStepLeavesNothing(t *testing.T) {
	for step := range steps {
		t.Run([]string{"connect", "ask", "alloc", "read", "verify"}[step], func(t *testing.T) {
			p := newProducer(t, false)
			p.put("k", full(100_000))
			reached := make(chan struct{}, 100)
			hit := func() { reached <- struct{}{} }
			var rules []faulty.Rule
			hold := make(chan struct{})
			if step == stepRead {
				rules = append(rules, faulty.Rule{Op: faulty.Complete, Hold: hold, Hit: hit})
			}
			s := newSlab(t, 200_000, rules...)
			var late asked
			p.onAsk(func(q asked) bool {
				if step == stepAsk && q.Op == wire.Get && len(p.asked(wire.Get)) == 1 || step == stepVerify && q.Op == wire.Verify {
					late = q
					hit()
					return true
				}
				if step == stepAlloc && q.Op == wire.Get {
					q.serve()
					hit()
					return true
				}
				return false
			})
			c := newClient(t, ClientOptions{Slab: s})
			var room *slab.Buffer
			if step == stepAlloc {
				var err error
				if room, err = s.Alloc(t.Context(), []int64{150_000}); err != nil {
					t.Fatal(err)
				}
			}
			r := Request{Key: "k", From: p.endpoint()}
			ctx, cancel := context.WithCancel(t.Context())
			if step == stepConnect {
				cancel()
			}
			done := start(ctx, c, r)
			if step != stepConnect {
				receive(t, reached)
			}
			cancel()
			g := receive(t, done)
			if !errors.Is(g.err, context.Canceled) || g.Got != nil {
				t.Errorf("%v, %v, want context.Canceled", g.Got, g.err)
			}
			close(hold)
			if late.Request != nil {
				late.serve()
			}
			if room != nil {
				room.Free()
			}
			p.free()
			eventually(t, "nothing is pending or in use", func() bool { return c.Stats().Pending == 0 && s.Used() == 0 })

			p.onAsk(nil)
			got, err := c.Get(within(t, patience), r)
			if err != nil {
				t.Fatal(err)
			}
			releaseAs(t, got, full(100_000))
			p.free()
			if s.Used() != 0 {
				t.Errorf("%d bytes in use", s.Used())
			}
		})
	}
}

func TestAThousandGetsThatAreCalledOffLeaveNothing(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			value := full(10_000)
			p.put("k", value)
			s := newPlainSlab(t, 1<<20)
			c := newClient(t, ClientOptions{Slab: s, Inline: -1})
			get := func(ctx context.Context) {
				g, err := c.Get(ctx, Request{Key: "k", From: p.endpoint()})
				switch {
				case err == nil:
					releaseAs(t, g, value)
				case !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded):
					t.Error(err)
				}
			}
			settled := func() bool { return c.Stats().Pending == 0 && p.held() == 0 && s.Used() == 0 }
			get(within(t, patience))
			eventually(t, "the first has settled", settled)
			before := runtime.NumGoroutine()
			var all sync.WaitGroup
			for i := range 8 {
				all.Go(func() {
					for k := range 125 {
						ctx, cancel := context.WithTimeout(t.Context(), time.Duration((k*8+i)%50)*20*time.Microsecond)
						get(ctx)
						cancel()
					}
				})
			}
			all.Wait()
			eventually(t, "nothing is pending, claimed or in use", settled)
			eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= before })
			if st := c.Stats(); st.Gets != 1001 || st.GivenUp != 0 || st.Connections > plainConnections || st.OK+st.TimedOut != st.Gets {
				t.Errorf("%+v", st)
			}
		})
	}
}

func TestManyGetsAtOnceEachGetTheirPayload(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			for i := range 64 {
				p.put(itoa(i), full(1000*i))
			}
			c := newClient(t, ClientOptions{Slab: newPlainSlab(t, 4<<20)})
			var all sync.WaitGroup
			for i := range 64 {
				all.Go(func() {
					for range 5 {
						g, err := c.Get(within(t, patience), Request{Key: itoa(i), From: p.endpoint()})
						if err != nil {
							t.Error(err)
						} else {
							releaseAs(t, g, full(1000*i))
						}
					}
				})
			}
			all.Wait()
			p.free()
			if n := c.Stats().Connections; n > plainConnections || !plain && n != 1 {
				t.Errorf("%d connections", n)
			}
		})
	}
}

func TestConnectionsToManyProducersAreBounded(t *testing.T) {
	l, s := newLoop(t), newPlainSlab(t, 4096)
	c := newClient(t, ClientOptions{})
	for i := range maxConnections + 50 {
		p := &producer{t: t, plain: true, slab: s, payloads: map[string]*offered{}, claims: map[wire.ID]asked{}, changed: make(chan struct{})}
		p.listen(l, 0)
		p.put("k", empty(int64(i)))
		g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
		if err != nil {
			t.Fatal(err)
		}
		releaseAs(t, g, empty(int64(i)))
		p.free()
		if n := c.Stats().Connections; n > maxConnections+plainConnections {
			t.Fatalf("%d connections", n)
		}
	}
}

func TestAPayloadInPlaceIsClaimedUntilItsReleaseWhichVerifies(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", full(100))
	c := newClient(t, ClientOptions{})
	r := Request{Key: "k", From: p.endpoint(), InPlace: true}
	g, err := c.Get(within(t, patience), r)
	if err != nil {
		t.Fatal(err)
	}
	if g.Plane != "mapped" || p.held() != 1 || c.o.Slab.(*slab.Slab).Used() != 0 || len(p.asked(wire.Verify)) != 0 {
		t.Errorf("plane %q, %d claims, %d bytes in use", g.Plane, p.held(), c.o.Slab.(*slab.Slab).Used())
	}
	releaseAs(t, g, full(100))
	if p.held() != 0 || len(p.asked(wire.Verify)) != 1 {
		t.Errorf("after Release: %d claims", p.held())
	}
	if g, err = c.Get(within(t, patience), r); err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	clear(p.claims)
	p.mu.Unlock()
	if err := g.Release(); !errors.Is(err, ErrLost) {
		t.Errorf("Release: %v, want ErrLost", err)
	}
	if err := g.Release(); err != nil {
		t.Errorf("the second Release: %v", err)
	}
}

func TestWhatCannotBeHadInPlaceIsCopied(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", full(100))
	c := newClient(t, ClientOptions{Slab: newSlab(t, 1<<20, faulty.Rule{Op: faulty.View, Fail: true})})
	g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint(), InPlace: true})
	if err != nil {
		t.Fatal(err)
	}
	if c.o.Slab.(*slab.Slab).Used() == 0 || p.held() != 0 {
		t.Errorf("%d bytes in use, %d claims", c.o.Slab.(*slab.Slab).Used(), p.held())
	}
	releaseAs(t, g, full(100))
}

func TestLegacyMetadataIsReadWithoutAClaim(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(3))
	m := p.payloads["k"].m
	m.Legacy = true
	c := newClient(t, ClientOptions{})
	g, err := c.Get(within(t, patience), Request{Key: "k", Metadata: wire.AppendMetadata(nil, &m)})
	if err != nil {
		t.Fatal(err)
	}
	releaseAs(t, g, empty(3))
	if len(p.seen) != 0 {
		t.Errorf("the producer was asked: %v", p.seen)
	}
}

func TestAPayloadThatHasNoRoomIsGivenBack(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", full(100_000))
	c := newClient(t, ClientOptions{Slab: newSlab(t, 4096)})
	if _, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()}); !errors.Is(err, slab.ErrTooLarge) {
		t.Errorf("%v, want ErrTooLarge", err)
	}
	p.wants(wire.Fail, 1)
	p.free()
}

func TestAPlainProducerIsToldDoneWhateverBecameOfTheRead(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", full(100_000))
	p.put("bad", full(100_000))
	p.onAsk(func(q asked) bool {
		if q.Op != wire.Get || q.Key != "bad" {
			return false
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.claims[q.Claim] = q
		m := q.offer(p.payloads["bad"])
		m.Groups[0].Regions[0].Addr = 1 << 40 // nothing is registered there
		q.answer(wire.Reply{Status: wire.Found, Metadata: m})
		return true
	})
	c := newClient(t, ClientOptions{Slab: newPlainSlab(t, 1<<20)})
	g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
	if err != nil {
		t.Fatal(err)
	}
	if g.Plane != "nixl" {
		t.Errorf("plane %q", g.Plane)
	}
	releaseAs(t, g, full(100_000))
	p.free()
	if _, err := c.Get(within(t, patience), Request{Key: "bad", From: p.endpoint()}); err == nil {
		t.Error("a READ from nowhere succeeded")
	}
	p.free()
	if n := len(p.asked(wire.Done)); n != 2 || c.o.Slab.(*slab.Slab).Used() != 0 {
		t.Errorf("%d times done, %d bytes in use", n, c.o.Slab.(*slab.Slab).Used())
	}
}

func TestAFailedReadIsTriedOnceMoreAndThenGivenBack(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", full(100_000))
	c := newClient(t, ClientOptions{Slab: newSlab(t, 1<<20, faulty.Rule{Op: faulty.AddPeer, Index: faulty.Every, Fail: true})})
	g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
	if err != nil {
		t.Fatal(err)
	}
	if g.Plane != "tcp" {
		t.Errorf("plane %q, want the next one", g.Plane)
	}
	releaseAs(t, g, full(100_000))
	p.free()
}

func TestALocalSocketIsUsedOnceKnownAndTCPWhenItIsGone(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", empty(1))
	local, err := p.router.ListenLocal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	p.payloads["k"].m.Ferry.Local = local
	c := newClient(t, ClientOptions{})
	get := func() {
		t.Helper()
		g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint(), Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		releaseAs(t, g, empty(1))
	}
	last := func() control.Source {
		all := p.asked(wire.Get)
		return all[len(all)-1].from
	}
	get()
	if last().Local {
		t.Error("the first question came by a socket that nobody knew")
	}
	eventually(t, "the local socket is used", func() bool {
		get()
		return last().Local
	})
	eventually(t, "the connection before is closed", func() bool { return c.Stats().Connections == 1 })
	at := p.endpoint()
	p.stop()
	p.mu.Lock()
	p.payloads["k"].m.Ferry.Local = "" // the next has none
	p.mu.Unlock()
	p.listen(newLoop(t), at.Port)
	get()
	if last().Local {
		t.Error("still by the local socket")
	}
	p.free()
}

func TestCloseEndsGetsAndWaitsForWhatHasToBeTold(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(1))
	held := make(chan asked, 1)
	p.onAsk(func(q asked) bool {
		if q.Op == wire.Done && len(p.asked(wire.Done)) == 1 {
			held <- q
			return true
		}
		return q.Key == "never"
	})
	c := newClient(t, ClientOptions{})
	g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
	if err != nil {
		t.Fatal(err)
	}
	releaseAs(t, g, empty(1))
	q := receive(t, held)
	waiting := start(within(t, patience), c, Request{Key: "later", From: p.endpoint(), Wait: true})
	p.wants(wire.Get, 2)
	closed := make(chan error, 1)
	go func() { closed <- c.Close(within(t, patience)) }()
	if g := receive(t, waiting); !errors.Is(g.err, ErrClosing) {
		t.Errorf("%v, want ErrClosing", g.err)
	}
	select {
	case err := <-closed:
		t.Fatalf("Close did not wait: %v", err)
	default:
	}
	q.serve()
	if err := receive(t, closed); err != nil {
		t.Error(err)
	}
	p.free()
}

func TestCloseDoesNotWaitForEver(t *testing.T) {
	for _, plain := range []bool{true, false} {
		p := newProducer(t, plain)
		p.put("k", empty(1))
		p.onAsk(func(q asked) bool { return q.Op != wire.Get })
		c := newClient(t, ClientOptions{})
		g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
		if err != nil {
			t.Fatal(err)
		}
		releaseAs(t, g, empty(1))
		p.wants(wire.Done, 1)
		if err := c.Close(within(t, 20*time.Millisecond)); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want that a claim was not ended", name(plain), err)
		}
		if !plain { // ends with its connection
			p.free()
		}
	}
}

func TestAValueOfEveryKindComesBack(t *testing.T) {
	l := newLink(t, 4<<20)
	c := newClient(t, ClientOptions{Slab: newSlab(t, 4<<20)})
	for i, v := range []tensor.Node{
		full(10), full(200_000), tensor.List{full(1)}, tensor.Tuple{full(3), empty(2), full(70_000)}, tensor.String("text"), tensor.Null{},
		tensor.Map{tensor.Field("a", full(100)), tensor.Field("b", tensor.List{tensor.Int(1), full(5)}), tensor.Field("e", empty(1))},
	} {
		for _, inPlace := range []bool{false, true} {
			key := fmt.Sprint(i, inPlace)
			put := mustPut(t, l, key, v, PutOptions{})
			g, err := c.Get(within(t, patience), Request{Key: key, Metadata: put.Metadata, InPlace: inPlace})
			if err != nil {
				t.Fatal(err)
			}
			releaseAs(t, g, v)
			receive(t, put.Released())
			if put.Outcome() != Read {
				t.Errorf("%d: outcome %d", i, put.Outcome())
			}
		}
	}
}

func TestConnectionsThatNobodyUsesAreClosed(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			p.put("k", full(0))
			c := newClient(t, ClientOptions{})
			use := func(r Request) *Got {
				t.Helper()
				g, err := c.Get(within(t, patience), r)
				if err != nil {
					t.Fatal(err)
				}
				return g
			}
			r := Request{Key: "k", From: p.endpoint()}
			releaseAs(t, use(r), full(0))
			eventually(t, "the claim is ended", func() bool { return c.Stats().Pending == 0 })
			age := func() { // as if nobody had used anything for a while
				c.mu.Lock()
				for _, e := range c.endpoints {
					e.mu.Lock()
					for s := range e.sessions {
						s.since = s.since.Add(-idleFor)
					}
					e.mu.Unlock()
				}
				c.mu.Unlock()
				c.sweepIdle()
			}
			c.sweepIdle()
			if n := c.Stats().Connections; n != 1 {
				t.Errorf("%d connections before their time", n)
			}
			age()
			if n := c.Stats().Connections; n != 0 || len(c.endpoints) != 0 {
				t.Errorf("%d connections and %d endpoints after it", n, len(c.endpoints))
			}
			if plain {
				releaseAs(t, use(r), full(0))
				return
			}
			// One that a claim needs stays.
			p.put("k", full(10))
			r.InPlace = true
			g := use(r)
			age()
			if n := c.Stats().Connections; n != 1 {
				t.Errorf("%d connections while a payload is used in place", n)
			}
			releaseAs(t, g, full(10))
		})
	}
}
