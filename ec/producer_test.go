package ec

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// small is of routers of pools whose descriptors are too small to be shared.
type small struct{}

func (small) SendShared(string, []byte, *control.Shared) error {
	return errors.New("a descriptor of a small pool is shared")
}

// outbox is a router that keeps what is sent.
type outbox struct {
	small
	t    testing.TB
	mu   sync.Mutex
	sent []wire.Message
	err  error
}

func (o *outbox) Send(id string, body []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.err != nil {
		return o.err
	}
	m, err := wire.DecodeAtConsumer(body)
	if err != nil {
		o.t.Errorf("sent %x: %v", body, err)
	}
	o.sent = append(o.sent, m)
	return nil
}

func (o *outbox) take() []wire.Message {
	o.mu.Lock()
	defer o.mu.Unlock()
	m := o.sent
	o.sent = nil
	return m
}

// stand is a producer without a consumer: the test sends the messages.
type stand struct {
	t        testing.TB
	cache    *Cache
	out      *outbox
	log      *logBuffer
	producer *Producer
}

func newStand(t testing.TB, blocks int, change func(o *ProducerOptions)) *stand {
	t.Helper()
	s := &stand{t: t, out: &outbox{t: t}, log: &logBuffer{}, cache: newTestCache(t, blocks, blocks, CacheOptions{})}
	o := ProducerOptions{
		Pools: []ServedPool{{
			Cache: s.cache, Compat: testCompat, Memory: transfer.Memory{Bytes: s.cache.pool},
			Planes: []transfer.Plane{(&transfertest.Fabric{}).Plane()},
		}},
		Generation: wire.Generation2, Node: "producer", Epoch: 3, Log: s.log.logger(),
	}
	if change != nil {
		change(&o)
	}
	p, err := NewProducer(bg, o)
	if err != nil {
		t.Fatal(err)
	}
	s.producer = p
	p.serve(s.out)
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func (s *stand) request(key string) *wire.Request {
	return &wire.Request{
		Key: key, CompatHash: testCompat.Hash(), Session: "s-1", Version: wire.Generation2,
		Ferry: &wire.FerryRequest{V: 1, Node: "consumer", Planes: []string{transfertest.MemoryName}, Sum: true, Compat: testCompat, Try: 9},
	}
}

func (s *stand) from(r *wire.Request, from control.Source) *wire.Ack {
	s.t.Helper()
	s.producer.Message(from, wire.AppendRequest(nil, r, wire.Generation2))
	m := s.out.take()
	if len(m) != 1 {
		s.t.Fatalf("%d answers to one request", len(m))
	}
	return m[0].(*wire.Ack)
}

func (s *stand) ask(r *wire.Request) *wire.Ack {
	s.t.Helper()
	return s.from(r, control.Source{ID: "c-1", Addr: "10.0.0.1"})
}

func (s *stand) verify(a *wire.Ack, change func(v *wire.Verify)) []wire.Message {
	v := &wire.Verify{Key: a.Key, Session: a.Session, Grant: a.Ferry.Grant, Gen: a.Ferry.Gen}
	if change != nil {
		change(v)
	}
	s.producer.Message(control.Source{ID: "c-1", Addr: "10.0.0.1"}, wire.AppendVerify(nil, v))
	return s.out.take()
}

func TestRequestsAreCheckedInThePeersOrder(t *testing.T) {
	wrongVersion := func(r *wire.Request) { r.Version = wire.Generation1 }
	wrongHash := func(r *wire.Request) { r.CompatHash = "0000" }
	noSession := func(r *wire.Request) { r.Session = "" }
	tests := []struct {
		name   string
		key    string
		change []func(r *wire.Request)
		want   wire.Status
	}{
		{"everything wrong", "absent", []func(*wire.Request){wrongVersion, wrongHash, noSession}, wire.NackVersion},
		{"hash before session", "absent", []func(*wire.Request){wrongHash, noSession}, wire.NackIncompat},
		{"session before entry", "absent", []func(*wire.Request){noSession}, wire.NackInternal},
		{"absent", "absent", nil, wire.NackMissing},
		{"filling", "filling", nil, wire.NackNotReady},
		{"ready", "ready", nil, wire.OK},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newStand(t, 16, nil)
			save(t, s.cache, "ready", 3)
			defer reserve(t, s.cache, "filling", 3).Discard()
			r := s.request(tt.key)
			for _, c := range tt.change {
				c(r)
			}
			a := s.ask(r)
			if a.Status != tt.want || a.Key != tt.key {
				t.Fatalf("answered %+v, want %v", a, tt.want)
			}
			if a.Ferry == nil || a.Ferry.Try != 9 || a.Ferry.Node != "producer" || a.Ferry.Epoch != 3 {
				t.Errorf("the extension of an answer is %+v", a.Ferry)
			}
			if tt.want != wire.OK && (a.Session != "" || a.Ferry.Grant != "") {
				t.Errorf("a NACK says %+v", a)
			}
			if n := s.producer.Stats().Acks[tt.want]; n != 1 {
				t.Errorf("counted %d", n)
			}
		})
	}
}

