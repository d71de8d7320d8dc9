package ec

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/tensor"
)

// frozen is all of a cache that a refused call must leave as it was.
type frozen struct {
	Entries []Info
	Slots   []region.Slot
	Stats   Stats
}

func freeze(t testing.TB, c *Cache) frozen {
	t.Helper()
	f := frozen{Entries: c.Entries(), Stats: c.Stats()}
	f.Stats.Full, f.Stats.Misses = 0, 0 // count refusals
	for i := range c.slots.Len() {
		s, err := c.slots.Load(i)
		if err != nil {
			t.Fatal(err)
		}
		f.Slots = append(f.Slots, s)
	}
	return f
}

func TestRefusedCallsChangeNothing(t *testing.T) {
	c := newTestCache(t, 10, 8, CacheOptions{})
	put(t, c, "ready", 2)
	put(t, c, "pinned", 3)
	put(t, c, "held", 1)
	filling := reserve(t, c, "filling", 2)
	gone := reserve(t, c, "gone", 1)
	gone.Quarantine()
	defer pin(t, c, "pinned").Release()
	if err := c.Hold("held"); err != nil {
		t.Fatal(err)
	}

	reserving := func(key string, s Spec) func() error {
		return func() error { _, err := c.Reserve(key, s, 1); return err }
	}
	other := func(s Spec, f func(*Spec)) Spec { s.Shape = slices.Clone(s.Shape); f(&s); return s }
	for name, refused := range map[string]struct {
		call func() error
		want error
	}{
		"ready already":            {reserving("ready", spec(2)), ErrHeld},
		"being filled":             {reserving("filling", spec(2)), ErrPending},
		"another shape":            {reserving("ready", spec(1)), ErrConflict},
		"same bytes, other shape":  {reserving("ready", other(spec(2), func(s *Spec) { s.Shape[0], s.Shape[1] = 4, 4 })), ErrConflict},
		"same bytes, other dtype":  {reserving("ready", other(spec(2), func(s *Spec) { s.Dtype = "torch.float16" })), ErrConflict},
		"filling, another shape":   {reserving("filling", spec(1)), ErrConflict},
		"larger than what may go":  {reserving("new", spec(5)), ErrFull}, // 1 free, 2 ready, 1 held
		"the whole pool":           {reserving("new", spec(10)), ErrFull},
		"more than the pool":       {reserving("new", spec(11)), ErrTooLarge},
		"far more than the pool":   {reserving("new", Spec{"torch.uint8", []int64{math.MaxInt64, 1}, math.MaxInt64}), ErrTooLarge},
		"empty key":                {reserving("", spec(1)), ErrKey},
		"key of 257 bytes":         {reserving(strings.Repeat("k", 257), spec(1)), ErrKey},
		"key that is not UTF-8":    {reserving("k\xff", spec(1)), ErrKey},
		"key with a newline":       {reserving("k\n", spec(1)), ErrKey},
		"key with a C1 control":    {reserving("k\u0085", spec(1)), ErrKey},
		"dtype unknown":            {reserving("new", Spec{"torch.float12", []int64{1, 8}, 16}), ErrSpec},
		"dtype empty":              {reserving("new", Spec{"", []int64{1, 8}, 16}), ErrSpec},
		"no shape":                 {reserving("new", Spec{"torch.bfloat16", nil, 16}), ErrSpec},
		"three dimensions":         {reserving("new", Spec{"torch.bfloat16", []int64{1, 1, 8}, 16}), ErrSpec},
		"no rows":                  {reserving("new", Spec{"torch.bfloat16", []int64{0, 8}, 0}), ErrSpec},
		"negative twice":           {reserving("new", Spec{"torch.bfloat16", []int64{-1, -8}, 16}), ErrSpec},
		"bytes do not match":       {reserving("new", Spec{"torch.bfloat16", []int64{1, 8}, 15}), ErrSpec},
		"product overflows":        {reserving("new", Spec{"torch.bfloat16", []int64{1 << 32, 1 << 32}, 0}), ErrSpec},
		"bytes overflow":           {reserving("new", Spec{"torch.bfloat16", []int64{1 << 62, 2}, 0}), ErrSpec},
		"pin of nothing":           {func() error { _, err := c.Pin("new"); return err }, ErrMissing},
		"pin of what was given up": {func() error { _, err := c.Pin("gone"); return err }, ErrMissing},
		"pin while filling":        {func() error { _, err := c.Pin("filling"); return err }, ErrNotReady},
		"hold of nothing":          {func() error { return c.Hold("new") }, ErrMissing},
		"remove of nothing":        {func() error { return c.Remove("new") }, ErrMissing},
		"remove while filling":     {func() error { return c.Remove("filling") }, ErrNotReady},
		"remove of what is used":   {func() error { return c.Remove("pinned") }, ErrPinned},
		"commit of what is over":   {func() error { _, err := gone.Commit(nil); return err }, ErrStale},
	} {
		t.Run(name, func(t *testing.T) {
			before := freeze(t, c)
			if err := refused.call(); !errors.Is(err, refused.want) {
				t.Errorf("got %v, want %v", err, refused.want)
			}
			if d := cmp.Diff(before, freeze(t, c)); d != "" {
				t.Error(d)
			}
		})
	}
	filling.Discard()
}

