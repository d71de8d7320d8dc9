package region

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestDefaultSlotsAreOneForFourBlocksWithinBounds(t *testing.T) {
	for _, c := range []struct{ blocks, want int }{
		{1, 1}, {100, 100}, {4096, 4096}, {5000, 4096}, {16384, 4096}, {20000, 5000}, {1 << 20, 1 << 18}, {1 << 24, 1 << 18},
	} {
		if got := DefaultSlots(c.blocks); got != c.want {
			t.Errorf("DefaultSlots(%d) = %d, want %d", c.blocks, got, c.want)
		}
	}
}

// layout makes an allocator whose free runs are the given ones.
func layout(t *testing.T, blocks int, free ...Extent) *Allocator {
	t.Helper()
	a := NewAllocator(blocks)
	if _, ok := a.Alloc(blocks, 1); !ok {
		t.Fatal("cannot take all")
	}
	if err := a.Free(free); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestAllocIsContiguousBestFitAndElseAShortAscendingList(t *testing.T) {
	runs := []Extent{{0, 4}, {10, 2}, {20, 8}, {40, 3}, {50, 1}}
	for _, c := range []struct {
		n, max int
		want   []Extent
	}{
		{0, 8, nil},
		{-1, 8, nil},
		{1, 8, []Extent{{50, 1}}},
		{1, 0, nil},
		{2, 8, []Extent{{10, 2}}},
		{3, 8, []Extent{{40, 3}}},
		{5, 8, []Extent{{20, 5}}},
		{8, 1, []Extent{{20, 8}}},
		{9, 1, nil},
		{9, 2, []Extent{{20, 8}, {50, 1}}},
		{10, 2, []Extent{{10, 2}, {20, 8}}},
		{11, 2, []Extent{{20, 8}, {40, 3}}},
		{12, 2, []Extent{{0, 4}, {20, 8}}},
		{13, 2, nil},
		{13, 3, []Extent{{0, 4}, {20, 8}, {50, 1}}},
		{18, 5, []Extent{{0, 4}, {10, 2}, {20, 8}, {40, 3}, {50, 1}}},
		{18, 4, nil},
		{19, 9, nil},
	} {
		a := layout(t, 64, runs...)
		got, ok := a.Alloc(c.n, c.max)
		if diff := cmp.Diff(c.want, got); diff != "" || ok != (c.want != nil) {
			t.Errorf("Alloc(%d, %d): ok %t\n%s", c.n, c.max, ok, diff)
		}
		if left := 18 - max(0, c.n); ok && a.FreeBlocks() != left || !ok && a.FreeBlocks() != 18 {
			t.Errorf("Alloc(%d, %d): %d blocks are free", c.n, c.max, a.FreeBlocks())
		}
	}
}

func TestAppendAllocKeepsWhatTheCallerHasAndSortsOnlyItsOwn(t *testing.T) {
	a := layout(t, 64, Extent{0, 4}, Extent{20, 8})
	got, ok := a.AppendAlloc([]Extent{{60, 1}}, 12, 2)
	if diff := cmp.Diff([]Extent{{60, 1}, {0, 4}, {20, 8}}, got); diff != "" || !ok {
		t.Error(ok, diff)
	}
}

func TestWrongFreeAndTakeAreErrorsAndChangeNothing(t *testing.T) {
	for name, e := range map[string][]Extent{
		"empty":                     {{0, 0}},
		"outside":                   {{64, 1}},
		"over the end":              {{63, 2}},
		"overflowing":               {{1 << 31, 1<<32 - 1}},
		"free":                      {{4, 2}},
		"begins in a free run":      {{5, 10}},
		"ends in a free run":        {{2, 3}},
		"around a free run":         {{3, 8}},
		"twice in one call":         {{10, 2}, {20, 4}, {11, 1}},
		"right, then wrong":         {{0, 4}, {4, 1}},
		"right, joining, wrong":     {{3, 1}, {8, 2}, {40, 4}, {63, 2}},
		"the same extent two times": {{10, 2}, {10, 2}},
	} {
		a := layout(t, 64, Extent{4, 4})
		if err := a.Free(e); err == nil {
			t.Errorf("Free, %s: no error", name)
		}
		if diff := cmp.Diff([]Extent{{4, 4}}, freeRuns(a)); diff != "" {
			t.Errorf("Free, %s: %s", name, diff)
		}
	}
	for name, e := range map[string][]Extent{
		"empty":             {{0, 0}},
		"used":              {{0, 2}},
		"half used":         {{6, 4}},
		"outside":           {{64, 1}},
		"twice":             {{4, 2}, {5, 1}},
		"right, then wrong": {{4, 1}, {7, 1}, {0, 1}},
	} {
		a := layout(t, 64, Extent{4, 4})
		if err := a.Take(e); err == nil {
			t.Errorf("Take, %s: no error", name)
		}
		if diff := cmp.Diff([]Extent{{4, 4}}, freeRuns(a)); diff != "" {
			t.Errorf("Take, %s: %s", name, diff)
		}
	}
}

// freeRuns lists the runs by start, and checks that all the allocator's views of them agree.
func freeRuns(a *Allocator) []Extent {
	var runs []Extent
	free := 0
	for at := a.starts.next(0); at >= 0; at = a.starts.next(at + 1) {
		runs = append(runs, Extent{uint32(at), a.runs[at].length})
		free += int(a.runs[at].length)
	}
	var listed []Extent
	for size := a.sizes.next(0); size >= 0; size = a.sizes.next(size + 1) {
		prev := uint32(none)
		for at := a.heads[size]; at != none; at = a.runs[at].next {
			if a.runs[at].prev != prev || a.runs[at].length != uint32(size) {
				panic(fmt.Sprintf("list of length %d is broken at %d: %+v", size, at, a.runs[at]))
			}
			listed = append(listed, Extent{at, uint32(size)})
			prev = at
		}
	}
	slices.SortFunc(listed, func(x, y Extent) int { return int(x.Start) - int(y.Start) })
	if !slices.Equal(runs, listed) || free != a.free {
		panic(fmt.Sprintf("by start %v, by length %v, %d free", runs, listed, a.free))
	}
	return runs
}

// bitmap is the plain model.
type bitmap []bool // used

func (m bitmap) runs() (runs []Extent) {
	for i := 0; i < len(m); i++ {
		start := i
		for i < len(m) && !m[i] {
			i++
		}
		if i > start {
			runs = append(runs, Extent{uint32(start), uint32(i - start)})
		}
	}
	return runs
}

func (m bitmap) set(e []Extent, used bool) {
	for _, x := range e {
		for i := range x.Count {
			m[x.Start+i] = used
		}
	}
}

// canFree, canTake: all blocks in range, none twice, all used or all free.
func (m bitmap) all(e []Extent, used bool) bool {
	seen := map[uint32]bool{}
	for _, x := range e {
		if x.Count == 0 {
			return false
		}
		for i := range x.Count {
			b := x.Start + i
			if int(b) >= len(m) || m[b] != used || seen[b] {
				return false
			}
			seen[b] = true
		}
	}
	return true
}

func TestAllocatorAgreesWithABitmap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		blocks := rapid.SampledFrom([]int{1, 2, 63, 64, 65, 100, 4097}).Draw(t, "blocks")
		a := NewAllocator(blocks)
		m := make(bitmap, blocks)
		var held [][]Extent
		extents := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Extent {
			return Extent{uint32(rapid.IntRange(0, blocks+1).Draw(t, "start")), uint32(rapid.IntRange(0, 9).Draw(t, "count"))}
		}), 1, 4)
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				n, most := rapid.IntRange(0, min(blocks, 80)+1).Draw(t, "n"), rapid.IntRange(0, 8).Draw(t, "most")
				runs := m.runs()
				got, ok := a.Alloc(n, most)
				checkAlloc(t, runs, n, most, got, ok)
				if ok {
					m.set(got, true)
					held = append(held, got)
				}
			},
			"free": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip("nothing is held")
				}
				i := rapid.IntRange(0, len(held)-1).Draw(t, "i")
				e := held[i]
				held = slices.Delete(held, i, i+1)
				possible := m.all(e, true) // not if a wrong free below took a part of it
				if err := a.Free(e); (err == nil) != possible {
					t.Fatalf("Free(%v): %v", e, err)
				}
				if possible {
					m.set(e, false)
				}
			},
			"free anything": func(t *rapid.T) {
				e := extents.Draw(t, "e")
				possible := m.all(e, true)
				if err := a.Free(e); (err == nil) != possible {
					t.Fatalf("Free(%v): %v", e, err)
				}
				if possible {
					m.set(e, false)
				}
			},
			"take": func(t *rapid.T) {
				e := extents.Draw(t, "e")
				possible := m.all(e, false)
				if err := a.Take(e); (err == nil) != possible {
					t.Fatalf("Take(%v): %v", e, err)
				}
				if possible {
					m.set(e, true)
					held = append(held, e)
				}
			},
			"": func(t *rapid.T) {
				runs := m.runs()
				if diff := cmp.Diff(runs, freeRuns(a)); diff != "" {
					t.Fatal(diff)
				}
				free, largest := 0, 0
				for _, r := range runs {
					free += int(r.Count)
					largest = max(largest, int(r.Count))
				}
				if a.FreeBlocks() != free || a.LargestRun() != largest {
					t.Fatalf("free %d largest %d, want %d and %d", a.FreeBlocks(), a.LargestRun(), free, largest)
				}
			},
		})
	})
}

