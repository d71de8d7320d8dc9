package ec

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/region"
)

// restart gives the cache that a restarted node has of what c left: its slots and its bytes.
func restart(t testing.TB, c *Cache, o CacheOptions) (*Cache, *Adopted) {
	t.Helper()
	g := region.Geometry{BlockBytes: c.blockBytes, Blocks: c.blocks, Slots: c.slots.Len()}
	table := *c.slots.(*auditTable)
	table.slots, table.used = slices.Clone(table.slots), maps.Clone(table.used)
	next, a, err := adoptCache(t.Context(), o, g, c.pool, &table)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.check(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := next.check(); err != nil {
			t.Error(err)
		}
	})
	return next, a
}

func TestARestartServesWhatWasReadyInItsOrder(t *testing.T) {
	c := newTestCache(t, 6, 8, CacheOptions{})
	var infos []Info
	for i, key := range []string{"a", "b", "c"} {
		r := reserve(t, c, key, i+1)
		for _, b := range r.Buffers() {
			copy(b, bytes.Repeat([]byte(key), len(b)))
		}
		info, err := r.Commit(nil)
		if err != nil {
			t.Fatal(err)
		}
		infos = append(infos, info)
	}
	next, a := restart(t, c, CacheOptions{})
	if a.Entries != 3 || a.Bytes != 6*testBlock || a.Verified+a.Dropped+a.Freed+len(a.Corrupt)+len(a.Filling)+len(a.Pinned) != 0 {
		t.Errorf("%+v", a)
	}
	if got := keys(next); !slices.Equal(got, []string{"a", "b", "c"}) {
		t.Errorf("order %v", got)
	}
	for i, want := range infos {
		got := pin(t, next, want.Key)
		if g := got.Info(); g.Gen != want.Gen || g.Slot != want.Slot || !slices.Equal(g.Extents, want.Extents) || !g.Spec.equal(want.Spec) {
			t.Errorf("%+v, was %+v", g, want)
		}
		if b := bytes.Join(got.Buffers(), nil); !bytes.Equal(b, bytes.Repeat([]byte(want.Key), (i+1)*testBlock)) {
			t.Errorf("%s has other bytes", want.Key)
		}
		got.Release()
	}
	put(t, next, "d", 1)
	if _, state := next.Lookup("a"); state != Absent {
		t.Error("the oldest did not go first")
	}
	if _, state := next.Lookup("c"); state != Ready {
		t.Error("the newest went")
	}
}

