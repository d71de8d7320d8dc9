package wire

import (
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
)

// BenchmarkClaim is the control plane of one get: the request and the metadata, encoded and decoded, of one tensor and of 50.
func BenchmarkClaim(b *testing.B) {
	for _, n := range []int{1, 50} {
		m := &Metadata{Kind: Tensors, AgentMetadata: make([]byte, 400), SenderHost: "127.0.0.1", SenderPort: 50051, Generation: NewID(), Claim: NewID(),
			Groups: []Group{{MemoryType: "DRAM"}}}
		for i := range n {
			m.Specs = append(m.Specs, Spec{DType: tensor.Float32, Shape: tensor.Shape{16384}, Size: 65536})
			m.Groups[0].Regions = append(m.Groups[0].Regions, Region{Tensor: i, Addr: 0x7f0000000000 + uint64(i)<<16, Bytes: 65536})
			m.Size += 65536
		}
		q := &Request{Op: Get, Key: "req_0_1", Generation: m.Generation, Claim: m.Claim}
		b.Run(fmt.Sprintf("%d_tensors", n), func(b *testing.B) {
			var buf []byte
			b.ReportAllocs()
			for b.Loop() {
				buf = AppendRequest(buf[:0], q)
				if _, err := DecodeRequest(buf); err != nil {
					b.Fatal(err)
				}
				buf = AppendReply(buf[:0], &Reply{Status: Found, Metadata: m}, false)
				if _, err := DecodeReply(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkObject(b *testing.B) {
	small := dict{field("prompt", str("a cat")), field("steps", num(8)), field("tup", tuple{num(1), str("x")}),
		field("blob", tensor.Bytes{0xff, 0}), field("none", tensor.Null{}), field("f", tensor.Float(0.5))}
	ids := make(list, 4096)
	for i := range ids {
		ids[i] = num(i * 31)
	}
	for _, c := range []struct {
		name string
		n    tensor.Node
	}{
		{"small", small},
		{"4096_ids", dict{field("ids", ids)}},
		{"1MiB_tensor", dict{field("t", fill[float32](b, 1, 1<<18))}},
	} {
		encoded := encode(b, c.n)
		b.Run("encode_"+c.name, func(b *testing.B) {
			b.SetBytes(int64(len(encoded)))
			b.ReportAllocs()
			buf := make([]byte, 0, 2*len(encoded)+1024)
			for b.Loop() {
				if _, err := AppendObject(buf, c.n, ObjectOptions{}); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run("decode_"+c.name, func(b *testing.B) {
			b.SetBytes(int64(len(encoded)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := DecodeObject(encoded); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkPack50Leaves(b *testing.B) {
	layers := make(list, 50)
	for i := range layers {
		layers[i] = fill[float32](b, i, 16384)
	}
	root := dict{field("layers", layers), field("meta", dict{field("finished", tensor.Flag(true))})}
	b.ReportAllocs()
	for b.Loop() {
		p, err := Pack(root, PackOptions{})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := p.Unpack(); err != nil {
			b.Fatal(err)
		}
	}
}
