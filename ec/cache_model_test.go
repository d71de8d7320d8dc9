package ec

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"pgregory.net/rapid"
)

// model is the cache written down naively: a list of records, everything else found by going through it.
type model struct {
	blocks, slots, maxHeld int
	sieve                  bool // the policy; else fifo
	turns, hand            int  // for fifo: given so far, and the one taken last
	records                []*record
	stuck                  int // see Cache.stuck; here only for what the search leaves behind
	now, lease             time.Duration
	ticks                  int // of commits and holds
	watches                []*watched
	evicted, dropped       []string // callbacks
	stats                  Stats    // the counters
}

type record struct {
	key       string
	spec      Spec
	blocks    int
	extents   []region.Extent
	slot      int
	gen       uint64
	phase     phase
	pins      int
	holds     []time.Duration // ends
	ready     int             // tick of its commit
	turn      int             // for fifo: taken when it became free to go
	announced int             // tick of its newest hold
	res       *Reservation
	kept      *Quarantined

	taken                       bool // by next
	used, visited, late, passed bool // for sieve; late: its turn is in the next round
	was                         class
}

type watched struct {
	key     string
	ch      <-chan struct{}
	changed bool
}

func (m *model) find(key string) *record {
	for _, r := range m.records {
		if r.key == key && (r.phase == phaseFilling || r.phase == phaseReady) {
			return r
		}
	}
	return nil
}

func (m *model) inUse() []bool {
	used := make([]bool, m.blocks)
	for _, r := range m.records {
		mark(used, r.extents, true)
	}
	return used
}

func mark(used []bool, x []region.Extent, as bool) {
	for _, e := range x {
		for b := e.Start; b < e.Start+e.Count; b++ {
			used[b] = as
		}
	}
}

// freeRuns are the runs of blocks not in use.
func freeRuns(used []bool) []region.Extent {
	var runs []region.Extent
	for b := 0; b < len(used); b++ {
		start := b
		for b < len(used) && !used[b] {
			b++
		}
		if b > start {
			runs = append(runs, region.Extent{Start: uint32(start), Count: uint32(b - start)})
		}
	}
	return runs
}

// fewest is the number of extents that n blocks take at least, 0 if they are not free.
func fewest(used []bool, n int) int {
	runs := freeRuns(used)
	slices.SortFunc(runs, func(a, b region.Extent) int { return cmp.Compare(b.Count, a.Count) })
	for i, r := range runs {
		if n -= int(r.Count); n <= 0 {
			return i + 1
		}
	}
	return 0
}

// fits tells if n blocks can be had in one run, and in as many as an entry may have.
func fits(used []bool, n int) (one, some bool) {
	k := fewest(used, n)
	return k == 1, k > 0 && k <= region.MaxExtents
}

// victims are the records that may have to go for n blocks, in order; false if even all that may go do not do. Who looks for
// them leaves marks behind, as the policy has it.
func (m *model) victims(n int) (out []*record, ok bool) {
	defer func() {
		for _, r := range m.records {
			r.taken = false
		}
	}()
	var held []*record
	free, may, loose := m.blocks, 0, 0
	for _, r := range m.records {
		free -= r.blocks
		switch r.class() {
		case classLoose:
			loose++
			may += r.blocks
		case classHeld:
			held = append(held, r)
			may += r.blocks
		}
	}
	slices.SortFunc(held, func(a, b *record) int { return cmp.Compare(a.announced, b.announced) })
	slot := len(m.records) < m.slots
	used := m.inUse()
	one, some := fits(used, n)
	if slot && one {
		return nil, true
	}
	if n > free+may || !slot && loose+len(held) == 0 {
		return nil, false
	}
	if n >= m.stuck { // the cache knows that it does not fit and leaves no marks
		hand, marks := m.hand, make([]record, len(m.records))
		for i, r := range m.records {
			marks[i] = *r
		}
		defer func() {
			if ok {
				panic(fmt.Sprintf("%d blocks fit, where %d did not", n, m.stuck))
			}
			m.hand = hand
			for i, r := range m.records {
				*r = marks[i]
			}
		}()
	}
	if !one {
		for range maxSeeds {
			seed := m.next()
			if seed == nil {
				break
			}
			limit := maxRunCost * n
			if free < n {
				limit = max(limit, seed.blocks)
			}
			if v := m.around(seed, n, limit); v != nil {
				return v, true
			}
		}
		for _, r := range m.records {
			r.taken = false
		}
	}
	if slot && some {
		return nil, true
	}
	for {
		r := m.next()
		if r == nil {
			if len(held) == 0 {
				m.stuck = min(m.stuck, n)
				return nil, false
			}
			r, held = held[0], held[1:]
		}
		out = append(out, r)
		mark(used, r.extents, false)
		if _, ok := fits(used, n); ok {
			return out, true
		}
	}
}

