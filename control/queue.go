package control

import (
	"errors"
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

// addressShare is which part of Options.TotalBytes one address may use.
const addressShare = 4

// total is what waits for all destinations of a loop, or for those of a router at one address. Guarded by Loop.mu.
type total struct {
	whole *total // nil: this is all
	limit int64
	bytes int64 // in outlets
	flow  flow  // of libzmq
	peers int   // at the address
}

// errBudget comes with the ErrQueueFull of a body that there was no room for in a total.
var errBudget = errors.New("too much waits for peers that do not read")

// waiting is all of it. A body on its way from one to the other counts twice. Caller holds Loop.mu.
func (t *total) waiting() int64 { return t.bytes + t.flow.held() }

// add counts bytes in outlets. Caller holds Loop.mu.
func (t *total) add(bytes int64) {
	for ; t != nil; t = t.whole {
		t.bytes += bytes
	}
}

// fits says whether a body of that size may wait besides. Caller holds Loop.mu.
func (t *total) fits(size int64) error {
	if size < large {
		return nil
	}
	for ; t != nil; t = t.whole {
		if t.waiting()+size <= t.limit {
			continue
		}
		of := "all destinations"
		if t.whole != nil {
			of = "one address"
		}
		return fmt.Errorf("%w: %w: %d bytes more would be over %d for %s, see Options.TotalBytes", ErrQueueFull, errBudget, size, t.limit, of)
	}
	return nil
}

// join gives the total of the destinations at an address, which one more now counts for; leave is its end. Owner only; caller holds Loop.mu.
func (l *Loop) join(addr string) *total {
	t := l.addresses[addr]
	if t == nil {
		limit := max(l.opts.TotalBytes/addressShare, l.opts.QueueBytes)
		t = &total{whole: &l.total, limit: limit, flow: newFlow(l.total.flow)}
		l.addresses[addr] = t
	}
	t.peers++
	return t
}

func (l *Loop) leave(addr string, t *total) {
	if t.peers--; t.peers == 0 {
		delete(l.addresses, addr)
		t.flow.drop()
		t.flow = flow{}
	}
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
