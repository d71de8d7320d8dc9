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
			for _, o := range f.granted.ack.Ferry.Planes {
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
			a := f.granted.ack
			rs = append(rs, route{plane, a.AgentMetadata, nil, func(ctx context.Context) (transfer.Peer, error) {
				return f.c.addPlain(ctx, pr, a)
			}})
		}
	}
	return rs
}

// maxRegionBlocks is what fits into the largest ack.
const maxRegionBlocks = wire.MaxFrame / 14

// addPlain adds a plain peer's agent, after a look at its descriptor. A peer leaves that out where it thinks that the agent is known.
func (c *Consumer) addPlain(ctx context.Context, pr PlainReader, a *wire.Ack) (transfer.Peer, error) {
	addrs, err := c.plainBlocks(a.MemDescriptor)
	if err != nil {
		return nil, fmt.Errorf("%w: memory descriptor of %d bytes for an agent that is new here: %w", ErrBadAck, len(a.MemDescriptor), err)
	}
	return pr.AddPlainPeer(ctx, a.AgentMetadata, addrs, c.o.Compat.BlockBytes)
}

// plainBlocks gives the addresses of a plain peer's blocks. All of the descriptor is looked at before anything is allocated for it: one
// that is wrong costs no memory.
func (c *Consumer) plainBlocks(descriptor []byte) (addrs []uint64, err error) {
	block := c.o.Compat.BlockBytes
	blocks := 0
	err = wire.EachMemDescriptor(descriptor, maxRegionBlocks, func(i, n int, d wire.Descriptor) error {
		if d.Size != uint64(block) || d.Device != 0 {
			return fmt.Errorf("block %d has %d bytes on device %d, want %d on device 0", i, d.Size, d.Device, block)
		}
		blocks = n
		return nil
	})
	if err != nil {
		return nil, err
	}
	addrs = make([]uint64, blocks)
	err = wire.EachMemDescriptor(descriptor, maxRegionBlocks, func(i, _ int, d wire.Descriptor) error {
		addrs[i] = d.Addr
		return nil
	})
	return addrs, err
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

// open begins to make the peer readable on the best plane.
func (f *flight) open() event {
	f.endRead()
	r, ok := f.best()
	if !ok {
		f.err = fmt.Errorf("%w: no data plane of ours (%v) reads from %s%s%s", ErrUnreachable, f.c.planes, f.want.addr, f.needs(), f.after())
		return evGaveUp
	}
	l, err := f.peer.open(r.plane.Name(), r.metadata, r.add)
	if err != nil {
		f.err = err
		return evGaveUp
	}
	f.route, f.link = r, l
	f.timer.Reset(f.openWait())
	return evNone
}

// needs says which plane of ours would read what a plain peer granted, where none that is here does.
func (f *flight) needs() string {
	for _, p := range f.c.o.Planes {
		if _, ok := p.(PlainReader); ok || f.granted.own {
			return ""
		}
	}
	return ": it is an unmodified vLLM, which is read with nixl only"
}

// openWait is longer than the link's own limit, for a plane that does not keep to it.
func (f *flight) openWait() time.Duration { return 2 * f.c.t.Connect }

// opened is the end of adding the peer.
func (f *flight) opened() event {
	switch err := f.link.err; {
	case err == nil:
		return evOpened
	case errors.Is(err, transfer.ErrUnreachable):
		return f.outOfReach(err)
	default:
		return f.readFailed(err)
	}
}

func (f *flight) outOfReach(err error) event {
	name := f.route.plane.Name()
	f.beyond[name] = true
	f.err = fmt.Errorf("plane %s: %w", name, err)
	return evBeyond
}

// post starts the READ. While it is not posted nothing writes the destination.
func (f *flight) post() event {
	f.verifies = 0
	req := transfer.ReadRequest{Token: f.route.token, Remote: f.granted.remote, Local: f.res.Buffers()}
	if !f.granted.own {
		req.Notification = wire.Notification(f.granted.via.session, f.want.key)
	}
	rd, err := f.link.peer.Read(f.ctx, req)
	switch {
	case err == nil:
		f.read = rd
		f.timer.Reset(f.c.t.Read)
		if f.granted.own {
			f.renewal.Reset(f.granted.renew) // a READ may be allowed more time than the lease has
		}
		return evNone
	case f.ctx.Err() != nil:
		return evReadFailed // not the plane's fault; the next state sees that the flight is over
	case errors.Is(err, transfer.ErrUnreachable):
		f.peer.retire(f.link)
		return f.outOfReach(err)
	default:
		return f.readFailed(err)
	}
}

// readEnded is the READ's terminal status: nothing writes the destination from here on.
func (f *flight) readEnded() event {
	if err := f.read.Err(); err != nil {
		return f.readFailed(err)
	}
	if g := f.granted; !g.own {
		if age := time.Since(g.asked); g.asked.IsZero() || age > f.c.t.PlainLease {
			f.c.stats.verifyFailed.Add(1)
			return f.again(fmt.Errorf("%w: READ of %q from %s ended %v after it was asked for, and a plain peer keeps what it grants for %v only",
				ErrChanged, f.want.key, f.want.addr, age.Round(time.Millisecond), f.c.t.PlainLease), evReadFailed)
		}
	}
	return evRead
}

// readFailed counts a failure of the plane in use. Unless it is about the one READ only, the next READ adds the peer anew.
func (f *flight) readFailed(err error) event {
	name := f.route.plane.Name()
	f.failed[name]++
	f.c.stats.readErrors.Add(1)
	if !errors.Is(err, transfer.ErrDenied) && !errors.Is(err, transfer.ErrBadRequest) && !errors.Is(err, transfer.ErrCanceled) {
		f.peer.retire(f.link)
	}
	bad := errors.Is(err, transfer.ErrBadRequest)
	err = fmt.Errorf("%w: READ of %q from %s by plane %s: %w", ErrPeer, f.want.key, f.want.addr, name, err)
	if bad {
		f.err = err
		return evGaveUp // it will not get better
	}
	return f.again(err, evReadFailed)
}

// endRead gives the link back once no READ uses it.
func (f *flight) endRead() {
	if f.link != nil {
		f.peer.unlink(f.link)
		f.link = nil
	}
}

// verify asks an own peer whether the bytes are those that it granted. A plain peer cannot say; it has been notified. Where it is
// known here that they are, by the slot table that the plane sees or since the grant still stands, the question only ends the grant, is
// put a little later, and nobody waits for the answer.
func (f *flight) verify() event {
	if !f.granted.own {
		return f.check()
	}
	f.verifies++
	g := f.granted
	w, known := f.link.peer.(transfer.Witness)
	known = known && w.Holds(g.ack.Ferry.Slot, g.gen) || f.peer.vouches(g.via, g.asked, g.lease)
	v := &wire.Verify{Key: f.want.key, Session: g.via.session, Grant: g.grant, Gen: g.gen}
	if known {
		ev := f.check()
		if ev == evVerified {
			f.peer.verifyLater(g.via, v)
		}
		return ev
	}
	// If it cannot be sent now, the wait for the answer ends and it is sent again.
	_ = f.peer.send(g.via, wire.AppendVerify(nil, v))
	f.timer.Reset(f.c.t.AckOwn)
	return evNone
}

// check compares the checksum, where there is one, of bytes that are verified otherwise.
func (f *flight) check() event {
	f.sum = f.granted.sum
	if !f.c.o.Verify {
		return evVerified
	}
	sum := f.res.Checksum()
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
		_, _ = h.Write(b)
	}
	return h.Sum64()
}

// quarantine gives the key up but not the memory: the plane may write it until the READ has ended. No clock frees it. After
// Timeouts.Quarantine, or when the consumer closes, the peer's link is closed under the READ, which is the most that can be asked
// of a plane. It takes a reference of the link of its own.
func (c *Consumer) quarantine(w wanted, res *Reservation, rd transfer.Read, p *peer, l *planeLink) {
	q := res.Quarantine()
	c.stats.quarantined.Add(1)
	c.stats.quarantines.Add(1)
	c.work.Add(1)
	p.link(l)
	rd.Cancel()
	go func() {
		defer c.work.Done()
		overdue := time.NewTimer(c.t.Quarantine)
		defer overdue.Stop()
		select {
		case <-rd.Done():
		case <-c.ctx.Done():
			p.drop(l)
			<-rd.Done()
		case <-overdue.C:
			c.stats.overdue.Add(1)
			c.log.warn("overdue", w.addr, "a READ that was given up has not ended; its destination stays in quarantine until it does",
				"key", w.key, "plane", l.name, "bytes", w.spec.Bytes, "since", c.t.Quarantine)
			p.drop(l)
			<-rd.Done()
		}
		q.Settle()
		c.stats.quarantined.Add(-1)
		p.unlink(l)
	}()
}