// next takes the next record by the policy.
func (m *model) next() *record {
	for {
		var first *record
		waiting := false
		for _, r := range m.records {
			if r.phase != phaseReady || r.taken || !m.sieve && !r.loose() || r.passed {
				continue
			}
			waiting = true
			if !r.late && (first == nil || m.turn(r) < m.turn(first)) {
				first = r
			}
		}
		switch {
		case !waiting:
			return nil
		case first == nil:
			for _, r := range m.records {
				r.late = false
			}
		case !first.loose():
			first.passed, first.visited = true, false
		case m.sieve && first.visited:
			first.late, first.visited = true, false
		default:
			first.taken = true
			m.hand = first.turn
			return first
		}
	}
}

func (m *model) turn(r *record) int {
	if m.sieve {
		return r.ready
	}
	return r.turn
}

// after follows the change of each record's class.
func (m *model) after() {
	byAge := slices.SortedFunc(slices.Values(m.records), func(a, b *record) int { return cmp.Compare(a.announced, b.announced) })
	for _, r := range byAge { // holds end in the order of their ages
		now := r.class()
		if now == classLoose && (r.was == classPinned || r.was == classHeld) {
			m.turns++
			r.turn = m.turns
			if r.passed {
				r.passed, r.late = false, true
			}
		}
		switch r.was {
		case classFilling, classQuarantined, classPinned:
			if now != r.was {
				m.stuck = noneStuck
			}
		}
		r.was = now
	}
}

func (r *record) class() class {
	switch {
	case r.phase == phaseFilling:
		return classFilling
	case r.phase == phaseQuarantined:
		return classQuarantined
	case r.pins > 0:
		return classPinned
	case len(r.holds) > 0:
		return classHeld
	}
	return classLoose
}

func (r *record) loose() bool { return r.class() == classLoose }

func (r *record) hit() { r.visited, r.used = r.used, true }

func (m *model) cost(r *record) int {
	dear := m.sieve && r.visited
	if !m.sieve {
		dear = r.turn > m.hand && dearParts*(r.turn-m.hand) > dearFrom*(m.turns-m.hand)
	}
	if dear {
		return dearCost * r.blocks
	}
	return r.blocks
}

// side is a run that ends at a seed: what goes for it, and how long it is then.
type side struct {
	gone      []*record
	run, cost int
}

// around are the seed and the neighbours that have to go for a run of n blocks, at the least cost.
func (m *model) around(seed *record, n, limit int) []*record {
	owner := make([]*record, m.blocks)
	extent := make([]region.Extent, m.blocks)
	for _, r := range m.records {
		for _, x := range r.extents {
			for b := x.Start; b < x.Start+x.Count; b++ {
				owner[b], extent[b] = r, x
			}
		}
	}
	sides := func(at, dir int) (out []side) {
		var s side
		for ; ; at += dir {
			switch {
			case at < 0 || at >= m.blocks || owner[at] != nil && !owner[at].loose():
				return append(out, s)
			case owner[at] == nil:
				s.run++
			default:
				out = append(out, s)
				s.gone = append(slices.Clone(s.gone), owner[at])
				s.run += int(extent[at].Count)
				if owner[at] != seed {
					s.cost += m.cost(owner[at])
				}
				at += dir * (int(extent[at].Count) - 1)
			}
		}
	}
	var best []*record
	least := limit + 1
	for _, x := range seed.extents {
		for _, l := range sides(int(x.Start)-1, -1) {
			for _, r := range sides(int(x.Start+x.Count), 1) {
				cost := seed.blocks + l.cost + r.cost
				if l.run+int(x.Count)+r.run >= n && cost < least {
					least = cost
					best = slices.Concat([]*record{seed}, l.gone, r.gone)
				}
			}
		}
	}
	var out []*record
	for _, r := range best {
		if !slices.Contains(out, r) {
			out = append(out, r)
		}
	}
	return out
}

