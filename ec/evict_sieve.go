package ec

// sieve keeps the order of commits and a hand that goes through it from the oldest to the newest, round after round. It evicts
// what was not used since the hand last came by, and clears the mark of what was. A use moves nothing.
//
// The first use after the commit leaves no mark: it is the one that the entry was made for, and would mark them all.
//
// The hand is the border between two orders: the entries that it has yet to come to in this round, and those that wait for the
// next. An entry that may not go when the hand comes counts as used, and is forgotten until it is freed: it is then behind the hand.
type sieve struct {
	orders [2]order
	now    uint8 // the one that the hand is in
}

// sieveMark is what sieve keeps of an entry.
type sieveMark struct {
	used    bool // once, or more often
	visited bool // again since the hand came by
	passed  bool // met when it could not go: in no order
	in      uint8
}

func (s *sieve) put(e *entry, in uint8) {
	e.sieve.in = in
	s.orders[in].put(e)
}

func (s *sieve) add(e *entry) {
	e.turn = e.seq
	s.put(e, s.now)
}

func (s *sieve) hit(e *entry) {
	e.sieve.visited = e.sieve.used
	e.sieve.used = true
}

func (s *sieve) cost(e *entry) int {
	if e.sieve.visited {
		return dearCost * e.blocks
	}
	return e.blocks
}

func (s *sieve) next() *entry {
	for s.orders[0].len()+s.orders[1].len() > 0 { // ends: an entry is met twice at most, the second time without a mark
		e := s.orders[s.now].first()
		if e == nil {
			s.now = 1 - s.now
			continue
		}
		s.orders[s.now].remove(e)
		visited := e.sieve.visited
		e.sieve.visited = false
		switch {
		case e.class != classLoose:
			e.sieve.passed = true
		case visited:
			s.put(e, 1-s.now)
		default:
			return e
		}
	}
	return nil
}

func (s *sieve) coming() *entry { return s.orders[s.now].coming() }

func (s *sieve) putBack(e *entry) {
	if !e.queued() {
		s.put(e, s.now) // the hand goes back to it
	}
}

func (s *sieve) freed(e *entry) {
	if e.sieve.passed {
		e.sieve.passed = false
		s.put(e, 1-s.now)
	}
}

func (s *sieve) remove(e *entry) {
	if e.queued() {
		s.orders[e.sieve.in].remove(e)
	}
}