func TestAnOKAckSaysAllThatAnOwnReaderNeeds(t *testing.T) {
	s := newStand(t, 16, nil)
	info := save(t, s.cache, "img", 3)
	a := s.ask(s.request("img"))
	f := a.Ferry
	if a.Session != "s-1" || len(a.Blocks) != 0 || len(a.AgentMetadata) != 0 || len(a.MemDescriptor) != 0 {
		t.Errorf("ack %+v", a)
	}
	if f.Gen != info.Gen || int(f.Slot) != info.Slot || f.Bytes != info.Spec.Bytes || f.LeaseMS != 30_000 || len(f.Grant) != 32 {
		t.Errorf("extension %+v", f)
	}
	if f.Sum == nil || *f.Sum != info.Checksum {
		t.Errorf("checksum %v, want %x", f.Sum, info.Checksum)
	}
	if len(f.Extents) != 1 || f.Extents[0] != [2]uint32{info.Extents[0].Start, 3} {
		t.Errorf("extents %v", f.Extents)
	}
	if len(f.Planes) != 1 || f.Planes[0].Name != transfertest.MemoryName || len(f.Planes[0].Token) == 0 || len(f.Planes[0].Metadata) == 0 {
		t.Errorf("planes %+v", f.Planes)
	}
	r := s.request("img")
	r.Session, r.Ferry.Sum = "s-2", false
	if b := s.ask(r); b.Ferry.Sum != nil || b.Ferry.Grant == f.Grant {
		t.Errorf("another session was answered %+v", b.Ferry)
	}
}

func TestAskingAgainRenewsOneGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, 16, nil)
		save(t, s.cache, "img", 3)
		first := s.ask(s.request("img"))
		// C70: renewed each third of a lease, over ten leases.
		for i := range 30 {
			time.Sleep(10 * time.Second)
			synctest.Wait()
			again := s.from(s.request("img"), control.Source{ID: fmt.Sprint("c-", i%2), Addr: "10.0.0.1"})
			if again.Ferry.Grant != first.Ferry.Grant {
				t.Fatal("a grant that was renewed in time has lapsed")
			}
		}
		if info, _ := s.cache.Lookup("img"); info.Pins != 1 {
			t.Errorf("%d pins", info.Pins)
		}
		if st := s.producer.Stats(); st.Renewals != 30 || st.Grants != 1 || st.LeaseExpiries != 0 {
			t.Errorf("counted %+v", st)
		}
		time.Sleep(30*time.Second - 1)
		synctest.Wait()
		if info, _ := s.cache.Lookup("img"); info.Pins != 1 {
			t.Error("unpinned before the lease's end")
		}
		time.Sleep(1)
		synctest.Wait()
		if info, _ := s.cache.Lookup("img"); info.Pins != 0 {
			t.Error("pinned after the lease's end")
		}
		if st := s.producer.Stats(); st.LeaseExpiries != 1 || st.Grants != 0 || st.GrantedBlocks != 0 {
			t.Errorf("counted %+v", st)
		}
		if v := s.verify(first, nil)[0].(*wire.Verified); v.OK {
			t.Error("a lapsed grant was verified")
		}
	})
}

func TestVerifyEndsTheGrantItNamesAndNoOther(t *testing.T) {
	tests := []struct {
		name   string
		change func(v *wire.Verify)
		ok     bool
		ends   bool // the grant
		hold   bool // is dropped
	}{
		{"as granted", nil, true, true, true},
		{"given up", func(v *wire.Verify) { v.Failed = true }, false, true, false},
		{"another generation", func(v *wire.Verify) { v.Gen++ }, false, true, false},
		{"another grant", func(v *wire.Verify) { v.Grant = "forged" }, false, false, false},
		{"another session", func(v *wire.Verify) { v.Session = "s-2" }, false, false, false},
		{"another key", func(v *wire.Verify) { v.Key = "other" }, false, false, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStand(t, 16, nil)
				save(t, s.cache, "img", 3)
				s.cache.Hold("img")
				a := s.ask(s.request("img"))
				for i := range 2 { // the second time nothing is left to end
					answers := s.verify(a, tt.change)
					failed := tt.change != nil && len(answers) == 0
					if !failed && (len(answers) != 1 || answers[0].(*wire.Verified).OK != (tt.ok && i == 0)) {
						t.Errorf("answered %+v", answers)
					}
				}
				synctest.Wait()
				info, _ := s.cache.Lookup("img")
				if ended := info.Pins == 0; ended != tt.ends {
					t.Errorf("%d pins", info.Pins)
				}
				if dropped := info.Holds == 0; dropped != tt.hold {
					t.Errorf("%d holds", info.Holds)
				}
			})
		})
	}
}

