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
// If ctx is done before the READ is over, Read returns ctx's error and the READ may still write into the buffer: see Buffer.Idle. A READ
// that fails on one plane is tried on the next.
// Errors: ErrNoPlane, ErrMismatch, ErrClosed, and those of package transfer (ErrDenied, ErrPeerLost, ..).
func (s *Slab) Read(ctx context.Context, m *wire.Metadata, into *Buffer) (plane string, err error) {
	if err := into.fits(m); err != nil {
		return "", err
	}
	if err := into.begin(); err != nil {
		return "", err
	}
	switch f := m.Ferry; {
	case into.bytes == 0:
		into.end()
		return Inline, nil
	case f != nil && f.Inline != nil:
		defer into.end()
		return Inline, into.fill(f.Inline)
	case f != nil && len(f.Offsets) > 0:
		return s.readOffered(ctx, m, into)
	}
	into.end()
	return "", fmt.Errorf("%w: no descriptors", ErrNoPlane)
}

// fits says whether m's tensors are of b's sizes.
func (b *Buffer) fits(m *wire.Metadata) error {
	if len(m.Specs) != len(b.spans) {
		return fmt.Errorf("%w: %d tensors into a buffer of %d", ErrMismatch, len(m.Specs), len(b.spans))
	}
	for i, at := range b.spans {
		if m.Specs[i].Size != at.Length {
			return fmt.Errorf("%w: tensor %d has %d bytes, the buffer %d for it", ErrMismatch, i, m.Specs[i].Size, at.Length)
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
	var failed, reached error
	for _, w := range s.ways {
		name := w.plane.Name()
		at := slices.IndexFunc(m.Ferry.Planes, func(o wire.PlaneOffer) bool { return o.Name == name })
		if at < 0 {
			continue
		}
		offer := &m.Ferry.Planes[at]
		p, err := w.peers.get(ctx, offer.Metadata)
		if err == nil {
			err = w.read(ctx, p, s.requests(offer.Token, spans, into), into)
			if errors.Is(err, errAbandoned) {
				return "", fmt.Errorf("slab: plane %s: %w", name, ctx.Err()) // the READ ends the buffer's when it is over
			}
			reached = err
		}
		if err == nil || ctx.Err() != nil || errors.Is(err, transfer.ErrDenied) {
			into.end()
			if err != nil {
				return "", fmt.Errorf("slab: plane %s: %w", name, err)
			}
			return name, nil
		}
		failed = errors.Join(failed, fmt.Errorf("plane %s: %w", name, err))
	}
	into.end()
	switch {
	case reached != nil:
		return "", fmt.Errorf("slab: %w", failed)
	case failed != nil:
		return "", fmt.Errorf("%w: %w", ErrNoPlane, failed)
	}
	var offered []string
	for _, o := range m.Ferry.Planes {
		offered = append(offered, o.Name)
	}
	return "", fmt.Errorf("%w: it offers %s, here are %s", ErrNoPlane, names(offered), names(s.planeNames()))
}

// errAbandoned: the READ goes on after ctx, and ends the buffer's use when it is over.
var errAbandoned = errors.New("slab: abandoned")

// read does READs of one peer, which it puts back when they are over.
func (w *way) read(ctx context.Context, p *peer, requests []transfer.ReadRequest, into *Buffer) error {
	reads := make([]transfer.Read, 0, 4)
	var err error
	for _, r := range requests {
		var rd transfer.Read
		if rd, err = p.link.Read(ctx, r); err != nil {
			break
		}
		reads = append(reads, rd)
	}
	if err != nil { // those before it are of no use
		for _, rd := range reads {
			rd.Cancel()
		}
	}
	for i, rd := range reads {
		select {
		case <-rd.Done():
			continue
		default:
		}
		select {
		case <-rd.Done():
		case <-ctx.Done():
			w.abandon(p, reads[i:], into)
			return errAbandoned
		}
	}
	for _, rd := range reads {
		if err == nil {
			err = rd.Err()
		}
	}
	w.peers.put(p, lost(err))
	return err
}

// abandon lets READs go on that nobody waits for: their destination stays in quarantine until they are over.
func (w *way) abandon(p *peer, reads []transfer.Read, into *Buffer) {
	for _, rd := range reads {
		rd.Cancel()
	}
	w.peers.work.Go(func() {
		overdue := time.NewTimer(quarantine)
		defer overdue.Stop()
		failed := false
		for _, rd := range reads {
			select {
			case <-rd.Done():
			case <-overdue.C:
				w.peers.drop(p)
				w.peers.end(p)
				<-rd.Done()
			}
			failed = failed || lost(rd.Err())
		}
		into.end()
		w.peers.put(p, failed)
	})
}

// View gives the tensors' bytes where they are at a producer of this machine, without a copy: one read-only slice for each of
// m.Specs. They stay mapped until release is called. Whether they still are what was granted is for the caller to verify at the
// producer before it believes them, and its claim has to hold as long as they are in use. ErrNoPlane: not to be had without a copy.
func (s *Slab) View(ctx context.Context, m *wire.Metadata) (tensors [][]byte, plane string, release func(), err error) {
	f := m.Ferry
	if f == nil || len(f.Offsets) == 0 {
		return nil, "", nil, fmt.Errorf("%w: no offsets", ErrNoPlane)
	}
	spans, err := remote(m)
	if err != nil {
		return nil, "", nil, err
	}
	var failed error
	for _, w := range s.ways {
		name := w.plane.Name()
		at := slices.IndexFunc(f.Planes, func(o wire.PlaneOffer) bool { return o.Name == name })
		if at < 0 || !w.plane.Capabilities().InPlace {
			continue
		}
		p, err := w.peers.get(ctx, f.Planes[at].Metadata)
		if err == nil {
			tensors, release, err = view(p.link, f.Planes[at].Token, spans, m.Specs)
			w.peers.put(p, lost(err)) // a view outlives its peer
			if err == nil {
				return tensors, name, release, nil
			}
		}
		if ctx.Err() != nil {
			return nil, "", nil, ctx.Err()
		}
		failed = errors.Join(failed, fmt.Errorf("plane %s: %w", name, err))
	}
	if failed == nil {
		return nil, "", nil, fmt.Errorf("%w: no plane that shares memory is at both ends", ErrNoPlane)
	}
	return nil, "", nil, fmt.Errorf("%w: %w", ErrNoPlane, failed)
}

func view(link transfer.Peer, token []byte, spans []region.Span, specs []wire.Spec) ([][]byte, func(), error) {
	v, ok := link.(transfer.Viewer)
	if !ok {
		return nil, nil, fmt.Errorf("%w: its peers are no Viewers", transfer.ErrUnreachable)
	}
	var releases []func()
	release := func() {
		for _, f := range releases {
			f()
		}
	}
	var all [][]byte
	for part := range slices.Chunk(spans, transfer.MaxSpans) {
		got, f, err := v.View(token, part)
		if err != nil {
			release()
			return nil, nil, err
		}
		releases, all = append(releases, f), append(all, got...)
	}
	tensors := make([][]byte, len(specs))
	for i := range specs {
		if specs[i].Size == 0 {
			tensors[i] = []byte{}
			continue
		}
		tensors[i], all = all[0], all[1:]
	}
	return tensors, release, nil
}
