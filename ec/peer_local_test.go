package ec

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// localPair is a pair on one machine, which talks by the local path once something was pulled.
func localPair(t *testing.T, o pairOptions) (*pair, *testDealer) {
	p := newPair(t, o)
	p.producer.ServeLocal("name")
	made := make(chan *testDealer, 1)
	p.consumer.dialLocal = p.net.dialLocal(p.host, made)
	save(t, p.pcache, "first", 1)
	wantOutcome(t, p.consumer.Fetch(bg, "first", announced(1), 1), FetchReady)
	synctest.Wait()
	return p, <-made
}

// arrived is how many messages reached the producer, in all and by the local path.
func (p *pair) arrived() (all, local int) {
	p.host.mu.Lock()
	defer p.host.mu.Unlock()
	return len(p.host.seen), p.host.local
}

func TestOwnPeersOfOneMachineTalkByTheLocalPathAfterTheFirstAck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _ := localPair(t, pairOptions{})
		first, _ := p.arrived()
		save(t, p.pcache, "img", 4)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		wantBytes(t, p.ccache, "img")
		time.Sleep(tellPause)
		synctest.Wait()
		if all, local := p.arrived(); all != first+2 || local < 2 {
			t.Errorf("%d of %d messages by the local path; want the last two", local, all)
		}
		p.wantIdle()
	})
}

func TestAnAckThatCameFromFarNamesNoLocalPath(t *testing.T) {
	s := newStand(t, 64, nil)
	s.producer.ServeLocal("name")
	req := wire.AppendRequest(nil, s.request("img"), wire.Generation2)
	for _, tt := range []struct {
		from  control.Source
		names bool
	}{
		{control.Source{ID: "1", Addr: "127.0.0.1"}, true},
		{control.Source{ID: "2", Addr: "::ffff:127.0.0.5"}, true},
		{control.Source{ID: "3", Addr: "::1"}, true},
		{control.Source{ID: "4", Addr: "192.0.2.1"}, false}, // for documentation: nobody's
		{control.Source{ID: "5"}, false},
		{control.Source{ID: "6", Local: true}, false},
	} {
		s.producer.Message(tt.from, req)
		if got := s.out.take()[0].(*wire.Ack).Ferry.Local; (got == "name") != tt.names {
			t.Errorf("%+v was told %q", tt.from, got)
		}
	}
}

func TestAfterTheLocalPathIsLostItsQuestionsAreAskedAgainByTheFirstConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d := localPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		p.host.set(0, func(m wire.Message) bool { // the answer is lost
			_, ack := m.(*wire.Ack)
			return !ack
		})
		got := make(chan Result, 1)
		go func() { got <- p.consumer.Fetch(bg, "img", announced(4), 1) }()
		synctest.Wait()
		p.host.set(0, nil)
		start := time.Now()
		d.script.q <- func() { d.h.Down(fmt.Errorf("%w: it died", control.ErrGone)) }
		wantOutcome(t, <-got, FetchReady)
		if waited := time.Since(start); waited != 0 { // on the bubble's clock
			t.Errorf("waited %v", waited)
		}
		time.Sleep(p.producer.lease) // of the grant whose ack was lost: no other path may renew or end it
		synctest.Wait()
		// It is not made again: the producer says the same name.
		if p.consumer.peers[p.host.addr].local != nil {
			t.Error("there is another local connection")
		}
		p.wantIdle()
	})
}

func TestTheLocalPathGoesWithTheFirstConnectionAndIsMadeAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, d := localPair(t, pairOptions{})
		peer := p.consumer.peers[p.host.addr]
		peer.Down(control.ErrGone)
		p.host.mu.Lock()
		left := p.host.dealers[d.id]
		p.host.mu.Unlock()
		if left != nil {
			t.Error("it is open still")
		}
		made := make(chan *testDealer, 1)
		p.consumer.dialLocal = p.net.dialLocal(p.host, made)
		peer.Up()
		save(t, p.pcache, "img", 4)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		synctest.Wait()
		select {
		case <-made:
		default:
			t.Error("it was not made again")
		}
	})
}

// A grant that stands vouches for a READ: its lease has not ended, and its producer is alive.
func TestAGrantOfALiveNeighbourSparesTheWaitForVerify(t *testing.T) {
	for name, tt := range map[string]struct {
		dead   bool
		took   time.Duration // by the READ
		spared bool
	}{
		"at once":                 {spared: true},
		"just within the lease":   {took: 999 * time.Millisecond, spared: true},
		"when the lease may end":  {took: time.Second},
		"the producer is no more": {dead: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p, d := localPair(t, pairOptions{timeouts: Timeouts{GrantLease: time.Second}})
				save(t, p.pcache, "img", 4)
				p.host.set(0, func(m wire.Message) bool {
					_, answer := m.(*wire.Verified)
					return !answer
				})
				p.plane.read = func(_ int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
					rd, err := in.Read(bg, r)
					if err != nil || tt.took == 0 {
						return rd, err
					}
					held := newHeldRead()
					time.AfterFunc(tt.took, func() { <-rd.Done(); held.end(rd.Err()) })
					return held, nil
				}
				d.gone.Store(tt.dead)
				start := time.Now()
				wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), wantedOutcome(tt.spared))
				if waited := time.Since(start) > tt.took; waited == tt.spared {
					t.Errorf("waited for the answer: %v", waited)
				}
				if tt.spared {
					time.Sleep(tellPause)
					synctest.Wait()
					wantBytes(t, p.ccache, "img")
					p.wantIdle()
				}
			})
		})
	}
}

func TestRealPeersOfOneMachineTalkByTheLocalPath(t *testing.T) {
	eachPlane(t, func(t *testing.T, plane string) {
		dir := t.TempDir()
		from := newRealEnd(t, dir, "from", plane, 256)
		from.serve(0)
		defer from.stop()
		to := newRealEnd(t, dir, "to", plane, 256)
		to.consume()
		fetch := func(key string) {
			t.Helper()
			save(t, from.cache, key, 4)
			a := announced(4)
			a.PeerPort = from.router.Port()
			wantOutcome(t, to.consumer.Fetch(bg, key, a, 1), FetchReady)
			wantBytes(t, to.cache, key)
		}
		fetch("first")
		eventually(t, "a local connection", func() bool {
			to.consumer.mu.Lock()
			defer to.consumer.mu.Unlock()
			for _, p := range to.consumer.peers {
				p.mu.Lock()
				up := p.local != nil && p.local.up && p.local.conn != nil && p.local.alive.Connected()
				p.mu.Unlock()
				if up {
					return true
				}
			}
			return false
		})
		fetch("second")
		eventually(t, "no grants", func() bool { return from.producer.Stats().Grants == 0 })
	})
}

// A grant whose end is on its way must not be taken for one that stands, so a request never overtakes an end, whatever path it goes by.
func TestWhatIsPulledAgainAtOnceIsGrantedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _ := localPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		grants := map[string]bool{}
		p.host.set(0, func(m wire.Message) bool {
			if a, ok := m.(*wire.Ack); ok {
				if grants[a.Ferry.Grant] {
					t.Error("a grant that was done with was granted again")
				}
				grants[a.Ferry.Grant] = true
			}
			return true
		})
		for range 3 {
			wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
			wantBytes(t, p.ccache, "img")
			if err := p.ccache.Remove("img"); err != nil {
				t.Fatal(err)
			}
		}
		if len(grants) != 3 {
			t.Errorf("%d grants", len(grants))
		}
		time.Sleep(tellPause)
		synctest.Wait()
		p.wantIdle()
	})
}
