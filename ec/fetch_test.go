package ec

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

var bg = context.Background()

func TestFetchBringsTheBytesAndLetsGoOfTheGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{verify: true})
		made := save(t, p.pcache, "img", 5)
		if err := p.pcache.Hold("img"); err != nil {
			t.Fatal(err)
		}
		r := p.consumer.Fetch(bg, "img", announced(5), 1)
		wantOutcome(t, r, FetchReady)
		if r.Bytes != 5*testBlock || r.Plane != transfertest.MemoryName || r.Info.Gen == 0 {
			t.Errorf("result %+v", r)
		}
		if !r.Info.HasChecksum || r.Info.Checksum != made.Checksum {
			t.Errorf("the checksum was not kept: %+v", r.Info)
		}
		wantBytes(t, p.ccache, "img")
		synctest.Wait()
		p.wantIdle()
		if info, _ := p.pcache.Lookup("img"); info.Holds != 0 {
			t.Errorf("a pull left %d holds of 1", info.Holds)
		}
		if s := p.producer.Stats(); s.VerifiesOK != 1 || s.Acks[wire.OK] != 1 || s.BytesGranted != 5*testBlock {
			t.Errorf("producer counted %+v", s)
		}

		again := p.consumer.Fetch(bg, "img", announced(5), 1)
		wantOutcome(t, again, FetchReady)
		if reads, _ := p.plane.counts(); again.Plane != PlaneLocal || reads != 1 {
			t.Errorf("an entry of the pool came by plane %q, %d READs", again.Plane, reads)
		}
	})
}

func TestFetchWithoutShapeTakesOneRowABlock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 3)
		a := announced(3)
		a.Shape = nil
		r := p.consumer.Fetch(bg, "img", a, 1)
		wantOutcome(t, r, FetchReady)
		if s := r.Info.Spec.Shape; s[0] != 3 || s[1] != testBlock/2 {
			t.Errorf("shape %v", s)
		}
		wantBytes(t, p.ccache, "img")
	})
}

func TestAnEntryOfThePoolWithAnotherShapeIsAConflict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.ccache, "img", 3)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchConflict)
		wantOutcome(t, p.consumer.Fetch(bg, "img", &Announcement{}, 1), FetchReady)
		if p.host.requests() != 0 {
			t.Error("a peer was asked")
		}
	})
}

// C1.
func TestAMissingEntryEndsItsOwnFetchOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "there", 2)
		var wg sync.WaitGroup
		var missing, there Result
		wg.Go(func() { missing = p.consumer.Fetch(bg, "never", announced(2), 1) })
		wg.Go(func() { there = p.consumer.Fetch(bg, "there", announced(2), 1) })
		wg.Wait()
		wantOutcome(t, missing, FetchMissing)
		if !errors.Is(missing.Err, ErrMissing) {
			t.Errorf("error %v", missing.Err)
		}
		wantOutcome(t, there, FetchReady)
		synctest.Wait()
		p.wantIdle()
	})
}

// C4, V11.
func TestNotReadyIsAskedAgainWithTheSameDestination(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		filling := reserve(t, p.pcache, "img", 4)
		got := make(chan Result, 1)
		go func() { got <- p.consumer.Fetch(bg, "img", announced(4), 1) }()
		synctest.Wait()
		before, _ := p.ccache.Lookup("img")
		time.Sleep(3 * time.Second)
		synctest.Wait()
		during, state := p.ccache.Lookup("img")
		if state != Filling || during.Gen != before.Gen || during.Slot != before.Slot {
			t.Errorf("destination was %+v, is %+v (%v)", before, during, state)
		}
		if n := p.host.requests(); n < 5 || n > 20 {
			t.Errorf("%d requests in 3 s", n)
		}
		fill(t, filling, "img")
		wantOutcome(t, <-got, FetchReady)
		wantBytes(t, p.ccache, "img")
		if s := p.producer.Stats(); s.Acks[wire.NackMissing] != 0 {
			t.Error("an entry that exists was MISSING")
		}
		if s := p.ccache.Stats(); s.Discards != 0 || s.Evictions != 0 {
			t.Errorf("discards %d, evictions %d", s.Discards, s.Evictions)
		}
	})
}

func TestNotReadyUntilTheBudgetEndsIsNotReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		filling := reserve(t, p.pcache, "img", 4)
		defer filling.Discard()
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchNotReady)
		if r.Elapsed != 60*time.Second {
			t.Errorf("ended after %v", r.Elapsed)
		}
		synctest.Wait()
		p.wantIdle()
	})
}

