package ec

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/tensorferry/tensorferry/region"
	"pgregory.net/rapid"
)

// countingPolicy counts the steps taken in search of victims.
type countingPolicy struct {
	*fifo
	steps int
}

func (p *countingPolicy) next() *entry { p.steps++; return p.fifo.next() }

// checkerboard fills a pool with entries of one block and pins every second.
func checkerboard(t testing.TB, c *Cache) (pins []*Pin) {
	for i := range c.blocks {
		put(t, c, fmt.Sprint(i), 1)
		if i%2 == 0 {
			pins = append(pins, pin(t, c, fmt.Sprint(i)))
		}
	}
	return pins
}

func TestFullPoolCostsNoWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const blocks = 64
		c := newTestCache(t, blocks, blocks, CacheOptions{})
		pins := checkerboard(t, c)
		work := &countingPolicy{fifo: c.evict.(*fifo)}
		c.evict = work
		defer func() { c.evict = work.fifo }() // check looks into it
		refused := func(n int) int {
			work.steps = 0
			if _, err := c.Reserve("new", spec(n), 1); !errors.Is(err, ErrFull) {
				t.Fatalf("%d blocks: %v", n, err)
			}
			return work.steps
		}
		// 32 blocks may go, but no two lie side by side: the first to ask finds out, the others are told.
		if n := refused(region.MaxExtents + 1); n == 0 {
			t.Error("nobody looked")
		}
		for _, n := range []int{region.MaxExtents + 1, blocks / 2, blocks/2 + 1, blocks} {
			if steps := refused(n); steps != 0 {
				t.Errorf("%d blocks: %d steps to say no again", n, steps)
			}
		}
		// Whoever waits for a change sleeps: a bubble whose goroutines all sleep uses no processor.
		got := make(chan error)
		go func() {
			changed := c.Watch("0")
			<-changed
			_, err := c.Reserve("new", spec(region.MaxExtents+1), 1)
			got <- err
		}()
		synctest.Wait()
		for _, p := range pins { // what was known no longer holds
			p.Release()
		}
		if err := c.Remove("0"); err != nil {
			t.Fatal(err)
		}
		if err := <-got; err != nil {
			t.Error(err)
		}
	})
}

func TestEntryLiesInPiecesOnlyBetweenPins(t *testing.T) {
	c := newTestCache(t, 32, 32, CacheOptions{})
	checkerboard(t, c)
	i := put(t, c, "new", 5)
	if len(i.Extents) != 5 || !slices.IsSortedFunc(i.Extents, func(a, b region.Extent) int { return int(a.Start) - int(b.Start) }) {
		t.Errorf("%v", i.Extents)
	}
	s := c.Stats()
	if s.Fragmented != 1 || s.Evictions != 5 {
		t.Errorf("%+v", s)
	}
	p := pin(t, c, "new")
	defer p.Release()
	total := 0
	for _, b := range p.Buffers() {
		total += len(b)
	}
	if total != 5*testBlock {
		t.Errorf("%d bytes in %d buffers", total, len(p.Buffers()))
	}
}

func TestFragmentedPoolThatCannotHoldItEvictsNothing(t *testing.T) {
	c := newTestCache(t, 32, 32, CacheOptions{})
	checkerboard(t, c)
	before := freeze(t, c)
	for _, n := range []int{region.MaxExtents + 1, region.MaxExtents + 2} {
		_, err := c.Reserve("new", spec(n), 1)
		if !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "more than 8 pieces") {
			t.Errorf("%v", err)
		}
	}
	if d := cmp.Diff(before, freeze(t, c)); d != "" {
		t.Error(d)
	}
	if i := put(t, c, "new", region.MaxExtents); len(i.Extents) != region.MaxExtents {
		t.Errorf("%v", i.Extents)
	}
}

func TestWhatDidNotFitIsTriedAgainOnceBlocksCameFree(t *testing.T) {
	for name, state := range map[string]struct {
		enter func(*testing.T, *Cache, string) (leave func())
	}{
		"released": {func(t *testing.T, c *Cache, key string) func() {
			put(t, c, key, 1)
			return pin(t, c, key).Release
		}},
		"committed": {func(t *testing.T, c *Cache, key string) func() {
			r := reserve(t, c, key, 1)
			return func() { _, _ = r.Commit(nil) }
		}},
		"discarded": {func(t *testing.T, c *Cache, key string) func() {
			return reserve(t, c, key, 1).Discard
		}},
		"settled": {func(t *testing.T, c *Cache, key string) func() {
			return reserve(t, c, key, 1).Quarantine().Settle
		}},
	} {
		t.Run(name, func(t *testing.T) {
			c := newTestCache(t, 32, 32, CacheOptions{})
			var leave []func()
			for i := range 32 {
				if key := fmt.Sprint(i); i%2 == 0 {
					leave = append(leave, state.enter(t, c, key))
				} else {
					put(t, c, key, 1)
				}
			}
			n := region.MaxExtents + 1
			if _, err := c.Reserve("new", spec(n), 1); !errors.Is(err, ErrFull) {
				t.Fatal(err)
			}
			leave[5]()
			reserve(t, c, "new", n) // 3 blocks in a run, and single ones
			for _, f := range leave {
				f()
			}
		})
	}
}

