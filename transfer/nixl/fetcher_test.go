package nixl

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// slowAgent attaches and adds when its test lets it.
type slowAgent struct {
	agent
	attaching, adding chan struct{} // nil: at once
}

func (a *slowAgent) wait(on chan struct{}) error {
	if on == nil {
		return nil
	}
	select {
	case <-on:
		return nil
	case <-a.over():
		return errEnded
	}
}

func (a *slowAgent) attach(ctx context.Context, m attachment) (place, error) {
	if err := a.wait(a.attaching); err != nil {
		return place{}, err
	}
	return a.agent.attach(ctx, m)
}

func (a *slowAgent) addPeer(ctx context.Context, metadata []byte) (uint64, error) {
	if err := a.wait(a.adding); err != nil {
		return 0, err
	}
	return a.agent.addPeer(ctx, metadata)
}

// slow makes the plane's fetch agent one that waits.
func slow(t *testing.T, p *Plane, attaching, adding chan struct{}) *slowAgent {
	t.Helper()
	a, err := p.start(t.Context(), roleFetch, false, nil)
	must(t, err)
	s := &slowAgent{a, attaching, adding}
	must(t, p.fetch.install(s))
	return s
}

func expired(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	t.Cleanup(cancel)
	return ctx
}

func TestWhoWaitedForAnAgentThatIsOverGetsTheNextOne(t *testing.T) {
	p := newPlane(t, Options{Loaded: binding.NewFake().Library()})
	f := p.fetch
	dead, err := p.start(t.Context(), roleFetch, false, nil)
	must(t, err)
	s := &start{done: make(chan struct{})}
	f.mu.Lock()
	f.starting = s
	f.mu.Unlock()
	type answer struct {
		a   agent
		err error
	}
	answers := make(chan answer)
	const waiters = 10
	for range waiters {
		go func() {
			a, err := f.get(t.Context())
			answers <- answer{a, err}
		}()
	}
	dead.end()
	f.mu.Lock()
	f.cur, f.starting = &fetching{agent: dead, started: time.Now()}, nil
	f.mu.Unlock()
	close(s.done)
	for range waiters {
		got := <-answers
		if got.err != nil || got.a == nil || got.a == dead {
			t.Errorf("agent %v, error %v", got.a, got.err)
		}
	}
}

func TestDeadlinesHoldWhileAnAgentRegistersMemory(t *testing.T) {
	p := newPair(t, Options{})
	free := make(chan struct{})
	slow(t, p.reader, free, nil)
	reg := register(t, p.producer, shared(t, 4096))
	// A READ through the bounce buffer waits for the agent; adding a peer does not.
	c := add(t, p.reader, reg.Metadata())
	_, err := c.Read(expired(t), transfer.ReadRequest{Remote: []region.Span{{Length: 10}}, Local: [][]byte{make([]byte, 10)}})
	wantErr(t, "READ", err, context.DeadlineExceeded)
	close(free)
	must(t, pull(t, c, make([]byte, 10)))
}

func TestMemoryThatIsClosedWhileAnAgentRegistersItIsWithdrawn(t *testing.T) {
	f := binding.NewFake()
	p := newPlane(t, Options{Loaded: f.Library()})
	free := make(chan struct{})
	s := slow(t, p, free, nil)
	mem, err := p.addMemory(shared(t, 4096))
	must(t, err)
	wantErr(t, "attach", p.fetch.attach(expired(t), s, mem), context.DeadlineExceeded)
	removed := make(chan struct{})
	go func() {
		p.removeMemory(mem)
		close(removed)
	}()
	transfertest.Eventually(t, "it to be withdrawn", func() bool {
		p.fetch.mu.Lock()
		defer p.fetch.mu.Unlock()
		d := p.fetch.cur.destinations[mem.id]
		return d != nil && d.gone
	})
	close(free)
	<-removed
	if _, registrations, _, _ := f.Live(); registrations > 0 {
		t.Errorf("%d registrations are left", registrations)
	}
}

