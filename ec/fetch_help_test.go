package ec

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

var testCompat = wire.Compat{VLLMVersion: "0.32.0", Model: "tiny-mm", Dtype: "torch.bfloat16", BlockBytes: testBlock}

// script runs functions one after another on a goroutine of its own, as a control loop runs handlers.
type script struct{ q chan func() }

func newScript(t testing.TB) *script {
	s := &script{q: make(chan func(), 1<<16)}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for f := range s.q {
			if f == nil {
				return
			}
			f()
		}
	}()
	t.Cleanup(func() {
		s.q <- nil
		<-ended
	})
	return s
}

// testNet is a control plane in memory: dealers, and one host an address.
type testNet struct {
	t     testing.TB
	mu    sync.Mutex
	hosts map[string]*testHost
	conns int
}

func newTestNet(t testing.TB) *testNet { return &testNet{t: t, hosts: map[string]*testHost{}} }

// testHost is what listens, or does not, at an address.
type testHost struct {
	small

	net    *testNet
	addr   string
	port   int
	script *script

	mu      sync.Mutex
	handler control.RouterHandler // nil: nothing listens
	dealers map[string]*testDealer
	delay   time.Duration
	pass    func(m wire.Message) bool // decides which messages arrive, in both directions; nil: all
	seen    []wire.Message            // what arrived at the host
	local   int                       // of it, by the local path
}

func (n *testNet) host(port int) *testHost {
	n.mu.Lock()
	defer n.mu.Unlock()
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	h := n.hosts[addr]
	if h == nil {
		h = &testHost{net: n, addr: addr, port: port, script: newScript(n.t), dealers: map[string]*testDealer{}}
		n.hosts[addr] = h
	}
	return h
}

// listen makes a handler the one that serves; dealers that are there come up.
func (h *testHost) listen(handler control.RouterHandler) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.handler = handler
	for _, d := range h.dealers {
		d.script.q <- d.h.Up
	}
}

// fall is the end of the process that listens: what is on its way is lost.
func (h *testHost) fall() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.handler = nil
	for _, d := range h.dealers {
		d.script.q <- func() { d.h.Down(fmt.Errorf("%w: %s", control.ErrGone, h.addr)) }
	}
}

func (h *testHost) set(delay time.Duration, pass func(wire.Message) bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.delay, h.pass = delay, pass
}

func (h *testHost) requests() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.seen {
		if _, ok := m.(*wire.Request); ok {
			n++
		}
	}
	return n
}

// carry brings a message over, late if the host is slow.
func (h *testHost) carry(to *script, m wire.Message, deliver func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pass != nil && m != nil && !h.pass(m) {
		return
	}
	if h.delay > 0 {
		time.AfterFunc(h.delay, func() { to.q <- deliver })
		return
	}
	to.q <- deliver
}

// Send implements messenger.
func (h *testHost) Send(id string, body []byte) error {
	h.mu.Lock()
	d := h.dealers[id]
	h.mu.Unlock()
	if d == nil {
		return control.ErrGone
	}
	m, _ := wire.DecodeAtConsumer(body)
	h.carry(d.script, m, func() { d.h.Message(body) })
	return nil
}

type testDealer struct {
	local  bool
	gone   atomic.Bool // local: Connected is false
	id     string
	host   *testHost
	h      control.DealerHandler
	script *script
}

func (n *testNet) dial(_ context.Context, addr string, handler control.DealerHandler) (conn, error) {
	_, port, _ := net.SplitHostPort(addr)
	p, _ := strconv.Atoi(port)
	h := n.host(p)
	n.mu.Lock()
	n.conns++
	d := &testDealer{id: fmt.Sprintf("conn-%d", n.conns), host: h, h: handler, script: newScript(n.t)}
	n.mu.Unlock()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dealers[d.id] = d
	if h.handler != nil {
		d.script.q <- handler.Up
	} else {
		d.script.q <- func() { handler.Down(fmt.Errorf("%w: %s refused", control.ErrGone, addr)) }
	}
	return d, nil
}

func (d *testDealer) Send(body []byte) error {
	h := d.host
	h.mu.Lock()
	gone := h.handler == nil
	h.mu.Unlock()
	if gone {
		return control.ErrGone
	}
	m, err := wire.DecodeAtProducer(body, wire.Generation2)
	if err != nil {
		return err
	}
	h.carry(h.script, m, func() {
		h.mu.Lock()
		handler := h.handler
		if handler != nil {
			h.seen = append(h.seen, m)
			if d.local {
				h.local++
			}
		}
		h.mu.Unlock()
		if handler != nil {
			from := control.Source{ID: d.id, Addr: "127.0.0.1"}
			if d.local {
				from = control.Source{ID: d.id, Local: true}
			}
			handler.Message(from, body)
		}
	})
	return nil
}

func (d *testDealer) Close() error {
	d.host.mu.Lock()
	defer d.host.mu.Unlock()
	delete(d.host.dealers, d.id)
	return nil
}

// Connected implements localConn.
func (d *testDealer) Connected() bool { return !d.gone.Load() }

