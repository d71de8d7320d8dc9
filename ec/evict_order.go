package ec

// order is a set of entries in the order of their turns. Those that come in that order are a list; those put back, in any order,
// are a heap. An entry is in one order at most.
type order struct {
	queue ring[entry] // by turn
	back  []*entry    // min-heap by turn; place i holds the entry whose heap is i+1
}

// queued tells if an entry is in an order.
func (e *entry) queued() bool { return e.queue.linked() || e.heap != 0 }

func (o *order) len() int { return o.queue.len + len(o.back) }

// put takes in an entry that is in no order.
func (o *order) put(e *entry) {
	if last := o.queue.back(); last == nil || last.turn < e.turn {
		o.queue.pushBack(e, &e.queue)
		return
	}
	o.back = append(o.back, e)
	e.heap = int32(len(o.back))
	o.up(len(o.back) - 1)
}

// first is the entry with the earliest turn, nil if there is none. It stays.
func (o *order) first() *entry {
	e := o.queue.front()
	if len(o.back) > 0 && (e == nil || o.back[0].turn < e.turn) {
		return o.back[0]
	}
	return e
}

// coming is first but for those put back.
func (o *order) coming() *entry { return o.queue.front() }

// remove takes out an entry that is in this order.
func (o *order) remove(e *entry) {
	if e.queue.linked() {
		o.queue.remove(&e.queue)
		return
	}
	i, last := int(e.heap)-1, len(o.back)-1
	o.swap(i, last)
	o.back[last] = nil
	o.back = o.back[:last]
	e.heap = 0
	if i < last {
		o.up(i)
		o.down(i)
	}
}

func (o *order) swap(i, j int) {
	o.back[i], o.back[j] = o.back[j], o.back[i]
	o.back[i].heap, o.back[j].heap = int32(i+1), int32(j+1)
}

func (o *order) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if o.back[parent].turn < o.back[i].turn {
			return
		}
		o.swap(parent, i)
		i = parent
	}
}

func (o *order) down(i int) {
	for {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(o.back); child++ {
			if o.back[child].turn < o.back[least].turn {
				least = child
			}
		}
		if least == i {
			return
		}
		o.swap(least, i)
		i = least
	}
}
