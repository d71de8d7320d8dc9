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
)

// V9: one plain peer asks for 10,000 entries, on 4 connections of 4 sessions, and reads none, for half an hour. Small entries, large ones, and
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
			r.Session = fmt.Sprint("greedy-", i%16)
			s.from(r, control.Source{ID: fmt.Sprint("greedy-", i%4), Addr: "10.0.0.66"})
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
