// Command cache measures the operations of our cache against those of vLLM's own EmbeddingCache in the same run, and takes both
// through the same traces for their hit rates. vLLM's part needs PEERS_PYTHON.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/bench/internal/peers"
	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
)

//go:embed vllm_cache.py
var script []byte

const (
	blockBytes = 64 // no byte of the pool is touched
	poolBlocks = 1 << 16
	turnKeys   = 1 << 17 // different keys: twice what the pool can hold
	pinTurn    = 10_000
)

func main() {
	rounds := flag.Int("rounds", 31, "turns that count")
	flag.Parse()
	if err := run(*rounds); err != nil {
		fmt.Fprintln(os.Stderr, "cache:", err)
		os.Exit(1)
	}
}

func run(rounds int) (err error) {
	dir, err := os.MkdirTemp("/dev/shm", "ferry-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	theirs, err := peers.Start("vllm_cache.py", script)
	switch {
	case errors.Is(err, peers.ErrNone):
		fmt.Fprintln(os.Stderr, "cache: vLLM's column is left out:", err)
	case err != nil:
		return err
	default:
		defer func() { err = errors.Join(err, theirs.Close()) }()
	}
	w := os.Stdout
	measure.Header(w, "cache operations and hit rates", strings.Join(append([]string{"go run ./bench/cache"}, os.Args[1:]...), " "), rounds)
	fmt.Fprintf(w, "## Operations\n\nA full pool of %d blocks; keys of 64 hexadecimal digits; one caller. By the processor time of the process, Go's\ncollector and Python's included. A turn is %d entries, or %d of 1024 blocks; %d pins.\n\n", poolBlocks, evictTurn(1), evictTurn(1024), pinTurn)
	if err := operations(w, dir, rounds, theirs); err != nil {
		return err
	}
	fmt.Fprintf(w, "\n## Traces\n\n%d requests by a Zipf law for entries of mixed sizes; each pins its entry, so that about %.0f%% of the entries are\npinned at any time; the pool is always full. An entry in one piece is whole.\n\n", traceRequests, 100*pinnedShare)
	return traces(w, dir, theirs)
}

func key(i int) string { return fmt.Sprintf("%064x", uint64(i)*0x9e3779b97f4a7c15) }

func spec(blocks int) ec.Spec {
	return ec.Spec{Dtype: "torch.bfloat16", Shape: []int64{int64(blocks), blockBytes / 2}, Bytes: int64(blocks) * blockBytes}
}

// newCache makes a cache over a region file in dir.
func newCache(dir string, blocks int, o ec.CacheOptions) (*ec.Cache, func() error, error) {
	r, err := region.Create(context.Background(), region.Options{
		Dir:      dir,
		Identity: region.Identity{Instance: "bench", Group: "0"},
		Geometry: region.Geometry{BlockBytes: blockBytes, Blocks: blocks, Slots: blocks},
	})
	if err != nil {
		return nil, nil, err
	}
	o.Region = r
	c, err := ec.NewCache(o)
	if err != nil {
		return nil, nil, errors.Join(err, r.Close(true))
	}
	return c, func() error { return r.Close(true) }, nil
}

// ours is our cache in the hands of the benchmark.
type ours struct {
	c      *ec.Cache
	keys   []string
	spec   ec.Spec
	at     int
	recent []string // keys of the last turn of evict
}

func (o *ours) put(n int) error {
	for range n {
		r, err := o.c.Reserve(o.keys[o.at%turnKeys], o.spec, 0)
		if err != nil {
			return err
		}
		if _, err := r.Commit(nil); err != nil {
			return err
		}
		o.at++
	}
	return nil
}

func (o *ours) pin(n int) error {
	for i := range n {
		p, err := o.c.Pin(o.recent[i%len(o.recent)])
		if err != nil {
			return err
		}
		p.Release()
	}
	return nil
}

func operations(w io.Writer, dir string, rounds int, theirs *peers.Script) error {
	measure.Table(w, "operation", "blocks", "ours, 1,000/s", "quartiles, ns", "vLLM, 1,000/s", "times vLLM")
	keys := make([]string, turnKeys)
	for i := range keys {
		keys[i] = key(i)
	}
	for _, blocks := range []int{1, 32, 1024} {
		c, end, err := newCache(filepath.Clean(dir), poolBlocks, ec.CacheOptions{})
		if err != nil {
			return err
		}
		o := &ours{c: c, keys: keys, spec: spec(blocks)}
		err = o.put(poolBlocks / blocks)
		if err == nil && theirs != nil {
			_, err = theirs.Ask("pool %d %d", poolBlocks, blocks)
		}
		if err == nil {
			err = row(w, "alloc + evict + ready", "evict", blocks, evictTurn(blocks), rounds, theirs, o.put)
		}
		if err == nil {
			o.recent = nil
			for i := max(0, o.at-32); i < o.at; i++ {
				o.recent = append(o.recent, keys[i%turnKeys])
			}
			err = row(w, "pin + unpin", "pin", blocks, pinTurn, rounds, theirs, o.pin)
		}
		if err = errors.Join(err, end()); err != nil {
			return err
		}
	}
	return nil
}

// evictTurn is how many entries make a turn of about 0.3 s for the slower of the two: long enough that what the other has left in
// the processor's caches does not count.
func evictTurn(blocks int) int {
	if blocks == 1024 {
		return 10_000
	}
	return 100_000
}

// cpuTime is the processor time of this process so far, that of the collector included.
func cpuTime() (time.Duration, error) {
	var t unix.Timespec
	err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t)
	return time.Duration(t.Nano()), err
}

