// Package span has the arithmetic of spans that the planes share.
package span

import (
	"cmp"
	"slices"

	"github.com/tensorferry/tensorferry/region"
)

// Cover is a set of bytes: spans in ascending order, neighbours merged.
type Cover []region.Span

// NewCover builds the set of the bytes of spans, which must be valid (see transfer.CheckSpans). spans is not kept.
func NewCover(spans []region.Span) Cover {
	c := slices.Clone(spans)
	slices.SortFunc(c, func(a, b region.Span) int { return cmp.Compare(a.Offset, b.Offset) })
	out := c[:0]
	for _, s := range c {
		if n := len(out); n > 0 && s.Offset <= out[n-1].Offset+out[n-1].Length {
			out[n-1].Length = max(out[n-1].Length, s.Offset+s.Length-out[n-1].Offset)
			continue
		}
		out = append(out, s)
	}
	return Cover(out)
}

// Contains says whether every byte of s, which must be valid, is in the set.
func (c Cover) Contains(s region.Span) bool {
	i, exact := slices.BinarySearchFunc(c, s.Offset, func(a region.Span, off int64) int { return cmp.Compare(a.Offset, off) })
	if !exact {
		i--
	}
	return i >= 0 && s.Offset+s.Length <= c[i].Offset+c[i].Length
}

// Slices gives the bytes of spans in mem.
func Slices(mem []byte, spans []region.Span) [][]byte {
	out := make([][]byte, len(spans))
	for i, s := range spans {
		out[i] = mem[s.Offset : s.Offset+s.Length : s.Offset+s.Length]
	}
	return out
}

// Piece is a run of bytes that is contiguous at both ends.
type Piece struct{ Dst, Src []byte }

// Pieces pairs dst with src, which have the same total length, in runs of at most limit bytes.
func Pieces(dst, src [][]byte, limit int) []Piece {
	var out []Piece
	var d, s []byte
	for {
		for len(d) == 0 && len(dst) > 0 {
			d, dst = dst[0], dst[1:]
		}
		for len(s) == 0 && len(src) > 0 {
			s, src = src[0], src[1:]
		}
		n := min(len(d), len(s), limit)
		if n == 0 {
			return out
		}
		out = append(out, Piece{Dst: d[:n], Src: s[:n]})
		d, s = d[n:], s[n:]
	}
}

// Part is a READ or a piece of one: spans of the far memory and the slices they go to, of equal total length.
type Part struct {
	Remote []region.Span
	Local  [][]byte
	Bytes  int64
}

// Split cuts a READ of total bytes into n parts whose sizes differ by at most a page of 4 KiB, in order. It gives fewer parts if
// total has fewer pages.
func Split(remote []region.Span, local [][]byte, total int64, n int) []Part {
	const page = 4096
	size := (total + int64(n) - 1) / int64(n)
	size = (size + page - 1) / page * page
	var out []Part
	for total > 0 {
		p := Part{Bytes: min(size, total)}
		p.Remote, remote = cutSpans(remote, p.Bytes)
		p.Local, local = cutSlices(local, p.Bytes)
		total -= p.Bytes
		out = append(out, p)
	}
	return out
}

func cutSpans(s []region.Span, n int64) (head, tail []region.Span) {
	for i := range s {
		if n < s[i].Length {
			if n == 0 {
				return s[:i:i], s[i:]
			}
			head = append(slices.Clone(s[:i]), region.Span{Offset: s[i].Offset, Length: n})
			tail = slices.Clone(s[i:])
			tail[0] = region.Span{Offset: s[i].Offset + n, Length: s[i].Length - n}
			return head, tail
		}
		n -= s[i].Length
	}
	return s, nil
}

func cutSlices(s [][]byte, n int64) (head, tail [][]byte) {
	for i := range s {
		if l := int64(len(s[i])); n < l {
			if n == 0 {
				return s[:i:i], s[i:]
			}
			head = append(slices.Clone(s[:i]), s[i][:n])
			tail = slices.Clone(s[i:])
			tail[0] = s[i][n:]
			return head, tail
		} else {
			n -= l
		}
	}
	return s, nil
}
