package tensor

import (
	"fmt"
	"math/bits"
)

// Shape is the size of each dimension, outermost first. An empty or nil Shape is that of a single element.
type Shape []int64

// String is such as "[4 8]".
func (s Shape) String() string { return fmt.Sprint([]int64(s)) }

// Len is the number of elements. The error wraps ErrShape or ErrLimit.
func (s Shape) Len() (int64, error) { return s.bytes(1) }

// bytes is the size of a tensor of items of size bytes. It is refused if any stride in bytes is over an int64, also where another
// dimension is 0 and the tensor has no bytes at all: torch refuses the same.
func (s Shape) bytes(size int64) (int64, error) {
	if len(s) > MaxRank {
		return 0, fmt.Errorf("%w: %d dimensions, limit %d", ErrLimit, len(s), MaxRank)
	}
	empty := false
	n := size
	for _, d := range s {
		switch {
		case d < 0:
			return 0, fmt.Errorf("%w: dimension %d in %v", ErrShape, d, s)
		case d == 0:
			empty = true
		default:
			var ok bool
			if n, ok = mul(n, d); !ok {
				return 0, fmt.Errorf("%w: %v of %d bytes each is over 2^63", ErrShape, s, size)
			}
		}
	}
	if empty {
		return 0, nil
	}
	return n, nil
}

// Strides are those of a contiguous tensor of s, in elements. s must be valid. As torch has it, a dimension of 0 counts as 1.
func (s Shape) Strides() []int64 {
	strides := make([]int64, len(s))
	n := int64(1)
	for i := len(s) - 1; i >= 0; i-- {
		strides[i] = n
		n *= max(s[i], 1)
	}
	return strides
}

// mul multiplies two numbers from 0 up; it is not ok if the product is over an int64.
func mul(a, b int64) (int64, bool) {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	return int64(lo), hi == 0 && int64(lo) >= 0
}