// C2.
func TestASlowFirstAckIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		p.host.set(2500*time.Millisecond, nil)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		if n := p.host.requests(); n != 1 {
			t.Errorf("%d requests of a peer that is not known yet", n)
		}
	})
}

func TestAnAckSlowerThanTheWaitOfAnOwnNodeIsActedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		for _, k := range []string{"first", "second"} {
			save(t, p.pcache, k, 4)
		}
		wantOutcome(t, p.consumer.Fetch(bg, "first", announced(4), 1), FetchReady)
		p.host.set(2500*time.Millisecond, func(m wire.Message) bool {
			if v, ok := m.(*wire.Verify); ok && !v.Failed {
				p.host.delay = 0
			}
			return true
		})
		r := p.consumer.Fetch(bg, "second", announced(4), 1)
		wantOutcome(t, r, FetchReady)
		if s := p.consumer.Stats(); s.AckTimeouts == 0 {
			t.Error("the wait for an own node's ack did not end before the ack came")
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		p.wantIdle()
	})
}

func TestAPeerThatNeverAnswersEndsAtTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		p.host.listen(newAnswers(p.host, func(*wire.Request) []*wire.Ack { return nil }))
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchTimedOut)
		if n := p.host.requests(); r.Elapsed != 60*time.Second || n < 2 || n > 3 { // at 0 and 30 s, and as the budget ends
			t.Errorf("ended after %v and %d requests", r.Elapsed, n)
		}
		synctest.Wait()
		p.wantIdle()
		if n := p.clog.lines("a fetch is slow", "an ack", "127.0.0.1:7000", "img"); n != 1 {
			t.Errorf("%d lines about what was waited for", n)
		}
	})
}

func TestARefusedConnectionIsUnreachableLongBeforeTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		p.host.fall()
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchUnreachable)
		if r.Elapsed != 5*time.Second {
			t.Errorf("ended after %v", r.Elapsed)
		}
		r = p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchUnreachable)
		if r.Elapsed != time.Second {
			t.Errorf("a peer known to be gone was waited for %v", r.Elapsed)
		}
		if !strings.Contains(r.Err.Error(), "not connected within 1s: ") {
			t.Error(r.Err)
		}
		p.wantIdle()
	})
}

// V7, C78.
func TestARestartedProducerIsAskedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		for i := range 30 {
			key := fmt.Sprint("img-", i)
			save(t, p.pcache, key, 2)
			old := p.producer
			p.host.set(0, func(m wire.Message) bool { _, ack := m.(*wire.Ack); return !ack }) // it dies with the acks
			got := make(chan Result, 1)
			go func() { got <- p.consumer.Fetch(bg, key, announced(2), 1) }()
			synctest.Wait()
			p.host.fall()
			old.Close()
			synctest.Wait()
			p.host.set(0, nil)
			p.start(pairOptions{})
			wantOutcome(t, <-got, FetchReady)
			wantBytes(t, p.ccache, key)
			if _, open := p.plane.counts(); open > 1 {
				t.Fatalf("%d peers open on the plane", open)
			}
		}
		synctest.Wait()
		p.wantIdle()
	})
}

// C68.
func TestADeadPeerLeavesNothingOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 2)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(2), 1), FetchReady)
		p.host.fall()
		synctest.Wait()
		if _, open := p.plane.counts(); open != 0 {
			t.Errorf("%d peers open on the plane", open)
		}
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if n := p.consumer.Stats().Peers; n != 0 {
			t.Errorf("%d idle connections", n)
		}
	})
}

// Announcements can name any number of hosts where nobody is.
func TestHostsThatAreNeverReachedAreNotAllKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 2)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(2), 1), FetchReady)
		for i := range 300 {
			dead := announced(2)
			dead.PeerPort = 7001 + i
			wantOutcome(t, p.consumer.Fetch(bg, fmt.Sprint("other-", i), dead, 1), FetchUnreachable)
		}
		synctest.Wait()
		if n := p.consumer.Stats().Peers; n > keptUnreached+1 {
			t.Errorf("%d connections are kept", n)
		}
		if r := p.consumer.Fetch(bg, "img-2", announced(2), 1); r.Outcome != FetchMissing {
			t.Errorf("who is there says %v (%v), want missing", r.Outcome, r.Err)
		}
	})
}