func TestFullErrorSaysWhereTheBlocksAre(t *testing.T) {
	c := newTestCache(t, 10, 8, CacheOptions{})
	put(t, c, "a", 4)
	defer pin(t, c, "a").Release()
	reserve(t, c, "b", 3)
	reserve(t, c, "c", 2).Quarantine()
	_, err := c.Reserve("d", spec(2), 1)
	if want := `"d" needs 2 blocks of 10; free or evictable 1, pinned 4, being filled 3, quarantined 2`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want %s", err, want)
	}
}

func TestKeysAreComparedInFull(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	prefix := strings.Repeat("0123456789abcdef", 4)
	a, b := put(t, c, prefix+"a", 1), put(t, c, prefix+"b", 1)
	long := strings.Repeat("é", region.MaxKey/2)
	put(t, c, long, 1)
	if a.Slot == b.Slot || a.Gen == b.Gen || a.Extents[0] == b.Extents[0] {
		t.Errorf("%+v and %+v", a, b)
	}
	for _, k := range []string{prefix + "a", prefix + "b", long} {
		if i, s := c.Lookup(k); s != Ready || i.Key != k {
			t.Errorf("Lookup(%q): %+v %v", k, i, s)
		}
	}
	if _, s := c.Lookup(prefix); s != Absent {
		t.Errorf("the common prefix is %v", s)
	}
}

func TestSecondPutOfAHeldKeyIsTheSameEntry(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	first := put(t, c, "a", 2)
	if _, err := c.Reserve("a", Spec{"bfloat16", spec(2).Shape, spec(2).Bytes}, 9); !errors.Is(err, ErrHeld) {
		t.Fatal(err)
	}
	if now, s := c.Lookup("a"); s != Ready || now.Gen != first.Gen || now.Slot != first.Slot {
		t.Errorf("%+v %v, was %+v", now, s, first)
	}
}

func TestUsedNeverExceedsThePool(t *testing.T) {
	const blocks = 64
	var evicted int64
	c := newTestCache(t, blocks, 32, CacheOptions{Evicted: func(_ string, n int64) { evicted += n }})
	total := int64(0)
	for i := 0; total < 2*blocks*testBlock; i++ {
		n := 1 + i%7
		put(t, c, fmt.Sprint(i), n)
		total += spec(n).Bytes
		var kept int64
		for _, e := range c.Entries() {
			kept += e.Spec.Bytes
		}
		if kept > blocks*testBlock || kept+evicted != total {
			t.Fatalf("put %d bytes: %d there, %d evicted", total, kept, evicted)
		}
	}
}

func TestFirstFreeToGoGoesFirst(t *testing.T) {
	c := newTestCache(t, 4, 8, CacheOptions{})
	for _, k := range []string{"a", "b", "c", "d"} {
		put(t, c, k, 1)
	}
	p := pin(t, c, "a")
	put(t, c, "e", 1)
	if got := keys(c); !slices.Equal(got, []string{"a", "c", "d", "e"}) {
		t.Fatalf("%v: b was the oldest that may go", got)
	}
	p.Release() // a has been free to go for the shortest time
	put(t, c, "f", 2)
	if got := keys(c); !slices.Equal(got, []string{"a", "e", "f"}) {
		t.Fatalf("%v: c and d were the first to go", got)
	}
}

