package stage

import (
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
)

// BenchmarkFill is the copy of a put, with and without a checksum.
func BenchmarkFill(b *testing.B) {
	for _, n := range []int64{64 << 10, 1 << 20, 16 << 20, 256 << 20} {
		v, err := tensor.Of(make([]uint8, n), n)
		if err != nil {
			b.Fatal(err)
		}
		to := [][]byte{make([]byte, n)}
		for _, sum := range []bool{false, true} {
			b.Run(fmt.Sprintf("bytes=%d/sum=%v", n, sum), func(b *testing.B) {
				fill(to, []tensor.Tensor{v}, sum)
				b.SetBytes(n)
				for b.Loop() {
					fill(to, []tensor.Tensor{v}, sum)
				}
			})
		}
	}
}