func TestAMismatchIsLoggedByTheFieldThatDiffers(t *testing.T) {
	theirs := testCompat
	theirs.BlockBytes = 7168
	s := newStand(t, 16, nil)
	r := s.request("img")
	r.CompatHash, r.Ferry.Compat = theirs.Hash(), theirs
	s.ask(r)
	if s.log.lines("block_size_bytes: theirs 7168, ours 16", "10.0.0.1") != 1 || s.log.lines("model: theirs") != 0 {
		t.Errorf("log: %s", s.log.b.String())
	}
	r.Ferry = nil
	if a := s.from(r, control.Source{ID: "c-2", Addr: "10.0.0.2"}); a.Status != wire.NackIncompat || a.Ferry != nil {
		t.Errorf("a plain peer was answered %+v", a)
	}
	if s.log.lines("10.0.0.2", testCompat.Hash(), "tiny-mm", theirs.Hash()) != 1 {
		t.Errorf("log: %s", s.log.b.String())
	}
}

func TestAPlainPeerWithoutAPlaneForItIsToldWhy(t *testing.T) {
	s := newStand(t, 16, nil)
	save(t, s.cache, "img", 3)
	r := s.request("img")
	r.Ferry = nil
	for range 100 {
		if a := s.ask(r); a.Status != wire.NackInternal || a.Ferry != nil {
			t.Fatalf("answered %+v", a)
		}
	}
	if n := s.log.lines("start this node with the nixl plane"); n != 1 {
		t.Errorf("%d lines for 100 requests", n)
	}
	if info, _ := s.cache.Lookup("img"); info.Pins != 0 || s.producer.Stats().PlainRefused != 100 {
		t.Errorf("%d pins, %d counted", info.Pins, s.producer.Stats().PlainRefused)
	}
}

func TestNoPlaneInCommonIsAnError(t *testing.T) {
	s := newStand(t, 16, nil)
	save(t, s.cache, "img", 3)
	r := s.request("img")
	r.Ferry.Planes = []string{"warp"}
	if a := s.ask(r); a.Status != wire.NackInternal {
		t.Errorf("answered %v", a.Status)
	}
	if info, _ := s.cache.Lookup("img"); info.Pins != 0 || s.log.lines("no data plane in common", "warp") != 1 {
		t.Errorf("%d pins; log: %s", info.Pins, s.log.b.String())
	}
}

func TestPlanesAreOfferedInTheReadersOrder(t *testing.T) {
	s := newStand(t, 16, func(o *ProducerOptions) {
		for _, n := range []string{"a", "b", "c"} {
			o.Pools[0].Planes = append(o.Pools[0].Planes, &hookPlane{Plane: (&transfertest.Fabric{}).Plane(), name: n})
		}
	})
	save(t, s.cache, "img", 3)
	r := s.request("img")
	r.Ferry.Planes = []string{"c", "warp", "a", "c"}
	var names []string
	for _, o := range s.ask(r).Ferry.Planes {
		names = append(names, o.Name)
	}
	if !slices.Equal(names, []string{"c", "a"}) {
		t.Errorf("offered %v", names)
	}
}

// V9: a greedy peer.
func TestGrantsOfOneSourceAreCapped(t *testing.T) {
	for _, tt := range []struct {
		blocks, size int
		over         wire.Status // the answer to who is over its share
		others       int         // entries that others are granted
	}{
		{6000, 1, wire.NackMissing, 3000 + 250*2}, // others have 6 each, and may have 8
		{3000, 1, wire.NackNotReady, 1500 + 375},  // a quarter is 750, less than 1,024 grants
		{6000, 100, wire.NackNotReady, 30 + 7},
		{6, 2, wire.NackNotReady, 1}, // one entry is more than a quarter
	} {
		t.Run(fmt.Sprintf("%d of %d", tt.size, tt.blocks), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { capped(t, tt.blocks, tt.size, tt.over, tt.others) })
		})
	}
}