func TestPinnedEntryIsNeverEvicted(t *testing.T) {
	c := newTestCache(t, 8, 8, CacheOptions{})
	put(t, c, "a", 3)
	p, q := pin(t, c, "a"), pin(t, c, "a")
	before := p.Info()
	for i := range 20 {
		put(t, c, fmt.Sprint(i), 1+i%5)
	}
	p.Release()
	p.Release() // takes off its own pin only
	for i := range 20 {
		put(t, c, fmt.Sprint("x", i), 1+i%5)
	}
	now, s := c.Lookup("a")
	if s != Ready || now.Gen != before.Gen || !slices.Equal(now.Extents, before.Extents) || now.Pins != 1 {
		t.Errorf("%+v %v, was %+v", now, s, before)
	}
	q.Release()
}

func TestReleasedPinCannotUnpinALaterEntryOfTheKey(t *testing.T) {
	c := newTestCache(t, 2, 2, CacheOptions{})
	put(t, c, "a", 2)
	old := pin(t, c, "a")
	old.Release()
	if err := c.Remove("a"); err != nil {
		t.Fatal(err)
	}
	put(t, c, "a", 2)
	p := pin(t, c, "a")
	old.Release()
	if _, err := c.Reserve("b", spec(1), 1); !errors.Is(err, ErrFull) {
		t.Errorf("a pinned entry went: %v", err)
	}
	if i := old.Info(); i.State != Absent {
		t.Errorf("the old pin shows %+v", i)
	}
	p.Release()
}

func TestEndedReservationCannotTouchTheNext(t *testing.T) {
	c := newTestCache(t, 2, 2, CacheOptions{})
	old := reserve(t, c, "a", 2)
	old.Discard()
	next := reserve(t, c, "a", 2)
	old.Discard()
	old.Quarantine().Settle()
	if _, err := old.Commit(nil); !errors.Is(err, ErrStale) {
		t.Error(err)
	}
	if _, s := c.Lookup("a"); s != Filling {
		t.Errorf("the next reservation is %v", s)
	}
	if _, err := next.Commit(nil); err != nil {
		t.Error(err)
	}
	next.Discard()
	next.Quarantine().Settle()
	if _, err := next.Commit(nil); !errors.Is(err, ErrStale) {
		t.Error(err)
	}
	if _, s := c.Lookup("a"); s != Ready {
		t.Errorf("after its commit the entry is %v", s)
	}
}

func TestFillerThatDiesWakesThoseWhoWaitAndTheNextReserveWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newTestCache(t, 4, 4, CacheOptions{})
		filler := reserve(t, c, "a", 2)
		won := make(chan int, 3)
		for i := range cap(won) {
			go func() { // as an engine does that needs the encoding: wait for it, or make it
				for {
					changed := c.Watch("a")
					switch _, s := c.Lookup("a"); s {
					case Ready:
						won <- -1
						return
					case Filling:
						<-changed
					case Absent:
						r, err := c.Reserve("a", spec(2), uint64(i))
						if errors.Is(err, ErrPending) || errors.Is(err, ErrHeld) {
							continue
						}
						if err != nil {
							t.Error(err)
							return
						}
						if _, err := r.Commit(nil); err != nil {
							t.Error(err)
						}
						won <- i
						return
					}
				}
			}()
		}
		synctest.Wait() // all wait, none spins
		filler.Discard()
		encoded := 0
		for range cap(won) {
			if i := <-won; i >= 0 {
				encoded++
			}
		}
		if encoded != 1 {
			t.Errorf("encoded %d times", encoded)
		}
	})
}

