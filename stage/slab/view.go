package slab

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// View gives the tensors' bytes where they are at a producer of this machine, without a copy: one read-only slice for each of
// m.Specs. They stay mapped until release is called, which says whether the slot table vouches for them: that they were what was granted
// until then. If not, the caller has to verify that at the producer before it believes them. Its claim has to hold as long as they are in
// use. ErrNoPlane: not to be had without a copy.
func (s *Slab) View(ctx context.Context, m *wire.Metadata) (tensors [][]byte, plane string, release func() (vouched bool), err error) {
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
			var unmap func()
			tensors, unmap, err = view(p.link, f.Planes[at].Token, spans, m.Specs)
			w.peers.put(p, lost(err)) // a view outlives its peer
			if err == nil {
				return tensors, name, func() bool {
					defer unmap()
					return vouches(p.link, f) // false if the peer is closed by now
				}, nil
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
