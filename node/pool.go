package node

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// pool is one region and what works on it.
type pool struct {
	poolSettings
	group    string // compatibility hash
	region   *region.Region
	cache    *ec.Cache
	clients  *clients
	producer *ec.Producer // the node's, which serves all its pools
	consumer *ec.Consumer
	granted  []*ec.Pin // by the node before; the producer's, once there is one

	grantedBefore []ec.Info // what these are, until the start has succeeded
	left          bool      // the agents that serve it outlive the node
}

// entries are those of the cache, with the grants that the producer made of them.
func (p *pool) entries() []ec.Info {
	entries := p.cache.Entries()
	p.producer.CountGrants(p.cache, entries)
	return entries
}

// openPool makes the region and its cache, or goes on with those of a node that died. The consumer comes later, when there are
// planes.
func openPool(ctx context.Context, s *settings, ps poolSettings, log *slog.Logger) (*pool, error) {
	p := &pool{poolSettings: ps, group: ps.compat.Hash()}
	var err error
	start := time.Now()
	p.region, err = region.Take(ctx, region.Options{
		Dir:      s.ShmDir,
		Mode:     s.Mode,
		Identity: region.Identity{Instance: s.Instance, Group: p.group, Rank: s.Rank},
		Geometry: region.Geometry{BlockBytes: ps.BlockBytes, Blocks: ps.blocks, Slots: ps.Slots},
		Keep:     s.Timeouts.Adopt,
		Reclaim:  nixl.EndUnnamed,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: ec_cpu_bytes %s in shm_dir %s: %w", ErrConfig, ps.ECCPUBytes, s.ShmDir, err)
	}
	log = log.With("model", ps.Model)
	var adopted *ec.Adopted
	p.cache, adopted, err = ec.AdoptCache(ctx, ec.CacheOptions{
		Region:    p.region,
		HoldLease: s.Timeouts.HoldLease,
		HoldShare: s.HoldShare,
		Policy:    s.Eviction,
		Evicted:   func(key string, bytes int64) { log.Debug("evicted", "key", key, "bytes", bytes) },
		HoldDropped: func(key string, bytes int64) {
			log.Info("an announced entry lost its hold before the lease ended: a peer that comes now may find it missing", "key", key, "bytes", bytes)
		},
	})
	if err != nil {
		_ = p.region.Close(!p.region.Adopted())
		return nil, err
	}
	p.granted = adopted.Granted
	for _, pin := range p.granted {
		p.grantedBefore = append(p.grantedBefore, pin.Info())
	}
	p.clients = newClients(p.region, adopted, s.shareOf(ps.blocks), log)
	p.logStart(adopted, time.Since(start), log)
	return p, nil
}

// served is the pool as the producer offers it. The file is the caller's to close once the producer has it.
func (p *pool) served(planes []transfer.Plane) (ec.ServedPool, error) {
	f, err := p.region.Reopen(false)
	if err != nil {
		return ec.ServedPool{}, err
	}
	return ec.ServedPool{
		Cache:  p.cache,
		Compat: p.compat,
		Memory: transfer.Memory{Bytes: p.region.Pool(), File: f, Path: p.region.Path(), FileOffset: p.region.PoolOffset()},
		Planes: planes,

		Granted: p.granted,
	}, nil
}

// announcement is the entry of ec_transfer_params for a key: a hold is taken, so that the entry is there when a peer comes. A key
// that is not held gets no address and no metadata, so that nobody takes the media off the request.
func (p *pool) announcement(op *api.Op, host string, port, generation int) ec.Announcement {
	none := ec.Announcement{Metadata: []byte("{}")}
	if p.cache.Hold(op.Key) != nil {
		return none
	}
	info, state := p.cache.Lookup(op.Key)
	if state == ec.Absent { // removed since
		return none
	}
	a := ec.Announcement{
		Metadata:  op.Metadata,
		PeerHost:  host,
		PeerPort:  port,
		SizeBytes: (info.Spec.Bytes + p.BlockBytes - 1) / p.BlockBytes * p.BlockBytes,
	}
	slot := uint32(info.Slot)
	a.Slot = &slot
	if len(a.Metadata) == 0 {
		a.Metadata = none.Metadata
	}
	if generation >= 2 {
		a.ItemIndices = op.ItemIndices
		a.Shape = make([]int, len(info.Spec.Shape))
		for i, n := range info.Spec.Shape {
			a.Shape[i] = int(n)
		}
	}
	return a
}