func TestWatchEndsAtEachChange(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	var r *Reservation
	for _, step := range []struct {
		name string
		do   func()
		ends bool
	}{
		{"reserve", func() { r = reserve(t, c, "a", 4) }, false},
		{"commit", func() { _, _ = r.Commit(nil) }, true},
		{"pin and release", func() { pin(t, c, "a").Release() }, false},
		{"hold", func() { _ = c.Hold("a") }, false},
		{"remove", func() { _ = c.Remove("a") }, true},
		{"reserve", func() { r = reserve(t, c, "a", 4) }, false},
		{"discard", func() { r.Discard() }, true},
		{"reserve", func() { r = reserve(t, c, "a", 4) }, false},
		{"quarantine", func() { r.Quarantine() }, true},
		{"settle", func() { r.Quarantine().Settle() }, false},
		{"reserve", func() { r = reserve(t, c, "a", 4) }, false},
		{"commit", func() { _, _ = r.Commit(nil) }, true},
		{"evict", func() { put(t, c, "b", 4) }, true},
	} {
		w := c.Watch("a")
		step.do()
		if closed(w) != step.ends {
			t.Errorf("%s: closed %v, want %v", step.name, closed(w), step.ends)
		}
	}
}

func TestWatchesOfAbsentKeysAreBounded(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	first := c.Watch("0")
	for i := range 3 * maxAbsentWatches {
		c.Watch(fmt.Sprint(i))
	}
	if n := len(c.absent); n > maxAbsentWatches {
		t.Errorf("%d watches kept", n)
	}
	if !closed(first) {
		t.Error("a watch that is forgotten must end")
	}
}

func TestQuarantineFreesTheKeyAtOnceAndTheBlocksOnce(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	r := reserve(t, c, "a", 2)
	old := r.Info()
	q := r.Quarantine()
	if _, s := c.Lookup("a"); s != Absent {
		t.Fatalf("the key is %v", s)
	}
	if s, err := c.slots.Load(old.Slot); err != nil || s.State != region.SlotFilling || s.Gen != old.Gen || !slices.Equal(s.Extents, old.Extents) {
		t.Errorf("the slot must keep the blocks from being given away after a crash, says %+v, %v", s, err)
	}
	next := put(t, c, "a", 2)
	if overlap(next.Extents, old.Extents) || next.Slot == old.Slot {
		t.Errorf("%+v was given what %+v may still be written to", next, old)
	}
	if _, err := c.Reserve("b", spec(3), 1); !errors.Is(err, ErrFull) {
		t.Errorf("quarantined blocks were given away: %v", err)
	}
	q.Settle()
	b := put(t, c, "b", 2) // in the blocks just settled
	q.Settle()
	r.Quarantine().Settle()
	if !overlap(b.Extents, old.Extents) {
		t.Fatalf("b is at %v", b.Extents)
	}
	if s := c.Stats(); s.FreeBlocks != 0 || s.QuarantinedBlocks != 0 || s.Entries != 2 {
		t.Errorf("%+v", s)
	}
}

func TestEntryThatLacksOnlyASlotEvictsOne(t *testing.T) {
	c := newTestCache(t, 16, 3, CacheOptions{})
	for _, k := range []string{"a", "b", "c"} {
		put(t, c, k, 1)
	}
	p := pin(t, c, "a")
	put(t, c, "d", 4)
	if got := keys(c); !slices.Equal(got, []string{"a", "c", "d"}) {
		t.Errorf("%v", got)
	}
	defer pin(t, c, "c").Release()
	r := reserve(t, c, "e", 1) // evicts d
	defer r.Discard()
	before := freeze(t, c)
	if _, err := c.Reserve("f", spec(1), 1); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), "all 3 slots are in use") {
		t.Error(err)
	}
	if d := cmp.Diff(before, freeze(t, c)); d != "" {
		t.Error(d)
	}
	p.Release()
	put(t, c, "f", 1)
}

func TestBuffersAreTheEncodingsBytesAndNoMore(t *testing.T) {
	c := newTestCache(t, 8, 8, CacheOptions{})
	s := Spec{"torch.uint8", []int64{5, 7}, 35} // 2 blocks and 3 bytes
	r, err := c.Reserve("a", s, 1)
	if err != nil {
		t.Fatal(err)
	}
	b := r.Buffers()
	if len(b) != 1 || len(b[0]) != 35 || cap(b[0]) != 35 {
		t.Fatalf("%d buffers, %d bytes, capacity %d", len(b), len(b[0]), cap(b[0]))
	}
	copy(b[0], strings.Repeat("x", 35))
	if _, err := r.Commit(nil); err != nil {
		t.Fatal(err)
	}
	p := pin(t, c, "a")
	defer p.Release()
	if got := string(p.Buffers()[0]); got != strings.Repeat("x", 35) {
		t.Errorf("%q", got)
	}
	off := int(r.Info().Extents[0].Start) * testBlock
	if got := string(c.pool[off : off+35]); got != strings.Repeat("x", 35) {
		t.Errorf("the pool has %q", got)
	}
}

