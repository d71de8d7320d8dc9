package ec

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/tensorferry/tensorferry/region"
)

// BenchmarkReserveCommitEvict is one reservation and commit in a full pool of 65536 blocks, so that each evicts as many blocks as
// it takes. Keys are as long as vLLM's (64 hexadecimal digits).
func BenchmarkReserveCommitEvict(b *testing.B) {
	for _, blocks := range []int{1, 32, 1024} {
		b.Run(fmt.Sprint(blocks), func(b *testing.B) {
			const pool = 1 << 16
			entries := pool / blocks
			c := newRegionCache(b, pool, pool, CacheOptions{})
			keys := benchKeys(2 * pool)
			s := spec(blocks)
			i := 0
			step := func() {
				r, err := c.Reserve(keys[i%len(keys)], s, 1)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := r.Commit(nil); err != nil {
					b.Fatal(err)
				}
				i++
			}
			for range entries {
				step()
			}
			b.ReportAllocs()
			for b.Loop() {
				step()
			}
			if s := c.Stats(); s.FreeBlocks != 0 || s.Fragmented != 0 {
				b.Fatalf("%+v", s)
			}
		})
	}
}

// BenchmarkReserveMixed is the same with sizes of 1 to 256 blocks and a tenth of the entries pinned, so that room has to be looked
// for between pins.
func BenchmarkReserveMixed(b *testing.B) {
	const blocks = 1 << 16
	c := newRegionCache(b, blocks, blocks/8, CacheOptions{})
	rng := rand.New(rand.NewPCG(1, 2))
	keys := benchKeys(1 << 14)
	sizes := make([]Spec, len(keys))
	for i := range sizes {
		sizes[i] = spec(1 + rng.IntN(256))
	}
	pins := make([]*Pin, blocks/128/10)
	i := 0
	step := func() {
		k := i % len(keys)
		i++
		r, err := c.Reserve(keys[k], sizes[k], 1)
		if errors.Is(err, ErrHeld) {
			return // it was pinned for long
		}
		if err != nil {
			b.Fatal(err)
		}
		if _, err := r.Commit(nil); err != nil {
			b.Fatal(err)
		}
		if i%10 == 0 {
			p := &pins[i/10%len(pins)]
			if *p != nil {
				(*p).Release()
			}
			*p = pin(b, c, keys[k])
		}
	}
	for range 4 * blocks / 128 {
		step()
	}
	b.ReportAllocs()
	for b.Loop() {
		step()
	}
	s := c.Stats()
	b.ReportMetric(100*float64(s.Fragmented)/float64(s.Commits), "%pieces")
}

func BenchmarkPinRelease(b *testing.B) {
	const entries = 1024
	c := newRegionCache(b, entries, entries, CacheOptions{})
	keys := benchKeys(entries)
	for _, k := range keys {
		put(b, c, k, 1)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		p, err := c.Pin(keys[i%entries])
		if err != nil {
			b.Fatal(err)
		}
		p.Release()
	}
}

func BenchmarkHoldDrop(b *testing.B) {
	const entries = 1024
	c := newRegionCache(b, entries, entries, CacheOptions{})
	keys := benchKeys(entries)
	for _, k := range keys {
		put(b, c, k, 1)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if err := c.Hold(keys[i%entries]); err != nil {
			b.Fatal(err)
		}
		c.DropHold(keys[i%entries])
	}
}

func benchKeys(n int) []string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf("%064x", uint64(i)*0x9e3779b97f4a7c15)
	}
	return keys
}

// newRegionCache makes a cache over a region file.
func newRegionCache(t testing.TB, blocks, slots int, o CacheOptions) *Cache {
	t.Helper()
	r, err := region.Create(context.Background(), region.Options{
		Dir:      t.TempDir(),
		Identity: region.Identity{Instance: "cache-test", Group: "00"},
		Geometry: region.Geometry{BlockBytes: testBlock, Blocks: blocks, Slots: slots},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(true); err != nil {
			t.Error(err)
		}
	})
	o.Region = r
	c, err := NewCache(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.check(); err != nil {
			t.Error(err)
		}
	})
	return c
}
