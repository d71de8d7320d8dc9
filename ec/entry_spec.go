package ec

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/tensor"
)

// Spec says what an entry holds. Shape is [rows, width]; Bytes = rows x width x size of Dtype.
type Spec struct {
	Dtype string // as torch prints it, "torch.bfloat16"; "bfloat16" is taken for the same
	Shape []int64
	Bytes int64
}

func (s Spec) String() string { return fmt.Sprintf("%s%v, %d bytes", s.Dtype, s.Shape, s.Bytes) }

// equal compares specs that checkSpec let through.
func (s Spec) equal(t Spec) bool {
	return s.Dtype == t.Dtype && s.Bytes == t.Bytes && slices.Equal(s.Shape, t.Shape)
}

// ItemSize is the size in bytes of one element of a dtype, named as torch prints it ("torch.bfloat16") or without "torch.".
// The error wraps ErrSpec.
func ItemSize(name string) (int, error) {
	d, err := parseDType(name)
	return int(d.Size()), err
}

// parseDType is tensor's, with an error of this package.
func parseDType(name string) (tensor.DType, error) {
	d, err := tensor.ParseDType(name)
	if err != nil {
		return d, fmt.Errorf("%w: %w", ErrSpec, err)
	}
	return d, nil
}

// checkSpec gives the spec with its dtype's full name.
func checkSpec(s Spec) (Spec, error) {
	d := tensor.BFloat16 // what nearly all entries have
	if s.Dtype != "torch.bfloat16" {
		var err error
		if d, err = parseDType(s.Dtype); err != nil {
			return s, err
		}
		if !strings.HasPrefix(s.Dtype, "torch.") {
			s.Dtype = d.String()
		}
	}
	if len(s.Shape) != 2 {
		return s, fmt.Errorf("%w: shape of %d dimensions; give [rows, width]", ErrSpec, len(s.Shape))
	}
	rows, width := s.Shape[0], s.Shape[1]
	if rows <= 0 || width <= 0 {
		return s, fmt.Errorf("%w: shape %v; both must be above 0", ErrSpec, s.Shape)
	}
	over, elements := bits.Mul64(uint64(rows), uint64(width))
	over2, bytes := bits.Mul64(elements, uint64(d.Size()))
	if over != 0 || over2 != 0 || bytes > math.MaxInt64 {
		return s, fmt.Errorf("%w: shape %v is more than can be counted", ErrSpec, s.Shape)
	}
	if want := int64(bytes); s.Bytes != want {
		return s, fmt.Errorf("%w: %d bytes given, %s%v takes %d", ErrSpec, s.Bytes, d, s.Shape, want)
	}
	return s, nil
}

// checkKey takes keys of 1 to region.MaxKey bytes of UTF-8 without control characters: they are shown to people, and stand
// in file names and logs.
func checkKey(key string) error {
	if len(key) == 0 || len(key) > region.MaxKey {
		return fmt.Errorf("%w: %d bytes; give 1 to %d", ErrKey, len(key), region.MaxKey)
	}
	if plainASCII(key) {
		return nil
	}
	for i := range len(key) {
		if b := key[i]; b < ' ' || b == 0x7f {
			return fmt.Errorf("%w: %q has a control character", ErrKey, key)
		}
	}
	if !utf8.ValidString(key) {
		return fmt.Errorf("%w: %q is not UTF-8", ErrKey, key)
	}
	if strings.ContainsFunc(key, unicode.IsControl) {
		return fmt.Errorf("%w: %q has a control character", ErrKey, key)
	}
	return nil
}

// plainASCII tells that a string of at least 8 bytes is ASCII without control characters, eight bytes at a time: keys are
// 64 digits, and every request names one. False: look closer.
func plainASCII(s string) bool {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	if len(s) < 8 {
		return false
	}
	odd := uint64(0)
	look := func(w uint64) {
		del := w ^ 0x7f*ones
		odd |= (w | (w - ' '*ones) | (del - ones)) & highs // above 0x7f, below ' ', or 0x7f
	}
	for i := 0; i+8 <= len(s); i += 8 {
		look(word(s[i:]))
	}
	look(word(s[len(s)-8:]))
	return odd == 0
}

// word is the first eight bytes of s, the first lowest.
func word(s string) uint64 {
	_ = s[7]
	return uint64(s[0]) | uint64(s[1])<<8 | uint64(s[2])<<16 | uint64(s[3])<<24 |
		uint64(s[4])<<32 | uint64(s[5])<<40 | uint64(s[6])<<48 | uint64(s[7])<<56
}
