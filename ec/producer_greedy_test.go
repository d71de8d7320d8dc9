package ec

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// V9: one plain peer asks for 10,000 entries, by a session for each eight, and reads none, for half an hour. Small entries, large ones, and
// entries of which five fill the pool.
func TestAPeerThatTakesAllItCanAndReadsNothingStopsNobody(t *testing.T) {
	for _, tt := range []struct{ blocks, size int }{{4000, 1}, {4000, 40}, {4000, 800}} {
		t.Run(fmt.Sprintf("%d of %d", tt.size, tt.blocks), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { greedy(t, tt.blocks, tt.size) })
		})
	}
}

func greedy(t *testing.T, blocks, size int) {
	s, plane := plainStand(t, blocks)
	a := plane.byName["agent-0"]
	n := blocks / size
	for i := range n {
		save(t, s.cache, fmt.Sprint("img-", i), size)
	}
	// burst asks for everything, as a peer does that takes each NOT_READY for an invitation.
	burst := func(requests int) {
		for i := range requests {
			r := s.plain(fmt.Sprint("img-", i%n))
			r.Session = fmt.Sprint("greedy-", i/maxDescriptors)
			s.from(r, control.Source{ID: r.Session, Addr: "10.0.0.66"})
		}
	}
	burst(10_000)
	saved := 0
	for minute := range 30 {
		burst(300)
		// Others save, and pull what they saved.
		for range 5 {
			key := fmt.Sprint("new-", saved)
			saved++
			r, err := s.cache.Reserve(key, spec(size), 1)
			if errors.Is(err, ErrFull) {
				t.Fatalf("minute %d: no room for a save; %+v", minute, s.producer.Stats())
			}
			if err != nil {
				t.Fatal(err)
			}
			if _, err := r.Commit(nil); err != nil {
				t.Fatal(err)
			}
			ack := s.session(key, "other", "7")
			if ack.Status != wire.OK {
				t.Fatalf("minute %d: another peer is answered %v; %+v", minute, ack.Status, s.producer.Stats())
			}
			a.notify(transfer.Notification{Message: wire.Notification("other", key)})
		}
		time.Sleep(time.Minute)
		synctest.Wait()
	}
	if st := s.producer.Stats(); st.Rotations == 0 || st.Rotations > 30 || s.log.lines("") > 30*10 {
		t.Errorf("%d rotations, %d lines", st.Rotations, s.log.lines(""))
	}
	wait(time.Hour)
	if st := s.producer.Stats(); st.Grants != 0 || st.Retiring != 0 || s.cache.Stats().PinnedBlocks != 0 {
		t.Errorf("an hour later: %+v, %d blocks pinned", st, s.cache.Stats().PinnedBlocks)
	}
}

