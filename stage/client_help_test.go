package stage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/control"
	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/faulty"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/tcp"
)

// newSlab gives a slab with the planes mapped and tcp, closed at the end, when nothing of it may be in use. rules are faults of mapped.
func newSlab(t testing.TB, bytes int64, rules ...faulty.Rule) *slab.Slab {
	t.Helper()
	return newSlabWith(t, bytes, nil, rules...)
}

// agents is a NIXL whose agents, of one process, meet.
var agents = binding.NewFake()

// newPlainSlab gives a slab that plain peers also read from, and that reads from them.
func newPlainSlab(t testing.TB, bytes int64) *slab.Slab {
	t.Helper()
	p, err := nixl.New(nixl.Options{Loaded: agents.Library(), Drain: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return newSlabWith(t, bytes, p)
}

// newSlabWith also takes another plane, which is closed with the slab; it may be nil.
func newSlabWith(t testing.TB, bytes int64, other transfer.Plane, rules ...faulty.Rule) *slab.Slab {
	t.Helper()
	dir := filepath.Join(os.TempDir(), fmt.Sprint("stage-test-", os.Getpid())) // one for all: mapped reads from there only
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(dir) }) // by the last one
	m, err := mapped.New(mapped.Options{Dirs: []string{dir}})
	if err != nil {
		t.Fatal(err)
	}
	c, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	planes := []transfer.Plane{faulty.New(m, rules...), c}
	if other != nil {
		planes = append(planes, other)
	}
	s, err := slab.New(t.Context(), slab.Options{Dir: dir, Name: wire.NewID().String(), Bytes: bytes, Planes: planes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Error(err)
		}
		for _, p := range planes {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return s
}

// newClient gives a client, of any producer unless o.Slab says otherwise, that is closed at the end, with nothing left to be told.
func newClient(t testing.TB, o ClientOptions) *Client {
	t.Helper()
	o.Loop, o.Node = newLoop(t), "consumer"
	if o.Slab == nil {
		o.Slab = newPlainSlab(t, 1<<20)
	}
	c, err := NewClient(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := c.Close(ctx); err != nil {
			t.Error(err)
		}
		if st := c.Stats(); st.Pending != 0 || st.Connections != 0 {
			t.Errorf("after Close %d are pending, %d connections are open", st.Pending, st.Connections)
		}
		if _, err := c.Get(context.Background(), Request{Key: "k", From: Endpoint{"127.0.0.1", 1}}); !errors.Is(err, ErrClosing) {
			t.Errorf("a get after Close: %v", err)
		}
	})
	return c
}

// producer is a scripted one: of ours, or plain. It keeps account of its claims.
type producer struct {
	t      testing.TB
	plain  bool
	slab   *slab.Slab
	router *control.Router

	mu       sync.Mutex
	script   func(q asked) (handled bool)
	payloads map[string]*offered
	claims   map[wire.ID]asked
	seen     []asked
	grants   int
	changed  chan struct{} // closed and replaced when something came
}

// asked is a request that came.
type asked struct {
	*wire.Request
	from control.Source
	p    *producer
}

// offered is a payload of a producer.
type offered struct {
	m      wire.Metadata
	memory *slab.Payload
}

type producerHandler producer

func (h *producerHandler) Serve(r *control.Router) { h.router = r }

func (h *producerHandler) Message(from control.Source, body []byte) {
	p := (*producer)(h)
	q, err := wire.DecodeRequest(body)
	if err != nil {
		p.t.Errorf("the producer was asked nonsense: %v", err)
		return
	}
	a := asked{q, from, p}
	p.mu.Lock()
	p.seen = append(p.seen, a)
	script := p.script
	close(p.changed)
	p.changed = make(chan struct{})
	p.mu.Unlock()
	if script == nil || !script(a) {
		a.serve()
	}
}

func (h *producerHandler) Left(from control.Source) {
	if h.plain {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, q := range h.claims {
		if q.from.ID == from.ID {
			delete(h.claims, id)
		}
	}
}

func newProducer(t testing.TB, plain bool) *producer {
	t.Helper()
	p := &producer{t: t, plain: plain, payloads: map[string]*offered{}, claims: map[wire.ID]asked{}, changed: make(chan struct{})}
	if plain {
		p.slab = newPlainSlab(t, 16<<20)
	} else {
		p.slab = newSlab(t, 16<<20)
	}
	p.listen(newLoop(t), 0)
	return p
}

func (p *producer) listen(l *control.Loop, port int) {
	p.t.Helper()
	eventually(p.t, "the port is free", func() bool { // a router that was closed before lets go of it soon
		_, err := l.Listen(p.t.Context(), "127.0.0.1", port, (*producerHandler)(p))
		return err == nil
	})
}

// stop is its death: its connections end, and what it had granted.
func (p *producer) stop() {
	_ = p.router.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.claims)
}

func (p *producer) endpoint() Endpoint { return Endpoint{"127.0.0.1", p.router.Port()} }

// onAsk sets what is asked first about each request.
func (p *producer) onAsk(script func(q asked) (handled bool)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.script = script
}

// put publishes a payload.
func (p *producer) put(key string, root tensor.Node) {
	p.t.Helper()
	packed, err := wire.Pack(root, wire.PackOptions{})
	if err != nil {
		p.t.Fatal(err)
	}
	o := &offered{m: wire.Metadata{Kind: packed.Kind, Generation: wire.NewID(), SenderHost: "127.0.0.1", SenderPort: p.router.Port()}}
	if o.m.Specs, o.m.Size, err = packed.Specs(); err != nil {
		p.t.Fatal(err)
	}
	sizes := make([]int64, len(packed.Tensors))
	for i, t := range packed.Tensors {
		sizes[i] = t.Bytes()
	}
	b, err := p.slab.Alloc(p.t.Context(), sizes)
	if err != nil {
		p.t.Fatal(err)
	}
	sum := fill(b.Slices(), packed.Tensors, true)
	if !p.plain {
		o.m.Ferry = &wire.FerryMetadata{Top: packed.Top, Sum: sum}
	}
	o.memory = b.Payload(o.m.Specs)
	p.t.Cleanup(o.memory.Release)
	p.mu.Lock()
	p.payloads[key] = o
	p.mu.Unlock()
}

// serve answers as a producer does.
func (q asked) serve() {
	p := q.p
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.payloads[q.Key]
	held, there := p.claims[q.Claim]
	switch q.Op {
	case wire.Get:
		if o == nil || !q.Generation.IsZero() && q.Generation != o.m.Generation || there && !p.plain && held.from.ID != q.from.ID {
			q.answer(wire.Reply{Status: wire.NotFound})
			return
		}
		p.claims[q.Claim] = q
		p.grants++
		if !q.answer(wire.Reply{Status: wire.Found, Metadata: q.offer(o)}) && !p.plain {
			delete(p.claims, q.Claim)
		}
	case wire.Done, wire.Verify, wire.Fail:
		status := wire.Lost
		if there && o != nil && q.Generation == o.m.Generation && (p.plain || held.from.ID == q.from.ID) {
			delete(p.claims, q.Claim)
			status = wire.Held
		}
		if q.Op == wire.Done {
			status = wire.Acked
		}
		q.answer(wire.Reply{Status: status})
	case wire.Stat:
		q.answer(wire.Reply{Status: wire.NotFound}) // of a plain one as to what no peer knows; of ours that is tested with a Link
	default:
		p.t.Errorf("the producer was asked for %d", q.Op)
	}
}

// offer is the metadata that q is granted.
func (q asked) offer(o *offered) *wire.Metadata {
	m := o.m
	m.Claim = q.Claim
	var ask *wire.FerryRequest
	if !q.p.plain {
		f := *o.m.Ferry
		m.Ferry, ask = &f, q.Ferry
	}
	if err := o.memory.Offer(context.Background(), fmt.Sprint("grant", q.p.grants), ask, &m); err != nil {
		q.p.t.Error(err)
	}
	return &m
}

// answer sends a reply to q, if its connection is still there.
func (q asked) answer(a wire.Reply) bool {
	own := !q.p.plain && q.Ferry != nil
	if own {
		a.Try = q.Ferry.Try
		if a.Metadata != nil {
			if a.Metadata.Ferry == nil {
				a.Metadata.Ferry = &wire.FerryMetadata{}
			}
			a.Metadata.Ferry.Try = a.Try
		}
	}
	return q.send(wire.AppendReply(nil, &a, own))
}

func (q asked) send(body []byte) bool { return q.p.router.Send(q.from.ID, body) == nil }

// asked gives what came so far of one kind.
func (p *producer) asked(op wire.Op) []asked {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []asked
	for _, q := range p.seen {
		if q.Op == op {
			all = append(all, q)
		}
	}
	return all
}

// wants waits for the n-th request of a kind.
func (p *producer) wants(op wire.Op, n int) asked {
	p.t.Helper()
	late := time.After(patience)
	for {
		p.mu.Lock()
		changed := p.changed
		p.mu.Unlock()
		if all := p.asked(op); len(all) >= n {
			return all[n-1]
		}
		select {
		case <-changed:
		case <-late:
			p.t.Fatalf("%d requests of kind %d came, not %d", len(p.asked(op)), op, n)
		}
	}
}

func (p *producer) held() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.claims)
}

