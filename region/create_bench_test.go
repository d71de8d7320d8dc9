package region

import (
	"fmt"
	"testing"
)

// BenchmarkCreate makes a region ready for use on a tmpfs and removes it.
func BenchmarkCreate(b *testing.B) {
	for _, mib := range []int{64, 1024} {
		b.Run(fmt.Sprintf("%dMiB", mib), func(b *testing.B) {
			o := smallOptions(DefaultDir)
			o.Geometry = Geometry{BlockBytes: 2048, Blocks: mib << 9}
			b.SetBytes(o.Geometry.PoolBytes())
			for b.Loop() {
				r, err := Create(b.Context(), o)
				if err != nil {
					b.Fatal(err)
				}
				r.Close(true)
			}
		})
	}
}
