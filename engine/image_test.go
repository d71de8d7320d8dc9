package engine

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"strings"
	"testing"
)

// picture is a small image whose every pixel depends on its place and on seed.
func picture(w, h, seed int) *image.RGBA {
	m := image.NewRGBA(image.Rect(0, 0, w, h))
	for y := range h {
		for x := range w {
			m.SetRGBA(x, y, color.RGBA{uint8(x*7 + seed), uint8(y*5 + 3*seed), uint8(x*y + seed), 255})
		}
	}
	return m
}

func pngBytes(t testing.TB, m image.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, m); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func jpegBytes(t testing.TB, m image.Image) []byte {
	t.Helper()
	var b bytes.Buffer
	if err := jpeg.Encode(&b, m, nil); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// bomb is a PNG of a few bytes whose head claims w x h pixels.
func bomb(t testing.TB, w, h uint32) []byte {
	b := pngBytes(t, picture(1, 1, 0))
	binary.BigEndian.PutUint32(b[16:], w)
	binary.BigEndian.PutUint32(b[20:], h)
	binary.BigEndian.PutUint32(b[29:], crc32.ChecksumIEEE(b[12:29]))
	return b
}

// The expected sizes are those of transformers' smart_resize with factor 28 and the limits above.
func TestImagesAreSizedAsTheProcessorOfQwen2VLDoes(t *testing.T) {
	for _, c := range []struct{ w, h, gw, gh, rows int }{
		{512, 512, 36, 36, 324},
		{451, 300, 32, 22, 176},
		{600, 400, 42, 28, 294},
		{56, 56, 4, 4, 4},
		{1, 1, 4, 4, 4},
		{28, 28, 4, 4, 4},
		{42, 42, 4, 4, 4}, // 1.5 rounds to even
		{70, 70, 4, 4, 4}, // 2.5 rounds to even
		{4000, 3000, 82, 60, 1230},
		{1260, 28, 90, 2, 45},
	} {
		g, err := gridOf(c.w, c.h)
		if err != nil || g != (Grid{1, c.gh, c.gw}) || g.Rows() != c.rows {
			t.Errorf("gridOf(%d, %d) = %v (%d rows), %v; want [1 %d %d] (%d rows)", c.w, c.h, g, g.Rows(), err, c.gh, c.gw, c.rows)
		}
	}
}

func TestEveryGridThatTheProcessorGivesIsWithinTheLimits(t *testing.T) {
	for w := 1; w < 40000; w += 1 + w/7 {
		for h := 1; h < 40000; h += 1 + h/7 {
			g, err := gridOf(w, h)
			if max(w, h) > maxAspect*min(w, h) {
				if err == nil {
					t.Fatalf("%d x %d: accepted", w, h)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%d x %d: %v", w, h, err)
			}
			if err := g.valid(); err != nil {
				t.Fatalf("%d x %d: %v", w, h, err)
			}
		}
	}
}

func TestBadImagesAreRefusedWithTheReason(t *testing.T) {
	good := jpegBytes(t, picture(64, 48, 1))
	for _, c := range []struct {
		name string
		b    []byte
		want string
	}{
		{"empty", nil, "not a JPEG or PNG"},
		{"text", []byte("hello, I am no image"), "not a JPEG or PNG"},
		{"half a JPEG", good[:len(good)/2], "damaged"},
		{"half a PNG", pngBytes(t, picture(64, 48, 1))[:200], "damaged"},
		{"bomb", bomb(t, 60000, 60000), "60000 x 60000 pixels; at most"},
		{"overflowing bomb", bomb(t, 1<<31-1, 1<<31-1), "not a JPEG or PNG"},
		{"no pixels", bomb(t, 0, 5), "not a JPEG or PNG"},
		{"a hair", pngBytes(t, picture(1, 300, 1)), "more than 200 times"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := decodeImage(c.b, 1<<20); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v; want one that says %q", err, c.want)
			}
		})
	}
}

func TestTransparentPixelsBecomeWhite(t *testing.T) {
	px, err := decodeImage(pngBytes(t, image.NewNRGBA(image.Rect(0, 0, 56, 56))), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if c := px.rgba.RGBAAt(10, 10); c != (color.RGBA{255, 255, 255, 255}) {
		t.Errorf("pixel %v", c)
	}
}

func FuzzDecodeImage(f *testing.F) {
	f.Add(jpegBytes(f, picture(20, 30, 1)))
	f.Add(pngBytes(f, picture(20, 30, 1)))
	f.Add(bomb(f, 60000, 60000))
	f.Fuzz(func(t *testing.T, b []byte) {
		px, err := decodeImage(b, 1<<16)
		if err != nil {
			return
		}
		if err := px.grid.valid(); err != nil {
			t.Fatal(err)
		}
		if px.source.X*px.source.Y > 1<<16 {
			t.Fatalf("decoded %v pixels", px.source)
		}
	})
}