func TestDeadlinesHoldWhileAnAgentAddsAPeer(t *testing.T) {
	p := newPair(t, Options{})
	free := make(chan struct{})
	slow(t, p.reader, nil, free)
	reg := register(t, p.producer, shared(t, 4096))
	_, err := p.reader.AddPeer(expired(t), reg.Metadata())
	wantErr(t, "add", err, context.DeadlineExceeded)
	var all sync.WaitGroup
	for range 3 {
		all.Go(func() {
			c, err := p.reader.AddPeer(t.Context(), reg.Metadata())
			if err != nil {
				t.Error(err)
				return
			}
			if err := pull(t, c, make([]byte, 10)); err != nil {
				t.Error(err)
			}
			_ = c.Close()
		})
	}
	close(free)
	all.Wait()
	// The one that was given up is let go of too.
	p.reader.fetch.mu.Lock()
	e := p.reader.fetch.cur.agent.(*slowAgent).agent.(*engine)
	p.reader.fetch.mu.Unlock()
	transfertest.Eventually(t, "nobody to use the peer", func() bool {
		e.peers.mu.Lock()
		defer e.peers.mu.Unlock()
		return len(e.peers.idle) == 1
	})
}

func TestAPlaneClosesWhileItsAgentIsBusy(t *testing.T) {
	p := newPair(t, Options{})
	slow(t, p.reader, nil, make(chan struct{}))
	reg := register(t, p.producer, shared(t, 4096))
	added := make(chan error)
	go func() {
		_, err := p.reader.AddPeer(t.Context(), reg.Metadata())
		added <- err
	}()
	transfertest.Eventually(t, "it to be added", func() bool {
		p.reader.fetch.mu.Lock()
		defer p.reader.fetch.mu.Unlock()
		return len(p.reader.fetch.cur.adding) == 1
	})
	must(t, p.reader.Close())
	if err := <-added; err == nil {
		t.Error("added to a plane that is closed")
	}
}

func TestTheDestinationOfAFailedReadInPiecesIsKeptUntilTheAgentIsOver(t *testing.T) {
	p := newPair(t, Options{Drain: 20 * time.Millisecond})
	failing, frozen := register(t, p.producer, shared(t, 8192)), register(t, p.producer, shared(t, 8192))
	m := shared(t, 8192)
	register(t, p.reader, m)
	c, other := add(t, p.reader, failing.Metadata()), add(t, p.reader, frozen.Metadata())
	request := transfer.ReadRequest{
		Remote: []region.Span{{Length: 10}, {Offset: 100, Length: 10}}, Local: [][]byte{m.Bytes[:10], m.Bytes[1000:1010]},
	}
	for i, call := range []binding.FakeCall{binding.FakePost, binding.FakeStatus} {
		a, err := p.reader.fetch.get(t.Context())
		must(t, err)
		hangs := transfer.Read(nil)
		if call == binding.FakePost { // one that never ends is waited for no longer than Drain
			p.fake.Freeze(frozen.agentName())
			hangs, err = other.Read(t.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: 10}}, Local: [][]byte{m.Bytes[5000:5010]}})
			must(t, err)
			transfertest.Eventually(t, "it to be in flight", func() bool { return polling(a) })
		} else {
			p.fake.Freeze(failing.agentName())
		}
		p.fake.Fail(call, 0, binding.StatusBackend)
		rd, err := c.Read(t.Context(), request)
		must(t, err)
		wantErr(t, string(call), wait(t, rd), transfer.ErrPeerLost)
		select {
		case <-a.over():
		default:
			t.Errorf("%s: Done, and the agent may still write", call)
		}
		if hangs != nil {
			wantErr(t, "the one that hung", wait(t, hangs), transfer.ErrPeerLost)
		}
		if got, want := p.reader.Counts(), (Counts{Unsettled: uint64(i) + 1, Retired: uint64(i) + 1}); got != want {
			t.Errorf("%s: %+v, want %+v", call, got, want)
		}
		p.fake.Thaw(frozen.agentName())
		p.fake.Thaw(failing.agentName())
		c = add(t, p.reader, failing.Metadata())
		must(t, pull(t, c, m.Bytes[:10]))
	}
}

// polling says whether a READ that was posted is in flight.
func polling(a agent) bool {
	e := a.(*engine)
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.polling
}

