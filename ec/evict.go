package ec

import "fmt"

// Policies of eviction, for CacheOptions.Policy.
const (
	// PolicyFIFO evicts in the order of commits, as the peers do.
	PolicyFIFO = "fifo"
	// PolicySIEVE passes over what was used since it was last looked at (Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024).
	PolicySIEVE = "sieve"
)

// policy says in which order ready entries are evicted. Its methods are called under the cache's lock; it owns entry.queue,
// entry.heap and entry.sieve. It looks at entry.class but is not told when an entry is pinned or held: such an entry is passed
// over when it is met, and comes back by putBack.
type policy interface {
	// add takes in an entry that has become ready.
	add(e *entry)
	// hit says that an entry was used.
	hit(e *entry)
	// next takes out the next entry to evict, always of classLoose; nil if there is none.
	next() *entry
	// putBack gives back its place to an entry that next took out or passed over. It does nothing if the entry has its place.
	putBack(e *entry)
	// cost is how much is lost if an entry goes before its turn, for the sake of its place: in blocks of one that was never used.
	cost(e *entry) int
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

// fifo evicts in the order of commits. An entry that may not go when its turn comes is forgotten until it is put back, so a
// pinned entry costs one step and not one step an eviction.
type fifo struct{ order }

func (f *fifo) add(e *entry) { f.put(e) }

func (f *fifo) hit(*entry) {}

func (f *fifo) cost(e *entry) int { return e.blocks }

func (f *fifo) next() *entry {
	for {
		e := f.first()
		if e == nil {
			return nil
		}
		f.order.remove(e)
		if e.class == classLoose {
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
