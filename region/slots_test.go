package region

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

var tableGeometry = Geometry{BlockBytes: 100, Blocks: 64, Slots: 8}

// memoryTable is a table in Go's memory, where the race detector sees every access (it does not look into mapped files).
func memoryTable(g Geometry) *SlotTable {
	words := make([]uint64, (tableOffset+g.Slots*SlotBytes)/8)
	return newSlotTable(unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8), g, true)
}

func someSlot() Slot {
	return Slot{
		Key: strings.Repeat("0123456789abcdef", 4), Dtype: "torch.bfloat16", Shape: []int64{10, 25}, Bytes: 500,
		Extents: []Extent{{3, 2}, {9, 3}}, Owner: 77, Holds: 2,
	}
}

func mustFill(t *testing.T, table *SlotTable, i int, s Slot) uint64 {
	t.Helper()
	gen, err := table.Fill(i, &s)
	if err != nil {
		t.Fatal(err)
	}
	return gen
}

func wantSlot(t *testing.T, table *SlotTable, i int, want Slot) {
	t.Helper()
	got, err := table.Load(i)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Fatalf("slot %d: %s", i, diff)
	}
}

func TestSlotGoesFromFillingToReadyToFreeAndEveryGenerationIsNew(t *testing.T) {
	table := memoryTable(tableGeometry)
	wantSlot(t, table, 2, Slot{})
	s := someSlot()
	s.State, s.Gen, s.Checksum, s.HasChecksum = SlotReady, 999, 5, true // all ignored
	gen := mustFill(t, table, 2, s)
	want := someSlot()
	want.State, want.Gen = SlotFilling, gen
	wantSlot(t, table, 2, want)
	if table.Check(2, gen) {
		t.Error("a filling slot passes for ready")
	}
	if _, err := table.Fill(2, &s); !errors.Is(err, ErrSlot) {
		t.Errorf("Fill of a filling slot: %v", err)
	}

	table.SetHolds(2, 9)
	table.Ready(2, 123, true)
	want.State, want.Holds, want.Checksum, want.HasChecksum = SlotReady, 9, 123, true
	wantSlot(t, table, 2, want)
	if !table.Check(2, gen) || table.Check(2, gen+1) || table.Check(3, gen) || table.Check(2, gen|1<<62) {
		t.Error("Check is wrong about a ready slot")
	}
	table.Ready(2, 124, true) // not filling: nothing changes
	wantSlot(t, table, 2, want)

	table.Free(2)
	wantSlot(t, table, 2, Slot{State: SlotFree, Gen: gen})
	if table.Check(2, gen) {
		t.Error("a free slot passes for ready")
	}
	next := mustFill(t, table, 2, someSlot())
	if next <= gen {
		t.Errorf("generation %d after %d", next, gen)
	}
	table.Ready(2, 0, false) // the checksum of the entry before must not show
	want = someSlot()
	want.State, want.Gen = SlotReady, next
	wantSlot(t, table, 2, want)
	if table.Check(2, gen) || !table.Check(2, next) {
		t.Error("Check does not tell generations apart")
	}
}

func TestLargestAndSmallestEntriesFitASlot(t *testing.T) {
	table := memoryTable(Geometry{BlockBytes: 1, Blocks: MaxBlocks, Slots: 2})
	extents := make([]Extent, MaxExtents)
	for i := range extents {
		extents[i] = Extent{uint32(i) << 28, 1 << 28}
	}
	large := Slot{
		Key: strings.Repeat("k", MaxKey), Dtype: strings.Repeat("d", MaxDtype), Shape: []int64{math.MaxInt64, 1, 0, 7},
		Bytes: 1 << 31, Extents: extents, Owner: math.MaxUint64, Holds: math.MaxUint32,
	}
	large.Gen = mustFill(t, table, 1, large)
	large.State = SlotFilling
	wantSlot(t, table, 1, large)
	small := Slot{Key: "k"}
	small.Gen = mustFill(t, table, 0, small)
	small.State = SlotFilling
	wantSlot(t, table, 0, small)
	wantSlot(t, table, 1, large)
}

