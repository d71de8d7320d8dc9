package node

import (
	"fmt"
	"testing"

	"github.com/tensorferry/tensorferry/node/client"
)

// BenchmarkRoundTrip is one lookup, there and back.
func BenchmarkRoundTrip(b *testing.B) {
	n := startNode(b, testConfig(b, 256))
	c := dial(b, n)
	put(b, c, "k", 1, 1)
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Lookup(ctx, "k"); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkBatch64 is a step of 64 lookups in one round trip.
func BenchmarkBatch64(b *testing.B) {
	n := startNode(b, testConfig(b, 256))
	c := dial(b, n)
	var ops []client.Op
	for i := range 64 {
		key := fmt.Sprintf("key-%02d", i)
		put(b, c, key, 1, 1)
		ops = append(ops, client.LookupOp(key))
	}
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Batch(ctx, ops...); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkMapRelease is what a decode step does for one entry that the pool has.
func BenchmarkMapRelease(b *testing.B) {
	n := startNode(b, testConfig(b, 256))
	c := dial(b, n)
	put(b, c, "k", 64, 1)
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		m, err := c.Map(ctx, "k")
		if err != nil {
			b.Fatal(err)
		}
		m.Release()
	}
}

// BenchmarkPut1MiB is reserve, copy, commit of 1 MiB.
func BenchmarkPut1MiB(b *testing.B) {
	n := startNode(b, testConfig(b, 8192))
	c := dial(b, n)
	data := payload(512, 1)
	ctx := b.Context()
	b.SetBytes(int64(len(data)))
	for i := 0; b.Loop(); i++ {
		if _, err := c.Put(ctx, fmt.Sprint(i), spec(512), data); err != nil {
			b.Fatal(err)
		}
	}
}
