package ec

import (
	"context"
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
)

// agents is a plane as unmodified peers use it: an agent's metadata, a descriptor a region, notifications, no tokens.
type agents struct {
	mu     sync.Mutex
	byName map[string]*agent
	added  int

	rotations int
	fixed     bool // agents cannot be rotated
}

type agent struct {
	all    *agents
	name   string
	memory []byte
	gone   chan struct{}
	notify func(transfer.Notification)
}

func (p *agents) Name() string                        { return "agents" }
func (p *agents) Capabilities() transfer.Capabilities { return transfer.Capabilities{Notify: true} }
func (p *agents) Close() error                        { return nil }

func (p *agents) Register(_ context.Context, m transfer.Memory, notify func(transfer.Notification)) (transfer.Registration, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := &agent{all: p, name: fmt.Sprint("agent-", len(p.byName)), memory: m.Bytes, gone: make(chan struct{}), notify: notify}
	if p.byName == nil {
		p.byName = map[string]*agent{}
	}
	p.byName[a.name] = a
	return a, nil
}

func (p *agents) AddPeer(context.Context, []byte) (transfer.Peer, error) {
	return nil, transfer.ErrUnreachable
}

func (p *agents) AddPlainPeer(_ context.Context, metadata []byte, blocks []uint64, blockBytes int64) (transfer.Peer, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.byName[string(metadata)]
	if a == nil {
		return nil, transfer.ErrUnreachable
	}
	if len(blocks) != len(a.memory)/testBlock || blockBytes != testBlock || blocks[1] != 4096+testBlock {
		return nil, fmt.Errorf("%w: %d blocks of %d bytes", transfer.ErrBadRequest, len(blocks), blockBytes)
	}
	p.added++
	return &agentPeer{a}, nil
}

func (a *agent) Metadata() []byte { return []byte(a.name) }
func (a *agent) Agent() ([]byte, uint64, <-chan struct{}) {
	a.all.mu.Lock()
	defer a.all.mu.Unlock()
	if a.name == "" {
		return nil, 0, nil
	}
	return []byte(a.name), 4096, a.gone
}
func (a *agent) Grant(string, []region.Span) ([]byte, error) { return nil, nil }
func (a *agent) Revoke(string)                               {}
func (a *agent) Close() error                                { return nil }

type agentPeer struct{ a *agent }

func (p *agentPeer) Close() error { return nil }

func (p *agentPeer) Read(_ context.Context, r transfer.ReadRequest) (transfer.Read, error) {
	rd := newHeldRead()
	local := r.Local
	for _, s := range r.Remote {
		from := p.a.memory[s.Offset : s.Offset+s.Length]
		for len(from) > 0 {
			n := copy(local[0], from)
			from = from[n:]
			if local[0] = local[0][n:]; len(local[0]) == 0 {
				local = local[1:]
			}
		}
	}
	rd.end(nil)
	p.a.notify(transfer.Notification{Message: slices.Clone(r.Notification)})
	return rd, nil
}

func plainStand(t testing.TB, blocks int) (*stand, *agents) {
	plane := &agents{}
	return newStand(t, blocks, func(o *ProducerOptions) { o.Pools[0].Planes = []transfer.Plane{plane} }), plane
}

func (s *stand) plain(key string) *wire.Request {
	r := s.request(key)
	r.Ferry = nil
	return r
}

func TestAPlainPeersRequestIsCheckedBeforeAnAgentIsLookedFor(t *testing.T) {
	s := newStand(t, 16, nil) // no plane for plain peers
	save(t, s.cache, "ready", 1)
	defer reserve(t, s.cache, "filling", 1).Discard()
	for key, want := range map[string]wire.Status{"absent": wire.NackMissing, "filling": wire.NackNotReady, "ready": wire.NackInternal} {
		if a := s.ask(s.plain(key)); a.Status != want || a.Ferry != nil {
			t.Errorf("%s: answered %+v, want %v", key, a, want)
		}
	}
}

func TestAPlainPeerGetsBlocksAgentAndDescriptor(t *testing.T) {
	s, _ := plainStand(t, 16)
	save(t, s.cache, "other", 2)
	info := save(t, s.cache, "img", 3)
	a := s.ask(s.plain("img"))
	start := info.Extents[0].Start
	if a.Status != wire.OK || a.Session != "s-1" || a.Ferry != nil || !slices.Equal(a.Blocks, []uint32{start, start + 1, start + 2}) {
		t.Errorf("ack %+v", a)
	}
	if string(a.AgentMetadata) != "agent-0" || len(a.MemDescriptor) == 0 {
		t.Errorf("agent %q, descriptor of %d bytes", a.AgentMetadata, len(a.MemDescriptor))
	}
}