func TestFillRefusesWhatDoesNotFitAndChangesNothing(t *testing.T) {
	for name, change := range map[string]func(*Slot){
		"no key":               func(s *Slot) { s.Key = "" },
		"long key":             func(s *Slot) { s.Key = strings.Repeat("k", MaxKey+1) },
		"long dtype":           func(s *Slot) { s.Dtype = strings.Repeat("d", MaxDtype+1) },
		"five dimensions":      func(s *Slot) { s.Shape = make([]int64, MaxDims+1) },
		"negative dimension":   func(s *Slot) { s.Shape = []int64{-1} },
		"negative bytes":       func(s *Slot) { s.Bytes = -1 },
		"more bytes than room": func(s *Slot) { s.Bytes = 501 },
		"no extents":           func(s *Slot) { s.Extents = nil },
		"nine extents":         func(s *Slot) { s.Extents = make([]Extent, MaxExtents+1) },
		"empty extent":         func(s *Slot) { s.Extents = []Extent{{0, 5}, {7, 0}} },
		"descending":           func(s *Slot) { s.Extents = []Extent{{9, 3}, {3, 2}} },
		"overlapping":          func(s *Slot) { s.Extents = []Extent{{3, 3}, {5, 3}} },
		"outside the pool":     func(s *Slot) { s.Extents = []Extent{{60, 5}} },
		"overflowing":          func(s *Slot) { s.Extents = []Extent{{math.MaxUint32, math.MaxUint32}} },
	} {
		table := memoryTable(tableGeometry)
		s := someSlot()
		change(&s)
		if _, err := table.Fill(1, &s); !errors.Is(err, ErrSlot) {
			t.Errorf("%s: %v", name, err)
		}
		wantSlot(t, table, 1, Slot{})
	}
	table := memoryTable(tableGeometry)
	for _, i := range []int{-1, 8, math.MaxInt} {
		if _, err := table.Fill(i, new(someSlot())); !errors.Is(err, ErrSlot) {
			t.Errorf("Fill(%d): %v", i, err)
		}
		if _, err := table.Load(i); !errors.Is(err, ErrSlot) {
			t.Errorf("Load(%d): %v", i, err)
		}
		if table.Check(i, 0) {
			t.Errorf("Check(%d) is true", i)
		}
	}
}

func TestWriteToAnAttachedTablePanics(t *testing.T) {
	table := memoryTable(tableGeometry)
	table.writable = false
	for name, write := range map[string]func(){
		"Fill":     func() { table.Fill(0, new(someSlot())) },
		"Ready":    func() { table.Ready(0, 0, false) },
		"Free":     func() { table.Free(0) },
		"SetHolds": func() { table.SetHolds(0, 1) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s did not panic", name)
				}
			}()
			write()
		}()
	}
}

