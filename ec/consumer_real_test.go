package ec

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/tcp"
)

// realEnd is one end of the real thing: a region, a cache, planes, a control loop.
type realEnd struct {
	t        testing.TB
	name     string
	region   *region.Region
	cache    *Cache
	planes   []transfer.Plane
	loop     *control.Loop
	router   *control.Router
	producer *Producer
	consumer *Consumer
}

func newRealEnd(t testing.TB, dir, name, plane string, blocks int) *realEnd {
	t.Helper()
	e := &realEnd{t: t, name: name}
	must := func(err error) {
		if err != nil {
			t.Helper()
			t.Fatal(err)
		}
	}
	var err error
	e.region, err = region.Create(bg, region.Options{
		Dir: dir, Identity: region.Identity{Instance: name, Group: "00"}, Geometry: region.Geometry{BlockBytes: testBlock, Blocks: blocks, Slots: blocks},
	})
	must(err)
	t.Cleanup(func() { must(e.region.Close(true)) })
	e.cache, err = NewCache(CacheOptions{Region: e.region})
	must(err)
	var p transfer.Plane
	if plane == transfer.Mapped {
		p, err = mapped.New(mapped.Options{Dirs: []string{dir}})
	} else {
		p, err = tcp.New(bg, tcp.Options{})
	}
	must(err)
	e.planes = []transfer.Plane{p}
	t.Cleanup(func() { must(p.Close()) })
	return e
}

// serve starts a producer; port 0 is any.
func (e *realEnd) serve(port int) {
	e.t.Helper()
	f, err := e.region.Reopen(false)
	if err != nil {
		e.t.Fatal(err)
	}
	defer f.Close()
	e.producer, err = NewProducer(bg, ProducerOptions{
		Pools: []ServedPool{{
			Cache: e.cache, Compat: testCompat, Planes: e.planes,
			Memory: transfer.Memory{Bytes: e.region.Pool(), File: f, Path: e.region.Path(), FileOffset: e.region.PoolOffset()},
		}},
		Generation: wire.Generation2, Node: e.name,
	})
	if err != nil {
		e.t.Fatal(err)
	}
	if e.loop, err = control.NewLoop(control.Options{}); err != nil {
		e.t.Fatal(err)
	}
	if e.router, err = e.loop.Listen(bg, "127.0.0.1", port, e.producer); err != nil {
		e.t.Fatal(err)
	}
	name, err := e.router.ListenLocal(bg)
	if err != nil {
		e.t.Fatal(err)
	}
	e.producer.ServeLocal(name)
}

func (e *realEnd) stop() {
	if err := e.loop.Close(); err != nil {
		e.t.Error(err)
	}
	if err := e.producer.Close(); err != nil {
		e.t.Error(err)
	}
}

func (e *realEnd) consume() {
	e.t.Helper()
	loop, err := control.NewLoop(control.Options{})
	if err != nil {
		e.t.Fatal(err)
	}
	e.consumer, err = NewConsumer(ConsumerOptions{
		Cache: e.cache, Compat: testCompat, Generation: wire.Generation2, ItemSize: 2, Loop: loop, Planes: e.planes, Node: e.name, Verify: true,
	})
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() {
		if err := e.consumer.Close(); err != nil {
			e.t.Error(err)
		}
		if err := loop.Close(); err != nil {
			e.t.Error(err)
		}
	})
}

// eventually polls, for what ends on goroutines of planes and sockets.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	within(t, 20*time.Second, what, f)
}

func within(t testing.TB, limit time.Duration, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(limit); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}

func eachPlane(t *testing.T, f func(t *testing.T, plane string)) {
	for _, plane := range []string{transfer.Mapped, transfer.TCP} {
		t.Run(plane, func(t *testing.T) { f(t, plane) })
	}
}

