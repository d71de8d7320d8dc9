package slab

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// Many puts, gets, gets that are given up and claims that lapse, in slabs that are too small for all of them at once.
func TestManyPutsGetsAndAbortsAtOnceLeaveNothing(t *testing.T) {
	dir := transfertest.Dir(t)
	planes := func() []transfer.Plane {
		return []transfer.Plane{makers[transfer.Mapped](t, dir), makers[transfer.TCP](t, dir), fakeNIXL(t)}
	}
	a, b := planes(), planes()
	leaks(t, dir)
	producer, consumer := newSlab(t, dir, "a", 1<<20, a...), newSlab(t, dir, "b", 1<<20, b...)
	const workers, rounds = 8, 250
	ctx := patient(t)
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(5, uint64(w)))
			for i := range rounds {
				if err := putGet(ctx, t, producer, consumer, rng, uint64(w*rounds+i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	transfertest.Eventually(t, "buffers to be free", func() bool { return producer.Used()+consumer.Used() == 0 })
}

func putGet(ctx context.Context, t *testing.T, producer, consumer *Slab, rng *rand.Rand, seed uint64) error {
	sizes := make([]int64, 1+rng.IntN(6))
	for i := range sizes {
		sizes[i] = rng.Int64N(1 << rng.IntN(17))
	}
	from, err := producer.Alloc(ctx, sizes)
	if err != nil {
		return err
	}
	for i, to := range from.Slices() {
		transfertest.Fill(to, seed+uint64(i)*1000)
	}
	m := describe(sizes)
	p := from.Payload(m.Specs)
	defer p.Release()
	own := rng.IntN(4) > 0
	var ask *wire.FerryRequest
	if own {
		m.Ferry = &wire.FerryMetadata{}
		ask = &wire.FerryRequest{Planes: [][]string{{transfer.Mapped}, {transfer.TCP}, {transfer.NIXL}}[rng.IntN(3)], Inline: rng.Int64N(2000)}
	}
	if err := p.Offer(ctx, "1", ask, m); err != nil {
		return err
	}
	into, err := consumer.Alloc(ctx, sizes)
	if err != nil {
		return err
	}
	defer into.Free()
	short, cancel := context.WithCancel(ctx)
	abort := rng.IntN(4) == 0
	if abort {
		go cancel()
	}
	_, err = consumer.Read(short, m, into)
	cancel()
	switch {
	case err == nil:
		compare(t, into.Slices(), seed)
	case !abort || !errors.Is(err, context.Canceled) && !errors.Is(err, transfer.ErrCanceled):
		return fmt.Errorf("%v by %+v: %w", sizes, ask, err)
	}
	// A reader that did not end its claim may still read until it is stopped. Rarely, or it is all rotations.
	idle := err == nil || rng.IntN(8) > 0
	if !idle {
		into.Free()
	} else {
		<-into.Idle()
	}
	return p.Withdraw(ctx, "1", idle)
}
