package nixl

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// What the plane, with its agents in processes, costs over the library's own READ of the same bytes from the same agent, in turns.
func BenchmarkReadAgainstTheRawLibrary(b *testing.B) {
	o := processes(b)
	const pool = 64 << 20
	m, d := shared(b, pool), shared(b, pool)
	p := newPlane(b, o)
	src, err := p.Register(b.Context(), m, nil)
	must(b, err)
	if _, err := p.Register(b.Context(), d, nil); err != nil {
		b.Fatal(err)
	}
	peer, err := p.AddPeer(b.Context(), src.Metadata())
	must(b, err)
	l, err := binding.Load(o.libraryOptions()...)
	must(b, err)
	raw, err := l.NewAgent("raw", binding.AgentConfig{ProgressDelay: 100 * time.Millisecond})
	must(b, err)
	defer raw.Close()
	if _, err := raw.CreateBackend("UCX", nil); err != nil {
		b.Fatal(err)
	}
	if _, err := raw.Register(binding.DRAM, []binding.Range{binding.RangeOf(d.Bytes)}); err != nil {
		b.Fatal(err)
	}
	md, base, _ := src.(*Registration).Agent()
	far, err := raw.AddPeer(md)
	must(b, err)
	for _, n := range []int{64 << 10, 1 << 20, 16 << 20, 64 << 20} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			var rawTimes, planeTimes []time.Duration
			for b.Loop() {
				start := time.Now()
				r, err := raw.NewRequest(binding.Read, binding.Descs{Ranges: []binding.Range{binding.RangeOf(d.Bytes[:n])}},
					binding.Descs{Ranges: []binding.Range{{Addr: uintptr(base), Len: uint64(n)}}}, far, binding.RequestOptions{})
				if err != nil {
					b.Fatal(err)
				}
				done, err := r.Post()
				if err == nil && !done {
					err = r.Wait(b.Context())
				}
				if err != nil {
					b.Fatal(err)
				}
				r.Release()
				rawTimes = append(rawTimes, time.Since(start))

				start = time.Now()
				rd, err := peer.Read(b.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: int64(n)}}, Local: [][]byte{d.Bytes[:n]}})
				if err != nil {
					b.Fatal(err)
				}
				<-rd.Done()
				if rd.Err() != nil {
					b.Fatal(rd.Err())
				}
				planeTimes = append(planeTimes, time.Since(start))
			}
			slices.Sort(rawTimes)
			slices.Sort(planeTimes)
			report := func(name string, d time.Duration) { b.ReportMetric(float64(d.Microseconds()), name) }
			report("raw-p50-us", rawTimes[len(rawTimes)/2])
			report("plane-p50-us", planeTimes[len(planeTimes)/2])
			report("raw-p10-us", rawTimes[len(rawTimes)/10])
			report("plane-p10-us", planeTimes[len(planeTimes)/10])
		})
	}
}

// shared is memory of n bytes in a file.
func shared(t testing.TB, n int) transfer.Memory {
	t.Helper()
	fd, err := unix.MemfdCreate("pool", unix.MFD_CLOEXEC)
	must(t, err)
	f := os.NewFile(uintptr(fd), "pool")
	must(t, f.Truncate(int64(n)))
	mem, err := unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	must(t, err)
	transfertest.Fill(mem, 1)
	t.Cleanup(func() {
		must(t, unix.Munmap(mem))
		must(t, f.Close())
	})
	return transfer.Memory{Bytes: mem, File: f, Path: "pool"}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
