package ec

// policy says in which order ready entries are evicted. Its methods are called under the cache's lock; it owns entry.queue and
// entry.heap. It looks at entry.class but is not told when an entry is pinned or held: such an entry is passed over when it is
// met, and comes back by putBack.
type policy interface {
	// add takes in an entry that has become ready.
	add(e *entry)
	// hit says that an entry was used.
	hit(e *entry)
	// next takes out the next entry to evict, always of classLoose; nil if there is none.
	next() *entry
	// putBack gives back its place to an entry that next took out or passed over. It does nothing if the entry has its place.
	putBack(e *entry)
	// remove takes out an entry that goes for another reason. It does nothing if the entry was taken out or passed over.
	remove(e *entry)
}

// fifo evicts in the order of commits. An entry that may not go when its turn comes is forgotten until it is put back, so a
// pinned entry costs one step and not one step an eviction; those put back are a heap, since they come back in any order.
type fifo struct {
	queue ring[entry] // by seq
	back  []*entry    // min-heap by seq; place i holds the entry whose heap is i+1
}

func newFIFO() *fifo { return &fifo{} }

func (f *fifo) add(e *entry) { f.queue.pushBack(e, &e.queue) }

func (f *fifo) hit(*entry) {}

func (f *fifo) next() *entry {
	for {
		e := f.queue.front()
		if len(f.back) > 0 && (e == nil || f.back[0].seq < e.seq) {
			e = f.back[0]
		}
		if e == nil {
			return nil
		}
		f.remove(e)
		if e.class == classLoose {
			return e
		}
	}
}

func (f *fifo) putBack(e *entry) {
	if e.queue.linked() || e.heap != 0 {
		return
	}
	f.back = append(f.back, e)
	e.heap = int32(len(f.back))
	f.up(len(f.back) - 1)
}

func (f *fifo) remove(e *entry) {
	if e.queue.linked() {
		f.queue.remove(&e.queue)
		return
	}
	if e.heap == 0 {
		return
	}
	i, last := int(e.heap)-1, len(f.back)-1
	f.swap(i, last)
	f.back[last] = nil
	f.back = f.back[:last]
	e.heap = 0
	if i < last {
		f.up(i)
		f.down(i)
	}
}

func (f *fifo) swap(i, j int) {
	f.back[i], f.back[j] = f.back[j], f.back[i]
	f.back[i].heap, f.back[j].heap = int32(i+1), int32(j+1)
}

func (f *fifo) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if f.back[parent].seq < f.back[i].seq {
			return
		}
		f.swap(parent, i)
		i = parent
	}
}

func (f *fifo) down(i int) {
	for {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(f.back); child++ {
			if f.back[child].seq < f.back[least].seq {
				least = child
			}
		}
		if least == i {
			return
		}
		f.swap(least, i)
		i = least
	}
}