// Two addresses ask once for as much as they get, never READ, and stay connected.
func TestWhatPlainPeersBurnedStopsNeitherOwnPeersNorThoseThatHaveLittle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const blocks, n = 4000, 3000
		plane := &agents{}
		s := newStand(t, blocks, func(o *ProducerOptions) {
			o.Pools[0].Planes = []transfer.Plane{(&transfertest.Fabric{}).Plane(), plane}
		})
		var a *agent
		for _, a = range plane.byName {
		}
		key := func(i int) string { return fmt.Sprint("img-", i%n) }
		for i := range n {
			put(t, s.cache, key(i), 1)
		}
		s.session(key(0), "warm", "3")
		a.notify(transfer.Notification{Message: wire.Notification("warm", key(0))})
		for i := range 1020 {
			for _, session := range []string{"greedy-1", "greedy-2"} { // as many sessions of one address would, of eight descriptors each
				s.producer.mu.Lock()
				s.producer.grants.plainSession(session).descriptors = 0
				s.producer.mu.Unlock()
			}
			s.session(key(i), "greedy-1", "1")
			s.session(key(i+1500), "greedy-2", "2")
		}
		if st := s.producer.Stats(); st.GrantedBlocks != blocks/2 {
			t.Fatalf("%d of %d blocks are granted", st.GrantedBlocks, blocks)
		}
		own := func(i int) *wire.Ack {
			return s.from(s.request(key(i)), control.Source{ID: "own", Addr: "10.0.0.1"}) // at the address of a greedy one
		}
		others := func(when string) {
			t.Helper()
			for i := range 20 {
				ack := own(1100 + i)
				if ack.Status != wire.OK || !s.verify(ack, nil)[0].(*wire.Verified).OK {
					t.Fatalf("%s: an own peer is answered %v", when, ack.Status)
				}
				k := key(1100 + i)
				if ack := s.session(k, "warm", "3"); ack.Status != wire.OK {
					t.Fatalf("%s: a peer that READs is answered %v", when, ack.Status)
				}
				a.notify(transfer.Notification{Message: wire.Notification("warm", k)})
			}
			// More than its part of the reserve at a time: there is room when it has READ.
			var last wire.Status
			for i := range fewGrants + 1 {
				last = s.session(key(1200+i), "warm", "3").Status
			}
			if last != wire.NackNotReady {
				t.Errorf("%s: a burst of a peer that READs is answered %v", when, last)
			}
			for i := range fewGrants {
				a.notify(transfer.Notification{Message: wire.Notification("warm", key(1200+i))})
			}
			if ack := s.session(key(1499), "greedy-1", "1"); when != "at once" && ack.Status != wire.NackMissing {
				t.Errorf("%s: a peer that READs nothing is answered %v", when, ack.Status)
			}
		}
		others("at once")
		time.Sleep(31 * time.Second)
		synctest.Wait()
		if st := s.producer.Stats(); st.Burned == 0 || st.Rotations != 1 {
			t.Fatalf("%+v", st)
		}
		others("when it is burned")

		// A crowd takes the reserve. It is told to encode for itself after that, and own peers still find room.
		crowd := map[wire.Status]int{}
		for i := range 400 {
			r := s.plain(key(2600 + i))
			r.Session = fmt.Sprint("crowd-", i/4)
			crowd[s.from(r, control.Source{ID: r.Session, Addr: r.Session}).Status]++
			r = s.plain(key(1020 + i))
			r.Session = fmt.Sprint("crowd-", i/4)
			crowd[s.from(r, control.Source{ID: r.Session, Addr: r.Session}).Status]++
		}
		if crowd[wire.OK] != blocks/8 || s.session(key(2999), "fresh", "9").Status != wire.NackMissing {
			t.Errorf("answers %v", crowd)
		}
		for i := range 100 {
			if ack := own(1300 + i); ack.Status != wire.OK {
				t.Fatalf("an own peer is answered %v beside all that plain peers can take", ack.Status)
			}
		}
		if r, err := s.cache.Reserve("saved", spec(blocks/5), 1); err != nil {
			t.Error(err)
		} else {
			r.Discard()
		}

		time.Sleep(lateFirstAck - 31*time.Second + retireCheck)
		synctest.Wait()
		if ack := s.session(key(2999), "fresh", "9"); ack.Status != wire.OK {
			t.Errorf("after the former agent: %v; %+v", ack.Status, s.producer.Stats())
		}
	})
}

// How long others wait for a NACK while one peer asks for 10,000 entries at a time and reads nothing.
func BenchmarkNackBesideAGreedyPeer(b *testing.B) {
	const entries = 10_000
	s, at := listening(b, 4*entries, entries)
	for i := range entries {
		save(b, s.cache, fmt.Sprint("img-", i), 4)
	}
	ask := asker(b, s, at)
	answered := func() (n uint64) {
		for _, acks := range s.producer.Stats().Acks {
			n += acks
		}
		return n
	}
	var took []time.Duration
	for b.Loop() {
		z, err := zmq4.NewSocket(zmq4.DEALER)
		if err != nil {
			b.Fatal(err)
		}
		_ = z.SetLinger(0)
		_ = z.SetSndhwm(0)
		if err := z.Connect("tcp://" + at); err != nil {
			b.Fatal(err)
		}
		before := answered()
		for i := range entries {
			r := s.plain(fmt.Sprint("img-", i))
			r.Session = "greedy"
			if _, err := z.SendMessage("", wire.AppendRequest(nil, r, wire.Generation2)); err != nil {
				b.Fatal(err)
			}
		}
		for asked := uint64(0); answered() < before+entries+asked; asked++ {
			start := time.Now()
			if ack := ask("absent"); ack == nil || ack.Status != wire.NackMissing {
				b.Fatalf("%+v", ack)
			}
			took = append(took, time.Since(start))
		}
		_ = z.Close()
	}
	slices.Sort(took)
	b.ReportMetric(took[len(took)/2].Seconds()*1e3, "p50-ms")
	b.ReportMetric(took[len(took)*99/100].Seconds()*1e3, "p99-ms")
	b.ReportMetric(took[len(took)-1].Seconds()*1e3, "longest-ms")
}