// Many goroutines fetch and give up over real sockets and planes, from a pool that holds all into one that holds a part.
func TestManyFetchesAndCancelsMixNothingUpAndLeaveNothing(t *testing.T) {
	eachPlane(t, func(t *testing.T, plane string) {
		const keys, goroutines = 200, 64
		fetches := 1000
		if testing.Short() {
			fetches = 50
		}
		dir := t.TempDir()
		from := newRealEnd(t, dir, "from", plane, 4096)
		from.serve(0)
		defer from.stop()
		to := newRealEnd(t, dir, "to", plane, 2048)
		to.consume()
		size := func(i int) int { return 1 + i*i%37 } // blocks
		for i := range keys {
			save(t, from.cache, fmt.Sprint("img-", i), size(i))
		}
		var ready, canceled, moved atomic.Int64
		var wg sync.WaitGroup
		for g := range goroutines {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(g), 7))
				for range fetches {
					i := rng.IntN(keys)
					key := fmt.Sprint("img-", i)
					ctx, cancel := context.WithCancel(bg)
					if rng.IntN(4) == 0 {
						time.AfterFunc(time.Duration(rng.IntN(2000))*time.Microsecond, cancel)
					}
					a := announced(size(i))
					a.PeerPort = from.router.Port()
					r := to.consumer.Fetch(ctx, key, a, uint64(g))
					switch {
					case r.Outcome == FetchReady:
						ready.Add(1)
						if r.Plane == plane {
							moved.Add(1)
						}
						if p, err := to.cache.Pin(key); err == nil { // else evicted since
							got := bytes.Join(p.Buffers(), nil)
							p.Release()
							if !bytes.Equal(got, content(key, len(got))) {
								t.Errorf("%s holds other bytes", key)
							}
						}
						if rng.IntN(3) == 0 {
							_ = to.cache.Remove(key) // so that it must be pulled again; pinned is fine too
						}
					case r.Outcome == FetchCanceled && ctx.Err() != nil:
						canceled.Add(1)
					default:
						t.Errorf("%s: %v (%v)", key, r.Outcome, r.Err)
					}
					cancel()
				}
			})
		}
		wg.Wait()
		st := to.consumer.Stats()
		t.Logf("%d ready, of which %d moved; %d canceled; %+v", ready.Load(), moved.Load(), canceled.Load(), st)
		if st.ReadErrors != 0 || st.VerifyFailed != 0 {
			t.Errorf("%d READs failed, %d were not verified, because others gave up", st.ReadErrors, st.VerifyFailed)
		}
		// What a fetch that was given up could not say any more ends with its grant's lease.
		within(t, 2*Timeouts{}.WithDefaults().GrantLease, "no grant, no pin, nothing being filled or in quarantine", func() bool {
			s := to.cache.Stats()
			return from.producer.Stats().Grants == 0 && from.cache.Stats().PinnedBlocks == 0 && s.FillingBlocks == 0 && s.QuarantinedBlocks == 0
		})
		if err := to.cache.check(); err != nil {
			t.Error(err)
		}
	})
}

// V7, C78.
func TestTheFirstFetchAfterAProducersRestartSucceeds(t *testing.T) {
	eachPlane(t, func(t *testing.T, plane string) {
		dir := t.TempDir()
		from := newRealEnd(t, dir, "from", plane, 256)
		to := newRealEnd(t, dir, "to", plane, 256)
		to.consume()
		port := 0
		for i := range 10 {
			from.serve(port)
			port = from.router.Port()
			key := fmt.Sprint("img-", i)
			save(t, from.cache, key, 4)
			a := announced(4)
			a.PeerPort = port
			wantOutcome(t, to.consumer.Fetch(bg, key, a, 1), FetchReady)
			wantBytes(t, to.cache, key)
			from.stop()
		}
	})
}

func BenchmarkFetch(b *testing.B) {
	dir := b.TempDir()
	from := newRealEnd(b, dir, "from", transfer.Mapped, 64)
	from.serve(0)
	defer from.stop()
	to := newRealEnd(b, dir, "to", transfer.Mapped, 64)
	to.consume()
	save(b, from.cache, "img", 4)
	a := announced(4)
	a.PeerPort = from.router.Port()
	for b.Loop() {
		if r := to.consumer.Fetch(bg, "img", a, 1); r.Outcome != FetchReady {
			b.Fatal(r.Err)
		}
		if err := to.cache.Remove("img"); err != nil {
			b.Fatal(err)
		}
	}
}

// discard is a router that takes everything.
type discard struct{ small }

func (discard) Send(string, []byte) error { return nil }

func BenchmarkAck(b *testing.B) {
	dir := b.TempDir()
	from := newRealEnd(b, dir, "from", transfer.TCP, 1<<16)
	from.serve(0)
	defer from.stop()
	from.producer.serve(discard{})
	for i := range 64 {
		save(b, from.cache, fmt.Sprint("img-", i), 512)
	}
	s := &stand{t: b}
	var reqs [64][]byte
	for i := range reqs {
		r := s.request(fmt.Sprint("img-", i))
		r.Ferry.Planes = []string{transfer.TCP}
		reqs[i] = wire.AppendRequest(nil, r, wire.Generation2)
	}
	src := control.Source{ID: "c", Addr: "127.0.0.1"}
	for i := 0; b.Loop(); i++ {
		from.producer.Message(src, reqs[i%64])
	}
}

func BenchmarkGrantAndVerify(b *testing.B) {
	s := newStand(b, 64, nil)
	save(b, s.cache, "img", 4)
	req := wire.AppendRequest(nil, s.request("img"), wire.Generation2)
	src := control.Source{ID: "c", Addr: "127.0.0.1"}
	for b.Loop() {
		s.producer.Message(src, req)
		a := s.out.take()[0].(*wire.Ack)
		s.producer.Message(src, wire.AppendVerify(nil, &wire.Verify{Key: "img", Session: a.Session, Grant: a.Ferry.Grant, Gen: a.Ferry.Gen}))
		if v := s.out.take()[0].(*wire.Verified); !v.OK {
			b.Fatal("not verified")
		}
	}
}