// checkAlloc judges an answer by the contract, given the free runs before it.
func checkAlloc(t *rapid.T, runs []Extent, n, most int, got []Extent, ok bool) {
	lengths := make([]int, len(runs))
	for i, r := range runs {
		lengths[i] = int(r.Count)
	}
	slices.Sort(lengths)
	slices.Reverse(lengths)
	sum, fewest := 0, 0
	for fewest < len(lengths) && sum < n {
		sum += lengths[fewest]
		fewest++
	}
	possible := n >= 1 && sum >= n && fewest <= most
	if ok != possible {
		t.Fatalf("Alloc(%d, %d) with runs %v: %t", n, most, runs, ok)
	}
	if !ok {
		if got != nil {
			t.Fatalf("extents %v with no success", got)
		}
		return
	}
	if len(got) != fewest {
		t.Fatalf("Alloc(%d, %d) with runs %v: %v, could be %d extents", n, most, runs, got, fewest)
	}
	total := 0
	for i, e := range got {
		total += int(e.Count)
		if i > 0 && e.Start < got[i-1].Start+got[i-1].Count {
			t.Fatalf("not ascending: %v", got)
		}
		if !slices.ContainsFunc(runs, func(r Extent) bool { return r.Start <= e.Start && e.Start+e.Count <= r.Start+r.Count }) {
			t.Fatalf("%v was not free", e)
		}
	}
	if total != n {
		t.Fatalf("%v has %d blocks, want %d", got, total, n)
	}
	if len(got) == 1 {
		best := lengths[0]
		for _, l := range lengths {
			if l >= n {
				best = l
			}
		}
		if !slices.ContainsFunc(runs, func(r Extent) bool { return r.Start == got[0].Start && int(r.Count) == best }) {
			t.Fatalf("Alloc(%d) took from %v, the best fit has %d blocks", n, got, best)
		}
	}
}