func capped(t *testing.T, blocks, size int, over wire.Status, others int) {
	s := newStand(t, blocks, nil)
	n := blocks / size
	for i := range n {
		put(t, s.cache, fmt.Sprint("img-", i), size)
	}
	greedy := max(n/4, 1)
	for i := range n {
		want := wire.OK
		if i >= greedy {
			want = over
		}
		if got := s.ask(s.request(fmt.Sprint("img-", i))).Status; got != want {
			t.Fatalf("the greedy source's request %d is answered %v, want %v", i, got, want)
		}
	}
	// What is in place already costs nothing more. Others are served until half of the pool is granted, and
	// an eighth more where they have little.
	granted := 0
	for i := range n {
		from := control.Source{ID: fmt.Sprint("other-", i), Addr: fmt.Sprint("10.1.0.", i%250)}
		switch got := s.from(s.request(fmt.Sprint("img-", i)), from).Status; got {
		case wire.OK:
			granted++
		case wire.NackNotReady:
		default:
			t.Fatalf("others are answered %v", got)
		}
	}
	if granted != others {
		t.Errorf("%d grants to others, want %d", granted, others)
	}
	st := s.producer.Stats()
	if st.GrantedBlocks != others*size || st.Capped == 0 || st.Capped != st.Acks[wire.NackMissing]+st.Acks[wire.NackNotReady] {
		t.Errorf("counted %+v", st)
	}
	if lines := s.log.lines("over a limit"); lines > 1+250 {
		t.Errorf("%d lines", lines)
	}
	time.Sleep(30 * time.Second)
	synctest.Wait()
	if st := s.producer.Stats(); st.Grants != 0 || s.cache.Stats().PinnedBlocks != 0 {
		t.Errorf("%d grants after a lease", st.Grants)
	}
	if a := s.ask(s.request(fmt.Sprint("img-", n-1))); a.Status != wire.OK {
		t.Errorf("after a lease the source gets %v", a.Status)
	}
}

func TestAConnectionHasAtMostFourSessions(t *testing.T) {
	s := newStand(t, 16, nil)
	save(t, s.cache, "img", 1)
	ask := func(session, conn string) wire.Status {
		r := s.request("img")
		r.Session = session
		return s.from(r, control.Source{ID: conn, Addr: "10.0.0.1"}).Status
	}
	for i := range maxSessions {
		if st := ask(fmt.Sprint("s-", i), "c"); st != wire.OK {
			t.Fatalf("session %d: %v", i, st)
		}
	}
	if st := ask("one more", "c"); st != wire.NackMissing {
		t.Errorf("a fifth session: %v", st)
	}
	if st := ask("s-2", "c"); st != wire.OK {
		t.Errorf("a session that is known: %v", st)
	}
	if st := ask("one more", "d"); st != wire.OK {
		t.Errorf("on another connection: %v", st)
	}
}

// V2, V14, V18.
func TestFramesThatAreNoMessageAreDroppedAndCounted(t *testing.T) {
	s := newStand(t, 16, nil)
	good := wire.AppendRequest(nil, s.request("img"), wire.Generation2)
	frames := [][]byte{nil, {0xc0}, {0x91}, good[:len(good)-1], append(slices.Clone(good), 0), slices.Repeat([]byte{0x91}, 1200), make([]byte, 1<<20),
		wire.AppendAck(nil, &wire.Ack{Key: "img", Status: wire.OK})}
	for range 1000 {
		for _, f := range frames {
			s.producer.Message(control.Source{ID: "c", Addr: "10.0.0.9"}, f)
		}
	}
	if n := s.producer.Stats().BadFrames; n != uint64(1000*len(frames)) {
		t.Errorf("%d counted", n)
	}
	if len(s.out.take()) != 0 || s.log.lines("") != 1 {
		t.Errorf("%d lines", s.log.lines(""))
	}
	s.ask(s.request("img"))
}

func TestAnAckThatCannotBeSentPinsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStand(t, 16, nil)
		save(t, s.cache, "img", 3)
		s.out.err = control.ErrQueueFull
		s.producer.Message(control.Source{ID: "c"}, wire.AppendRequest(nil, s.request("img"), wire.Generation2))
		synctest.Wait()
		// The ack, and NOT_READY in its place.
		if info, _ := s.cache.Lookup("img"); info.Pins != 0 || s.producer.Stats().SendFailed != 2 {
			t.Errorf("%d pins, %d answers failed", info.Pins, s.producer.Stats().SendFailed)
		}
	})
}