func TestEntryInPiecesGoesOnceHoweverManyPiecesLieInTheRun(t *testing.T) {
	c := newTestCache(t, 8, 8, CacheOptions{})
	pins := checkerboard(t, c)
	put(t, c, "pieces", 4)
	for _, p := range pins {
		p.Release()
	}
	if i := put(t, c, "new", 8); len(i.Extents) != 1 {
		t.Errorf("%v", i.Extents)
	}
	if s := c.Stats(); s.Evictions != 4+5 {
		t.Errorf("%+v", s)
	}
}

func TestRunTakesThePiecesOfTheOldestFirst(t *testing.T) {
	c := newTestCache(t, 8, 8, CacheOptions{})
	pins := checkerboard(t, c)
	put(t, c, "pieces", 4)
	for i, p := range pins { // make it the oldest
		p.Release()
		if err := c.Remove(fmt.Sprint(2 * i)); err != nil {
			t.Fatal(err)
		}
		put(t, c, fmt.Sprint("at ", 2*i), 1)
	}
	if i := put(t, c, "new", 3); len(i.Extents) != 1 || i.Extents[0].Start != 1 {
		t.Errorf("%v", i.Extents)
	}
	if got := keys(c); !slices.Equal(got, []string{"at 0", "at 4", "at 6", "new"}) {
		t.Errorf("%v", got)
	}
}

func TestFIFOKeepsTheOrderInWhichEntriesBecameFreeToGo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := &fifo{}
		var all []*entry        // that are in or were passed over, by turn
		var out []*entry        // taken out by next
		pass := func() *entry { // the first that may go
			for _, e := range all {
				if e.class == classLoose {
					return e
				}
			}
			return nil
		}
		drop := func(from []*entry, e *entry) []*entry {
			return slices.DeleteFunc(from, func(o *entry) bool { return o == e })
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				e := &entry{class: classLoose}
				f.add(e)
				all = append(all, e)
			},
			"pin or unpin": func(t *rapid.T) {
				if len(all) == 0 {
					t.Skip()
				}
				e := rapid.SampledFrom(all).Draw(t, "entry")
				if e.class == classLoose {
					e.class = classPinned
					return
				}
				e.class = classLoose
				f.freed(e)
				all = append(drop(all, e), e)
			},
			"next": func(t *rapid.T) {
				want, got := pass(), f.next()
				if got != want {
					t.Fatalf("got %+v, want %+v", got, want)
				}
				if got != nil {
					all = drop(all, got)
					out = append(out, got)
				}
			},
			"put back": func(t *rapid.T) {
				if len(out) == 0 {
					t.Skip()
				}
				e := rapid.SampledFrom(out).Draw(t, "entry")
				out = drop(out, e)
				f.putBack(e)
				f.putBack(e)
				all = append(all, e)
				slices.SortFunc(all, func(a, b *entry) int { return int(a.turn) - int(b.turn) })
			},
			"remove": func(t *rapid.T) {
				if len(all) == 0 {
					t.Skip()
				}
				e := rapid.SampledFrom(all).Draw(t, "entry")
				f.remove(e)
				f.remove(e)
				all = drop(all, e)
			},
		})
	})
}

func TestNeighboursOfTheOldestGoWithIt(t *testing.T) {
	c := newTestCache(t, 8, 8, CacheOptions{})
	for i := range 8 {
		put(t, c, fmt.Sprint(i), 1)
	}
	if err := c.Remove("6"); err != nil {
		t.Fatal(err)
	}
	if i := put(t, c, "new", 3); len(i.Extents) != 1 || i.Extents[0] != (region.Extent{Start: 0, Count: 3}) {
		t.Errorf("%v", i.Extents)
	}
	if got := keys(c); !slices.Equal(got, []string{"3", "4", "5", "7", "new"}) {
		t.Errorf("%v", got)
	}
}

func TestSmallEntryDoesNotEvictALargeOneToBeWhole(t *testing.T) {
	for _, large := range []int{2 * maxRunCost, 2*maxRunCost + 1} {
		c := newTestCache(t, 3*(1+large), 42, CacheOptions{})
		for _, k := range []string{"a", "b", "c"} {
			put(t, c, k, 1)
			put(t, c, "large "+k, large)
		}
		for _, k := range []string{"a", "b", "c"} {
			if err := c.Remove(k); err != nil {
				t.Fatal(err)
			}
		}
		i := put(t, c, "new", 2)
		if whole := len(i.Extents) == 1; whole != (large <= 2*maxRunCost) || whole != (c.Stats().Evictions == 1) {
			t.Errorf("beside entries of %d blocks: %v, %d evicted", large, i.Extents, c.Stats().Evictions)
		}
	}
}