// dialLocal is a dialLocalFunc to the host of a pair. made takes what it makes.
func (n *testNet) dialLocal(h *testHost, made chan<- *testDealer) dialLocalFunc {
	return func(_ context.Context, name string, handler control.DealerHandler) (localConn, error) {
		n.mu.Lock()
		n.conns++
		d := &testDealer{id: fmt.Sprintf("conn-%d", n.conns), local: true, host: h, h: handler, script: newScript(n.t)}
		n.mu.Unlock()
		h.mu.Lock()
		defer h.mu.Unlock()
		h.dealers[d.id] = d
		d.script.q <- handler.Up
		made <- d
		return d, nil
	}
}

// answers is a host that answers requests by a function: a foreign, broken or hostile peer.
type answers struct {
	host  *testHost
	reply func(r *wire.Request) []*wire.Ack
	saw   chan *wire.Verify
}

func newAnswers(h *testHost, reply func(r *wire.Request) []*wire.Ack) *answers {
	return &answers{host: h, reply: reply, saw: make(chan *wire.Verify, 1<<10)}
}

func (a *answers) Message(from control.Source, body []byte) {
	m, _ := wire.DecodeAtProducer(body, wire.Generation2)
	switch m := m.(type) {
	case *wire.Request:
		for _, ack := range a.reply(m) {
			a.host.Send(from.ID, wire.AppendAck(nil, ack))
		}
	case *wire.Verify:
		a.saw <- m
		if !m.Failed {
			a.host.Send(from.ID, wire.AppendVerified(nil, &wire.Verified{Key: m.Key, Session: m.Session, Grant: m.Grant, Gen: m.Gen, OK: true}))
		}
	}
}

// hookPlane is a plane whose READs a test decides about.
type hookPlane struct {
	transfer.Plane
	name string
	// add, if set, may refuse AddPeer.
	add func() error
	// read, if set, is called for each READ with its number, from 0, and may make another of it.
	read func(n int, p transfer.Peer, r transfer.ReadRequest) (transfer.Read, error)

	// see, if set, makes its peers witnesses; slot is what they see of a slot.
	see  func(slot uint32, gen uint64) bool
	slot func(slot uint32) (region.Slot, bool)

	mu     sync.Mutex
	reads  int
	opened int
	shut   int
}

func (p *hookPlane) Name() string {
	if p.name != "" {
		return p.name
	}
	return p.Plane.Name()
}

func (p *hookPlane) AddPeer(ctx context.Context, metadata []byte) (transfer.Peer, error) {
	if p.add != nil {
		if err := p.add(); err != nil {
			return nil, err
		}
	}
	in, err := p.Plane.AddPeer(ctx, metadata)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	p.opened++
	p.mu.Unlock()
	if p.see != nil {
		return seeing{&hookPeer{in, p}, p.see, p.slot}, nil
	}
	return &hookPeer{in, p}, nil
}

func (p *hookPlane) counts() (reads, open int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.reads, p.opened - p.shut
}

type hookPeer struct {
	transfer.Peer
	p *hookPlane
}

func (p *hookPeer) Read(ctx context.Context, r transfer.ReadRequest) (transfer.Read, error) {
	p.p.mu.Lock()
	n := p.p.reads
	p.p.reads++
	p.p.mu.Unlock()
	if p.p.read != nil {
		return p.p.read(n, p.Peer, r)
	}
	return p.Peer.Read(ctx, r)
}

func (p *hookPeer) Close() error {
	p.p.mu.Lock()
	p.p.shut++
	p.p.mu.Unlock()
	return p.Peer.Close()
}

// heldRead is a READ that ends when the test says so.
type heldRead struct {
	done     chan struct{}
	err      error
	canceled chan struct{} // closed by Cancel
	once     sync.Once
}

func newHeldRead() *heldRead {
	return &heldRead{done: make(chan struct{}), canceled: make(chan struct{})}
}

func (r *heldRead) Done() <-chan struct{} { return r.done }
func (r *heldRead) Err() error            { return r.err }
func (r *heldRead) Cancel()               { r.once.Do(func() { close(r.canceled) }) }

func (r *heldRead) end(err error) {
	r.err = err
	close(r.done)
}

// logBuffer collects log lines.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

func (l *logBuffer) lines(with ...string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.b.String()) {
		has := true
		for _, w := range with {
			has = has && strings.Contains(line, w)
		}
		if has {
			n++
		}
	}
	return n
}

// pair is a producer and a consumer over memory.
type pair struct {
	t        testing.TB
	net      *testNet
	host     *testHost
	fabric   *transfertest.Fabric
	plane    *hookPlane // the consumer's
	pcache   *Cache
	ccache   *Cache
	producer *Producer
	consumer *Consumer
	plog     *logBuffer
	clog     *logBuffer
}

type pairOptions struct {
	blocks   int // of each pool, default 64
	timeouts Timeouts
	verify   bool
	planes   func(f *transfertest.Fabric, p *hookPlane) []transfer.Plane // the consumer's; default: the hook plane
	consumer func(o *ConsumerOptions)
	producer func(o *ProducerOptions)
}