// end takes a record's key away; its blocks too unless it is quarantined.
func (m *model) end(r *record, to phase) {
	if r.phase != phaseQuarantined { // the key it had may be another's by now
		m.changed(r.key)
	}
	r.phase, r.holds = to, nil
	if to == phaseGone {
		if c := r.was; c == classFilling || c == classQuarantined || c == classPinned {
			m.stuck = noneStuck
		}
		m.records = slices.DeleteFunc(m.records, func(o *record) bool { return o == r })
	}
}

func (m *model) changed(key string) {
	for _, w := range m.watches {
		if w.key == key {
			w.changed = true
		}
	}
}

func (m *model) heldBlocks() int {
	n := 0
	for _, r := range m.records {
		if len(r.holds) > 0 {
			n += r.blocks
		}
	}
	return n
}

func (m *model) pass(d time.Duration) {
	m.now += d
	for _, r := range m.records {
		for len(r.holds) > 0 && r.holds[0] <= m.now {
			r.holds = r.holds[1:]
			m.stats.HoldsLapsed++
		}
	}
}

func (m *model) want() Stats {
	s := m.stats
	s.Blocks, s.FreeBlocks = m.blocks, m.blocks
	for _, r := range m.records {
		s.FreeBlocks -= r.blocks
		s.Holds += len(r.holds)
		if len(r.holds) > 0 {
			s.HeldBlocks += r.blocks
		}
		switch r.phase {
		case phaseFilling:
			s.Filling++
			s.FillingBlocks += r.blocks
		case phaseQuarantined:
			s.Quarantined++
			s.QuarantinedBlocks += r.blocks
		case phaseReady:
			s.Ready++
			if r.pins > 0 {
				s.PinnedBlocks += r.blocks
			}
		}
	}
	s.Entries = s.Ready + s.Filling
	return s
}

type machine struct {
	model
	c    *Cache
	pins []*modelPin
	old  []*record // whose reservation is over
}

type modelPin struct {
	pin  *Pin
	r    *record
	over bool
}

func TestCacheBehavesAsItsModel(t *testing.T) {
	for _, policy := range []string{PolicyFIFO, PolicySIEVE} {
		t.Run(policy, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { checkModel(t, policy) })
		})
	}
}