// scattered is what the peers do: blocks anywhere, and what has been unpinned for longest goes until there are enough.
type scattered struct {
	free  int
	order []int // unpinned keys
	size  []int
	in    []bool
	pins  []int
}

// pin puts a key there if it is not, and pins it.
func (s *scattered) pin(k int) (hit bool) {
	hit = s.in[k]
	for !hit && s.free < s.size[k] {
		v := s.order[0]
		s.order = s.order[1:]
		s.in[v] = false
		s.free += s.size[v]
	}
	if !hit {
		s.in[k] = true
		s.free -= s.size[k]
	} else if s.pins[k] == 0 {
		s.order = slices.DeleteFunc(s.order, func(o int) bool { return o == k })
	}
	s.pins[k]++
	return hit
}

func (s *scattered) unpin(k int) {
	s.pins[k]--
	if s.pins[k] == 0 {
		s.order = append(s.order, k)
	}
}

// trace is a Zipf trace of requests for entries of mixed sizes.
type trace struct {
	blocks, keys, largest int
	skew                  float64
}

const traceRequests = 15_000

// sizes are log-normal over two orders of magnitude, as those of images.
func (tr trace) sizes(rng *rand.Rand) []int {
	size := make([]int, tr.keys)
	for i := range size {
		size[i] = min(tr.largest, max(1, int(math.Exp(rng.NormFloat64()*0.9)*float64(tr.largest)/6)))
	}
	return size
}

// run asks for one key after another and keeps a tenth of the entries pinned at any time. It runs the peers' way beside.
func (tr trace) run(t *testing.T, seed uint64, o CacheOptions) (s Stats, hits, peersHits int) {
	rng := rand.New(rand.NewPCG(seed, 0))
	zipf := rand.NewZipf(rng, tr.skew, 1, uint64(tr.keys-1))
	size := tr.sizes(rng)
	c := newTestCache(t, tr.blocks, tr.blocks, o)
	peer := &scattered{free: tr.blocks, size: size, in: make([]bool, tr.keys), pins: make([]int, tr.keys)}
	type use struct {
		pin *Pin
		key int
	}
	var uses []use
	for range traceRequests {
		k := int(zipf.Uint64())
		key := fmt.Sprint(k)
		p, err := c.Pin(key)
		if err == nil {
			hits++
		} else {
			put(t, c, key, size[k])
			p = pin(t, c, key)
		}
		if peer.pin(k) {
			peersHits++
		}
		uses = append(uses, use{p, k})
		for len(uses) > c.Stats().Entries/10 {
			i := rng.IntN(len(uses))
			uses[i].pin.Release()
			peer.unpin(uses[i].key)
			uses = slices.Delete(uses, i, i+1)
		}
	}
	return c.Stats(), hits, peersHits
}

// TestEntriesStayWholeInAFullPool compares each policy with the peers' way.
func TestEntriesStayWholeInAFullPool(t *testing.T) {
	for _, tr := range []trace{
		{8192, 400, 256, 1.1},
		{8192, 2000, 64, 1.05},
		{16384, 800, 512, 1.2},
	} {
		for policy, least := range map[string]float64{PolicyFIFO: -0.01, PolicySIEVE: 0} { // against the peers
			t.Run(fmt.Sprint(tr, policy), func(t *testing.T) {
				const seeds = 2
				hits, peersHits := 0, 0
				var commits, fragmented uint64
				for seed := range uint64(seeds) {
					s, h, ph := tr.run(t, seed, CacheOptions{Policy: policy})
					hits, peersHits = hits+h, peersHits+ph
					commits, fragmented = commits+s.Commits, fragmented+s.Fragmented
					if s.FreeBlocks > tr.blocks/10 {
						t.Errorf("%d of %d blocks lie idle", s.FreeBlocks, tr.blocks)
					}
				}
				whole := 1 - float64(fragmented)/float64(commits)
				rate, peersRate := float64(hits)/(traceRequests*seeds), float64(peersHits)/(traceRequests*seeds)
				t.Logf("%.2f%% whole; hit rate %.2f%%, scattered %.2f%%", 100*whole, 100*rate, 100*peersRate)
				if whole < 0.95 {
					t.Errorf("%.2f%% of the entries are whole", 100*whole)
				}
				if rate < peersRate+least {
					t.Errorf("hit rate %.2f%%, scattered %.2f%%", 100*rate, 100*peersRate)
				}
			})
		}
	}
}
