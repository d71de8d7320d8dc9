// Command mapped measures the mapped plane against memcpy of the same bytes from shared memory to shared memory, and a view
// against nothing: the time to have the bytes in reach.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/bench/internal/memcpy"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
)

func main() {
	rounds := flag.Int("rounds", 31, "turns that count")
	cold := flag.Bool("cold", false, "walk through a large pool, so that source and destination are in no cache")
	flag.Parse()
	if err := run(*rounds, *cold); err != nil {
		fmt.Fprintln(os.Stderr, "mapped:", err)
		os.Exit(1)
	}
}

const pool = 512 << 20

// rig is a region, the mapped plane on both ends of it, and a destination in another shared mapping.
type rig struct {
	reg   *region.Region
	peer  transfer.Peer
	dst   []byte
	close []func() error
}

func newRig(ctx context.Context) (r *rig, err error) {
	r = &rig{}
	defer func() {
		if err != nil {
			r.end()
		}
	}()
	dir, err := os.MkdirTemp("/dev/shm", "ferry-bench-")
	if err != nil {
		return nil, err
	}
	r.onEnd(func() error { return os.RemoveAll(dir) })
	r.reg, err = region.Create(ctx, region.Options{
		Dir: dir, Identity: region.Identity{Instance: "bench", Group: "0"}, Geometry: region.Geometry{BlockBytes: 1 << 20, Blocks: pool >> 20},
	})
	if err != nil {
		return nil, err
	}
	r.onEnd(func() error { return r.reg.Close(true) })
	f, err := r.reg.Reopen(false)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	plane, err := mapped.New(mapped.Options{Dirs: []string{dir}})
	if err != nil {
		return nil, err
	}
	r.onEnd(plane.Close)
	offer, err := plane.Register(ctx, transfer.Memory{Bytes: r.reg.Pool(), File: f, Path: r.reg.Path(), FileOffset: r.reg.PoolOffset()}, nil)
	if err != nil {
		return nil, err
	}
	r.onEnd(offer.Close)
	if r.peer, err = plane.AddPeer(ctx, offer.Metadata()); err != nil {
		return nil, err
	}
	r.onEnd(r.peer.Close)
	r.dst, err = sharedMemory(filepath.Join(dir, "destination"))
	for i := range r.reg.Pool() {
		r.reg.Pool()[i] = byte(i>>12) + byte(i)
	}
	return r, err
}

func sharedMemory(path string) ([]byte, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(pool); err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, pool, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
}

func (r *rig) onEnd(f func() error) { r.close = append(r.close, f) }

func (r *rig) end() {
	for i := len(r.close) - 1; i >= 0; i-- {
		if err := r.close[i](); err != nil {
			fmt.Fprintln(os.Stderr, "mapped: cleaning up:", err)
		}
	}
}

func (r *rig) read(at, n int64) error {
	rd, err := r.peer.Read(context.Background(), transfer.ReadRequest{
		Remote: []region.Span{{Offset: at, Length: n}}, Local: [][]byte{r.dst[at : at+n]},
	})
	if err != nil {
		return err
	}
	<-rd.Done()
	return rd.Err()
}

var sum byte

// look takes a view and reads one byte of each page of it.
func (r *rig) look(at, n int64) error {
	spans, release, err := r.peer.(transfer.Viewer).View(nil, []region.Span{{Offset: at, Length: n}})
	if err != nil {
		return err
	}
	defer release()
	for i := 0; i < len(spans[0]); i += 4096 {
		sum += spans[0][i]
	}
	return nil
}

func run(rounds int, cold bool) error {
	r, err := newRig(context.Background())
	if err != nil {
		return err
	}
	defer r.end()
	w := os.Stdout
	how := "hot: the same buffers each turn"
	if cold {
		how = "cold: each turn takes other bytes of a 512 MiB pool"
	}
	measure.Header(w, "mapped plane, "+how, strings.Join(append([]string{"go run ./bench/mapped"}, os.Args[1:]...), " "), rounds)
	measure.Table(w, "bytes", "memcpy shm to shm, GB/s", "Go copy, GB/s (ratio)", "mapped READ, GB/s (ratio)", "READ, quartiles in us", "view and one byte a page, us")
	for _, n := range []int64{64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20} {
		src := r.reg.Pool()
		turns := 0
		where := func() int64 { // the four candidates of a turn take the same place when hot, places of their own when cold
			turns++
			if !cold {
				return 0
			}
			return int64(turns) * n % (pool - n + 1) &^ 4095
		}
		res, err := measure.Run(3, rounds, []measure.Candidate{
			measure.Timed("memcpy", func() error { at := where(); memcpy.Copy(r.dst[at:at+n], src[at:at+n]); return nil }),
			measure.Timed("copy", func() error { at := where(); copy(r.dst[at:at+n], src[at:at+n]); return nil }),
			measure.Timed("read", func() error { return r.read(where(), n) }),
			measure.Timed("view", func() error { return r.look(where(), n) }),
		})
		if err != nil {
			return err
		}
		clear(r.dst[:n])
		if err := r.read(0, n); err != nil {
			return err
		}
		if !bytes.Equal(r.dst[:n], src[:n]) {
			return fmt.Errorf("%s arrived wrong", measure.Size(n))
		}
		lo, hi := res[2].Quartiles()
		measure.Row(w, measure.Size(n),
			fmt.Sprintf("%.1f", measure.GBs(n, res[0].Median())),
			fmt.Sprintf("%.1f (%.2f)", measure.GBs(n, res[1].Median()), res[1].Faster(res[0])),
			fmt.Sprintf("%.1f (%.2f)", measure.GBs(n, res[2].Median()), res[2].Faster(res[0])),
			fmt.Sprintf("%d to %d", lo.Microseconds(), hi.Microseconds()),
			fmt.Sprintf("%.1f", float64(res[3].Median().Nanoseconds())/1e3))
	}
	return nil
}