// BenchmarkAllocator frees the oldest entry and allocates a new one, in a pool that is full of entries of mixed sizes around the
// named one: what a cache does for each encoding once it is full.
func BenchmarkAllocator(b *testing.B) {
	const blocks = 1 << 20
	for _, mean := range []int{1, 16, 1024} {
		b.Run(fmt.Sprintf("blocks=%d", mean), func(b *testing.B) {
			rnd := rand.New(rand.NewPCG(1, 2))
			size := func() int { return 1 + rnd.IntN(2*mean-1) }
			a := NewAllocator(blocks)
			var ring [][]Extent
			for {
				e, ok := a.Alloc(size(), MaxExtents)
				if !ok {
					break
				}
				ring = append(ring, e)
			}
			rnd.Shuffle(len(ring), func(i, j int) { ring[i], ring[j] = ring[j], ring[i] })
			sizes := make([]int, 4096)
			for i := range sizes {
				sizes[i] = size()
			}
			frees, at := 0, 0
			b.ReportAllocs()
			b.ResetTimer()
			for i := range b.N {
				n := sizes[i%len(sizes)]
				dst := ring[at][:0]
				for {
					if len(ring[at]) > 0 {
						if err := a.Free(ring[at]); err != nil {
							b.Fatal(err)
						}
						ring[at] = ring[at][:0]
						frees++
					}
					e, ok := a.AppendAlloc(dst, n, MaxExtents)
					if ok {
						ring[at] = e
						at = (at + 1) % len(ring)
						break
					}
					at = (at + 1) % len(ring)
					dst = ring[at][:0:0]
				}
			}
			b.ReportMetric(float64(frees)/float64(b.N), "frees/op")
			b.ReportMetric(float64(len(freeRuns(a))), "runs")
		})
	}
}
