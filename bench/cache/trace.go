package main

import (
	"bufio"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/tensorferry/tensorferry/ec"
)

// A trace is requests for entries of mixed sizes, by a Zipf law. Each request pins its entry, after putting it there if it is
// missing, and releases it some requests later, so that about a tenth of the entries are pinned at any time. The pool is always
// full. As a file:
//
//	BLOCKS KEYS            of the pool, of the trace
//	SIZE                   of each key, in blocks
//	get NUMBER KEY         pin
//	release NUMBER         what that get pinned
type trace struct {
	blocks, keys, largest int
	skew                  float64
	seed                  uint64

	size []int
	ops  []traceOp
}

type traceOp struct {
	release     bool
	number, key int
}

const (
	traceRequests = 50_000
	pinnedShare   = 0.1
)

func (tr *trace) make() {
	rng := rand.New(rand.NewPCG(tr.seed, 0))
	zipf := rand.NewZipf(rng, tr.skew, 1, uint64(tr.keys-1))
	tr.size = make([]int, tr.keys)
	total := 0
	for i := range tr.size { // log-normal over two orders of magnitude, as the sizes of images
		tr.size[i] = min(tr.largest, max(1, int(math.Exp(rng.NormFloat64()*0.9)*float64(tr.largest)/6)))
		total += tr.size[i]
	}
	pins := int(pinnedShare * float64(tr.blocks) / (float64(total) / float64(tr.keys)))
	var pinned []int
	for n := range traceRequests {
		tr.ops = append(tr.ops, traceOp{number: n, key: int(zipf.Uint64())})
		pinned = append(pinned, n)
		if len(pinned) > pins {
			i := rng.IntN(len(pinned))
			tr.ops = append(tr.ops, traceOp{release: true, number: pinned[i]})
			pinned[i] = pinned[len(pinned)-1]
			pinned = pinned[:len(pinned)-1]
		}
	}
}

func (tr *trace) String() string {
	return fmt.Sprintf("%d keys to %d blocks, skew %.2f, pool of %d", tr.keys, tr.largest, tr.skew, tr.blocks)
}

func (tr *trace) write(dir string) (path string, err error) {
	f, err := os.Create(filepath.Join(dir, "trace"))
	if err != nil {
		return "", err
	}
	w := bufio.NewWriter(f)
	fmt.Fprintln(w, tr.blocks, tr.keys)
	for _, s := range tr.size {
		fmt.Fprintln(w, s)
	}
	for _, op := range tr.ops {
		if op.release {
			fmt.Fprintln(w, "release", op.number)
		} else {
			fmt.Fprintln(w, "get", op.number, op.key)
		}
	}
	return f.Name(), errors.Join(w.Flush(), f.Close())
}

// outcome is what a cache made of a trace.
type outcome struct{ hits, allocations, whole, refused int }

func (o outcome) hitRate() float64 { return 100 * float64(o.hits) / traceRequests }
func (o outcome) wholeShare() float64 {
	return 100 * float64(o.whole) / float64(max(1, o.allocations))
}

// run takes our cache through the trace.
func (tr *trace) run(dir, policy string) (o outcome, err error) {
	c, end, err := newCache(dir, tr.blocks, ec.CacheOptions{Policy: policy})
	if err != nil {
		return o, err
	}
	defer func() { err = errors.Join(err, end()) }()
	pins := map[int]*ec.Pin{}
	for _, op := range tr.ops {
		if op.release {
			if p := pins[op.number]; p != nil {
				p.Release()
				delete(pins, op.number)
			}
			continue
		}
		k := key(op.key)
		p, err := c.Pin(k)
		if err == nil {
			o.hits++
		} else {
			r, err := c.Reserve(k, spec(tr.size[op.key]), 0)
			if errors.Is(err, ec.ErrFull) {
				o.refused++
				continue
			}
			if err != nil {
				return o, err
			}
			o.allocations++
			if len(r.Info().Extents) == 1 {
				o.whole++
			}
			if _, err := r.Commit(nil); err != nil {
				return o, err
			}
			if p, err = c.Pin(k); err != nil {
				return o, err
			}
		}
		pins[op.number] = p
	}
	return o, nil
}
