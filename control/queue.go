package control

import (
	"fmt"
	"syscall"
	"unsafe"
)

// outlet is what waits for one destination: the messages accepted and not yet given to libzmq, and a count of what libzmq holds.
// Send appends to in under Loop.mu; the owner works through out without the lock, and swaps the two when out is empty.
type outlet struct {
	in    []parcel // guarded by Loop.mu
	out   []parcel // owner only
	at    int      // next in out; owner only
	flow  flow
	total *total // that it counts for

	n     int   // messages in both; guarded by Loop.mu
	bytes int64 // their cost; guarded by Loop.mu
}

// holds says whether something waits in q or in libzmq.
func (l *Loop) holds(q *outlet) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return q.n > 0 || q.flow.held() > 0
}

// push accepts p or says why not. Caller holds Loop.mu.
func (q *outlet) push(p parcel, o *Options) error {
	size := p.cost()
	switch {
	case size > o.QueueBytes:
		return fmt.Errorf("%w: %d bytes, where Options.QueueBytes allows %d", ErrTooLarge, size, o.QueueBytes)
	case q.n >= o.Queue || q.bytes+q.flow.held()+size > o.QueueBytes:
		return ErrQueueFull
	}
	if err := q.total.fits(size); err != nil {
		return err
	}
	q.in = append(q.in, p)
	q.n++
	q.bytes += size
	q.total.add(size)
	return nil
}

// drain hands messages to libzmq. It returns how many, and 0 when there are none left, syscall.EAGAIN when libzmq has no room, or
// what else stopped it. Owner only. settled is called under Loop.mu when there are none left.
func (q *outlet) drain(l *Loop, socket unsafe.Pointer, id string, settled func()) (sent int, errno syscall.Errno) {
	n, bytes := 0, int64(0) // handed over and still accounted for
	for {
		for q.at < len(q.out) && errno == 0 {
			p := q.out[q.at]
			if errno = send(socket, q.flow, id, p); errno == 0 {
				q.out[q.at] = parcel{} // let go of it now: it may be large
				q.at++
				n++
				bytes += p.cost()
			}
		}
		l.mu.Lock()
		q.n -= n
		q.bytes -= bytes
		q.total.add(-bytes)
		if errno == 0 {
			q.in, q.out, q.at = q.out[:0], q.in, 0
		}
		done := errno != 0 || len(q.out) == 0
		if done && errno == 0 && settled != nil {
			settled()
		}
		l.mu.Unlock()
		sent += n
		if done {
			return sent, errno
		}
		n, bytes = 0, 0
	}
}

// clear drops what waits and returns how many messages that was. Owner only; caller holds Loop.mu.
func (q *outlet) clear() int {
	n := q.n
	q.total.add(-q.bytes)
	q.in, q.out, q.at, q.n, q.bytes = nil, nil, 0, 0, 0
	return n
}
