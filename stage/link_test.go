package stage

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
)

// values are payloads of every kind.
func values(t testing.TB) map[string]tensor.Node {
	empty, err := tensor.New(tensor.Float32, tensor.Shape{3, 0}, nil)
	if err != nil {
		t.Fatal(err)
	}
	scalar, err := tensor.Of([]int64{7})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]tensor.Node{
		"tensor":         bytesOf(t, 1000, 1),
		"large":          bytesOf(t, 300_000, 2),
		"scalar":         scalar,
		"empty":          empty,
		"list":           tensor.List{bytesOf(t, 10, 3), bytesOf(t, 70_000, 4)},
		"list of one":    tensor.List{bytesOf(t, 10, 5)},
		"tuple":          tensor.Tuple{bytesOf(t, 10, 6), empty},
		"object":         tensor.Map{tensor.Field("prompt", tensor.String("a cat")), tensor.Field("steps", tensor.Int(8))},
		"empty object":   tensor.Map{},
		"structured":     tensor.Map{tensor.Field("h", tensor.List{bytesOf(t, 100_000, 7), empty, scalar}), tensor.Field("n", tensor.Int(1))},
		"many leaves":    leaves(t, 50, 4096),
		"text":           tensor.String("x"),
		"a large object": tensor.Bytes(make([]byte, 200_000)),
	}
}

func leaves(t testing.TB, n, size int) tensor.Node {
	m := tensor.Map{}
	for i := range n {
		m = append(m, tensor.Field(keyOf(i), bytesOf(t, size, i)))
	}
	return m
}

func TestWhatIsPutComesBack(t *testing.T) {
	for name, set := range map[string][]func(*LinkOptions){"": nil, "summed": {withSum}, "not inline": {noInline, withSum}} {
		t.Run(name, func(t *testing.T) {
			from, to := newLink(t, 16<<20, set...), newLink(t, 16<<20, append(set, onlyGets)...)
			for key, v := range values(t) {
				p := mustPut(t, from, key, v, PutOptions{})
				if p.Key != key || p.Generation.IsZero() {
					t.Errorf("%+v", p)
				}
				r := Request{Key: key, Metadata: p.Metadata}
				if len(key)%2 == 0 {
					r = Request{Key: key, From: from.Endpoint()}
				}
				consume(t, to, r, v)
				receive(t, p.Claimed())
				if receive(t, p.Released()); p.Outcome() != Read {
					t.Errorf("%s: outcome %d", key, p.Outcome())
				}
			}
			idle(t, from)
			idle(t, to)
		})
	}
}

func TestAPutIsACopy(t *testing.T) {
	l := newLink(t, 16<<20)
	v := bytesOf(t, 100_000, 1)
	p := mustPut(t, l, "k", v, PutOptions{})
	want := v.Clone()
	clear(v.Data())
	consume(t, l, Request{Key: "k", Metadata: p.Metadata}, want)
}

