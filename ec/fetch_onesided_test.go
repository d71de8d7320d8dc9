package ec

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// sighted is a pair whose consumer sees the producer's slot table once it has pulled something.
func sighted(t *testing.T, o pairOptions) *pair {
	p := newPair(t, o)
	p.plane.slot = func(slot uint32) (region.Slot, bool) {
		p.pcache.mu.Lock() // that a table in a file does not need
		defer p.pcache.mu.Unlock()
		s, err := p.pcache.slots.Load(int(slot))
		return s, err == nil
	}
	p.plane.see = func(slot uint32, gen uint64) bool {
		s, ok := p.plane.slot(slot)
		return ok && s.State == region.SlotReady && s.Gen == gen
	}
	p.plane.read = func(_ int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) { return p.look(in, r) }
	save(t, p.pcache, "first", 1)
	wantOutcome(t, p.consumer.Fetch(bg, "first", announced(1), 1), FetchReady)
	time.Sleep(tellPause)
	synctest.Wait()
	return p
}

// look is a READ, of what was not granted too, as on a plane without tokens.
func (p *pair) look(in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
	if r.Token != nil {
		return in.Read(bg, r)
	}
	if _, err := r.Check(int64(len(p.pcache.pool))); err != nil {
		return nil, err
	}
	to := r.Local[0]
	for _, s := range r.Remote {
		to = to[copy(to, p.pcache.pool[s.Offset:s.Offset+s.Length]):]
	}
	rd := newHeldRead()
	rd.end(nil)
	return rd, nil
}

// at is an announcement of n blocks in a slot.
func at(n int, i Info) *Announcement {
	a := announced(n)
	slot := uint32(i.Slot)
	a.Slot = &slot
	return a
}

func (p *pair) oneSided() uint64 { return p.consumer.Stats().OneSided }

func TestAnEntryThatTheSlotTableShowsIsPulledWithoutAsking(t *testing.T) {
	for _, verify := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			p := sighted(t, pairOptions{verify: verify})
			info := save(t, p.pcache, "img", 4)
			for range 2 { // two announcements
				if err := p.pcache.Hold("img"); err != nil {
					t.Fatal(err)
				}
			}
			before := p.host.requests()
			r := p.consumer.Fetch(bg, "img", at(4, info), 1)
			wantOutcome(t, r, FetchReady)
			wantBytes(t, p.ccache, "img")
			if n := p.host.requests() - before; n != 0 || p.oneSided() != 1 {
				t.Errorf("%d requests, %d pulls that asked nobody", n, p.oneSided())
			}
			if r.Info.HasChecksum != verify || r.Plane != p.plane.Name() {
				t.Errorf("%+v", r)
			}
			time.Sleep(tellPause)
			synctest.Wait()
			if now, _ := p.pcache.Lookup("img"); now.Holds != 1 || p.producer.Stats().Pulled != 1 {
				t.Errorf("%d holds are left of 2, %d pulls reported", now.Holds, p.producer.Stats().Pulled)
			}
			p.wantIdle()
		})
	}
}

func TestTheFirstPullFromAPeerAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		p.plane.see = func(uint32, uint64) bool { return true }
		p.plane.slot = func(uint32) (region.Slot, bool) { t.Error("a slot was looked at"); return region.Slot{}, false }
		info := save(t, p.pcache, "img", 4)
		wantOutcome(t, p.consumer.Fetch(bg, "img", at(4, info), 1), FetchReady)
		if n := p.host.requests(); n != 1 {
			t.Errorf("%d requests", n)
		}
	})
}

func TestAfterTheConnectionIsLostAPullAsks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := sighted(t, pairOptions{})
		info := save(t, p.pcache, "img", 4)
		p.host.fall()
		synctest.Wait()
		p.host.listen(p.producer)
		wantOutcome(t, p.consumer.Fetch(bg, "img", at(4, info), 1), FetchReady)
		if n := p.host.requests(); n != 2 || p.oneSided() != 0 {
			t.Errorf("%d requests, %d pulls that asked nobody", n, p.oneSided())
		}
	})
}