// free waits until the producer has no claim.
func (p *producer) free() {
	p.t.Helper()
	eventually(p.t, "the producer has no claim left", func() bool { return p.held() == 0 })
}

// got is what Get gave.
type got struct {
	*Got
	err error
}

// start begins a get.
func start(ctx context.Context, c *Client, r Request) <-chan got {
	ch := make(chan got, 1)
	go func() {
		g, err := c.Get(ctx, r)
		ch <- got{g, err}
	}()
	return ch
}

// within gives a context that ends after d.
func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// empty is a tensor without elements: n tells one from another.
func empty(n int64) tensor.Tensor {
	v, err := tensor.New(tensor.Float32, tensor.Shape{0, n}, nil)
	if err != nil {
		panic(err)
	}
	return v
}

// full is a tensor of n bytes.
func full(n int) tensor.Tensor {
	b := make([]uint8, n)
	for i := range b {
		b[i] = uint8(i*7 + i>>8)
	}
	v, err := tensor.Of(b, int64(n))
	if err != nil {
		panic(err)
	}
	return v
}

// releaseAs checks that want is what was got, and releases it.
func releaseAs(t testing.TB, g *Got, want tensor.Node) {
	t.Helper()
	if !tensor.Equal(g.Root, want) {
		t.Errorf("got %v, want %v", g.Root, want)
	}
	if err := g.Release(); err != nil {
		t.Error(err)
	}
}

func name(plain bool) string {
	if plain {
		return "plain"
	}
	return "own"
}

func itoa(n int) string { return strconv.Itoa(n) }
