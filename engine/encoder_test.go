package engine

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"math"
	"testing"
)

func decoded(t testing.TB, b []byte) *pixels {
	t.Helper()
	px, err := decodeImage(b, 1<<24)
	if err != nil {
		t.Fatal(err)
	}
	return px
}

func embedded(t testing.TB, e *encoder, px *pixels) []byte {
	t.Helper()
	b := make([]byte, px.grid.Rows()*e.rowBytes())
	if err := e.embed(px, [][]byte{b}); err != nil {
		t.Fatal(err)
	}
	return b
}

// reference is the same product, written the plain way, in the order of sums that the encoder promises.
func reference(e *encoder, px *pixels) []byte {
	var out []byte
	across := px.grid[2] / mergeSide
	for r := range px.grid.Rows() {
		var in []float32
		for y := range factor {
			for x := range factor {
				c := px.rgba.RGBAAt(r%across*factor+x, r/across*factor+y)
				for ch, v := range []uint8{c.R, c.G, c.B} {
					in = append(in, (float32(v)/255-channelMean[ch])/channelStd[ch])
				}
			}
		}
		for col := range e.width {
			var sum float32
			for k, v := range in {
				sum += float32(v * e.weights[col/tileCols*rowInputs+k][col%tileCols])
			}
			out = binary.LittleEndian.AppendUint16(out, bfloat16(sum))
		}
	}
	return out
}

func TestEncodingIsTheProductOfMergedPatchesAndWeights(t *testing.T) {
	for _, width := range []int{1, 6, 8} { // 1 and 6: no whole number of tiles
		e := newEncoder("tiny-mm", width)
		for _, size := range [][2]int{{84, 84}, {84, 28}} { // 9 and 3 rows: odd
			px := decoded(t, pngBytes(t, picture(size[0], size[1], 3)))
			if got, want := embedded(t, e, px), reference(e, px); !bytes.Equal(got, want) {
				t.Errorf("width %d, image %v: encoding differs from the plain product", width, size)
			}
		}
	}
}

// The digest pins the bytes over releases and machines: two engines of different builds must agree. The image needs no resize.
func TestEncodingIsTheSameOnEveryMachine(t *testing.T) {
	e := newEncoder("tiny-mm", 16)
	sum := sha256.Sum256(embedded(t, e, decoded(t, pngBytes(t, picture(84, 56, 1)))))
	const want = "0ed625586cb65f129787f89d5bd129002a6656a52647130f9cd29e0031436636"
	if got := hex.EncodeToString(sum[:]); got != want {
		t.Errorf("sha256 %s, want %s", got, want)
	}
}

func TestEncodingDoesNotDependOnWorkersOrBuffers(t *testing.T) {
	px := decoded(t, jpegBytes(t, picture(150, 130, 2)))
	one := newEncoder("tiny-mm", 12)
	one.workers = 1
	many := newEncoder("tiny-mm", 12)
	many.workers = 7
	want := embedded(t, one, px)
	if !bytes.Equal(want, embedded(t, many, px)) {
		t.Error("workers change the encoding")
	}
	b := make([]byte, len(want))
	cut := 3 * one.rowBytes()
	if err := many.embed(px, [][]byte{b[:cut], b[cut : 2*cut], b[2*cut:]}); err != nil || !bytes.Equal(want, b) {
		t.Errorf("three extents change the encoding (%v)", err)
	}
}

func TestModelWidthAndImageDecideTheEncoding(t *testing.T) {
	px := decoded(t, pngBytes(t, picture(84, 56, 1)))
	base := embedded(t, newEncoder("tiny-mm", 8), px)
	if bytes.Equal(base, embedded(t, newEncoder("other", 8), px)) {
		t.Error("another model, the same encoding")
	}
	if bytes.Equal(base, embedded(t, newEncoder("tiny-mm", 8), decoded(t, pngBytes(t, picture(84, 56, 2))))) {
		t.Error("another image, the same encoding")
	}
}

func TestRoomThatIsNotTheImagesRowsIsRefused(t *testing.T) {
	e := newEncoder("tiny-mm", 8)
	px := decoded(t, pngBytes(t, picture(56, 56, 1)))
	for _, n := range []int{0, 3, 5} {
		if err := e.embed(px, [][]byte{make([]byte, n*e.rowBytes())}); err == nil {
			t.Errorf("room for %d rows was accepted for an image of 4", n)
		}
	}
	if err := e.embed(px, [][]byte{make([]byte, 4*e.rowBytes()-1), make([]byte, 1)}); err == nil {
		t.Error("a row cut by two buffers was accepted")
	}
}

func TestBfloat16RoundsToNearestEven(t *testing.T) {
	for _, c := range []struct {
		in  uint32
		out uint16
	}{
		{0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, {0x3f808001, 0x3f81}, {0xbf80ffff, 0xbf81}, {0, 0}, {0x80000000, 0x8000},
	} {
		if got := bfloat16(math.Float32frombits(c.in)); got != c.out {
			t.Errorf("bfloat16(%#x) = %#x, want %#x", c.in, got, c.out)
		}
	}
}

func BenchmarkEncode(b *testing.B) {
	e := newEncoder("tiny-mm", 1024)
	px := decoded(b, jpegBytes(b, picture(512, 512, 1)))
	out := make([]byte, px.grid.Rows()*e.rowBytes())
	b.SetBytes(int64(len(out)))
	for b.Loop() {
		if err := e.embed(px, [][]byte{out}); err != nil {
			b.Fatal(err)
		}
	}
}