// Whatever the slot says or becomes, what does not fit is asked for.
func TestAPullThatTheSlotTableDoesNotBearOutAsks(t *testing.T) {
	tests := []struct {
		name  string
		see   func(p *pair, s region.Slot) (region.Slot, bool) // what is seen of the slot
		after func(p *pair)                                    // when the READ has ended
		reads int
	}{
		{name: "cannot be seen", see: func(*pair, region.Slot) (region.Slot, bool) { return region.Slot{}, false }, reads: 1},
		{name: "free", see: func(*pair, region.Slot) (region.Slot, bool) { return region.Slot{State: region.SlotFree, Gen: 1}, true }, reads: 1},
		{name: "being filled", see: func(_ *pair, s region.Slot) (region.Slot, bool) { s.State = region.SlotFilling; return s, true }, reads: 1},
		{name: "another key", see: func(_ *pair, s region.Slot) (region.Slot, bool) { s.Key = "other"; return s, true }, reads: 1},
		{name: "another dtype", see: func(_ *pair, s region.Slot) (region.Slot, bool) { s.Dtype = "torch.float16"; return s, true }, reads: 1},
		{name: "another shape", see: func(_ *pair, s region.Slot) (region.Slot, bool) { s.Shape = []int64{2, testBlock}; return s, true }, reads: 1},
		{name: "other bytes", see: func(_ *pair, s region.Slot) (region.Slot, bool) { s.Bytes -= 2; return s, true }, reads: 1},
		{name: "extents past the pool", see: func(_ *pair, s region.Slot) (region.Slot, bool) {
			s.Extents = []region.Extent{{Start: 1 << 20, Count: 4}}
			return s, true
		}, reads: 2},
		{name: "extents of too few blocks", see: func(_ *pair, s region.Slot) (region.Slot, bool) {
			s.Extents = []region.Extent{{Start: 0, Count: 1}}
			return s, true
		}, reads: 2},
		{name: "another checksum", see: func(_ *pair, s region.Slot) (region.Slot, bool) { s.Checksum++; return s, true }, reads: 2},
		{name: "evicted and saved again meanwhile", after: func(p *pair) {
			if err := p.pcache.Remove("img"); err != nil {
				p.t.Error(err)
			}
			save(p.t, p.pcache, "img", 4)
		}, reads: 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := sighted(t, pairOptions{verify: true})
				real := p.plane.slot
				p.plane.slot = func(slot uint32) (region.Slot, bool) {
					s, ok := real(slot)
					if tt.see != nil {
						return tt.see(p, s)
					}
					return s, ok
				}
				p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
					rd, err := p.look(in, r)
					if err == nil {
						<-rd.Done()
						if n == 1 && tt.after != nil {
							tt.after(p)
						}
					}
					return rd, err
				}
				// What was linked before does not see what is set now.
				p.host.fall()
				synctest.Wait()
				p.host.listen(p.producer)
				save(t, p.pcache, "second", 1)
				info := save(t, p.pcache, "img", 4)
				p.plane.mu.Lock()
				p.plane.reads = 0
				p.plane.mu.Unlock()
				wantOutcome(t, p.consumer.Fetch(bg, "second", announced(1), 1), FetchReady)
				wantOutcome(t, p.consumer.Fetch(bg, "img", at(4, info), 1), FetchReady)
				wantBytes(t, p.ccache, "img")
				reads, _ := p.plane.counts()
				if n := p.host.requests(); n != 3 || reads-1 != tt.reads || p.oneSided() != 0 {
					t.Errorf("%d requests, %d READs, %d pulls that asked nobody; want 3, %d, 0", n, reads-1, p.oneSided(), tt.reads)
				}
				time.Sleep(tellPause)
				synctest.Wait()
				p.wantIdle()
			})
		})
	}
}