func TestARestartVerifiesChecksums(t *testing.T) {
	c := newTestCache(t, 300, 300, CacheOptions{})
	for i := range 300 {
		r := reserve(t, c, fmt.Sprint(i), 1)
		r.Buffers()[0][3] = byte(i)
		sum := checksum(r.Buffers())
		if i%10 == 9 {
			r.Buffers()[0][5] = 1 // written after the commit's checksum was made
		}
		if _, err := r.Commit(&sum); err != nil {
			t.Fatal(err)
		}
	}
	next, a := restart(t, c, CacheOptions{})
	if a.Entries != 270 || a.Verified != 270 || len(a.Corrupt) != 30 {
		t.Fatalf("%+v", a)
	}
	if s := next.Stats(); s.FreeBlocks != 30 || s.Ready != 270 {
		t.Errorf("%+v", s)
	}
	if info, state := next.Lookup("8"); state != Ready || !info.HasChecksum {
		t.Errorf("%+v, %v", info, state)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	g := region.Geometry{BlockBytes: testBlock, Blocks: 300, Slots: 300}
	if _, _, err := adoptCache(ctx, CacheOptions{}, g, next.pool, next.slots); err == nil || err.Error() == "" {
		t.Error("no error though the context ended")
	}
}

func TestWhatAClientWasFillingWaitsForIt(t *testing.T) {
	c := newTestCache(t, 8, 8, CacheOptions{})
	for _, key := range []string{"back", "dead", "away"} {
		reserve(t, c, key, 2)
	}
	if _, err := c.Reserve("fetched", spec(1), 0); err != nil { // by the node itself
		t.Fatal(err)
	}
	next, a := restart(t, c, CacheOptions{})
	if len(a.Filling) != 3 || a.Freed != 1 || a.Entries != 0 {
		t.Fatalf("%+v", a)
	}
	if s := next.Stats(); s.FillingBlocks != 6 || s.FreeBlocks != 2 {
		t.Errorf("%+v", s)
	}
	for _, r := range a.Filling {
		key := r.Info().Key
		if r.Info().Owner != 7 {
			t.Errorf("%s: owner %d", key, r.Info().Owner)
		}
		if _, err := next.Reserve(key, spec(2), 8); !errors.Is(err, ErrPending) {
			t.Errorf("%s: %v; want ErrPending", key, err)
		}
		switch key {
		case "back":
			if _, err := r.Commit(nil); err != nil {
				t.Error(err)
			}
			pin(t, next, key).Release()
		case "dead":
			r.Quarantine().Settle()
		case "away":
			q := r.Quarantine()
			other := reserve(t, next, key, 2) // the key is another's now, in other blocks
			if _, err := r.Commit(nil); !errors.Is(err, ErrStale) {
				t.Errorf("%v; want ErrStale", err)
			}
			if overlap(other.Info().Extents, r.Info().Extents) {
				t.Error("blocks that are still written were given away")
			}
			other.Discard()
			q.Settle()
		}
	}
	if s := next.Stats(); s.FreeBlocks != 6 || s.Ready != 1 || s.QuarantinedBlocks != 0 {
		t.Errorf("%+v", s)
	}
}

func TestAQuarantineOutlivesARestart(t *testing.T) {
	c := newTestCache(t, 8, 8, CacheOptions{})
	reserve(t, c, "k", 2).Quarantine()
	put(t, c, "k", 1)
	reserve(t, c, "l", 2).Quarantine()
	reserve(t, c, "l", 1)
	next, a := restart(t, c, CacheOptions{})
	if len(a.Filling) != 3 || a.Entries != 1 {
		t.Fatalf("%+v", a)
	}
	if s := next.Stats(); s.QuarantinedBlocks != 4 || s.FillingBlocks != 1 || s.FreeBlocks != 2 {
		t.Errorf("%+v", s)
	}
	if _, state := next.Lookup("k"); state != Ready {
		t.Error("the ready entry lost its key to a quarantine")
	}
	for _, r := range a.Filling {
		r.Quarantine().Settle()
		r.Quarantine().Settle()
	}
	if s := next.Stats(); s.FreeBlocks != 7 {
		t.Errorf("%+v", s)
	}
}

func TestWhatClientsHadPinnedStaysPinned(t *testing.T) {
	c := newTestCache(t, 4, 8, CacheOptions{})
	put(t, c, "a", 1)
	put(t, c, "b", 1)
	put(t, c, "c", 1)
	for range 2 {
		p := pin(t, c, "a")
		p.Keep()
		p.Keep()
	}
	gone := pin(t, c, "b")
	gone.Keep()
	gone.Release()
	gone.Keep()
	pin(t, c, "c") // by the node, for a peer: ends with it
	next, a := restart(t, c, CacheOptions{})
	if len(a.Pinned) != 1 || a.Pinned[0].Info().Key != "a" {
		t.Fatalf("%+v", a)
	}
	put(t, next, "d", 3)
	if got := keys(next); !slices.Equal(got, []string{"a", "d"}) {
		t.Errorf("%v", got)
	}
	mine := pin(t, next, "a") // the client is back
	mine.Keep()
	a.Pinned[0].Release()
	third, b := restart(t, next, CacheOptions{})
	if len(b.Pinned) != 1 {
		t.Fatalf("%+v", b)
	}
	b.Pinned[0].Release()
	put(t, third, "e", 4)
	if _, c := restart(t, third, CacheOptions{}); len(c.Pinned) != 0 || c.Entries != 1 {
		t.Errorf("%+v", c)
	}
}

func TestHoldsStartAFreshLeaseAfterARestart(t *testing.T) {
	c := newTestCache(t, 10, 10, CacheOptions{HoldShare: 1})
	put(t, c, "a", 2)
	put(t, c, "b", 3)
	put(t, c, "c", 2)
	for _, key := range []string{"a", "a", "b", "c"} {
		if err := c.Hold(key); err != nil {
			t.Fatal(err)
		}
	}
	next, _ := restart(t, c, CacheOptions{HoldShare: 0.5})
	for key, want := range map[string]int{"a": 0, "b": 1, "c": 1} { // the oldest has no place in a smaller share
		if info, _ := next.Lookup(key); info.Holds != want {
			t.Errorf("%s: %d holds, want %d", key, info.Holds, want)
		}
	}
	next, _ = restart(t, c, CacheOptions{HoldShare: 1, HoldLease: time.Nanosecond})
	if info, _ := next.Lookup("b"); info.Holds != 0 {
		t.Error("the lease did not start")
	}
}

func TestOfTwoReadyEntriesOfOneKeyTheNewerIsServed(t *testing.T) {
	table := newAuditTable(t, 4)
	for i, x := range []region.Extent{{Start: 0, Count: 1}, {Start: 3, Count: 1}} {
		if _, err := table.Fill(i, &region.Slot{Key: "k", Dtype: "torch.bfloat16", Shape: []int64{1, testBlock / 2}, Bytes: testBlock, Extents: []region.Extent{x}}); err != nil {
			t.Fatal(err)
		}
		table.Ready(i, 0, false)
	}
	if _, err := table.Fill(2, &region.Slot{Key: "odd", Dtype: "torch.qint9", Shape: []int64{3}, Bytes: 3, Extents: []region.Extent{{Start: 5, Count: 1}}}); err != nil {
		t.Fatal(err)
	}
	table.Ready(2, 0, false)
	g := region.Geometry{BlockBytes: testBlock, Blocks: 8, Slots: 4}
	c, a, err := adoptCache(t.Context(), CacheOptions{}, g, make([]byte, g.PoolBytes()), table)
	if err != nil {
		t.Fatal(err)
	}
	if info, state := c.Lookup("k"); state != Ready || info.Extents[0].Start != 3 || a.Dropped != 2 || a.Entries != 1 {
		t.Errorf("%+v, %v, %+v", info, state, a)
	}
	if err := c.check(); err != nil {
		t.Error(err)
	}
}

// V1: a plain peer takes what it READs on an old ack for what it was granted, whoever's bytes these are by then.
func TestWhatARestartWithdrawsKeepsItsBlocksWhileSomebodyMayReadThem(t *testing.T) {
	const blocks = 8
	g := region.Geometry{BlockBytes: testBlock, Blocks: blocks, Slots: 6}
	for why, odd := range map[string]func(s *region.Slot){
		"bytes are not those of the checksum": func(s *region.Slot) { s.Checksum, s.HasChecksum = 1, true },
		"twice":                               func(s *region.Slot) { s.Key = "twice" },
		"cannot be served":                    func(s *region.Slot) { s.Dtype = "torch.qint9" },
	} {
		for who, use := range map[string]struct {
			pins    uint32
			granted bool
		}{"a client": {2, false}, "a plain peer": {0, true}, "both": {3, true}, "nobody": {0, false}} {
			t.Run(why+", read by "+who, func(t *testing.T) {
				table := newAuditTable(t, g.Slots)
				fill := func(i int, s region.Slot) {
					sum, has := s.Checksum, s.HasChecksum
					if _, err := table.Fill(i, &s); err != nil {
						t.Fatal(err)
					}
					table.Ready(i, sum, has)
				}
				s := region.Slot{Key: "k", Dtype: "torch.bfloat16", Shape: []int64{2, testBlock / 2}, Bytes: 2 * testBlock,
					Extents: []region.Extent{{Start: 3, Count: 2}}, Owner: 7, Holds: 2}
				odd(&s)
				fill(1, s)
				table.SetPins(1, use.pins)
				table.SetGranted(1, use.granted)
				fill(4, region.Slot{Key: "twice", Dtype: "torch.bfloat16", Shape: []int64{1, testBlock / 2}, Bytes: testBlock,
					Extents: []region.Extent{{Start: 7, Count: 1}}})

				pool := make([]byte, g.PoolBytes())
				taken := use.pins > 0 || use.granted
				for life := range 3 { // each dies before it has let go
					c, a, err := adoptCache(t.Context(), CacheOptions{}, g, pool, table)
					if err != nil {
						t.Fatal(err)
					}
					if err := c.check(); err != nil {
						t.Fatal(err)
					}
					if len(a.Pinned) > 0 != (use.pins > 0) || len(a.Granted) > 0 != use.granted || a.Entries != 1 || len(a.Filling)+a.Freed != 0 {
						t.Fatalf("life %d: %+v", life, a)
					}
					if gone := a.Dropped + len(a.Corrupt); life == 0 && gone != 1 || life > 0 && gone != 0 {
						t.Errorf("life %d: %+v", life, a)
					}
					if info, state := c.Lookup("k"); state != Absent {
						t.Errorf("it is still found: %+v", info)
					}
					want := blocks - 1
					if taken {
						want -= 2
					}
					if st := c.Stats(); st.FreeBlocks != want || st.QuarantinedBlocks != blocks-1-want || st.Entries != 1 {
						t.Fatalf("life %d: %+v, want %d free blocks", life, st, want)
					}
					other := put(t, c, "k", 2) // the key is another's, in other blocks
					if taken && overlap(other.Extents, s.Extents) {
						t.Fatal("blocks that are read were given away")
					}
					if err := c.Remove("k"); err != nil {
						t.Fatal(err)
					}
					if life < 2 {
						continue
					}
					pins := append(a.Granted, a.Pinned...)
					for i, p := range pins {
						if free := c.Stats().FreeBlocks; free != want {
							t.Errorf("%d blocks are free after %d of %d pins", free, i, len(pins))
						}
						p.Release()
						p.Release()
						if err := c.check(); err != nil {
							t.Fatal(err)
						}
					}
					if st := c.Stats(); st.FreeBlocks != blocks-1 || st.QuarantinedBlocks != 0 {
						t.Errorf("in the end %+v", st)
					}
					if len(pins) > 0 && table.slots[1].State != region.SlotFree {
						t.Errorf("its slot is %+v", table.slots[1])
					}
				}
			})
		}
	}
}

// Whatever a node did before it died, the next one has the same ready entries, gives no block away that somebody may still use,
// and loses none.
func TestRestartAfterAnything(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const blocks, slots = 24, 12
		g := region.Geometry{BlockBytes: testBlock, Blocks: blocks, Slots: slots}
		table := newAuditTable(rt, slots)
		pool := make([]byte, g.PoolBytes())
		c, err := newCache(CacheOptions{}, g, pool, table)
		if err != nil {
			rt.Fatal(err)
		}
		for range rapid.IntRange(1, 3).Draw(rt, "lives") {
			var open []*Reservation
			var pins []*Pin
			for range rapid.IntRange(0, 60).Draw(rt, "steps") {
				key := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"}).Draw(rt, "key")
				switch rapid.IntRange(0, 7).Draw(rt, "step") {
				case 0, 1, 2:
					if r, err := c.Reserve(key, spec(rapid.IntRange(1, 6).Draw(rt, "blocks")), uint64(rapid.IntRange(0, 2).Draw(rt, "owner"))); err == nil {
						open = append(open, r)
					}
				case 3, 4:
					if len(open) > 0 {
						r := open[0]
						open = open[1:]
						sum := checksum(r.Buffers())
						_, _ = r.Commit(&sum)
					}
				case 5:
					if len(open) > 0 {
						open[0].Quarantine()
						open = open[1:]
					}
				case 6:
					if p, err := c.Pin(key); err == nil {
						p.Keep()
						pins = append(pins, p)
					}
				case 7:
					_ = c.Hold(key)
					if len(pins) > 0 {
						pins[0].Release()
						pins = pins[1:]
					}
				}
			}
			before, stats := c.Entries(), c.Stats()
			pinned := map[string]bool{}
			for _, i := range before {
				if i.Pins > 0 {
					pinned[i.Key] = true
				}
			}
			next, a, err := adoptCache(context.Background(), CacheOptions{}, g, pool, table)
			if err != nil {
				rt.Fatal(err)
			}
			if err := next.check(); err != nil {
				rt.Fatal(err)
			}
			ready := 0
			for _, i := range before {
				got, state := next.Lookup(i.Key)
				if i.State == Ready {
					ready++
					if state != Ready || got.Gen != i.Gen || !slices.Equal(got.Extents, i.Extents) {
						rt.Fatalf("%+v became %+v", i, got)
					}
				} else if i.Owner == 0 && state != Absent && got.Gen == i.Gen {
					rt.Fatalf("%+v of the dead node is still there", i)
				}
			}
			if a.Entries != ready || len(a.Pinned) != len(pinned) {
				rt.Fatalf("%+v; want %d ready, %d pinned", a, ready, len(pinned))
			}
			if n := stats.Filling + stats.Quarantined; a.Freed+len(a.Filling) != n {
				rt.Fatalf("%+v; %d were filling or quarantined", a, n)
			}
			for _, p := range a.Pinned {
				if !pinned[p.Info().Key] {
					rt.Fatalf("%s was not pinned", p.Info().Key)
				}
				if rapid.Bool().Draw(rt, "account") {
					p.Release()
				}
			}
			for _, r := range a.Filling {
				if rapid.Bool().Draw(rt, "settle") {
					r.Quarantine().Settle()
				}
			}
			c = next
		}
		if err := c.check(); err != nil {
			rt.Fatal(err)
		}
	})
}