func checkModel(t *testing.T, policy string) {
	rapid.Check(struct{ rapid.TB }{t}, func(t *rapid.T) { // not a *testing.T: a bubble has no Deadline
		m := &machine{}
		m.sieve, m.stuck = policy == PolicySIEVE, noneStuck
		m.blocks = rapid.IntRange(4, 64).Draw(t, "blocks")
		m.slots = rapid.IntRange(2, 32).Draw(t, "slots")
		share := rapid.SampledFrom([]float64{0.25, 0.5, 1}).Draw(t, "share")
		m.maxHeld = int(share * float64(m.blocks))
		m.lease = 10 * time.Second
		var gotEvicted, gotDropped []string
		g := region.Geometry{BlockBytes: testBlock, Blocks: m.blocks, Slots: m.slots}
		c, err := newCache(CacheOptions{
			HoldLease: m.lease, HoldShare: share, Policy: policy,
			Evicted:     func(key string, bytes int64) { gotEvicted = append(gotEvicted, fmt.Sprint(key, bytes)) },
			HoldDropped: func(key string, bytes int64) { gotDropped = append(gotDropped, fmt.Sprint(key, bytes)) },
		}, g, make([]byte, g.PoolBytes()), newAuditTable(t, m.slots))
		if err != nil {
			t.Fatal(err)
		}
		m.c = c
		for range rapid.IntRange(0, 24).Draw(t, "entries at first") {
			m.put(t)
			m.after()
		}
		for range rapid.IntRange(0, 12).Draw(t, "pins at first") {
			m.pin(t)
			m.after()
		}
		t.Repeat(map[string]func(*rapid.T){
			"Put":        m.put,
			"Put again":  m.put,
			"Reserve":    func(t *rapid.T) { m.reserve(t) },
			"Commit":     m.commit,
			"Discard":    m.discard,
			"Quarantine": m.quarantine,
			"Settle":     m.settle,
			"Pin":        m.pin,
			"Release":    m.release,
			"Hold":       m.hold,
			"DropHold":   m.dropHold,
			"Remove":     m.remove,
			"Watch":      m.watch,
			"Time": func(t *rapid.T) {
				d := time.Duration(rapid.IntRange(1, 6).Draw(t, "seconds")) * time.Second
				time.Sleep(d)
				m.pass(d)
			},
			"": func(t *rapid.T) {
				m.compare(t)
				if !slices.Equal(gotEvicted, m.evicted) || !slices.Equal(gotDropped, m.dropped) {
					t.Fatalf("told of evicted %v, dropped %v; want %v, %v", gotEvicted, gotDropped, m.evicted, m.dropped)
				}
			},
		})
	})
}

func drawKey(t *rapid.T) string {
	return fmt.Sprintf("k%d", rapid.IntRange(1, 24).Draw(t, "key"))
}

// reserve gives the record of a reservation that was made, nil if it was refused.
func (m *machine) reserve(t *rapid.T) *record {
	key := drawKey(t)
	most := rapid.SampledFrom([]int{1, 1, 2, 2, 4, 8, m.blocks / 2, m.blocks + 1}).Draw(t, "most")
	bytes := int64(rapid.IntRange(1, most*testBlock).Draw(t, "bytes"))
	s := Spec{Dtype: "torch.uint8", Shape: []int64{bytes, 1}, Bytes: bytes}
	old := m.find(key)
	if old != nil && rapid.Bool().Draw(t, "same") {
		s = old.spec
	}
	n := int((s.Bytes + testBlock - 1) / testBlock)
	wantErr := error(nil)
	var victims []*record
	switch {
	case n > m.blocks:
		wantErr = ErrTooLarge
	case old != nil && (old.spec.Bytes != s.Bytes):
		wantErr = ErrConflict
	case old != nil && old.phase == phaseFilling:
		wantErr = ErrPending
	case old != nil:
		wantErr = ErrHeld
		old.hit()
	default:
		var ok bool
		if victims, ok = m.victims(n); !ok {
			wantErr = ErrFull
			m.stats.Full++
		}
	}
	res, err := m.c.Reserve(key, s, rand.Uint64())
	if !errors.Is(err, wantErr) {
		t.Fatalf("Reserve(%q, %v): %v, want %v", key, s, err, wantErr)
	}
	if err != nil {
		return nil
	}
	i := res.Info()
	noSlot := len(m.records) == m.slots
	used := m.inUse()
	for _, v := range victims {
		mark(used, v.extents, false)
	}
	if len(i.Extents) != fewest(used, n) {
		t.Fatalf("%d blocks at %v; free were %v", n, i.Extents, freeRuns(used))
	}
	for _, x := range i.Extents {
		for b := x.Start; b < x.Start+x.Count; b++ {
			if used[b] {
				t.Fatalf("block %d of %v was in use", b, i.Extents)
			}
		}
	}
	// Victims whose blocks were not used stay, but for one if only a slot was lacking.
	gone := slices.DeleteFunc(slices.Clone(victims), func(r *record) bool { return !shareBlock(r.extents, i.Extents) })
	if len(gone) == 0 && noSlot {
		gone = victims[:1]
	}
	for _, r := range gone {
		if len(r.holds) > 0 {
			m.dropped = append(m.dropped, fmt.Sprint(r.key, r.spec.Bytes))
			m.stats.HoldsDropped += uint64(len(r.holds))
		}
		m.evicted = append(m.evicted, fmt.Sprint(r.key, r.spec.Bytes))
		m.stats.Evictions++
		m.end(r, phaseGone)
	}
	r := &record{key: key, spec: s, blocks: n, extents: i.Extents, slot: i.Slot, gen: i.Gen, phase: phaseFilling, res: res}
	m.records = append(m.records, r)
	return r
}

