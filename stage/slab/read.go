package slab

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Inline is the plane's name of what came in the metadata itself.
const Inline = "inline"

// quarantine is how long a READ that was given up may go on. After it the plane is made to end it, by closing the peer.
const quarantine = 60 * time.Second

// Read READs all tensors that m describes into the slices of into, which has one for each of m.Specs, by the first plane that both
// ends have: for own producers what m.Ferry offers, for plain ones the NIXL agent of m. It gives the plane's name ("inline" for bytes
// that came in m itself). On success, all bytes are in place.
//
// If ctx is done, or the slab closed, before the READ is over, Read returns ctx's error, or ErrClosed, and the
// READ may still write into the buffer: see Buffer.Idle. A READ that fails on one plane is tried on the next, or, with a plain producer, once more.
// Errors: ErrNoPlane, ErrMismatch, ErrClosed, and those of package transfer (ErrDenied, ErrPeerLost, ..).
func (s *Slab) Read(ctx context.Context, m *wire.Metadata, into *Buffer) (plane string, err error) {
	if err := into.fits(m); err != nil {
		return "", err
	}
	if !s.enter() {
		return "", ErrClosed
	}
	defer s.work.Done()
	if err := into.begin(); err != nil {
		return "", err
	}
	switch f := m.Ferry; {
	case into.bytes == 0:
		into.end()
		return Inline, nil
	case into.OnDevice() || f == nil || f.Inline == nil && len(f.Offsets) == 0:
		return s.readPlaces(ctx, m, into)
	case f.Inline != nil:
		defer into.end()
		return Inline, into.fill(f.Inline)
	}
	return s.readOffered(ctx, m, into)
}

// fits says whether m's tensors are of b's sizes.
func (b *Buffer) fits(m *wire.Metadata) error {
	if len(m.Specs) != len(b.spans) {
		return fmt.Errorf("%w: %d tensors into a buffer of %d", ErrMismatch, len(m.Specs), len(b.spans))
	}
	for i := range b.spans {
		if n := b.size(i); m.Specs[i].Size != n {
			return fmt.Errorf("%w: tensor %d has %d bytes, the buffer %d for it", ErrMismatch, i, m.Specs[i].Size, n)
		}
	}
	return nil
}

func (b *Buffer) fill(inline []byte) error {
	if int64(len(inline)) != b.bytes {
		return fmt.Errorf("%w: %d bytes inline for %d", ErrMismatch, len(inline), b.bytes)
	}
	for _, to := range b.slices {
		inline = inline[copy(to, inline):]
	}
	return nil
}

// remote gives where m's tensors are in the memory that its planes offer, one span for each that has bytes.
func remote(m *wire.Metadata) ([]region.Span, error) {
	next := m.Ferry.Offsets
	spans := make([]region.Span, 0, len(next))
	for i := range m.Specs {
		n := m.Specs[i].Size
		if n == 0 {
			continue
		}
		if len(next) == 0 || next[0] < 0 || next[0] > math.MaxInt64-n {
			return nil, fmt.Errorf("%w: tensor %d has no place, or an impossible one", ErrMismatch, i)
		}
		spans = append(spans, region.Span{Offset: next[0], Length: n})
		next = next[1:]
	}
	if len(next) > 0 {
		return nil, fmt.Errorf("%w: %d offsets for %d tensors that have bytes", ErrMismatch, len(m.Ferry.Offsets), len(spans))
	}
	return spans, nil
}

// requests are the READs for all of spans, as few as they can be.
func (s *Slab) requests(token []byte, spans []region.Span, into *Buffer) []transfer.ReadRequest {
	var out []transfer.ReadRequest
	var local []region.Span
	flush := func() {
		r := &out[len(out)-1]
		for _, at := range local {
			r.Local = append(r.Local, s.pool[at.Offset:at.Offset+at.Length])
		}
		local = local[:0]
	}
	for i, k := 0, 0; i < len(into.spans); i++ {
		at := into.spans[i]
		if at.Length == 0 {
			continue
		}
		if len(out) == 0 || len(out[len(out)-1].Remote) == transfer.MaxSpans {
			if len(out) > 0 {
				flush()
			}
			out = append(out, transfer.ReadRequest{Token: token})
		}
		r := &out[len(out)-1]
		r.Remote = appendSpan(r.Remote, spans[k])
		local = appendSpan(local, at)
		k++
	}
	flush()
	return out
}

