package ec

// ring is a doubly linked list whose links lie in the elements, so that an element is taken out where it is met and nothing is
// allocated. The zero value is empty.
type ring[T any] struct {
	root link[T]
	len  int
}

// link is an element's place in one ring.
type link[T any] struct {
	prev, next *link[T]
	of         *T
}

func (l *link[T]) linked() bool { return l.next != nil }

// pushBack appends v, whose link is l.
func (r *ring[T]) pushBack(v *T, l *link[T]) {
	if r.root.next == nil {
		r.root.prev, r.root.next = &r.root, &r.root
	}
	l.of, l.prev, l.next = v, r.root.prev, &r.root
	l.prev.next, l.next.prev = l, l
	r.len++
}

// remove takes l out; it must be in r.
func (r *ring[T]) remove(l *link[T]) {
	l.prev.next, l.next.prev = l.next, l.prev
	*l = link[T]{}
	r.len--
}

// front is the first element, nil if there is none.
func (r *ring[T]) front() *T {
	if r.root.next == nil {
		return nil
	}
	return r.root.next.of
}

// back is the last element, nil if there is none.
func (r *ring[T]) back() *T {
	if r.root.prev == nil {
		return nil
	}
	return r.root.prev.of
}

// after is the element that follows the one of link l, nil if it is the last.
func (r *ring[T]) after(l *link[T]) *T { return l.next.of }