// V1: a plain peer may act on its ack at any time.
func TestNoClockFreesWhatAPlainPeerWasGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane := plainStand(t, 16)
		plane.fixed = true
		save(t, s.cache, "img", 3)
		s.cache.Hold("img")
		s.ask(s.plain("img"))
		time.Sleep(time.Hour)
		synctest.Wait()
		if st := s.producer.Stats(); st.Burned != 1 || st.BurnedBlocks != 3 || st.Grants != 1 {
			t.Errorf("counted %+v", st)
		}
		if info, _ := s.cache.Lookup("img"); info.Pins != 1 {
			t.Errorf("%d pins", info.Pins)
		}
		// Asking again renews it; then it is read.
		if a := s.ask(s.plain("img")); a.Status != wire.OK || len(a.MemDescriptor) == 0 {
			t.Errorf("ack %+v", a)
		}
		if st := s.producer.Stats(); st.Burned != 0 || st.Grants != 1 {
			t.Errorf("counted %+v", st)
		}
		notify := plane.byName["agent-0"].notify
		notify(transfer.Notification{Message: []byte("no colon")})
		notify(transfer.Notification{Message: wire.Notification("s-2", "img")})
		if s.producer.Stats().Grants != 1 {
			t.Error("another session's notification ended the grant")
		}
		notify(transfer.Notification{Message: wire.Notification("s-1", "img")})
		notify(transfer.Notification{Message: wire.Notification("s-1", "img")}) // it was acked twice
		info, _ := s.cache.Lookup("img")
		if st := s.producer.Stats(); st.Grants != 0 || st.Notified != 2 || info.Pins != 0 || info.Holds != 0 {
			t.Errorf("counted %+v; %d pins, %d holds", st, info.Pins, info.Holds)
		}
	})
}

func TestTheEndOfTheAgentFreesWhatOnlyItCouldServe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane := plainStand(t, 200) // large: few burned blocks start no rotation
		a := plane.byName["agent-0"]
		for _, k := range []string{"old", "both", "new"} {
			save(t, s.cache, k, 2)
		}
		s.ask(s.plain("old"))
		s.session("both", "s-2", "2")
		time.Sleep(time.Minute)
		synctest.Wait()
		first := a.gone
		a.name = ""
		if got := s.ask(s.plain("new")); got.Status != wire.NackNotReady {
			t.Errorf("without an agent: %v", got.Status)
		}
		a.name, a.gone = "agent-1", make(chan struct{})
		s.session("both", "s-2", "2")
		s.session("new", "s-3", "3")
		close(first)
		synctest.Wait()
		for k, want := range map[string]int{"old": 0, "both": 1, "new": 1} {
			if i, _ := s.cache.Lookup(k); i.Pins != want {
				t.Errorf("%s has %d pins, want %d", k, i.Pins, want)
			}
		}
		if st := s.producer.Stats(); st.AgentGone != 1 || st.Grants != 2 || st.Burned != 0 {
			t.Errorf("counted %+v", st)
		}
	})
}

// V10.
func TestTheDescriptorIsSentUntilTheFirstReadIsComplete(t *testing.T) {
	s, plane := plainStand(t, 64)
	with := func(from, n int) (sent int) {
		for i := range n {
			key := fmt.Sprint("img-", from+i)
			save(t, s.cache, key, 1)
			if len(s.ask(s.plain(key)).MemDescriptor) > 0 {
				sent++
			}
		}
		return sent
	}
	if n := with(0, 20); n != maxDescriptors {
		t.Errorf("%d of 20 acks carry the descriptor, want %d", n, maxDescriptors)
	}
	if a := s.ask(s.plain("img-0")); a.Status != wire.NackNotReady {
		t.Errorf("a session that has READ nothing is answered %v without a descriptor", a.Status)
	}
	r := s.plain("img-0")
	r.Session = "s-2"
	if len(s.ask(r).MemDescriptor) == 0 {
		t.Error("another session got none")
	}
	plane.byName["agent-0"].notify(transfer.Notification{Message: wire.Notification("s-2", "img-0")})
	r.Key = "img-1"
	if len(s.ask(r).MemDescriptor) != 0 {
		t.Error("sent after a complete READ")
	}
	plane.byName["agent-0"].name = "agent-0b" // a new incarnation
	if len(s.ask(r).MemDescriptor) == 0 {
		t.Error("not sent with a new agent")
	}
}