func row(w io.Writer, name, ask string, blocks, n, rounds int, theirs *peers.Script, f func(int) error) error {
	cs := []measure.Candidate{{Name: "ours", Run: func() (time.Duration, error) {
		start, err := cpuTime()
		if err == nil {
			err = f(n)
		}
		end, e := cpuTime()
		return end - start, errors.Join(err, e)
	}}}
	if theirs != nil {
		cs = append(cs, measure.Candidate{Name: "vLLM", Run: func() (time.Duration, error) { return theirs.Took("%s %d", ask, n) }})
	}
	res, err := measure.Run(3, rounds, cs)
	if err != nil {
		return err
	}
	rate := func(r measure.Result) string { return fmt.Sprintf("%.0f", float64(n)/r.Median().Seconds()/1e3) }
	lo, hi := res[0].Quartiles()
	cells := []string{
		name, fmt.Sprint(blocks), rate(res[0]),
		fmt.Sprintf("%d to %d", lo.Nanoseconds()/int64(n), hi.Nanoseconds()/int64(n)), "not run", "",
	}
	if len(res) > 1 {
		cells[4], cells[5] = rate(res[1]), fmt.Sprintf("%.1f", res[0].Faster(res[1]))
	}
	measure.Row(w, cells...)
	return nil
}

func traces(w io.Writer, dir string, theirs *peers.Script) error {
	measure.Table(w, "trace", "fifo: hits, whole", "sieve: hits, whole", "vLLM: hits, whole")
	for _, tr := range []*trace{
		{blocks: 1 << 13, keys: 400, largest: 256, skew: 1.1},
		{blocks: 1 << 13, keys: 2000, largest: 64, skew: 1.05},
		{blocks: 1 << 14, keys: 800, largest: 512, skew: 1.2},
		{blocks: 1 << 16, keys: 20_000, largest: 256, skew: 1.01},
	} {
		tr.make()
		show := func(o outcome) string { return fmt.Sprintf("%.1f%%, %.1f%%", o.hitRate(), o.wholeShare()) }
		cells := []string{tr.String()}
		for _, policy := range []string{ec.PolicyFIFO, ec.PolicySIEVE} {
			o, err := tr.run(dir, policy)
			if err != nil {
				return err
			}
			cells = append(cells, show(o))
		}
		vllm := "not run"
		if theirs != nil {
			path, err := tr.write(dir)
			if err != nil {
				return err
			}
			answer, err := theirs.Ask("trace %s", path)
			if err != nil {
				return err
			}
			var o outcome
			if _, err := fmt.Sscan(answer, &o.hits, &o.allocations, &o.whole, &o.refused); err != nil {
				return fmt.Errorf("vLLM's answer %q: %w", answer, err)
			}
			vllm = show(o)
		}
		measure.Row(w, append(cells, vllm)...)
	}
	return nil
}
