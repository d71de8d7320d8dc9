package span

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/region"
)

// spansIn draws spans in memory of n bytes.
func spansIn(n int64) *rapid.Generator[[]region.Span] {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) region.Span {
		off := rapid.Int64Range(0, n-1).Draw(t, "offset")
		return region.Span{Offset: off, Length: rapid.Int64Range(1, n-off).Draw(t, "length")}
	}), 1, 12)
}

// cut draws a way to cut b into slices.
func cut(t *rapid.T, b []byte) [][]byte {
	var out [][]byte
	for len(b) > 0 {
		n := rapid.IntRange(1, len(b)).Draw(t, "cut")
		out, b = append(out, b[:n]), b[n:]
	}
	return out
}

func memory(n int64) []byte {
	m := make([]byte, n)
	for i := range m {
		m[i] = byte(i * 7)
	}
	return m
}

func TestACoverHasExactlyTheBytesOfItsSpans(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const n = 64
		spans := spansIn(n).Draw(t, "spans")
		var in [n]bool
		for _, s := range spans {
			for i := s.Offset; i < s.Offset+s.Length; i++ {
				in[i] = true
			}
		}
		c := NewCover(spans)
		for _, s := range spansIn(n).Draw(t, "asked") {
			want := true
			for i := s.Offset; i < s.Offset+s.Length; i++ {
				want = want && in[i]
			}
			if c.Contains(s) != want {
				t.Fatalf("cover %v of %v: contains %v: %v", c, spans, s, !want)
			}
		}
	})
}

func TestPiecesCopyLikeOneCopy(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mem := memory(200)
		src := Slices(mem, spansIn(200).Draw(t, "spans"))
		want := bytes.Join(src, nil)
		got := make([]byte, len(want))
		limit := rapid.IntRange(1, 300).Draw(t, "limit")
		for _, p := range Pieces(cut(t, got), src, limit) {
			if len(p.Dst) != len(p.Src) || len(p.Dst) == 0 || len(p.Dst) > limit {
				t.Fatalf("a piece of %d and %d bytes, limit %d", len(p.Dst), len(p.Src), limit)
			}
			copy(p.Dst, p.Src)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("got %x, want %x", got, want)
		}
	})
}

func TestPartsAreTheWholeInOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mem := memory(60000)
		spans := spansIn(60000).Draw(t, "spans")
		want := bytes.Join(Slices(mem, spans), nil)
		got := make([]byte, len(want))
		n := rapid.IntRange(1, 9).Draw(t, "parts")
		parts := Split(spans, cut(t, got), int64(len(want)), n)
		if len(parts) > n {
			t.Fatalf("%d parts, asked for %d", len(parts), n)
		}
		for _, p := range parts {
			var sum int64
			for _, s := range p.Remote {
				if s.Length <= 0 {
					t.Fatalf("empty span in %v", p.Remote)
				}
				sum += s.Length
			}
			if sum != p.Bytes || sum == 0 {
				t.Fatalf("a part of %d bytes has spans of %d", p.Bytes, sum)
			}
			for _, q := range Pieces(p.Local, Slices(mem, p.Remote), 1<<20) {
				copy(q.Dst, q.Src)
			}
		}
		if !bytes.Equal(got, want) {
			t.Fatal("the parts are not the whole")
		}
	})
}