func TestASessionThatDroppedItsFirstAcksGetsTheDescriptorLater(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane := plainStand(t, 64)
		save(t, s.cache, "img", 1)
		for range maxDescriptors {
			s.ask(s.plain("img"))
		}
		for range 3 { // its grant never lapses, as it goes on asking
			if a := s.ask(s.plain("img")); a.Status != wire.NackNotReady {
				t.Errorf("at once: %v", a.Status)
			}
			time.Sleep(descriptorEvery)
			if a := s.ask(s.plain("img")); a.Status != wire.OK || len(a.MemDescriptor) == 0 {
				t.Errorf("later: %v, descriptor of %d bytes", a.Status, len(a.MemDescriptor))
			}
		}
		plane.byName["agent-0"].notify(transfer.Notification{Message: wire.Notification("s-1", "img")})
		if a := s.ask(s.plain("img")); a.Status != wire.OK || len(a.MemDescriptor) != 0 {
			t.Errorf("after a READ: %v, descriptor of %d bytes", a.Status, len(a.MemDescriptor))
		}
	})
}

func TestAReadByTheFormerAgentDoesNotWithholdTheDescriptorOfTheNew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, plane := plainStand(t, 64)
		save(t, s.cache, "img", 1)
		s.ask(s.plain("img"))
		former := plane.byName["agent-0"]
		former.name = "agent-0b" // a new incarnation
		if a := s.ask(s.plain("img")); a.Status != wire.OK || len(a.MemDescriptor) == 0 {
			t.Fatalf("%v, descriptor of %d bytes", a.Status, len(a.MemDescriptor))
		}
		former.notify(transfer.Notification{Message: wire.Notification("s-1", "img")})
		if a := s.ask(s.plain("img")); a.Status != wire.OK || len(a.MemDescriptor) == 0 {
			t.Errorf("after a READ that the former agent may have served: %v, descriptor of %d bytes", a.Status, len(a.MemDescriptor))
		}
	})
}

func TestPlainSessionsAreForgottenBeforeTheyFillTheMemory(t *testing.T) {
	s, plane := plainStand(t, 16)
	save(t, s.cache, "img", 1)
	for i := range maxPlainSessions + 100 {
		r := s.plain("img")
		r.Session = fmt.Sprint("s-", i)
		s.from(r, control.Source{ID: fmt.Sprint("c-", i), Addr: "10.0.0.1"})
		plane.byName["agent-0"].notify(transfer.Notification{Message: wire.Notification(r.Session, "img")})
	}
	if n := len(s.producer.grants.plain); n > maxPlainSessions {
		t.Errorf("%d sessions kept", n)
	}
}

func TestAConsumerReadsFromAPlainPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		plane := &agents{}
		served := newTestCache(t, 64, 64, CacheOptions{})
		reg, err := plane.Register(bg, transfer.Memory{Bytes: served.pool}, func(transfer.Notification) {})
		if err != nil {
			t.Fatal(err)
		}
		p := newPair(t, pairOptions{consumer: func(o *ConsumerOptions) { o.Planes = append(o.Planes, plane) }})
		described := false
		p.host.listen(newAnswers(p.host, func(r *wire.Request) []*wire.Ack {
			pin := pin(t, served, r.Key)
			defer pin.Release()
			a := &wire.Ack{Key: r.Key, Session: r.Session, AgentMetadata: reg.Metadata()}
			for _, e := range pin.Info().Extents {
				for b := e.Start; b < e.Start+e.Count; b++ {
					a.Blocks = append(a.Blocks, b)
				}
			}
			if !described {
				a.MemDescriptor = wire.AppendMemDescriptor(nil, 4096, 64, testBlock)
				described = true
			}
			return []*wire.Ack{a}
		}))
		for i := range 5 {
			key := fmt.Sprint("img-", i)
			save(t, served, key, 3)
			r := p.consumer.Fetch(bg, key, announced(3), 1)
			wantOutcome(t, r, FetchReady)
			wantBytes(t, p.ccache, key)
			if r.Plane != "agents" {
				t.Errorf("plane %q", r.Plane)
			}
		}
		if plane.added != 1 {
			t.Errorf("the agent was added %d times", plane.added)
		}
		synctest.Wait()
		p.wantIdle()
	})
}