const testPort = 7000

func newPair(t testing.TB, o pairOptions) *pair {
	t.Helper()
	if o.blocks == 0 {
		o.blocks = 64
	}
	p := &pair{t: t, net: newTestNet(t), fabric: &transfertest.Fabric{}, plog: &logBuffer{}, clog: &logBuffer{}}
	p.host = p.net.host(testPort)
	p.pcache = newTestCache(t, o.blocks, o.blocks, CacheOptions{})
	p.ccache = newTestCache(t, o.blocks, o.blocks, CacheOptions{})
	p.start(o)
	p.plane = &hookPlane{Plane: p.fabric.Plane()}
	planes := []transfer.Plane{p.plane}
	if o.planes != nil {
		planes = o.planes(p.fabric, p.plane)
	}
	co := ConsumerOptions{
		Cache: p.ccache, Compat: testCompat, Generation: wire.Generation2, ItemSize: 2, Planes: planes, Node: "consumer", Epoch: 1,
		Verify: o.verify, Timeouts: o.timeouts, Log: p.clog.logger(),
	}
	if o.consumer != nil {
		o.consumer(&co)
	}
	c, err := newConsumer(co, p.net.dial)
	if err != nil {
		t.Fatal(err)
	}
	p.consumer = c
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// start makes a producer listen; after fall, that of a restarted process.
func (p *pair) start(o pairOptions) {
	p.t.Helper()
	po := ProducerOptions{
		Pools: []ServedPool{{
			Cache: p.pcache, Compat: testCompat, Memory: transfer.Memory{Bytes: p.pcache.pool}, Planes: []transfer.Plane{p.fabric.Plane()},
		}},
		Generation: wire.Generation2, Node: "producer", Epoch: 1, Timeouts: o.timeouts, Log: p.plog.logger(),
	}
	if o.producer != nil {
		o.producer(&po)
	}
	pr, err := NewProducer(context.Background(), po)
	if err != nil {
		p.t.Fatal(err)
	}
	p.producer = pr
	pr.serve(p.host)
	p.host.listen(pr)
	p.t.Cleanup(func() {
		if err := pr.Close(); err != nil {
			p.t.Error(err)
		}
	})
}

// content is what an entry of that key holds.
func content(key string, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = key[i%len(key)] + byte(i/len(key))
	}
	return b
}

// save makes a ready entry of n blocks in a cache.
func save(t testing.TB, c *Cache, key string, n int) Info {
	t.Helper()
	r := reserve(t, c, key, n)
	return fill(t, r, key)
}

func fill(t testing.TB, r *Reservation, key string) Info {
	t.Helper()
	b := content(key, int(r.Info().Spec.Bytes))
	for _, to := range r.Buffers() {
		b = b[copy(to, b):]
	}
	sum := checksum(r.Buffers())
	i, err := r.Commit(&sum)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// announced is an entry of n blocks at the pair's host.
func announced(n int) *Announcement {
	return &Announcement{PeerHost: "127.0.0.1", PeerPort: testPort, SizeBytes: int64(n) * testBlock, Shape: []int{n, testBlock / 2}}
}

// wantBytes fails unless the key is ready in the cache with the right bytes.
func wantBytes(t testing.TB, c *Cache, key string) {
	t.Helper()
	p, err := c.Pin(key)
	if err != nil {
		t.Fatalf("%q: %v", key, err)
	}
	defer p.Release()
	got := bytes.Join(p.Buffers(), nil)
	if !bytes.Equal(got, content(key, len(got))) {
		t.Fatalf("%q holds other bytes than its producer's", key)
	}
}

func wantOutcome(t testing.TB, r Result, o Outcome) {
	t.Helper()
	if r.Outcome != o {
		t.Fatalf("fetch of %q: %v (%v), want %v", r.Key, r.Outcome, r.Err, o)
	}
	if (r.Err == nil) != (o == FetchReady) {
		t.Fatalf("fetch of %q: %v with error %v", r.Key, r.Outcome, r.Err)
	}
}

// wantIdle fails unless both ends are as if nothing had been asked: no grant, no pin, nothing being filled or in quarantine.
func (p *pair) wantIdle() {
	p.t.Helper()
	if s := p.producer.Stats(); s.Grants != 0 || s.GrantedBlocks != 0 {
		p.t.Errorf("the producer has %d grants of %d blocks", s.Grants, s.GrantedBlocks)
	}
	if s := p.pcache.Stats(); s.PinnedBlocks != 0 {
		p.t.Errorf("the producer has %d blocks pinned", s.PinnedBlocks)
	}
	if s := p.ccache.Stats(); s.FillingBlocks != 0 || s.QuarantinedBlocks != 0 {
		p.t.Errorf("the consumer has %d blocks being filled, %d in quarantine", s.FillingBlocks, s.QuarantinedBlocks)
	}
	if s := p.consumer.Stats(); s.Flights != 0 || s.Quarantined != 0 {
		p.t.Errorf("the consumer has %d pulls, %d destinations in quarantine", s.Flights, s.Quarantined)
	}
}
