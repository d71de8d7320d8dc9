package node

import (
	"fmt"
	"os"
	"strconv"
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

// BenchmarkRestart is from the start of a process after a kill to the line that says that the node is ready: a region full of entries of
// 4 MiB is adopted, with their checksums compared or not. FERRY_BENCH_GIB says how large it is, 1 if it does not.
func BenchmarkRestart(b *testing.B) {
	gib := 1
	if text := os.Getenv("FERRY_BENCH_GIB"); text != "" {
		var err error
		if gib, err = strconv.Atoi(text); err != nil {
			b.Fatal(err)
		}
	}
	const rows = 2048 // of an entry
	for _, sums := range []bool{false, true} {
		b.Run(fmt.Sprintf("checksums=%t", sums), func(b *testing.B) {
			cfg := testConfig(b, gib<<30/testBlock)
			cfg.Checksums = sums
			p := spawnNode(b, cfg)
			c := dialNode(b, cfg.Socket)
			data := payload(rows, 1)
			for i := range gib << 30 / len(data) {
				data[0], data[1] = byte(i), byte(i>>8)
				if _, err := c.Put(b.Context(), fmt.Sprint(i), spec(rows), data); err != nil {
					b.Fatal(err)
				}
			}
			if err := c.Close(); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(gib) << 30)
			for b.Loop() {
				b.StopTimer()
				p.kill()
				b.StartTimer()
				p = spawnNode(b, cfg)
			}
			if said := p.said(); said != "" {
				b.Errorf("not adopted as it was:\n%s", said)
			}
			p.end()
		})
	}
}