func TestAReadWithoutAskingThatDoesNotEndIsQuarantined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := sighted(t, pairOptions{})
		info := save(t, p.pcache, "img", 4)
		rd := newHeldRead()
		p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
			if n == 1 {
				return rd, nil
			}
			return p.look(in, r)
		}
		wantOutcome(t, p.consumer.Fetch(bg, "img", at(4, info), 1), FetchReady) // by asking, into other blocks
		wantBytes(t, p.ccache, "img")
		if s := p.ccache.Stats(); s.QuarantinedBlocks != 4 {
			t.Errorf("%d blocks in quarantine", s.QuarantinedBlocks)
		}
		rd.end(errors.New("late"))
		time.Sleep(tellPause)
		synctest.Wait()
		p.wantIdle()
	})
}

func TestACallerThatGivesUpEndsAReadWithoutAsking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := sighted(t, pairOptions{})
		info := save(t, p.pcache, "img", 4)
		rd := newHeldRead()
		p.plane.read = func(int, transfer.Peer, transfer.ReadRequest) (transfer.Read, error) { return rd, nil }
		ctx, cancel := context.WithTimeout(bg, time.Second)
		defer cancel()
		wantOutcome(t, p.consumer.Fetch(ctx, "img", at(4, info), 1), FetchCanceled)
		<-rd.canceled
		if s := p.ccache.Stats(); s.QuarantinedBlocks != 4 {
			t.Errorf("%d blocks in quarantine", s.QuarantinedBlocks)
		}
		rd.end(transfer.ErrCanceled)
		synctest.Wait()
		p.wantIdle()
	})
}

func TestTryFetchDoesNothingWhereAPeerMustBeAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := sighted(t, pairOptions{})
		info := save(t, p.pcache, "img", 4)
		before, free := p.host.requests(), p.ccache.Stats().FreeBlocks
		nobody := at(4, info)
		nobody.PeerPort++
		for name, a := range map[string]*Announcement{"no announcement": nil, "no slot": announced(4), "a peer not yet known": nobody} {
			if r, ok := p.consumer.TryFetch("img", a, 1, 1<<20); ok {
				t.Errorf("%s: %+v", name, r)
			}
		}
		if r, ok := p.consumer.TryFetch("img", at(4, info), 1, 4*testBlock-1); ok {
			t.Errorf("over the limit: %+v", r)
		}
		if n := p.host.requests() - before; n != 0 || p.ccache.Stats().FreeBlocks != free {
			t.Errorf("%d requests", n)
		}
		for _, plane := range []string{p.plane.Name(), PlaneLocal} {
			r, ok := p.consumer.TryFetch("img", at(4, info), 1, 4*testBlock)
			if !ok || r.Outcome != FetchReady || r.Plane != plane || r.Key != "img" {
				t.Fatalf("%+v, %v", r, ok)
			}
		}
		other := at(4, info)
		other.Shape = []int{2, testBlock}
		if r, ok := p.consumer.TryFetch("img", other, 1, 4*testBlock); !ok || r.Outcome != FetchConflict {
			t.Errorf("%+v, %v", r, ok)
		}
	})
}

func TestReportsOfPullsThatSayNothingTrueChangeNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := sighted(t, pairOptions{})
		info := save(t, p.pcache, "img", 4)
		if err := p.pcache.Hold("img"); err != nil {
			t.Fatal(err)
		}
		for _, m := range []*wire.Pulled{
			{CompatHash: "other", Entries: []wire.PulledEntry{{Key: "img", Gen: info.Gen}}},
			{CompatHash: testCompat.Hash(), Entries: []wire.PulledEntry{{Key: "img", Gen: info.Gen + 1}, {Key: "gone", Gen: 1}}},
		} {
			p.producer.pulled(m)
		}
		if now, _ := p.pcache.Lookup("img"); now.Holds != 1 || now.Pins != 0 {
			t.Errorf("%+v", now)
		}
	})
}