func TestACloseRevokesBeforeItUnpins(t *testing.T) {
	fabric := &transfertest.Fabric{}
	s := newStand(t, 16, func(o *ProducerOptions) { o.Pools[0].Planes = []transfer.Plane{fabric.Plane()} })
	save(t, s.cache, "img", 3)
	a := s.ask(s.request("img"))
	peer, err := fabric.Plane().AddPeer(bg, a.Ferry.Planes[0].Metadata)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	if err := s.producer.Close(); err != nil {
		t.Fatal(err)
	}
	if info, _ := s.cache.Lookup("img"); info.Pins != 0 {
		t.Errorf("%d pins", info.Pins)
	}
	rd, err := peer.Read(bg, transfer.ReadRequest{Token: a.Ferry.Planes[0].Token, Remote: []region.Span{{Length: 3 * testBlock}}, Local: [][]byte{make([]byte, 3*testBlock)}})
	if err == nil {
		<-rd.Done()
		err = rd.Err()
	}
	if err == nil {
		t.Error("a READ after Close succeeded")
	}
	s.producer.Message(control.Source{ID: "c"}, wire.AppendRequest(nil, s.request("img"), wire.Generation2))
	if m := s.out.take(); len(m) != 0 {
		t.Errorf("answered after Close: %+v", m)
	}
}

// slowRevoke is a plane whose Revoke waits.
type slowRevoke struct {
	transfer.Plane
	gate chan struct{}
}

type slowRegistration struct {
	transfer.Registration
	gate chan struct{}
}

func (p *slowRevoke) Register(ctx context.Context, m transfer.Memory, n func(transfer.Notification)) (transfer.Registration, error) {
	r, err := p.Plane.Register(ctx, m, n)
	return &slowRegistration{r, p.gate}, err
}

func (r *slowRegistration) Revoke(id string) {
	<-r.gate
	r.Registration.Revoke(id)
}

// C5.
func TestAnswersDoNotWaitForARevocation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		s := newStand(t, 64, func(o *ProducerOptions) { o.Pools[0].Planes[0] = &slowRevoke{o.Pools[0].Planes[0], gate} })
		for i := range 50 {
			save(t, s.cache, fmt.Sprint("img-", i), 1)
		}
		for i := range 50 {
			a := s.ask(s.request(fmt.Sprint("img-", i)))
			if v := s.verify(a, nil)[0].(*wire.Verified); !v.OK {
				t.Fatal("not verified")
			}
		}
		if n := s.cache.Stats().PinnedBlocks; n != 50 {
			t.Errorf("%d of 50 blocks pinned before their revocation is through", n)
		}
		close(gate)
		synctest.Wait()
		if n := s.cache.Stats().PinnedBlocks; n != 0 {
			t.Errorf("%d blocks pinned", n)
		}
	})
}

func TestAProducerThatCannotRegisterLeavesNothing(t *testing.T) {
	fabric := &transfertest.Fabric{}
	c := newTestCache(t, 16, 16, CacheOptions{})
	pool := ServedPool{Cache: c, Compat: testCompat, Memory: transfer.Memory{Bytes: c.pool}, Planes: []transfer.Plane{fabric.Plane(), fabric.Plane()}}
	_, err := NewProducer(bg, ProducerOptions{Pools: []ServedPool{pool}, Generation: wire.Generation2})
	if !errors.Is(err, transfer.ErrBadRequest) {
		t.Fatalf("error %v: one memory was registered twice", err)
	}
	pool.Planes = pool.Planes[:1]
	p, err := NewProducer(bg, ProducerOptions{Pools: []ServedPool{pool}, Generation: wire.Generation2})
	if err != nil {
		t.Fatalf("the registration of a producer that failed is still there: %v", err)
	}
	p.Close()
	for _, g := range []int{0, 3} {
		if _, err := NewProducer(bg, ProducerOptions{Generation: g}); err == nil {
			t.Errorf("generation %d was taken", g)
		}
	}
}

func FuzzProducerMessage(f *testing.F) {
	s := &stand{t: f}
	req := s.request("img")
	f.Add(wire.AppendRequest(nil, req, wire.Generation2))
	req.Ferry = nil
	f.Add(wire.AppendRequest(nil, req, wire.Generation2))
	f.Add(wire.AppendVerify(nil, &wire.Verify{Key: "img", Session: "s-1", Grant: "g", Gen: 1}))
	f.Fuzz(func(t *testing.T, body []byte) {
		s := newStand(t, 16, nil)
		save(t, s.cache, "img", 3)
		s.producer.Message(control.Source{ID: "c"}, body)
		s.producer.Message(control.Source{ID: "c"}, body)
		if n := s.producer.Stats().Grants; n > 1 {
			t.Errorf("%d grants of one frame", n)
		}
	})
}