// readOffered reads by what an own producer offers. The buffer's READ has begun, and is ended here.
func (s *Slab) readOffered(ctx context.Context, m *wire.Metadata, into *Buffer) (string, error) {
	spans, err := remote(m)
	if err != nil {
		into.end()
		return "", err
	}
	var failed error
	reached, held := false, false
	for _, w := range s.ways {
		name := w.plane.Name()
		at := slices.IndexFunc(m.Ferry.Planes, func(o wire.PlaneOffer) bool { return o.Name == name })
		if at < 0 {
			continue
		}
		offer := &m.Ferry.Planes[at]
		p, err := w.peers.get(ctx, offer.Metadata)
		if err == nil {
			var over bool
			reached = true
			f := post(ctx, p, s.requests(offer.Token, spans, into), into, &w.peers)
			put := f.over
			f.over = func(lost bool) {
				// With tokens a READ that succeeds had a live grant to its end.
				held = w.tokens || !lost && vouches(p.link, m.Ferry)
				put(lost)
			}
			if over, err = s.wait(ctx, f); !over {
				return "", fmt.Errorf("slab: plane %s: %w", name, err)
			}
		}
		switch {
		case err == nil:
			into.vouch(held)
			into.end()
			return name, nil
		case ctx.Err() != nil || errors.Is(err, transfer.ErrDenied):
			into.end()
			return "", fmt.Errorf("slab: plane %s: %w", name, err)
		}
		failed = errors.Join(failed, fmt.Errorf("plane %s: %w", name, err))
	}
	into.end()
	switch {
	case reached:
		return "", fmt.Errorf("slab: %w", failed)
	case failed != nil:
		return "", fmt.Errorf("%w: %w", ErrNoPlane, failed)
	}
	var offered []string
	for _, o := range m.Ferry.Planes {
		offered = append(offered, o.Name)
	}
	return "", fmt.Errorf("%w: it offers %s, here are %s", ErrNoPlane, names(offered), names(s.Planes()))
}

// vouches says whether the slot table that the peer shows has the payload still.
func vouches(link transfer.Peer, f *wire.FerryMetadata) bool {
	w, ok := link.(transfer.Witness)
	return ok && f.Gen != 0 && w.Holds(f.Slot, f.Gen)
}

// flight is READs that were posted for one buffer. Its outcome is that of all together.
type flight struct {
	reads []transfer.Read
	err   error // of the posting: then some READs are missing
	into  *Buffer
	over  func(lost bool) // called once, when all are over: lost says that the peer failed
	force func()          // makes the plane end them
}

// post posts READs of one peer, which is put back when they are over.
func post(ctx context.Context, p *peer, requests []transfer.ReadRequest, into *Buffer, all *peers) flight {
	f := flight{
		into: into,
		over: func(lost bool) { all.put(p, lost) },
		force: func() {
			all.drop(p)
			all.end(p)
		},
	}
	for _, r := range requests {
		rd, err := p.link.Read(ctx, r)
		if err != nil {
			f.err = err
			break
		}
		f.reads = append(f.reads, rd)
	}
	return f
}

// enter lets a READ begin, which s.work counts then, unless the slab is closed.
func (s *Slab) enter() bool {
	s.gate.RLock()
	defer s.gate.RUnlock()
	if isClosed(s.closed) {
		return false
	}
	s.work.Add(1)
	return true
}

// wait waits for the READs of f and gives their outcome. If ctx ends first, or the slab is closed, they are given up: over is false,
// and when they are over they end the buffer's READ themselves.
func (s *Slab) wait(ctx context.Context, f flight) (over bool, err error) {
	if f.err != nil { // those that were posted are of no use
		for _, rd := range f.reads {
			rd.Cancel()
		}
	}
	for i, rd := range f.reads {
		select {
		case <-rd.Done():
			continue
		default:
		}
		select {
		case <-rd.Done():
		case <-ctx.Done():
			s.abandon(f, i)
			return false, ctx.Err()
		case <-s.closed:
			s.abandon(f, i)
			return false, ErrClosed
		}
	}
	err = f.err
	for _, rd := range f.reads {
		if err == nil {
			err = rd.Err()
		}
	}
	f.over(lost(err))
	return true, err
}

// abandon lets READs, from the i-th on, go on that nobody waits for: their destination stays in quarantine until they are over.
func (s *Slab) abandon(f flight, i int) {
	for _, rd := range f.reads[i:] {
		rd.Cancel()
	}
	s.work.Go(func() {
		overdue := time.NewTimer(quarantine)
		defer overdue.Stop()
		failed := false
		for _, rd := range f.reads[i:] {
			select {
			case <-rd.Done():
			case <-s.closed:
				f.force()
			case <-overdue.C:
				s.log.Warn("slab: a READ that was given up does not end; its peer is closed", "bytes", f.into.bytes, "since", quarantine)
				f.force()
			}
			<-rd.Done()
			failed = failed || lost(rd.Err())
		}
		f.into.end()
		f.over(failed)
	})
}