// A READ in one piece that fails is over.
func TestAFailedReadInOnePieceKeepsTheAgent(t *testing.T) {
	p := newPair(t, Options{})
	reg := register(t, p.producer, shared(t, 4096))
	c := add(t, p.reader, reg.Metadata())
	must(t, pull(t, c, make([]byte, 10)))
	p.fake.Fail(binding.FakePost, 0, binding.StatusBackend)
	wantErr(t, "READ", pull(t, c, make([]byte, 10)), transfer.ErrPeerLost)
	if got := p.reader.Counts(); got != (Counts{}) {
		t.Errorf("%+v", got)
	}
}

func TestSuspectsAreTriedOneByOneAndOnlyTheOneToBlameWaits(t *testing.T) {
	var s suspects
	ctx := t.Context()
	first, second, third := &slowAgent{}, &slowAgent{}, &slowAgent{}
	for _, name := range []string{"a", "b", "x", "a"} {
		s.blame(first, name)
	}
	must(t, s.admit(ctx, "innocent"))
	must(t, s.admit(ctx, "x"))
	wantErr(t, "beside x", s.admit(expired(t), "a"), context.DeadlineExceeded)
	must(t, s.admit(ctx, "x")) // several READs of one
	s.blame(second, "innocent")
	s.blame(second, "x")
	s.blame(second, "b2")
	must(t, s.admit(ctx, "innocent"))
	must(t, s.admit(ctx, "b2"))
	wantErr(t, "x at once", s.admit(ctx, "x"), transfer.ErrPeerLost)
	must(t, s.admit(ctx, "a"))
	wantErr(t, "beside a", s.admit(expired(t), "b"), context.DeadlineExceeded)
	waited := make(chan error)
	go func() { waited <- s.admit(ctx, "b") }()
	s.acquit("a")
	must(t, <-waited)
	s.acquit("b")
	s.acquit("x")
	if s.n.Load() != 0 || len(s.all) != 0 || s.trial != nil {
		t.Errorf("%d suspects are left", s.n.Load())
	}
	for i := range maxSuspects + 10 {
		s.blame(third, strings.Repeat("n", i+1))
	}
	if len(s.all) > maxSuspects || int(s.n.Load()) != len(s.all) {
		t.Errorf("%d suspects, counted %d", len(s.all), s.n.Load())
	}
}

// A peer whose READs end the fetch agent again and again, here by the test's hand, holds nobody else up.
func TestAPeerThatEndsTheAgentHoldsNobodyElseUp(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp")
	o, log := logged(t)
	p := newPlane(t, o)
	good, evil := register(t, p, shared(t, 64<<10)), register(t, p, shared(t, 64<<10))
	d := shared(t, 64<<10)
	register(t, p, d)
	g, e := add(t, p, good.Metadata()), add(t, p, evil.Metadata())
	must(t, pull(t, g, d.Bytes))
	must(t, pull(t, e, d.Bytes))
	stop(t, evil.pid()) // its READs stay in flight
	defer func() { _ = unix.Kill(evil.pid(), unix.SIGKILL) }()
	serve, aborts := good.pid(), uint64(0)
	refused := 0
	for round := range 3 {
		var rd transfer.Read
		transfertest.Eventually(t, "the next try", func() bool {
			var err error
			rd, err = e.Read(t.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: 64 << 10}}, Local: [][]byte{d.Bytes}})
			if err != nil {
				wantErr(t, "refused", err, transfer.ErrPeerLost)
				refused++
			}
			return err == nil
		})
		must(t, unix.Kill(p.fetchPID(), unix.SIGKILL))
		wantErr(t, "its READ", wait(t, rd), transfer.ErrPeerLost)
		clear(d.Bytes)
		if err := pull(t, g, d.Bytes); log.aborted(t, serve) {
			aborts++
			transfertest.Eventually(t, "its next agent", func() bool { return good.pid() != 0 && good.pid() != serve })
			serve, g = good.pid(), add(t, p, good.Metadata())
			must(t, pull(t, g, d.Bytes))
		} else if err != nil {
			t.Fatalf("round %d: the other peer: %v", round, err)
		}
		if !bytes.Equal(d.Bytes, good.memory.bytes) {
			t.Error("wrong bytes")
		}
	}
	if refused == 0 {
		t.Error("it never had to wait")
	}
	if got := p.Counts(); got != (Counts{Serve: DeathCounts{DeathAbort: aborts}, Fetch: DeathCounts{DeathKilled: 3}}) {
		t.Errorf("%+v", got)
	}
}
