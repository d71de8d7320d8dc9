package node

import (
	"bytes"
	"fmt"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
)

// ProbeKey names an entry that a node makes when a peer asks for it: one block of bytes that follow from its size, so that whoever
// pulls it can tell a data path that works from one that does not. `ferry doctor --peer` does. Once made it is an entry like any
// other: it shows in lists and can be evicted.
const ProbeKey = "ferry-doctor-probe"

// maxProbe bounds the block that is filled on the control loop's goroutine; 1 MiB takes well under a millisecond.
const maxProbe = 1 << 20

// Probe is the entry behind ProbeKey in a pool of that dtype and block size.
func Probe(dtype string, blockBytes int64) (ec.Spec, []byte, error) {
	size, err := ec.ItemSize(dtype)
	if err != nil {
		return ec.Spec{}, nil, err
	}
	if blockBytes < 1 || blockBytes > maxProbe || blockBytes%int64(size) != 0 {
		return ec.Spec{}, nil, fmt.Errorf("node: no probe for blocks of %d bytes: whole elements of %s, and at most %d bytes", blockBytes, dtype, maxProbe)
	}
	// A 32-bit linear congruential sequence (Numerical Recipes' constants): no two places of a block look alike, so bytes that
	// are shifted, repeated or left out show.
	b := make([]byte, blockBytes)
	x := uint32(blockBytes)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x >> 24)
	}
	return ec.Spec{Dtype: dtype, Shape: []int64{1, blockBytes / int64(size)}, Bytes: blockBytes}, b, nil
}

// probes hands messages to the producer, and makes the probe before a request for it.
type probes struct {
	*ec.Producer
	pools      []*pool
	generation int
	checksums  bool
}

// Message implements control.RouterHandler.
func (p *probes) Message(from control.Source, body []byte) {
	if bytes.Contains(body, []byte(ProbeKey)) {
		p.make(body)
	}
	p.Producer.Message(from, body)
}

// make answers nothing: a probe that cannot be made now, as in a pool of pinned entries, is MISSING to who asked.
func (p *probes) make(body []byte) {
	m, err := wire.DecodeAtProducer(body, p.generation)
	r, ok := m.(*wire.Request)
	if err != nil || !ok || r.Key != ProbeKey {
		return
	}
	for _, pool := range p.pools {
		if pool.group != r.CompatHash {
			continue
		}
		if _, state := pool.cache.Lookup(ProbeKey); state != ec.Absent {
			return
		}
		spec, data, err := Probe(pool.Dtype, pool.BlockBytes)
		if err != nil {
			return
		}
		res, err := pool.cache.Reserve(ProbeKey, spec, 0)
		if err != nil {
			return
		}
		for _, b := range res.Buffers() {
			data = data[copy(b, data):]
		}
		var sum *uint64
		if p.checksums {
			x := res.Checksum()
			sum = &x
		}
		if _, err := res.Commit(sum); err != nil {
			res.Discard()
		}
	}
}