// C89, and item 4 of the restart work: whatever step a caller's context ends in, nothing stays.
func TestACancelAtAnyStepLeavesNothing(t *testing.T) {
	hold := func(kind string) func(p *pair, release <-chan struct{}) {
		return func(p *pair, _ <-chan struct{}) {
			p.host.set(0, func(m wire.Message) bool { return fmt.Sprintf("%T", m) != kind })
		}
	}
	steps := []struct {
		name  string
		setup func(p *pair, release <-chan struct{})
	}{
		{"queued behind an engine", func(p *pair, release <-chan struct{}) {
			r := reserve(p.t, p.ccache, "img", 4)
			go func() { <-release; r.Discard() }()
		}},
		{"connecting", func(p *pair, _ <-chan struct{}) { p.host.fall() }},
		{"asking, request lost", hold("*wire.Request")},
		{"asking, granted", hold("*wire.Ack")},
		{"pausing", func(p *pair, release <-chan struct{}) {
			p.pcache.Remove("img")
			r := reserve(p.t, p.pcache, "img", 4)
			go func() { <-release; r.Discard() }()
		}},
		{"adding the peer", func(p *pair, release <-chan struct{}) { p.plane.add = func() error { <-release; return nil } }},
		{"reading", func(p *pair, release <-chan struct{}) {
			p.plane.read = func(int, transfer.Peer, transfer.ReadRequest) (transfer.Read, error) {
				rd := newHeldRead()
				go func() { <-release; rd.end(transfer.ErrCanceled) }()
				return rd, nil
			}
		}},
		{"verifying, question lost", hold("*wire.Verify")},
		{"verifying, answer lost", hold("*wire.Verified")},
	}
	for _, s := range steps {
		t.Run(s.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, pairOptions{})
				save(t, p.pcache, "img", 4)
				release := make(chan struct{})
				s.setup(p, release)
				base := p.ccache.Stats()
				ctx, cancel := context.WithCancel(bg)
				got := make(chan Result, 1)
				go func() { got <- p.consumer.Fetch(ctx, "img", announced(4), 1) }()
				time.Sleep(20 * time.Millisecond)
				synctest.Wait()
				cancel()
				wantOutcome(t, <-got, FetchCanceled)
				close(release)
				time.Sleep(30 * time.Second) // one lease
				synctest.Wait()
				p.wantIdle()
				if now := p.ccache.Stats(); now.FreeBlocks < base.FreeBlocks {
					t.Errorf("%d blocks free, %d before", now.FreeBlocks, base.FreeBlocks)
				}
				// The key is not spoiled.
				p.host.set(0, nil)
				p.plane.add, p.plane.read = nil, nil
				if s.name == "pausing" {
					save(t, p.pcache, "img", 4)
				}
				p.host.listen(p.producer)
				wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
				wantBytes(t, p.ccache, "img")
			})
		})
	}
}

func TestManyCallersShareOneReadAndKeepTheirOwnDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		rd := newHeldRead()
		p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
			go func() {
				time.Sleep(3 * time.Second)
				real, err := in.Read(bg, r)
				if err != nil {
					rd.end(err)
					return
				}
				<-real.Done()
				rd.end(real.Err())
			}()
			return rd, nil
		}
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				ctx, cancel := bg, context.CancelFunc(func() {})
				if i%2 == 1 {
					ctx, cancel = context.WithTimeout(bg, time.Second)
				}
				defer cancel()
				r := p.consumer.Fetch(ctx, "img", announced(4), uint64(i))
				if i%2 == 1 {
					if r.Outcome != FetchCanceled || r.Elapsed != time.Second {
						t.Errorf("a caller with a second to wait got %v after %v", r.Outcome, r.Elapsed)
					}
				} else if r.Outcome != FetchReady || r.Elapsed != 3*time.Second {
					t.Errorf("a patient caller got %v (%v) after %v", r.Outcome, r.Err, r.Elapsed)
				}
			})
		}
		wg.Wait()
		if reads, _ := p.plane.counts(); reads != 1 || p.host.requests() != 1 {
			t.Errorf("%d READs, %d requests", reads, p.host.requests())
		}
		wantBytes(t, p.ccache, "img")
	})
}

func TestACallerWhoseSharedPullFailedHasNoMoreTimeForItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const item = 3 * time.Second
		p := newPair(t, pairOptions{timeouts: Timeouts{Item: item}})
		first, second := p.net.host(7002), p.net.host(7003)
		first.listen(silent{})
		second.listen(silent{})
		a, b := announced(4), announced(4)
		a.PeerPort, b.PeerPort = first.port, second.port
		shared := make(chan Result, 1)
		go func() { shared <- p.consumer.Fetch(bg, "img", a, 1) }()
		time.Sleep(item / 2)
		joined := make(chan Result, 1)
		go func() { joined <- p.consumer.Fetch(bg, "img", b, 1) }()
		time.Sleep(item)
		third := make(chan Result, 1) // joins what the second one started, and has all of its own time
		go func() { third <- p.consumer.Fetch(bg, "img", b, 1) }()
		for _, got := range []chan Result{shared, joined, third} {
			r := <-got
			wantOutcome(t, r, FetchTimedOut)
			if r.Elapsed > item {
				t.Errorf("%v of %v: %v", r.Elapsed, item, r.Err)
			}
		}
		if n := second.requests(); n == 0 {
			t.Error("the other address was not asked")
		}
		synctest.Wait()
		p.wantIdle()
	})
}

func TestFetchUntilEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		h := p.net.host(7002)
		h.listen(silent{})
		a := announced(4)
		a.PeerPort = h.port
		r := p.consumer.FetchUntil(bg, "img", a, 1, time.Now().Add(time.Second))
		wantOutcome(t, r, FetchTimedOut)
		if r.Elapsed != time.Second {
			t.Errorf("after %v", r.Elapsed)
		}
		synctest.Wait()
		p.wantIdle()
	})
}

func TestACallerWithAnotherAddressGetsAPullOfItsOwnIfTheSharedOneFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		dead := announced(4)
		dead.PeerPort = 7001
		var wg sync.WaitGroup
		wg.Go(func() { wantOutcome(t, p.consumer.Fetch(bg, "img", dead, 1), FetchUnreachable) })
		synctest.Wait()
		wg.Go(func() { wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady) })
		other := announced(5)
		wantOutcome(t, p.consumer.Fetch(bg, "img", other, 1), FetchConflict)
		wg.Wait()
	})
}

func TestAKeyThatAnEngineFillsIsWaitedForAndCostsNoBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		filling := reserve(t, p.ccache, "img", 4)
		got := make(chan Result, 1)
		go func() { got <- p.consumer.Fetch(bg, "img", announced(4), 1) }()
		time.Sleep(7 * time.Second)
		if n := p.clog.lines("a fetch is slow", "an engine of this machine"); n != 1 {
			t.Errorf("%d lines about what is waited for", n)
		}
		fill(t, filling, "img")
		r := <-got
		wantOutcome(t, r, FetchReady)
		if r.Plane != PlaneLocal || p.host.requests() != 0 {
			t.Errorf("plane %q, %d requests", r.Plane, p.host.requests())
		}

		filling = reserve(t, p.ccache, "gone", 4)
		save(t, p.pcache, "gone", 4)
		go func() { got <- p.consumer.Fetch(bg, "gone", announced(4), 1) }()
		synctest.Wait()
		filling.Discard() // the engine died
		wantOutcome(t, <-got, FetchReady)
		wantBytes(t, p.ccache, "gone")
	})
}

func TestACloseEndsEveryFetch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		p.host.listen(newAnswers(p.host, func(*wire.Request) []*wire.Ack { return nil }))
		got := make(chan Result, 3)
		for i := range 3 {
			go func() { got <- p.consumer.Fetch(bg, fmt.Sprint("img-", i), announced(4), 1) }()
		}
		synctest.Wait()
		if err := p.consumer.Close(); err != nil {
			t.Error(err)
		}
		for range 3 {
			r := <-got
			wantOutcome(t, r, FetchCanceled)
			if !errors.Is(r.Err, ErrClosed) {
				t.Errorf("error %v", r.Err)
			}
		}
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchCanceled)
		p.wantIdle()
		if n := len(p.host.dealers); n != 0 {
			t.Errorf("%d connections left", n)
		}
	})
}

// C75.
func TestAnAnnouncementOfThisNodeItselfIsMissingAndSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{consumer: func(o *ConsumerOptions) { o.Node = "producer" }})
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchMissing)
		if !strings.Contains(r.Err.Error(), "127.0.0.1:7000") || !strings.Contains(r.Err.Error(), "this node") {
			t.Errorf("error %v", r.Err)
		}
	})
}

// C77, and the field that differs by name.
func TestAnIncompatiblePeerIsSaidInOneRoundTrip(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{consumer: func(o *ConsumerOptions) { o.Compat.Model = "other-mm" }})
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchIncompatible)
		if p.host.requests() != 1 {
			t.Errorf("%d requests", p.host.requests())
		}
		if n := p.plog.lines(`model: theirs \"other-mm\", ours \"tiny-mm\"`); n != 1 {
			t.Errorf("log: %s", p.plog.b.String())
		}
	})
}

func TestAFullPoolIsSaidAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{blocks: 8})
		save(t, p.ccache, "other", 6)
		defer pin(t, p.ccache, "other").Release()
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchFailed)
		if !errors.Is(r.Err, ErrFull) || r.Elapsed != 0 || p.host.requests() != 0 {
			t.Errorf("%v after %v", r.Err, r.Elapsed)
		}
	})
}
