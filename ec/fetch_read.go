package ec

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// route is one way to READ what was granted.
type route struct {
	plane    transfer.Plane
	metadata []byte
	token    []byte
	add      func(context.Context) (transfer.Peer, error)
}

// routes lists the ways of the ack in hand, in this node's order, best first; those that failed before come last, those that
// cannot reach the peer not at all.
func (f *flight) routes() []route {
	var rs []route
	for _, plane := range f.c.o.Planes {
		if f.beyond[plane.Name()] {
			continue
		}
		if f.granted.own {
			for _, o := range f.ack.Ferry.Planes {
				if o.Name == plane.Name() {
					rs = append(rs, route{plane, o.Metadata, o.Token, func(ctx context.Context) (transfer.Peer, error) {
						return plane.AddPeer(ctx, o.Metadata)
					}})
					break
				}
			}
			continue
		}
		if pr, ok := plane.(PlainReader); ok {
			a := f.ack
			rs = append(rs, route{plane, a.AgentMetadata, nil, func(ctx context.Context) (transfer.Peer, error) {
				return pr.AddPlainPeer(ctx, a.AgentMetadata, a.MemDescriptor)
			}})
		}
	}
	return rs
}

// best is the route with the fewest failures so far.
func (f *flight) best() (route, bool) {
	var best route
	found := false
	for _, r := range f.routes() {
		if !found || f.failed[r.plane.Name()] < f.failed[best.plane.Name()] {
			best, found = r, true
		}
	}
	return best, found
}

// startRead posts the READ on the best plane that reaches the peer.
func (f *flight) startRead() event {
	f.verifies = 0
	for {
		r, ok := f.best()
		if !ok {
			f.err = fmt.Errorf("%w: no data plane of ours (%v) reads from %s%s", ErrUnreachable, f.c.planes, f.want.addr, f.after())
			return evGaveUp
		}
		err := f.post(r)
		switch {
		case err == nil:
			f.timer.Reset(f.c.t.Read)
			return evNone
		case f.ctx.Err() != nil:
			return f.ended()
		case errors.Is(err, transfer.ErrUnreachable):
			f.beyond[r.plane.Name()] = true
			f.err = fmt.Errorf("plane %s: %w", r.plane.Name(), err)
			continue
		}
		return f.readFailed(r.plane.Name(), err)
	}
}

func (f *flight) post(r route) error {
	l, err := f.peer.open(f.ctx, r.plane.Name(), r.metadata, r.add)
	if err != nil {
		return err
	}
	req := transfer.ReadRequest{Token: r.token, Remote: f.granted.remote, Local: f.res.Buffers()}
	if !f.granted.own {
		req.Notification = wire.Notification(f.peer.session, f.want.key)
	}
	rd, err := l.peer.Read(f.ctx, req)
	if err != nil {
		f.distrust(l, err)
		f.peer.unlink(l)
		return err
	}
	f.read, f.link = rd, l
	return nil
}

// readEnded is the READ's terminal status: nothing writes the destination from here on.
func (f *flight) readEnded() event {
	err := f.read.Err()
	if err == nil {
		return evRead
	}
	f.distrust(f.link, err)
	return f.readFailed(f.link.name, err)
}

// endRead gives the link back once the READ has ended.
func (f *flight) endRead() {
	if f.link != nil {
		f.peer.unlink(f.link)
		f.link = nil
	}
}

func (f *flight) readFailed(plane string, err error) event {
	f.failed[plane]++
	f.c.stats.readErrors.Add(1)
	err = fmt.Errorf("%w: READ of %q from %s by plane %s: %w", ErrPeer, f.want.key, f.want.addr, plane, err)
	if errors.Is(err, transfer.ErrBadRequest) {
		f.err = err
		return evGaveUp // it will not get better
	}
	return f.again(err, evReadFailed)
}

// distrust retires a link unless the error is about the one READ only: the next READ adds the peer anew.
func (f *flight) distrust(l *planeLink, err error) {
	if !errors.Is(err, transfer.ErrDenied) && !errors.Is(err, transfer.ErrBadRequest) && !errors.Is(err, transfer.ErrCanceled) {
		f.peer.retire(l)
	}
}

// verify asks an own peer whether the bytes are those that it granted. A plain peer cannot say; it has been notified.
func (f *flight) verify() event {
	if !f.granted.own {
		return f.check()
	}
	f.verifies++
	g := f.granted
	f.timer.Reset(f.c.t.AckOwn)
	// If it cannot be sent now, the wait for the answer ends and it is sent again.
	f.peer.send(wire.AppendVerify(nil, &wire.Verify{Key: f.want.key, Session: f.peer.session, Grant: g.grant, Gen: g.gen}))
	return evNone
}

// check compares the checksum, where there is one, of bytes that are verified otherwise.
func (f *flight) check() event {
	f.sum = f.granted.sum
	if !f.c.o.Verify {
		return evVerified
	}
	sum := checksum(f.res.Buffers())
	if f.sum != nil && sum != *f.sum {
		f.c.stats.checksumFailed.Add(1)
		f.spoiled++
		err := fmt.Errorf("%w: %q from %s by plane %s: %016x, want %016x", ErrChecksum, f.want.key, f.want.addr, f.link.name, sum, *f.sum)
		if f.spoiled > 1 {
			f.err = err
			return evGaveUp
		}
		f.failed[f.link.name]++
		return f.again(err, evNotVerified)
	}
	f.sum = &sum
	return evVerified
}

// checksum is xxh3 of an encoding's bytes.
func checksum(bufs [][]byte) uint64 {
	if len(bufs) == 1 {
		return xxh3.Hash(bufs[0])
	}
	h := xxh3.New()
	for _, b := range bufs {
		h.Write(b)
	}
	return h.Sum64()
}

// quarantine gives the key up but not the memory: the plane may write it until the READ has ended. No clock frees it. After
// Timeouts.Quarantine the peer's link is closed under the READ, which is the most that can be asked of a plane.
func (f *flight) quarantine() {
	c, rd, l, p := f.c, f.read, f.link, f.peer
	q := f.res.Quarantine()
	c.stats.quarantined.Add(1)
	c.stats.quarantines.Add(1)
	c.quarantine.Add(1)
	rd.Cancel()
	go func() {
		defer c.quarantine.Done()
		overdue := time.NewTimer(c.t.Quarantine)
		defer overdue.Stop()
		select {
		case <-rd.Done():
		case <-overdue.C:
			c.stats.overdue.Add(1)
			c.log.warn("overdue", f.want.addr, "a READ that was given up has not ended; its destination stays in quarantine until it does",
				"key", f.want.key, "plane", l.name, "bytes", f.want.spec.Bytes, "since", c.t.Quarantine)
			p.drop(l)
			<-rd.Done()
		}
		q.Settle()
		c.stats.quarantined.Add(-1)
		p.unlink(l)
	}()
}