// A SIGKILL between any two stores of Fill leaves a prefix of its stores. Whatever the slot held before, Load must say filling,
// with the whole record or with none.
func TestHalfWrittenRecordIsFillingWithoutARecord(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := memoryTable(tableGeometry)
		slots := rapid.Custom(func(t *rapid.T) Slot {
			s := Slot{
				Key:   rapid.StringMatching(`[0-9a-f]{1,64}`).Draw(t, "key"),
				Dtype: rapid.SampledFrom([]string{"", "torch.bfloat16", "torch.float32"}).Draw(t, "dtype"),
				Shape: rapid.SliceOfN(rapid.Int64Range(0, 9), 0, MaxDims).Draw(t, "shape"),
				Owner: rapid.Uint64().Draw(t, "owner"),
			}
			at := uint32(0)
			for range rapid.IntRange(1, MaxExtents).Draw(t, "extents") {
				e := Extent{at + uint32(rapid.IntRange(0, 3).Draw(t, "gap")), uint32(rapid.IntRange(1, 4).Draw(t, "count"))}
				at = e.Start + e.Count
				s.Extents = append(s.Extents, e)
			}
			s.Bytes = rapid.Int64Range(0, 100).Draw(t, "bytes")
			return s
		})
		before, after := slots.Draw(t, "before"), slots.Draw(t, "after")
		if _, err := table.Fill(0, &before); err != nil {
			t.Fatal(err)
		}
		table.Ready(0, 1, true)
		table.Free(0)
		old := *table.slot(0)
		gen, err := table.Fill(0, &after)
		if err != nil {
			t.Fatal(err)
		}
		whole := *table.slot(0)
		after.State, after.Gen = SlotFilling, gen

		torn := old
		for _, w := range storesOfFill(after) {
			torn[w] = whole[w]
			*table.slot(0) = torn
			got, err := table.Load(0)
			if err != nil {
				t.Fatalf("after the store of word %d: %v", w, err)
			}
			if torn == whole {
				if diff := cmp.Diff(after, got, cmpopts.EquateEmpty()); diff != "" {
					t.Fatal(diff)
				}
			} else if diff := cmp.Diff(Slot{State: SlotFilling, Gen: gen}, got); diff != "" && !cmp.Equal(after, got, cmpopts.EquateEmpty()) {
				t.Fatalf("after the store of word %d: %s", w, diff)
			}
		}
		if torn != whole {
			t.Fatal("storesOfFill does not list the stores of Fill")
		}
	})
}

// storesOfFill are the words that Fill stores, in its order.
func storesOfFill(s Slot) []int {
	words := []int{wordState}
	for w := range wordRecord + wordsOfRecord(s) - wordHolds {
		words = append(words, wordHolds+w)
	}
	return append(words, wordSum)
}

func wordsOfRecord(s Slot) int {
	return recordFixed + len(s.Shape) + len(s.Extents) + (len(s.Dtype)+7)/8 + (len(s.Key)+7)/8
}

func TestDamagedReadyRecordIsErrFormat(t *testing.T) {
	table := memoryTable(tableGeometry)
	mustFill(t, table, 0, someSlot())
	table.Ready(0, 0, false)
	good := *table.slot(0)
	n := wordsOfRecord(someSlot())
	for w := wordSum; w < wordRecord+n; w++ {
		if w != wordSum && w < wordRecord {
			continue // holds, checksum and flags are not part of the record
		}
		for bit := range 64 {
			bad := good
			bad[w] ^= 1 << bit
			*table.slot(0) = bad
			if s, err := table.Load(0); !errors.Is(err, ErrFormat) {
				t.Fatalf("word %d, bit %d: %+v, %v", w, bit, s, err)
			}
		}
	}
	bad := good
	bad[wordState] |= 3
	*table.slot(0) = bad
	if _, err := table.Load(0); !errors.Is(err, ErrFormat) {
		t.Fatalf("impossible state: %v", err)
	}
}

// One owner writes, others read whatever they like without its lock. All that they see must be an entry that was there.
func TestReadersSeeOnlyWholeEntriesWhileTheOwnerWrites(t *testing.T) {
	const rounds = 20000
	table := memoryTable(tableGeometry)
	entry := func(gen uint64) Slot { // made from one number, so that a mixture shows
		n := gen % 50
		return Slot{
			Key: strings.Repeat(string(rune('a'+gen%26)), 1+int(gen%100)), Dtype: fmt.Sprintf("torch.float%d", n),
			Shape: []int64{int64(n)}, Bytes: int64(n), Extents: []Extent{{uint32(n), 1}}, Owner: gen,
		}
	}
	var done atomic.Bool
	var wg sync.WaitGroup
	defer wg.Wait()
	defer done.Store(true)
	var ready atomic.Int64
	for range 3 {
		wg.Go(func() {
			for i := 0; !done.Load(); i = (i + 1) % 2 {
				s, err := table.Load(i)
				if err != nil {
					t.Error(err)
					return
				}
				if s.State == SlotFree || s.Key == "" {
					continue
				}
				want := entry(s.Owner)
				want.State, want.Gen = s.State, s.Gen
				if s.State == SlotReady {
					ready.Add(1)
					want.Checksum, want.HasChecksum = s.Owner, true
				}
				if diff := cmp.Diff(want, s); diff != "" {
					t.Error(diff)
					return
				}
				table.Check(i, s.Gen)
			}
		})
	}
	for n := uint64(0); n < rounds || ready.Load() == 0; n++ {
		i := int(n % 2)
		table.Free(i)
		mustFill(t, table, i, entry(n))
		table.Ready(i, n, true)
		if t.Failed() {
			return
		}
	}
}

