package nixl

import (
	"fmt"
	"math"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// layout is where a peer's pool lies in its agent's process.
type layout struct {
	length     int64
	base       uint64
	blocks     []uint64 // addresses of its blocks, nil: they follow base
	blockBytes int64
}

// plainLayout checks what a plain peer says of its blocks. A peer can say anything: its addresses are only ever used in its own
// process, so what matters here is that they do not wrap.
func plainLayout(blocks []uint64, blockBytes int64) (layout, error) {
	if len(blocks) == 0 || blockBytes <= 0 || int64(len(blocks)) > math.MaxInt64/blockBytes {
		return layout{}, fmt.Errorf("%w: nixl: a pool of %d blocks of %d bytes", transfer.ErrBadRequest, len(blocks), blockBytes)
	}
	l := layout{length: int64(len(blocks)) * blockBytes, base: blocks[0], blockBytes: blockBytes}
	contiguous := true
	for i, a := range blocks {
		if a == 0 || a > math.MaxUint64-uint64(blockBytes) {
			return layout{}, fmt.Errorf("%w: nixl: block %d at %#x", transfer.ErrBadRequest, i, a)
		}
		contiguous = contiguous && a-l.base == uint64(i)*uint64(blockBytes)
	}
	if !contiguous {
		l.blocks = append([]uint64(nil), blocks...)
	}
	return l, nil
}

// run gives the address of a byte of the pool and how many more follow it there.
func (l *layout) run(offset int64) (addr, length uint64) {
	if l.blocks == nil {
		return l.base + uint64(offset), uint64(l.length - offset)
	}
	block, in := offset/l.blockBytes, offset%l.blockBytes
	return l.blocks[block] + uint64(in), uint64(l.blockBytes - in)
}

// pieces become a request's descriptors one by one. NIXL's prepared lists would save little of that: with 1,024 scattered blocks of
// 7 KiB a request takes 0.07 ms to make of prepared lists and 0.25 ms without, of a READ of 4 ms; to prepare a peer's 256 MiB takes
// 240 ms (1.3.2, same run).

// pieces pairs spans of the pool with local memory, which have the same total length, in the fewest pieces that are contiguous at
// both ends.
func (l *layout) pieces(remote []region.Span, locals []local) ([]piece, error) {
	out := make([]piece, 0, max(len(remote), len(locals)))
	var at local
	for _, s := range remote {
		for s.Length > 0 {
			if at.length == 0 {
				at, locals = locals[0], locals[1:]
			}
			addr, n := l.run(s.Offset)
			n = min(n, uint64(s.Length), at.length)
			if last := len(out) - 1; last >= 0 && out[last].memory == at.memory && out[last].offset+out[last].length == at.offset &&
				out[last].remote+out[last].length == addr {
				out[last].length += n
			} else {
				out = append(out, piece{memory: at.memory, offset: at.offset, remote: addr, length: n})
			}
			s.Offset, s.Length = s.Offset+int64(n), s.Length-int64(n)
			at.offset, at.length = at.offset+n, at.length-n
		}
	}
	if len(out) > maxPieces {
		return nil, fmt.Errorf("%w: nixl: a READ in %d pieces, at most %d", transfer.ErrBadRequest, len(out), maxPieces)
	}
	return out, nil
}