func (m *machine) put(t *rapid.T) {
	if r := m.reserve(t); r != nil {
		m.commitOf(t, r)
	}
}

func shareBlock(a, b []region.Extent) bool {
	for _, x := range a {
		for _, y := range b {
			if x.Start < y.Start+y.Count && y.Start < x.Start+x.Count {
				return true
			}
		}
	}
	return false
}

// drawReservation draws one that is open, or, now and then, one that is over.
func (m *machine) drawReservation(t *rapid.T) *record {
	var open []*record
	for _, r := range m.records {
		if r.phase == phaseFilling {
			open = append(open, r)
		}
	}
	if len(m.old) > 0 && rapid.IntRange(0, 4).Draw(t, "stale") == 0 {
		open = m.old
	}
	if len(open) == 0 {
		t.Skip("no reservation")
	}
	return rapid.SampledFrom(open).Draw(t, "reservation")
}

func (m *machine) commit(t *rapid.T) {
	m.commitOf(t, m.drawReservation(t))
}

func (m *machine) commitOf(t *rapid.T, r *record) {
	_, err := r.res.Commit(nil)
	if r.phase != phaseFilling {
		if !errors.Is(err, ErrStale) {
			t.Fatalf("Commit after the end: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	m.ticks++
	m.turns++
	r.phase, r.ready, r.turn = phaseReady, m.ticks, m.turns
	m.old = append(m.old, r)
	m.stats.Commits++
	if len(r.extents) > 1 {
		m.stats.Fragmented++
	}
	m.changed(r.key)
}

func (m *machine) discard(t *rapid.T) {
	r := m.drawReservation(t)
	r.res.Discard()
	if r.phase == phaseFilling {
		m.end(r, phaseGone)
		m.old = append(m.old, r)
		m.stats.Discards++
	}
}

func (m *machine) quarantine(t *rapid.T) {
	r := m.drawReservation(t)
	q := r.res.Quarantine()
	if r.phase == phaseFilling {
		m.end(r, phaseQuarantined)
		r.kept = q
		m.old = append(m.old, r)
		m.stats.Quarantines++
	} else if r.kept != nil && r.kept != q {
		t.Fatal("two quarantines of one reservation")
	} else if r.phase != phaseQuarantined {
		q.Settle() // of nothing
	}
}

func (m *machine) settle(t *rapid.T) {
	var kept []*record
	for _, r := range m.old {
		if r.kept != nil {
			kept = append(kept, r)
		}
	}
	if len(kept) == 0 {
		t.Skip("no quarantine")
	}
	r := rapid.SampledFrom(kept).Draw(t, "quarantine")
	r.kept.Settle()
	if r.phase == phaseQuarantined {
		m.end(r, phaseGone)
	}
}

func (m *machine) pin(t *rapid.T) {
	key := drawKey(t)
	r := m.find(key)
	p, err := m.c.Pin(key)
	switch {
	case r == nil:
		m.stats.Misses++
		if !errors.Is(err, ErrMissing) {
			t.Fatalf("Pin of an absent key: %v", err)
		}
	case r.phase == phaseFilling:
		m.stats.Misses++
		if !errors.Is(err, ErrNotReady) {
			t.Fatalf("Pin of a key being filled: %v", err)
		}
	case err != nil:
		t.Fatal(err)
	default:
		m.stats.Hits++
		r.hit()
		r.pins++
		m.pins = append(m.pins, &modelPin{pin: p, r: r})
	}
}

func (m *machine) release(t *rapid.T) {
	if len(m.pins) == 0 {
		t.Skip("no pin")
	}
	p := rapid.SampledFrom(m.pins).Draw(t, "pin")
	p.pin.Release()
	if !p.over {
		p.over = true
		p.r.pins--
	}
}

func (m *machine) hold(t *rapid.T) {
	key := drawKey(t)
	r := m.find(key)
	err := m.c.Hold(key)
	if r == nil {
		if !errors.Is(err, ErrMissing) {
			t.Fatalf("Hold of an absent key: %v", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if r.blocks > m.maxHeld {
		m.stats.HoldsDropped++
		m.dropped = append(m.dropped, fmt.Sprint(r.key, r.spec.Bytes))
		return
	}
	m.ticks++
	r.announced = m.ticks
	r.holds = append(r.holds, m.now+m.lease)
	for m.heldBlocks() > m.maxHeld {
		var oldest *record
		for _, o := range m.records {
			if len(o.holds) > 0 && (oldest == nil || o.announced < oldest.announced) {
				oldest = o
			}
		}
		m.stats.HoldsDropped += uint64(len(oldest.holds))
		m.dropped = append(m.dropped, fmt.Sprint(oldest.key, oldest.spec.Bytes))
		oldest.holds = nil
	}
}

func (m *machine) dropHold(t *rapid.T) {
	key := drawKey(t)
	m.c.DropHold(key)
	if r := m.find(key); r != nil && len(r.holds) > 0 {
		r.holds = r.holds[1:]
	}
}

func (m *machine) remove(t *rapid.T) {
	key := drawKey(t)
	r := m.find(key)
	err := m.c.Remove(key)
	switch {
	case r == nil && errors.Is(err, ErrMissing):
	case r != nil && r.phase == phaseFilling && errors.Is(err, ErrNotReady):
	case r != nil && r.phase == phaseReady && r.pins > 0 && errors.Is(err, ErrPinned):
	case r != nil && r.phase == phaseReady && r.pins == 0 && err == nil:
		m.end(r, phaseGone)
	default:
		t.Fatalf("Remove of %+v: %v", r, err)
	}
}

func (m *machine) watch(t *rapid.T) {
	key := drawKey(t)
	m.watches = append(m.watches, &watched{key: key, ch: m.c.Watch(key)})
}

func (m *machine) compare(t *rapid.T) {
	m.after()
	if err := m.c.check(); err != nil {
		t.Fatal(err)
	}
	if got, want := m.c.Stats(), m.want(); got != want {
		t.Fatalf("stats\n%+v, want\n%+v", got, want)
	}
	for _, w := range m.watches {
		if closed(w.ch) != w.changed {
			t.Fatalf("watch of %q: closed %v, want %v", w.key, !w.changed, w.changed)
		}
	}
	var ready, filling []*record
	for _, r := range m.records {
		switch r.phase {
		case phaseReady:
			ready = append(ready, r)
		case phaseFilling:
			filling = append(filling, r)
		}
	}
	slices.SortFunc(ready, func(a, b *record) int { return cmp.Compare(a.ready, b.ready) })
	entries := m.c.Entries()
	want := append(ready, filling...)
	if len(entries) != len(want) {
		t.Fatalf("%d entries, want %d", len(entries), len(want))
	}
	for i, r := range want {
		e := entries[i]
		state := Ready
		if r.phase == phaseFilling {
			state = Filling
		}
		if e.Key != r.key || e.State != state || e.Gen != r.gen || e.Slot != r.slot || e.Pins != r.pins || e.Holds != len(r.holds) ||
			!e.Spec.equal(r.spec) || !slices.Equal(e.Extents, r.extents) {
			t.Fatalf("entry %d is %+v, want %+v", i, e, r)
		}
		if got, s := m.c.Lookup(r.key); s != state || got.Gen != r.gen {
			t.Fatalf("Lookup(%q): %+v %v", r.key, got, s)
		}
	}
}
