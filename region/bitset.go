package region

import "math/bits"

// bitset is a set of numbers below a bound. Each level has one bit for 64 of the level below that says "not all zero", so every
// operation takes one step a level: four for 16 million numbers.
type bitset [][]uint64

func newBitset(bound int) bitset {
	var b bitset
	for n := bound; ; {
		n = (n + 63) / 64
		b = append(b, make([]uint64, max(n, 1)))
		if n <= 1 {
			return b
		}
	}
}

func (b bitset) add(i int) {
	for _, level := range b {
		w := &level[i>>6]
		was := *w
		*w |= 1 << (i & 63)
		if was != 0 {
			return
		}
		i >>= 6
	}
}

func (b bitset) remove(i int) {
	for _, level := range b {
		w := &level[i>>6]
		*w &^= 1 << (i & 63)
		if *w != 0 {
			return
		}
		i >>= 6
	}
}

func (b bitset) has(i int) bool { return b[0][i>>6]>>(i&63)&1 != 0 }

// next is the smallest member not below i, or -1.
func (b bitset) next(i int) int {
	for l := range b {
		if i>>6 >= len(b[l]) {
			return -1
		}
		if w := b[l][i>>6] >> (i & 63); w != 0 {
			i += bits.TrailingZeros64(w)
			for ; l > 0; l-- {
				i = i<<6 + bits.TrailingZeros64(b[l-1][i])
			}
			return i
		}
		i = i>>6 + 1
	}
	return -1
}

// prev is the largest member not above i, or -1.
func (b bitset) prev(i int) int {
	for l := range b {
		if i < 0 {
			return -1
		}
		if w := b[l][i>>6] << (63 - i&63); w != 0 {
			i -= bits.LeadingZeros64(w)
			for ; l > 0; l-- {
				i = i<<6 + 63 - bits.LeadingZeros64(b[l-1][i])
			}
			return i
		}
		i = i>>6 - 1
	}
	return -1
}
