package ec

import "fmt"

// Policies of eviction, for CacheOptions.Policy.
const (
	// PolicyFIFO evicts what has been free to go for longest, as the peers do: since its commit, or since its last pin or hold
	// ended.
	PolicyFIFO = "fifo"
	// PolicySIEVE passes over what was used since it was last looked at (Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024).
	PolicySIEVE = "sieve"
)

// policy says in which order ready entries are evicted. Its methods are called under the cache's lock; it owns entry.queue,
// entry.heap, entry.turn and entry.sieve. It looks at entry.class but is not told when an entry is pinned or held: such an entry
// is passed over when it is met.
type policy interface {
	// add takes in an entry that has become ready.
	add(e *entry)
	// hit says that an entry was used.
	hit(e *entry)
	// next takes out the next entry to evict, always of classLoose; nil if there is none.
	next() *entry
	// putBack gives back its place to an entry that next took out. It does nothing if the entry has its place.
	putBack(e *entry)
	// freed says that an entry, passed over or not, is of classLoose again.
	freed(e *entry)
	// cost is how much is lost if an entry goes before its turn, for the sake of its place: in blocks of one that was never used.
	cost(e *entry) int
	// coming is the entry that next will most likely give, nil if there is none to name at no cost. It stays.
	coming() *entry
	// remove takes out an entry that goes for another reason. It does nothing if the entry was taken out or passed over.
	remove(e *entry)
}

func newPolicy(name string) (policy, error) {
	switch name {
	case "", PolicyFIFO:
		return &fifo{}, nil
	case PolicySIEVE:
		return &sieve{}, nil
	}
	return nil, fmt.Errorf("%w: Policy %q; give %q or %q", ErrOptions, name, PolicyFIFO, PolicySIEVE)
}

// What an entry costs that goes before its turn, though it is likely to be used again: so many times its blocks. With 32, on Zipf
// traces (bench/cache), the hit rate is 2 to 4 points higher than with 1, and up to 0.3% of entries end in pieces. More gains
// nothing. To fifo these are the last 3 of 8 to go, reckoned by turns: with 4 of 8 the hit rate is 0.3 points higher, and 2% end
// in pieces.
const (
	dearCost  = 32
	dearFrom  = 5
	dearParts = 8
)

// fifo evicts in the order in which entries became free to go. One that may not go when its turn comes is forgotten until it is
// freed, so a pinned entry costs one step and not one step an eviction.
type fifo struct {
	order
	turns uint64 // given so far
	hand  uint64 // the one that next came to last
}

func (f *fifo) add(e *entry) {
	f.turns++
	e.turn = f.turns
	f.put(e)
}

func (f *fifo) freed(e *entry) {
	f.remove(e)
	f.add(e)
}

func (f *fifo) hit(*entry) {}

func (f *fifo) cost(e *entry) int {
	if e.turn > f.hand && dearParts*(e.turn-f.hand) > dearFrom*(f.turns-f.hand) {
		return dearCost * e.blocks
	}
	return e.blocks
}

func (f *fifo) next() *entry {
	for {
		e := f.first()
		if e == nil {
			return nil
		}
		f.order.remove(e)
		if e.class == classLoose {
			f.hand = e.turn
			return e
		}
	}
}

func (f *fifo) putBack(e *entry) {
	if !e.queued() {
		f.put(e)
	}
}

func (f *fifo) remove(e *entry) {
	if e.queued() {
		f.order.remove(e)
	}
}
