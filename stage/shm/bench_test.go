package shm

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

// BenchmarkPutGet is put, get and release between two connectors, in turns. As in the peers' own benchmark, whose figures BenchmarkPeers
// gives, nobody looks at the bytes.
func BenchmarkPutGet(b *testing.B) {
	for _, x := range []struct {
		name string
		n    int
	}{{"tiny", 16}, {"64KiB", 64 << 10}, {"1MiB", 1 << 20}, {"16MiB", 16 << 20}} {
		b.Run(x.name, func(b *testing.B) {
			dir := shmDir(b)
			from, to := open(b, Options{Dir: dir}), open(b, Options{Dir: dir})
			root := must(tensor.Of(make([]uint8, x.n), int64(x.n)))
			ctx := b.Context()
			var put, get time.Duration
			b.SetBytes(int64(x.n))
			for b.Loop() {
				start := time.Now()
				p, err := from.Put(ctx, "bench_0_0", root, stage.PutOptions{})
				if err != nil {
					b.Fatal(err)
				}
				mid := time.Now()
				g, err := to.Get(ctx, stage.Request{Key: "bench_0_0", Metadata: p.Metadata, InPlace: true})
				if err != nil {
					b.Fatal(err)
				}
				if err := g.Release(); err != nil {
					b.Fatal(err)
				}
				put, get = put+mid.Sub(start), get+time.Since(mid)
			}
			b.ReportMetric(float64(put.Nanoseconds())/float64(b.N), "put-ns/op")
			b.ReportMetric(float64(get.Nanoseconds())/float64(b.N), "get-ns/op")
		})
	}
}

// BenchmarkPutGet16 has 16 tiny payloads in flight between two connectors.
func BenchmarkPutGet16(b *testing.B) {
	dir := shmDir(b)
	from, to := open(b, Options{Dir: dir}), open(b, Options{Dir: dir})
	root := must(tensor.Of(make([]uint8, 16), 16))
	var keys atomic.Int32
	b.SetParallelism(16 / runtime.GOMAXPROCS(0))
	b.RunParallel(func(pb *testing.PB) {
		key := fmt.Sprintf("bench_0_%d", keys.Add(1))
		for pb.Next() {
			if _, err := from.Put(b.Context(), key, root, stage.PutOptions{}); err != nil {
				b.Error(err)
				return
			}
			if _, err := to.Get(b.Context(), stage.Request{Key: key}); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkPeers reports the medians of vLLM-Omni's SharedMemoryConnector, by interop/peers/omni/bench.py.
func BenchmarkPeers(b *testing.B) {
	python := os.Getenv("PEERS_PYTHON")
	if python == "" {
		b.Skip("PEERS_PYTHON is not set: set it to the last line that interop/peers/setup.sh prints")
	}
	script, err := filepath.Abs("../../interop/peers/omni/bench.py")
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.CommandContext(b.Context(), python, "-W", "ignore", script, filepath.Join(b.TempDir(), "bench.json"))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	for lines := bufio.NewScanner(out); lines.Scan(); {
		var row struct {
			Case, Connector string
			Put             float64 `json:"put_ms"`
			Get             float64 `json:"get_ms"`
			RoundTrip       float64 `json:"round_trip_ms"`
		}
		if !strings.HasPrefix(lines.Text(), "{") || json.Unmarshal(lines.Bytes(), &row) != nil || row.Connector != "shm" {
			continue
		}
		b.ReportMetric(row.Put*1e6, row.Case+"-put-ns")
		b.ReportMetric(row.Get*1e6, row.Case+"-get-ns")
		b.ReportMetric(row.RoundTrip*1e6, row.Case+"-ns")
	}
	if err := cmd.Wait(); err != nil {
		b.Fatal(err)
	}
}