// BenchmarkAdopt is a restart's part of this package: a GiB of entries of 4 MiB, with checksums and without.
func BenchmarkAdopt(b *testing.B) {
	for _, sums := range []bool{false, true} {
		b.Run(fmt.Sprintf("checksums=%t", sums), func(b *testing.B) {
			dir, err := os.MkdirTemp("/dev/shm", "ferry-test-")
			if err != nil {
				b.Skip("no tmpfs:", err)
			}
			defer os.RemoveAll(dir)
			o := region.Options{
				Dir: dir, Keep: time.Hour, Identity: region.Identity{Instance: "bench", Group: "0"},
				Geometry: region.Geometry{BlockBytes: 8192, Blocks: 1 << 17},
			}
			r, err := region.Take(b.Context(), o)
			if err != nil {
				b.Skip(err)
			}
			defer func() { _ = r.Close(true) }()
			c, _, err := AdoptCache(b.Context(), CacheOptions{Region: r})
			if err != nil {
				b.Fatal(err)
			}
			rnd := rand.NewChaCha8([32]byte{})
			for i := range 256 {
				res, err := c.Reserve(fmt.Sprint(i), Spec{Dtype: "torch.bfloat16", Shape: []int64{512, 4096}, Bytes: 4 << 20}, 1)
				if err != nil {
					b.Fatal(err)
				}
				var sum *uint64
				_, _ = rnd.Read(res.Buffers()[0])
				if sums {
					v := checksum(res.Buffers())
					sum = &v
				}
				if _, err := res.Commit(sum); err != nil {
					b.Fatal(err)
				}
			}
			b.SetBytes(1 << 30)
			for b.Loop() {
				_, a, err := AdoptCache(b.Context(), CacheOptions{Region: r})
				if err != nil || a.Entries != 256 {
					b.Fatal(a, err)
				}
			}
		})
	}
}
