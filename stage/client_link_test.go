package stage

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
)

func benchLink(b *testing.B) *Link {
	l, err := NewLink(b.Context(), LinkOptions{Slab: newSlab(b, 64<<20), Bind: &Endpoint{}})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := l.Close(ctx); err != nil {
			b.Error(err)
		}
	})
	return l
}

func roundTrip(b *testing.B, put, get *Link, key string, v tensor.Node) {
	p, err := put.Put(b.Context(), key, v, PutOptions{})
	if err != nil {
		b.Fatal(err)
	}
	got, err := get.Get(b.Context(), Request{Key: key, Metadata: p.Metadata})
	if err != nil {
		b.Fatal(err)
	}
	if err := got.Release(); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkPutAndGet(b *testing.B) {
	for _, size := range []int64{64, 64 << 10, 1 << 20} {
		v, err := tensor.Of(make([]uint8, size), size)
		if err != nil {
			b.Fatal(err)
		}
		for _, inFlight := range []int{1, 16} {
			b.Run(fmt.Sprintf("bytes=%d/inflight=%d", size, inFlight), func(b *testing.B) {
				put, get := benchLink(b), benchLink(b)
				roundTrip(b, put, get, "first", v)
				b.ReportAllocs()
				b.ResetTimer()
				var n atomic.Int64
				var group sync.WaitGroup
				for range inFlight {
					group.Go(func() {
						for i := n.Add(1); i <= int64(b.N); i = n.Add(1) {
							roundTrip(b, put, get, strconv.FormatInt(i, 10), v)
						}
					})
				}
				group.Wait()
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "gets/s")
			})
		}
	}
}
