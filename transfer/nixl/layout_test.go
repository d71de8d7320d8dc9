package nixl

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// naive pairs byte by byte.
func naive(l *layout, remote []region.Span, locals []local) (out []piece) {
	type place struct {
		memory uint32
		offset uint64
	}
	var to []place
	for _, x := range locals {
		for i := range x.length {
			to = append(to, place{x.memory, x.offset + i})
		}
	}
	at := 0
	for _, s := range remote {
		for i := range s.Length {
			addr, _ := l.run(s.Offset + i)
			p := to[at]
			at++
			if n := len(out) - 1; n >= 0 && out[n].memory == p.memory && out[n].offset+out[n].length == p.offset && out[n].remote+out[n].length == addr {
				out[n].length++
			} else {
				out = append(out, piece{p.memory, p.offset, addr, 1, 0})
			}
		}
	}
	return out
}

func TestPiecesAreTheLongestRunsThatAreContiguousAtBothEnds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const blockBytes, blocks = 8, 12
		addrs := make([]uint64, blocks)
		order := rapid.Permutation([]uint64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}).Draw(t, "order")
		scattered := rapid.Bool().Draw(t, "scattered")
		for i := range addrs {
			addrs[i] = 4096 + uint64(i)*blockBytes
			if scattered {
				addrs[i] = 4096 + order[i]*blockBytes
			}
		}
		l, err := plainLayout(addrs, blockBytes)
		if err != nil {
			t.Fatal(err)
		}
		var remote []region.Span
		var total int64
		for range rapid.IntRange(1, 5).Draw(t, "spans") {
			off := rapid.Int64Range(0, blocks*blockBytes-1).Draw(t, "offset")
			n := rapid.Int64Range(1, blocks*blockBytes-off).Draw(t, "length")
			remote = append(remote, region.Span{Offset: off, Length: n})
			total += n
		}
		var locals []local
		at := uint64(0)
		for left := uint64(total); left > 0; {
			n := rapid.Uint64Range(1, left).Draw(t, "local")
			locals = append(locals, local{uint32(rapid.IntRange(1, 2).Draw(t, "memory")), at, n})
			at += n + uint64(rapid.IntRange(0, 1).Draw(t, "gap"))
			left -= n
		}
		got, err := l.pieces(slices.Clone(remote), slices.Clone(locals))
		if err != nil {
			t.Fatal(err)
		}
		if want := naive(&l, remote, locals); !slices.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
	})
}

func TestAContiguousPoolIsOnePiece(t *testing.T) {
	addrs := make([]uint64, 150_000)
	for i := range addrs {
		addrs[i] = 1<<40 + uint64(i)*7168
	}
	l, err := plainLayout(addrs, 7168)
	must(t, err)
	got, err := l.pieces([]region.Span{{Offset: 7168, Length: 100 * 7168}, {Offset: 101 * 7168, Length: 50}}, []local{{1, 0, 100*7168 + 50}})
	must(t, err)
	if want := []piece{{1, 0, 1<<40 + 7168, 100*7168 + 50, 0}}; !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
	if l.blocks != nil {
		t.Error("the addresses of a contiguous pool are kept")
	}
}

func TestTooManyPiecesAreRefused(t *testing.T) {
	addrs := make([]uint64, maxPieces+1)
	for i := range addrs {
		addrs[i] = 1<<40 + uint64(i)*100
	}
	l, err := plainLayout(addrs, 10)
	must(t, err)
	_, err = l.pieces([]region.Span{{Length: l.length}}, []local{{1, 0, uint64(l.length)}})
	wantErr(t, "pieces", err, transfer.ErrBadRequest)
}