// The metadata of a put has the fields of the peers', in their order, and tells nobody where the bytes are before a claim.
func TestTheMetadataOfAPutIsThePeersWithoutDescriptors(t *testing.T) {
	l := newLink(t, 1<<20)
	p := mustPut(t, l, "k", bytesOf(t, 10, 1), PutOptions{})
	n, rest, err := msgp.ReadMapHeaderBytes(p.Metadata)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for range n {
		var name string
		if name, rest, err = msgp.ReadStringBytes(rest); err != nil {
			t.Fatal(err)
		}
		if rest, err = msgp.Skip(rest); err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	want := []string{"schema_version", "kind", "agent_metadata", "descriptor_groups", "tensor_specs", "size", "sender_host", "sender_zmq_port", "generation", "ferry"}
	if !slices.Equal(names, want) || len(rest) != 0 {
		t.Errorf("%v, want %v", names, want)
	}
	h, err := wire.DecodeHandoff(p.Metadata)
	if err != nil || (Endpoint{h.Host, h.Port}) != l.Endpoint() || h.Generation != p.Generation || h.Ferry.Node != l.o.Node || h.Ferry.Local != l.server.Local() ||
		len(h.Ferry.Planes)+len(h.Ferry.Offsets) != 0 {
		t.Errorf("%+v, %v", h, err)
	}
}

func TestALinkReplacesWhatNobodyClaimedOnly(t *testing.T) {
	l := newLink(t, 16<<20)
	first := mustPut(t, l, "k", bytesOf(t, 100_000, 1), PutOptions{})
	second := mustPut(t, l, "k", bytesOf(t, 100_000, 2), PutOptions{})
	if receive(t, first.Released()); first.Outcome() != Replaced {
		t.Errorf("outcome %d", first.Outcome())
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if got, err := l.Get(ctx, Request{Key: "k", Metadata: first.Metadata}); !errors.Is(err, ErrNotFound) {
		t.Errorf("the old generation: %+v, %v", got, err)
	}
	got := mustGet(t, l, Request{Key: "k", Metadata: second.Metadata, InPlace: true})
	receive(t, second.Claimed())
	if _, err := l.Put(ctx, "k", bytesOf(t, 1, 3), PutOptions{}); !errors.Is(err, ErrClaimed) {
		t.Errorf("put: %v", err)
	}
	if err := l.Cleanup("k"); !errors.Is(err, ErrClaimed) {
		t.Errorf("cleanup: %v", err)
	}
	if !tensor.Equal(got.Root, bytesOf(t, 100_000, 2)) {
		t.Error("other bytes")
	}
	if err := got.Release(); err != nil {
		t.Error(err)
	}
	receive(t, second.Released())
	third := mustPut(t, l, "k", bytesOf(t, 1, 3), PutOptions{})
	if err := l.Cleanup("k"); err != nil {
		t.Error(err)
	}
	if receive(t, third.Released()); third.Outcome() != CleanedUp {
		t.Errorf("outcome %d", third.Outcome())
	}
}

func TestAPayloadForSeveralReadersIsReleasedAfterTheLast(t *testing.T) {
	l := newLink(t, 16<<20, noInline)
	v := bytesOf(t, 100_000, 1)
	p := mustPut(t, l, "k", v, PutOptions{Readers: 3})
	for i := range 3 {
		select {
		case <-p.Released():
			t.Fatalf("released after %d readers", i)
		default:
		}
		consume(t, l, Request{Key: "k", Metadata: p.Metadata}, v)
	}
	if receive(t, p.Released()); p.Outcome() != Read {
		t.Errorf("outcome %d", p.Outcome())
	}
}

func TestManyPutsAndGetsAtOnceMixNothingUp(t *testing.T) {
	from, to := newLink(t, 32<<20, withSum), newLink(t, 32<<20)
	var all sync.WaitGroup
	for g := range 64 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 1))
			for i := range 20 {
				key := fmt.Sprintf("%d-%d", g, i)
				v := bytesOf(t, r.IntN(1<<(6+r.IntN(11)))+1, g*1000+i)
				put := func() []byte { return mustPut(t, from, key, v, PutOptions{}).Metadata }
				switch r.IntN(4) {
				case 0: // the get is there first
					go put()
					consume(t, to, Request{Key: key, From: from.Endpoint(), Wait: true}, v)
				case 1:
					consume(t, to, Request{Key: key, Metadata: put(), InPlace: true}, v)
				case 2: // nobody comes
					put()
					if err := from.Cleanup(key); err != nil {
						t.Error(err)
					}
				default:
					consume(t, to, Request{Key: key, Metadata: put()}, v)
				}
			}
		})
	}
	all.Wait()
	idle(t, from)
	idle(t, to)
	if st := from.Stats().Store; st.Lapsed+st.Failed != 0 || st.Puts != 64*20 {
		t.Errorf("%+v", st)
	}
}

