package stage

import (
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// BenchmarkServer is the producer's side of small gets: a claim answered with the bytes, and the done that ends it.
func BenchmarkServer(b *testing.B) {
	for _, c := range []struct {
		way  string
		dial func(testing.TB, *Server) *own
	}{{"local", newLocal}, {"tcp", newOwn}} {
		for _, inFlight := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/inflight=%d", c.way, inFlight), func(b *testing.B) {
				st, s := serve(b, Options{}, ServerOptions{})
				md := wire.Metadata{Kind: wire.Tensors, Specs: []wire.Spec{{DType: tensor.Uint8, Shape: tensor.Shape{64}, Size: 64}}, Size: 64}
				g, err := st.Put(Put{Key: "k", Metadata: md, Memory: newMemory(b), Readers: b.N + 1})
				if err != nil {
					b.Fatal(err)
				}
				o := c.dial(b, s)
				asked := 0
				ask := func() {
					asked++
					o.send(wire.Get, Claim{Key: "k", Generation: g, ID: wire.NewID()}, wire.FerryRequest{Try: uint64(asked), Inline: 1 << 10})
				}
				b.ReportAllocs()
				b.ResetTimer()
				for asked < min(inFlight, b.N) {
					ask()
				}
				for got := 0; got < b.N; {
					a := receive(b, o.answers)
					if a.Status == wire.Acked {
						continue
					}
					if a.Status != wire.Found || a.Metadata.Ferry.Inline == nil {
						b.Fatalf("%+v", a)
					}
					o.send(wire.Done, Claim{Key: "k", Generation: g, ID: a.Metadata.Claim}, wire.FerryRequest{})
					if got++; asked < b.N {
						ask()
					}
				}
				b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "gets/s")
			})
		}
	}
}