// FuzzLoad gives Load any bytes in a slot: a slot or ErrFormat, never a panic, and nothing that Fill would not take.
func FuzzLoad(f *testing.F) {
	table := memoryTable(tableGeometry)
	f.Add([]byte{}, false)
	f.Add(bytes.Repeat([]byte{0xff}, SlotBytes), false)
	table.Fill(0, new(someSlot()))
	f.Add(bytes.Clone(slotBytes(table)), false)
	table.Ready(0, 5, true)
	f.Add(bytes.Clone(slotBytes(table)), true)
	f.Fuzz(func(t *testing.T, raw []byte, fixSum bool) {
		table := memoryTable(tableGeometry)
		copy(slotBytes(table), raw)
		w := table.slot(0)
		var r record
		if fixSum && r.load(w) {
			w[wordSum] = r.sum(genOf(w[wordState]))
		}
		s, err := table.Load(0)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		if s.State > SlotReady || table.Check(0, s.Gen) != (s.State == SlotReady) {
			t.Fatalf("%+v", s)
		}
		if s.Key != "" {
			if _, err := table.Fill(1, &s); err != nil {
				t.Fatalf("Load gave %+v, Fill says %v", s, err)
			}
		}
	})
}

func slotBytes(t *SlotTable) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(t.slot(0))), SlotBytes)
}

func BenchmarkSlotTable(b *testing.B) {
	table := memoryTable(Geometry{BlockBytes: 2048, Blocks: 1 << 20, Slots: 1 << 14})
	s := someSlot()
	gens := make([]uint64, table.Len())
	for i := range table.Len() {
		gens[i], _ = table.Fill(i, &s)
		table.Ready(i, 1, true)
	}
	order := rand.New(rand.NewPCG(1, 2)).Perm(table.Len())
	attached := *table
	attached.writable = false
	for name, table := range map[string]*SlotTable{"": table, "Attached": &attached} {
		b.Run("Check"+name, func(b *testing.B) {
			for n := 0; b.Loop(); n++ {
				i := order[n%len(order)]
				if !table.Check(i, gens[i]) {
					b.Fatal("not ready")
				}
			}
		})
		b.Run("Load"+name, func(b *testing.B) {
			b.ReportAllocs()
			for n := 0; b.Loop(); n++ {
				if _, err := table.Load(order[n%len(order)]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("FreeFillReady", func(b *testing.B) {
		b.ReportAllocs()
		for n := 0; b.Loop(); n++ {
			i := order[n%len(order)]
			table.Free(i)
			if _, err := table.Fill(i, &s); err != nil {
				b.Fatal(err)
			}
			table.Ready(i, 1, true)
		}
	})
}

func TestAWithdrawnEntryIsNotFoundAndKeepsItsBlocks(t *testing.T) {
	table := memoryTable(tableGeometry)
	want := someSlot()
	want.State, want.Gen = SlotFilling, mustFill(t, table, 2, want)
	table.Withdraw(2) // not ready: nothing changes
	wantSlot(t, table, 2, want)
	table.Ready(2, 123, true)
	table.SetPins(2, 3)
	table.SetGranted(2, true)
	table.Withdraw(2)
	want.Pins, want.Granted = 3, true
	wantSlot(t, table, 2, want)
	if table.Check(2, want.Gen) {
		t.Error("a withdrawn entry passes for ready")
	}
	table.Free(2)
	table.Withdraw(2)
	wantSlot(t, table, 2, Slot{Gen: want.Gen})
	want.Pins, want.Granted, want.Gen = 0, false, mustFill(t, table, 2, someSlot())
	wantSlot(t, table, 2, want) // of the entry before nothing is left
}
