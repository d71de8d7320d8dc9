package wire

import (
	"strings"
	"testing"
)

func BenchmarkAppendAckOwn(b *testing.B) {
	a := fullAck()
	a.Blocks, a.AgentMetadata, a.MemDescriptor = nil, nil, nil
	buf := make([]byte, 0, 1024)
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendAck(buf[:0], a)
	}
}

func BenchmarkAppendAckPlain256Blocks(b *testing.B) {
	a := &Ack{Key: strings.Repeat("k", 64), Session: strings.Repeat("s", 36), Blocks: make([]uint32, 256), AgentMetadata: make([]byte, 490)}
	for i := range a.Blocks {
		a.Blocks[i] = uint32(100_000 + i)
	}
	buf := make([]byte, 0, 4096)
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendAck(buf[:0], a)
	}
}

func BenchmarkDecodeRequestPlain(b *testing.B) {
	frame := AppendRequest(nil, &Request{Key: strings.Repeat("k", 64), CompatHash: strings.Repeat("c", 64), Session: strings.Repeat("s", 36)}, 2)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeAtProducer(frame, 2); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecodeRequestOwn(b *testing.B) {
	frame := AppendRequest(nil, fullRequest(), 2)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeAtProducer(frame, 2); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecodeAckOwn(b *testing.B) {
	a := fullAck()
	a.Blocks, a.AgentMetadata, a.MemDescriptor = nil, nil, nil
	frame := AppendAck(nil, a)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeAtConsumer(frame); err != nil {
			b.Fatal(err)
		}
	}
}

// A region of 1 GiB in blocks of 7 KiB.
const regionBlocks, regionBase, regionBlock = 1 << 30 / 7168, 0x7f1122334000, 7168

func BenchmarkAppendMemDescriptor1GiB(b *testing.B) {
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = AppendMemDescriptor(buf[:0], regionBase, regionBlocks, regionBlock)
	}
	b.SetBytes(int64(len(buf)))
}

func BenchmarkDecodeMemDescriptor1GiB(b *testing.B) {
	buf := AppendMemDescriptor(nil, regionBase, regionBlocks, regionBlock)
	b.ReportAllocs()
	b.SetBytes(int64(len(buf)))
	for b.Loop() {
		if _, err := DecodeMemDescriptor(buf, regionBlocks); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkParamsDecodeAndPassOn(b *testing.B) {
	doc := []byte(readGolden(b).Params)
	b.ReportAllocs()
	b.SetBytes(int64(len(doc)))
	for b.Loop() {
		var p Params
		if err := p.UnmarshalJSON(doc); err != nil {
			b.Fatal(err)
		}
		if _, err := p.MarshalJSON(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkFindParamsBesideAnImage(b *testing.B) {
	body := []byte(`{"messages":[{"image_url":"data:image/png;base64,` + strings.Repeat("A", 1<<20) + `"}],"ec_transfer_params":{}}`)
	b.ReportAllocs()
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		if _, _, err := FindParams(body); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkCompatHash(b *testing.B) {
	c := Compat{"0.32.0", "Qwen/Qwen2.5-VL-7B-Instruct", "torch.bfloat16", 7168}
	b.ReportAllocs()
	for b.Loop() {
		c.Hash()
	}
}
