package chaos

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/transfer"
)

// Many goroutines save and pull over few connections, and most give up somewhere on the way: before a request is sent, between request
// and reply, while bytes move, after the result was on its way. What they gave up is freed, once, and nothing of it is left anywhere.
func TestTransfersThatAreGivenUpLeaveNothing(t *testing.T) {
	t.Parallel()
	seed := seedOf(t)
	const goroutines = 64
	each := 15
	if long() {
		each = 1000
	}
	w := newWorld(t, plan{nodes: 2, keys: 40, blocks: 200, planes: []string{transfer.TCP, transfer.Mapped}, adopt: time.Hour},
		seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	var ends [2][4]*client.Client
	for i := range w.nodes {
		w.startNode(i)
		for j := range ends[i] {
			c, err := w.dial(i)
			w.must(err)
			ends[i][j] = c
		}
	}
	var keys []string
	for i := range w.keys {
		if key := keyName(i); specOf(key).Bytes < 1<<20 {
			keys = append(keys, key)
		}
	}
	var done, givenUp atomic.Int64
	var work sync.WaitGroup
	for g := range goroutines {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(g)+1))
			for range each {
				from := rng.IntN(2)
				a, b := ends[from][rng.IntN(4)], ends[1-from][rng.IntN(4)]
				ctx, cancel := context.WithTimeout(context.Background(), patience)
				if rng.IntN(3) > 0 {
					cancel()
					ctx, cancel = context.WithTimeout(context.Background(), time.Duration(rng.Int64N(int64(20*time.Millisecond))))
				}
				switch err := transferOne(ctx, a, b, keys[rng.IntN(len(keys))]); {
				case err == nil:
					done.Add(1)
				case ctx.Err() != nil, errors.Is(err, ec.ErrPending), errors.Is(err, ec.ErrFull), errors.Is(err, errNotThere):
					givenUp.Add(1)
				default:
					t.Error(err)
				}
				cancel()
			}
		})
	}
	work.Wait()
	for i := range ends {
		for _, c := range ends[i] {
			w.must(c.Close())
		}
	}
	w.check()
	t.Logf("%d transfers done, %d given up", done.Load(), givenUp.Load())
}

// errNotThere: what was to be pulled had been evicted, or was not ready in time.
var errNotThere = errors.New("not there")

func transferOne(ctx context.Context, a, b *client.Client, key string) error {
	if _, err := a.Put(ctx, key, specOf(key), bytesOf(key)); err != nil {
		return err
	}
	p, err := a.Announce(ctx, []client.AnnounceItem{{Key: key, ItemIndices: []int{0}}})
	if err != nil {
		return err
	}
	if err := b.Remove(ctx, key); err != nil && !errors.Is(err, ec.ErrMissing) && !errors.Is(err, ec.ErrPinned) && !errors.Is(err, ec.ErrNotReady) {
		return err
	}
	results, err := b.FetchMap(ctx, p, 0)
	if err != nil {
		return err
	}
	err = errNotThere
	for r := range results {
		if r.Mapped != nil {
			err = check(r.Mapped.Buffers(), key)
			r.Mapped.Release()
		}
	}
	return err
}