func TestAMiddleStageReceivesAndPublishes(t *testing.T) {
	for name, sum := range map[string]func(*LinkOptions){"plain": func(*LinkOptions) {}, "summed": withSum} {
		t.Run(name, func(t *testing.T) {
			thinker, talker, vocoder := newLink(t, 16<<20, noInline), newLink(t, 16<<20, noInline, sum), newLink(t, 16<<20, noInline)
			v := tensor.Tuple{bytesOf(t, 200_000, 1), bytesOf(t, 3, 2)}
			for i, r := range []Request{{}, {InPlace: true}} { // the second cannot do without a copy
				key := keyOf(i)
				p := mustPut(t, thinker, key, v, PutOptions{})
				r.Key, r.Metadata = key, p.Metadata
				got := mustGet(t, talker, r)
				q, err := talker.Republish(t.Context(), key, got, PutOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if err := got.Release(); err != nil {
					t.Error(err)
				}
				receive(t, p.Released())
				consume(t, vocoder, Request{Key: key, Metadata: q.Metadata}, v)
				receive(t, q.Released())
				// It puts something of its own, too.
				own := mustPut(t, talker, key, v[1], PutOptions{})
				consume(t, vocoder, Request{Key: key, Metadata: own.Metadata}, v[1])
			}
			for _, l := range []*Link{thinker, talker, vocoder} {
				idle(t, l)
			}
		})
	}
}

func TestWhatCannotBeRepublishedIsFreed(t *testing.T) {
	from, to := newLink(t, 16<<20, noInline), newLink(t, 16<<20, noInline)
	busy := mustPut(t, to, "busy", bytesOf(t, 100_000, 1), PutOptions{})
	reader := mustGet(t, from, Request{Key: "busy", Metadata: busy.Metadata, InPlace: true})
	p := mustPut(t, from, "k", bytesOf(t, 100_000, 2), PutOptions{})
	got := mustGet(t, to, Request{Key: "k", Metadata: p.Metadata})
	if _, err := to.Republish(t.Context(), "busy", got, PutOptions{}); !errors.Is(err, ErrClaimed) {
		t.Error(err)
	}
	if _, err := to.Republish(t.Context(), "free", got, PutOptions{}); !errors.Is(err, ErrOptions) {
		t.Error("what was given away:", err)
	}
	if err := reader.Release(); err != nil {
		t.Error(err)
	}
	receive(t, busy.Released())
	idle(t, to)
}

func TestReplicasWithEqualKeysGiveTheirOwnBytes(t *testing.T) {
	var replicas [4]*Link
	for i := range replicas {
		replicas[i] = newLink(t, 4<<20)
	}
	to := newLink(t, 16<<20, onlyGets)
	var all sync.WaitGroup
	for i, from := range replicas {
		all.Go(func() {
			for k := range 20 {
				p := mustPut(t, from, keyOf(k), bytesOf(t, 70_000*(k%2)+10, i*100+k), PutOptions{})
				if k%3 == 0 {
					consume(t, to, Request{Key: keyOf(k), From: from.Endpoint()}, bytesOf(t, 70_000*(k%2)+10, i*100+k))
				} else {
					consume(t, to, Request{Key: keyOf(k), Metadata: p.Metadata}, bytesOf(t, 70_000*(k%2)+10, i*100+k))
				}
			}
		})
	}
	all.Wait()
	ports := map[int]bool{}
	for _, l := range replicas {
		ports[l.Endpoint().Port] = true
	}
	if len(ports) != 4 {
		t.Error(ports)
	}
}

func TestOptionsOfALinkThatCannotWorkAreNamed(t *testing.T) {
	s := sharedSlab(t, 1<<20)
	for name, o := range map[string]LinkOptions{
		"no slab":              {Bind: &Endpoint{}},
		"a wildcard":           {Slab: s, Bind: &Endpoint{Host: "*"}},
		"an IPv4 wildcard":     {Slab: s, Bind: &Endpoint{Host: "0.0.0.0"}},
		"an IPv6 wildcard":     {Slab: s, Bind: &Endpoint{Host: "[::]"}},
		"advertised wildcard":  {Slab: s, Bind: &Endpoint{Host: "127.0.0.1"}, Advertise: "::"},
		"auto":                 {Slab: s, Bind: &Endpoint{Host: "auto"}},
		"a lease below zero":   {Slab: s, Bind: &Endpoint{}, Store: Options{Lease: -1}},
		"a port out of range":  {Slab: s, Bind: &Endpoint{Port: 70000}},
		"a long advertisement": {Slab: s, Bind: &Endpoint{}, Advertise: string(make([]byte, 256))},
		"a client's option":    {Slab: s, Bind: &Endpoint{}, Client: ClientOptions{Query: -1}},
	} {
		l, err := NewLink(t.Context(), o)
		if err == nil || l != nil {
			t.Errorf("%s: %v", name, err)
		}
		if name != "a port out of range" && !errors.Is(err, ErrOptions) {
			t.Errorf("%s: %v", name, err)
		}
	}
	l := newLink(t, 1<<20, func(o *LinkOptions) { o.Bind, o.Advertise = &Endpoint{Host: "0.0.0.0"}, "127.0.0.1" })
	p := mustPut(t, l, "k", bytesOf(t, 10, 1), PutOptions{})
	consume(t, l, Request{Key: "k", Metadata: p.Metadata}, bytesOf(t, 10, 1))
}

func TestWhatCannotBePutIsNamed(t *testing.T) {
	l := newLink(t, 1<<20)
	gpu, err := tensor.OnDevice(tensor.Float32, tensor.Shape{2}, tensor.Device{Kind: "cuda"}, 4096)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		key  string
		root tensor.Node
		o    PutOptions
		want error
	}{
		"a device's tensor":  {"k", tensor.List{bytesOf(t, 1, 1), gpu}, PutOptions{}, ErrDevice},
		"no tree":            {"k", nil, PutOptions{}, tensor.ErrTree},
		"no key":             {"", bytesOf(t, 1, 1), PutOptions{}, ErrOptions},
		"a key of no text":   {"\xff", bytesOf(t, 1, 1), PutOptions{}, ErrOptions},
		"readers below zero": {"k", bytesOf(t, 1, 1), PutOptions{Readers: -1}, ErrOptions},
		"a lease below zero": {"k", bytesOf(t, 1, 1), PutOptions{Lease: -1}, ErrOptions},
		"over the cap":       {"k", bytesOf(t, 900_000, 1), PutOptions{}, ErrFull},
	} {
		if p, err := l.Put(t.Context(), c.key, c.root, c.o); !errors.Is(err, c.want) || p != nil {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	idle(t, l)
	only := newLink(t, 1<<20, onlyGets)
	if _, err := only.Put(t.Context(), "k", bytesOf(t, 1, 1), PutOptions{}); !errors.Is(err, ErrOptions) {
		t.Error(err)
	}
	only.Abort("k", "r")
	if err := only.Cleanup("k"); err != nil || (only.Endpoint() != Endpoint{}) || !only.Healthy() {
		t.Error(err)
	}
}

func TestPutsAreHeldBackByTheirReaders(t *testing.T) {
	l := newLink(t, 4<<20, noInline) // 2 MiB for puts
	v := bytesOf(t, 1<<20, 1)
	var puts []*Published
	for i := range 2 {
		puts = append(puts, mustPut(t, l, keyOf(i), v, PutOptions{}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := l.Put(ctx, "more", v, PutOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	put := make(chan error)
	go func() {
		p, err := l.Put(context.Background(), "more", v, PutOptions{})
		if err == nil {
			puts = append(puts, p)
		}
		put <- err
	}()
	// Gets find room, whatever was put.
	consume(t, l, Request{Key: keyOf(0), Metadata: puts[0].Metadata}, v)
	if err := receive(t, put); err != nil {
		t.Fatal(err)
	}
	for i, key := range []string{keyOf(1), "more"} {
		consume(t, l, Request{Key: key, Metadata: puts[i+1].Metadata}, v)
	}
	idle(t, l)
}

// Workers that each hold what they got while they put something would wait for one another if gets could take all of the slab.
func TestPutsFindRoomHoweverMuchIsHeldOfWhatWasGot(t *testing.T) {
	from, middle, to := newLink(t, 16<<20, noInline), newLink(t, 4<<20, noInline), newLink(t, 8<<20, noInline, onlyGets)
	v, w := bytesOf(t, 600_000, 1), bytesOf(t, 900_000, 2)
	const workers = 12 // all together need more than the slab, on either side
	var all sync.WaitGroup
	for i := range workers {
		key := keyOf(i)
		p := mustPut(t, from, key, v, PutOptions{})
		all.Go(func() {
			got := mustGet(t, middle, Request{Key: key, Metadata: p.Metadata})
			defer func() {
				if err := got.Release(); err != nil {
					t.Error(err)
				}
			}()
			q := mustPut(t, middle, key, w, PutOptions{})
			consume(t, to, Request{Key: key, Metadata: q.Metadata}, w)
		})
	}
	all.Wait()
	for _, l := range []*Link{from, middle, to} {
		idle(t, l)
	}
}

// All of the part for gets is held, and all that is put waits to be published from it.
func TestWhatIsHeldIsRepublishedHoweverFullTheSlabIs(t *testing.T) {
	from, middle, to := newLink(t, 16<<20, noInline), newLink(t, 4<<20, noInline), newLink(t, 8<<20, noInline, onlyGets)
	v := bytesOf(t, 1<<20, 1)
	var held []*Got
	for i := range 2 {
		p := mustPut(t, from, keyOf(i), v, PutOptions{})
		held = append(held, mustGet(t, middle, Request{Key: keyOf(i), Metadata: p.Metadata}))
	}
	p := mustPut(t, from, "more", v, PutOptions{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := middle.Get(ctx, Request{Key: "more", Metadata: p.Metadata}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a get that finds no room: %v", err)
	}
	var puts []*Published
	for i, got := range held {
		q, err := middle.Republish(t.Context(), keyOf(i), got, PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		puts = append(puts, q)
	}
	for i, q := range puts {
		consume(t, to, Request{Key: keyOf(i), Metadata: q.Metadata}, v)
	}
	consume(t, middle, Request{Key: "more", Metadata: p.Metadata}, v)
	idle(t, middle)
}

func TestALinkOfAllOfTheSlabSetsNothingAside(t *testing.T) {
	l := newLink(t, 1<<20, noInline, func(o *LinkOptions) { o.Store.MaxBytes = o.Slab.Bytes() })
	p := mustPut(t, l, "k", bytesOf(t, 1<<20, 1), PutOptions{})
	if err := l.Cleanup("k"); err != nil {
		t.Error(err)
	}
	receive(t, p.Released())
	idle(t, l)
	b, err := l.o.Slab.Alloc(t.Context(), []int64{1})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Free()
	if _, err := NewLink(t.Context(), LinkOptions{Slab: l.o.Slab, Bind: &Endpoint{}}); !errors.Is(err, ErrOptions) || !errors.Is(err, slab.ErrMismatch) {
		t.Errorf("a link of a slab that is in use: %v", err)
	}
}

func TestAPutMakesWayForItsOwnKey(t *testing.T) {
	l := newLink(t, 4<<20)
	first := mustPut(t, l, "k", bytesOf(t, 2<<20, 1), PutOptions{})
	second := mustPut(t, l, "k", bytesOf(t, 2<<20, 2), PutOptions{})
	if receive(t, first.Released()); first.Outcome() != Replaced {
		t.Errorf("outcome %d", first.Outcome())
	}
	consume(t, l, Request{Key: "k", Metadata: second.Metadata}, bytesOf(t, 2<<20, 2))
}

var _ Memory = (*slab.Payload)(nil)
