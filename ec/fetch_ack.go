package ec

import (
	"fmt"
	"math"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
)

// granted is an OK ack that was found good.
type granted struct {
	ack    *wire.Ack
	own    bool
	grant  string        // own
	gen    uint64        // own
	lease  time.Duration // own
	via    *path         // that the ack came by
	renew  time.Duration // own: how often to renew the grant while a READ goes on
	remote []region.Span
	sum    *uint64   // own: the producer's checksum
	asked  time.Time // the grant is not older than that; zero: not known
}

// Bounds of what an ack's lease is taken for, and of how often a grant is renewed.
const (
	maxLease   = time.Hour
	minRenewal = 100 * time.Millisecond
)

// judge looks at an ack and says what it means for this flight.
func (f *flight) judge(a *wire.Ack, in incoming) event {
	own := a.Ferry != nil && a.Ferry.V >= wire.ExtensionVersion
	f.c.know(f.want.addr, own)
	if own {
		if a.Ferry.Try < f.firstTry || a.Ferry.Try > f.try {
			// Of an earlier pull of this key, or of a grant that was given up. The grant may be the one that the next ack
			// brings, so it is not let go.
			f.c.stats.lateAcks.Add(1)
			return evNone
		}
		if a.Ferry.Node != "" && a.Ferry.Node == f.c.o.Node {
			// Our own producer sees our own reservation and would say NOT_READY until the budget ends.
			f.err = fmt.Errorf("%w: %q was announced at %s, which is this node (%s) itself and does not have it; if it should be another, set advertise_host there",
				ErrMissing, f.want.key, f.want.addr, a.Ferry.Node)
			f.peer.letGo(a)
			return evRefused
		}
	}
	if a.Status == wire.OK {
		g, err := f.c.checkAck(f.want, a, own)
		if err != nil {
			f.c.stats.badAcks.Add(1)
			f.c.log.warn("bad ack", f.want.addr, "an ack makes no sense", "key", f.want.key, "err", err)
			f.err = err
			f.peer.letGo(a)
			return evRefused
		}
		g.asked, g.via = in.asked, in.via
		f.offer = g
		return evGranted
	}
	if f.state != asking {
		return evNone // the answer to a request that was sent once more
	}
	switch a.Status {
	case wire.NackNotReady:
		f.c.stats.notReady.Add(1)
		f.err = fmt.Errorf("%w: %q at %s", ErrNotReady, f.want.key, f.want.addr)
		return evNotReady
	case wire.NackMissing:
		f.err = fmt.Errorf("%w: %q at %s", ErrMissing, f.want.key, f.want.addr)
	case wire.NackIncompat:
		f.err = fmt.Errorf("%w: %s refused our compatibility hash %s, made of %s; its log names the field that differs", ErrIncompatible, f.want.addr, f.c.hash, describe(f.c.o.Compat))
	case wire.NackVersion:
		f.err = fmt.Errorf("%w: %s does not speak connector version %d; set ec_protocol to its version", ErrIncompatible, f.want.addr, f.c.o.Generation)
	default:
		f.err = fmt.Errorf("%w: %s answered %s for %q; its log says why", ErrPeer, f.want.addr, a.Status, f.want.key)
	}
	return evRefused
}

// checkAck validates everything in an OK ack that can be, before any of it is acted on.
func (c *Consumer) checkAck(w wanted, a *wire.Ack, own bool) (*granted, error) {
	bad := func(format string, args ...any) (*granted, error) {
		return nil, fmt.Errorf("%w: %s for %q: %s", ErrBadAck, w.addr, w.key, fmt.Sprintf(format, args...))
	}
	if !own {
		if int64(len(a.Blocks)) != w.blocks {
			return bad("%d block numbers for %d blocks", len(a.Blocks), w.blocks)
		}
		if len(a.AgentMetadata) == 0 {
			return bad("no agent metadata")
		}
		return &granted{ack: a, remote: spansOf(runs(a.Blocks), c.o.Compat.BlockBytes, w.spec.Bytes)}, nil
	}

	x := a.Ferry
	switch {
	case x.Grant == "":
		return bad("no grant")
	case x.Bytes != w.spec.Bytes:
		return bad("the entry has %d bytes, %d were announced", x.Bytes, w.spec.Bytes)
	case len(x.Planes) == 0:
		return bad("no data plane")
	case x.Rows != 0 && x.Rows != w.spec.Shape[0]:
		return nil, fmt.Errorf("%w: %q has %d rows at %s, announced as %v", ErrConflict, w.key, x.Rows, w.addr, w.spec.Shape)
	}
	lease := time.Duration(min(x.LeaseMS, maxLease.Milliseconds())) * time.Millisecond
	var blocks, next int64
	extents := make([]region.Extent, 0, len(x.Extents))
	for i, e := range x.Extents {
		start, count := int64(e[0]), int64(e[1])
		if count == 0 || start+count > math.MaxUint32 || i > 0 && start < next {
			return bad("extent %d is %d blocks at %d; want ascending ones that do not overlap", i, count, start)
		}
		next = start + count
		blocks += count
		extents = append(extents, region.Extent{Start: e[0], Count: e[1]})
	}
	if blocks != w.blocks {
		return bad("extents of %d blocks for %d", blocks, w.blocks)
	}
	return &granted{ack: a, own: true, grant: x.Grant, gen: x.Gen, lease: lease, renew: max(lease/3, minRenewal), remote: spansOf(extents, c.o.Compat.BlockBytes, w.spec.Bytes), sum: x.Sum}, nil
}

// runs joins consecutive block numbers, in the order given.
func runs(blocks []uint32) []region.Extent {
	var x []region.Extent
	for _, b := range blocks {
		if n := len(x); n > 0 && x[n-1].Start+x[n-1].Count == b {
			x[n-1].Count++
			continue
		}
		x = append(x, region.Extent{Start: b, Count: 1})
	}
	return x
}
