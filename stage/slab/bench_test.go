package slab

import (
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// BenchmarkPutGet is one payload without its control plane: two buffers, the copy into the first, an offer, a READ, and all freed.
func BenchmarkPutGet(b *testing.B) {
	for _, plane := range []string{Inline, transfer.Mapped, transfer.TCP, transfer.NIXL} {
		for _, c := range []struct {
			name  string
			sizes []int64
		}{
			{"1KiB", []int64{1 << 10}}, {"64KiB", []int64{64 << 10}}, {"50x64KiB", slices.Repeat([]int64{64 << 10}, 50)},
			{"1MiB", []int64{1 << 20}}, {"16MiB", []int64{16 << 20}},
		} {
			m := describe(c.sizes)
			if plane == Inline && m.Size > wire.MaxInline {
				continue
			}
			b.Run(fmt.Sprintf("%s/%s", plane, c.name), func(b *testing.B) {
				dir, err := os.MkdirTemp(region.DefaultDir, "slab-bench-")
				must(b, err)
				b.Cleanup(func() { must(b, os.Remove(dir)) })
				of := makers[transfer.Mapped]
				inline := int64(0)
				if plane == Inline {
					inline = wire.MaxInline
				} else {
					of = makers[plane]
				}
				producer, consumer := newSlab(b, dir, "a", 64<<20, of(b, dir)), newSlab(b, dir, "b", 64<<20, of(b, dir))
				payload := make([]byte, m.Size)
				ask := &wire.FerryRequest{Planes: []string{plane}, Inline: inline}
				b.SetBytes(m.Size)
				b.ReportAllocs()
				putGet := func() {
					from, err := producer.Alloc(b.Context(), c.sizes)
					must(b, err)
					rest := payload
					for _, to := range from.Slices() {
						rest = rest[copy(to, rest):]
					}
					p := from.Payload(m.Specs)
					told := *m
					told.Ferry = &wire.FerryMetadata{}
					must(b, p.Offer(b.Context(), "1", ask, &told))
					into, err := consumer.Alloc(b.Context(), c.sizes)
					must(b, err)
					_, err = consumer.Read(b.Context(), &told, into)
					must(b, err)
					into.Free()
					must(b, p.Withdraw(b.Context(), "1", true))
					p.Release()
				}
				putGet() // connects
				for b.Loop() {
					putGet()
				}
			})
		}
	}
}
