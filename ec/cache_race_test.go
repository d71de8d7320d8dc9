package ec

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/tensorferry/tensorferry/region"
	"github.com/zeebo/xxh3"
)

// writePattern writes a pattern that only this filling of this key has, and gives its checksum.
func writePattern(bufs [][]byte, nonce uint64) uint64 {
	h := xxh3.New()
	for _, b := range bufs {
		for i := 0; i+8 <= len(b); i += 8 {
			binary.LittleEndian.PutUint64(b[i:], nonce)
			nonce = nonce*6364136223846793005 + 1442695040888963407
		}
		_, _ = h.Write(b)
	}
	return h.Sum64()
}

func xxh3Of(bufs [][]byte) uint64 {
	h := xxh3.New()
	for _, b := range bufs {
		_, _ = h.Write(b)
	}
	return h.Sum64()
}

// TestPinnedBytesNeverChange lets 64 goroutines fill, use, hold, give up and remove entries of a pool far too small for all. The
// race detector sees every byte of the pool: two who have one block at the same time are a race, and a checksum that does not
// match is one that it missed.
func TestPinnedBytesNeverChange(t *testing.T) {
	const (
		workers = 64
		rounds  = 400
		blocks  = 96
		names   = 48
	)
	var evicted atomic.Int64
	c := newTestCache(t, blocks, 40, CacheOptions{Evicted: func(string, int64) { evicted.Add(1) }})
	var nonce atomic.Uint64
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 1))
			for range rounds {
				k := rng.IntN(names)
				key := fmt.Sprint("key ", k)
				switch rng.IntN(10) {
				case 0, 1, 2, 3:
					r, err := c.Reserve(key, spec(1+k%12), uint64(w))
					if err != nil {
						if !errors.Is(err, ErrHeld) && !errors.Is(err, ErrPending) && !errors.Is(err, ErrFull) {
							t.Errorf("Reserve: %v", err)
						}
						continue
					}
					s := writePattern(r.Buffers(), nonce.Add(1))
					switch rng.IntN(8) {
					case 0:
						r.Discard()
					case 1:
						q := r.Quarantine()
						writePattern(r.Buffers(), nonce.Add(1)) // the transfer goes on
						q.Settle()
						q.Settle()
					default:
						if _, err := r.Commit(&s); err != nil {
							t.Errorf("Commit: %v", err)
						}
					}
				case 4, 5, 6, 7:
					p, err := c.Pin(key)
					if err != nil {
						continue
					}
					i := p.Info()
					for range 3 {
						if s := xxh3Of(p.Buffers()); s != i.Checksum {
							t.Errorf("bytes of %q changed under a pin", key)
						}
					}
					if j := p.Info(); j.Gen != i.Gen || j.State != Ready {
						t.Errorf("pinned %+v became %+v", i, j)
					}
					p.Release()
				case 8:
					_ = c.Hold(key) // may be missing
					c.DropHold(key)
					c.Watch(key)
				case 9:
					_ = c.Remove(key) // may be missing, or in use
					if s := c.Stats(); s.FreeBlocks < 0 || s.FreeBlocks > blocks || s.Entries != s.Ready+s.Filling {
						t.Errorf("%+v", s)
					}
				}
			}
		})
	}
	wg.Wait()
	if evicted.Load() == 0 {
		t.Error("nothing was evicted: the pool was too large for this test")
	}
	for _, e := range c.Entries() {
		if e.State != Ready || e.Pins != 0 {
			t.Errorf("left behind: %+v", e)
		}
		if err := c.Remove(e.Key); err != nil {
			t.Error(err)
		}
	}
	if s := c.Stats(); s.FreeBlocks != blocks || s.Holds != 0 || uint64(evicted.Load()) != s.Evictions {
		t.Errorf("after all were removed: %+v", s)
	}
}

func TestAttachersSeeEntriesBecomeReadyAndGo(t *testing.T) {
	c := newRegionCache(t, 8, 8, CacheOptions{})
	m, err := region.Open(c.opt.Region.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r := reserve(t, c, "a", 3)
	i := r.Info()
	s, err := m.Slots().Load(i.Slot)
	if err != nil || s.State != region.SlotFilling || s.Gen != i.Gen || s.Key != "a" || s.Owner != 7 {
		t.Errorf("%+v, %v", s, err)
	}
	want := writePattern(r.Buffers(), 1)
	if m.Slots().Check(i.Slot, i.Gen) {
		t.Error("ready before its commit")
	}
	if _, err := r.Commit(&want); err != nil {
		t.Fatal(err)
	}
	if !m.Slots().Check(i.Slot, i.Gen) {
		t.Error("not ready after its commit")
	}
	x := i.Extents[0]
	if got := xxh3Of([][]byte{m.Pool()[x.Start*testBlock:][:x.Count*testBlock]}); got != want {
		t.Error("an attacher reads other bytes")
	}
	if err := c.Hold("a"); err != nil {
		t.Fatal(err)
	}
	if s, err := m.Slots().Load(i.Slot); err != nil || s.Holds != 1 || s.Checksum != want {
		t.Errorf("%+v, %v", s, err)
	}
	put(t, c, "b", 8)
	if m.Slots().Check(i.Slot, i.Gen) {
		t.Error("still ready after its eviction")
	}
}

func TestOneRegionTakesOneCache(t *testing.T) {
	c := newRegionCache(t, 8, 8, CacheOptions{})
	put(t, c, "a", 3)
	if _, err := NewCache(CacheOptions{Region: c.opt.Region}); !errors.Is(err, ErrOptions) {
		t.Errorf("the blocks of an entry were given to another cache: %v", err)
	}
}