func TestCommitKeepsTheChecksumItIsGiven(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	sum := uint64(0xfeed)
	with, err := reserve(t, c, "a", 1).Commit(&sum)
	if err != nil {
		t.Fatal(err)
	}
	without := put(t, c, "b", 1)
	if !with.HasChecksum || with.Checksum != sum || without.HasChecksum {
		t.Errorf("%+v, %+v", with, without)
	}
}

func TestNewCacheRefusesBadOptions(t *testing.T) {
	g := region.Geometry{BlockBytes: testBlock, Blocks: 4, Slots: 4}
	for name, o := range map[string]CacheOptions{
		"share over 1":   {HoldShare: 1.01},
		"share negative": {HoldShare: -0.1},
		"share NaN":      {HoldShare: math.NaN()},
		"lease negative": {HoldLease: -1},
	} {
		if _, err := newCache(o, g, make([]byte, g.PoolBytes()), newAuditTable(t, 4)); !errors.Is(err, ErrOptions) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewCache(CacheOptions{}); !errors.Is(err, ErrOptions) {
		t.Errorf("no region: %v", err)
	}
	used := newAuditTable(t, 4)
	if _, err := used.Fill(2, &region.Slot{Key: "a", Extents: []region.Extent{{Start: 0, Count: 1}}}); err != nil {
		t.Fatal(err)
	}
	if _, err := newCache(CacheOptions{}, g, make([]byte, g.PoolBytes()), used); !errors.Is(err, ErrOptions) {
		t.Errorf("a table in use: %v", err)
	}
}

// brokenTable fails every Fill, as a table does whose region is gone.
type brokenTable struct{ *auditTable }

var errBroken = errors.New("broken")

func (brokenTable) Fill(int, *region.Slot) (uint64, error) { return 0, errBroken }

func TestReserveThatCannotBeRecordedTakesNoBlocks(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	c.slots = brokenTable{c.slots.(*auditTable)}
	if _, err := c.Reserve("a", spec(2), 1); !errors.Is(err, errBroken) {
		t.Error(err)
	}
	if s := c.Stats(); s.FreeBlocks != 4 || s.Entries != 0 {
		t.Errorf("%+v", s)
	}
}

func TestStateNames(t *testing.T) {
	for s, want := range map[State]string{Absent: "absent", Filling: "filling", Ready: "ready", 9: "State(9)"} {
		if s.String() != want {
			t.Errorf("%q, want %q", s, want)
		}
	}
}

func TestItemSizes(t *testing.T) {
	for dtype, want := range map[string]int{
		"torch.bool": 1, "torch.uint8": 1, "torch.int8": 1, "torch.int16": 2, "torch.int32": 4, "torch.int64": 8,
		"torch.float16": 2, "torch.bfloat16": 2, "torch.float32": 4, "torch.float64": 8,
		"torch.float8_e4m3fn": 1, "torch.float8_e5m2": 1, "torch.complex64": 8, "torch.complex128": 16, "bfloat16": 2,
	} {
		if n, err := ItemSize(dtype); err != nil || n != want {
			t.Errorf("ItemSize(%q) = %d, %v; want %d", dtype, n, err, want)
		}
	}
	for _, dtype := range []string{"", "torch.", "torch.torch.int8", "TORCH.INT8", "float", strings.Repeat("x", 1000)} {
		if _, err := ItemSize(dtype); !errors.Is(err, ErrSpec) || len(err.Error()) > 200 {
			t.Errorf("ItemSize(%q): %v", dtype, err)
		}
	}
	for _, d := range tensor.DTypes() {
		if len(d.String()) > region.MaxDtype {
			t.Errorf("%s does not fit a slot", d)
		}
	}
}
