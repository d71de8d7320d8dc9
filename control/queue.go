package control

// sendq holds the messages accepted for one destination and not yet given to libzmq. Send appends to in under Loop.mu; the owner
// works through out without the lock and swaps the two when out is empty.
type sendq struct {
	in  [][]byte // guarded by Loop.mu
	out [][]byte // owner only
	at  int      // next in out; owner only

	n     int   // messages in both; guarded by Loop.mu
	bytes int64 // their bytes; guarded by Loop.mu
}

// push accepts body or says why not. Caller holds Loop.mu.
func (q *sendq) push(body []byte, o *Options) error {
	size := int64(len(body))
	switch {
	case size > o.QueueBytes:
		return ErrTooLarge
	case q.n >= o.Queue || q.bytes+size > o.QueueBytes:
		return ErrQueueFull
	}
	q.in = append(q.in, body)
	q.n++
	q.bytes += size
	return nil
}

// refill makes the messages accepted meanwhile available to the owner, and says whether there are any. Caller holds Loop.mu.
func (q *sendq) refill() bool {
	if q.at < len(q.out) {
		return true
	}
	q.in, q.out, q.at = q.out[:0], q.in, 0
	return len(q.out) > 0
}

// next gives the message at the head. Owner only.
func (q *sendq) next() ([]byte, bool) {
	if q.at == len(q.out) {
		return nil, false
	}
	return q.out[q.at], true
}

// pop drops the head, whose bytes remain accounted for until settle. Owner only.
func (q *sendq) pop() {
	q.out[q.at] = nil // the body may be large: let it go now
	q.at++
}

// settle accounts for messages that left. Caller holds Loop.mu.
func (q *sendq) settle(n int, bytes int64) {
	q.n -= n
	q.bytes -= bytes
}

// clear drops everything and returns how many messages that was. Owner only; caller holds Loop.mu.
func (q *sendq) clear() int {
	n := q.n
	*q = sendq{}
	return n
}
