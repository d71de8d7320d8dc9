package node

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// twoNodes gives a client of each of two nodes on this machine; the second's pool has the given number of blocks.
func twoNodes(t *testing.T, blocks int) (a, b *client.Client, nb *Node) {
	t.Helper()
	ca, cb := testConfig(t, 64), testConfig(t, blocks)
	cb.ShmDir = ca.ShmDir
	nb = startNode(t, cb)
	return dial(t, startNode(t, ca)), dial(t, nb), nb
}

func announced(t *testing.T, c *client.Client, keys ...string) ec.Params {
	t.Helper()
	items := make([]client.AnnounceItem, len(keys))
	for i, k := range keys {
		items[i].Key = k
	}
	p, err := c.Announce(testContext(t), items)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestAFetchedEntryIsThereUntilItIsReleased(t *testing.T) {
	a, b, _ := twoNodes(t, 4)
	put(t, a, "k", 2, 1)
	for _, plane := range []string{"mapped", "local"} {
		ch, err := b.FetchMap(testContext(t), announced(t, a, "k"), 0)
		if err != nil {
			t.Fatal(err)
		}
		r := <-ch
		if r.Outcome != ec.FetchReady || r.Plane != plane || r.Mapped == nil || r.Mapped.Info().Pins == 0 {
			t.Fatalf("%+v; want it mapped, by plane %s", r, plane)
		}
		// Whatever is saved next, the entry stays, and stays as it is.
		for i := range 8 {
			put(t, b, fmt.Sprintf("%s %d", plane, i), 2, uint64(i)+2)
		}
		checkMapped(t, r.Mapped, 2, 1)
		if _, err := b.Reserve(testContext(t), "too much", spec(3)); !errors.Is(err, ec.ErrFull) {
			t.Errorf("3 of 4 blocks beside the 2 that are pinned: %v", err)
		}
		r.Mapped.Release()
	}
	put(t, b, "enough", 4, 3)
}

func TestAPinOfAFetchEndsWithTheConnection(t *testing.T) {
	a, b, nb := twoNodes(t, 4)
	put(t, a, "k", 2, 1)
	ch, err := b.FetchMap(testContext(t), announced(t, a, "k"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if r := <-ch; r.Mapped == nil {
		t.Fatalf("%+v", r)
	}
	if s := nb.pools[0].cache.Stats(); s.PinnedBlocks != 2 {
		t.Fatalf("%+v", s)
	}
	_ = b.Close()
	eventually(t, "nothing is pinned", func() bool { return nb.pools[0].cache.Stats().PinnedBlocks == 0 })
}

func TestNoPinIsLeftWhateverEndsAFetch(t *testing.T) {
	a, b, nb := twoNodes(t, 64)
	for i := range 100 {
		key := fmt.Sprint("k", i)
		put(t, a, key, 1, 1)
		ctx, cancel := context.WithCancel(testContext(t))
		c := dial(t, nb)
		ch, err := c.FetchMap(ctx, announced(t, a, key), 0)
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(time.Duration(i*20)*time.Microsecond, cancel)
		if i%2 == 0 {
			_ = c.Close() // with the fetch under way
		}
		for r := range ch {
			if r.Mapped != nil {
				r.Mapped.Release()
			}
		}
	}
	eventually(t, "nothing is pinned", func() bool {
		s, err := b.Stats(testContext(t))
		return err == nil && s.PinnedBlocks == 0 && s.Filling == 0 && s.QuarantinedBlocks == 0
	})
}

func TestAFullTableOfHandlesFailsTheFetchAndNothingElse(t *testing.T) {
	a, _, nb := twoNodes(t, 64)
	put(t, a, "k", 1, 1)
	c := dial(t, nb)
	put(t, c, "mine", 1, 2)
	ops := make([]client.Op, 1<<16)
	for i := range ops {
		ops[i] = client.MapOp("mine")
	}
	if _, err := c.Batch(testContext(t), ops...); err != nil {
		t.Fatal(err)
	}
	ch, err := c.FetchMap(testContext(t), announced(t, a, "k"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if r := <-ch; r.Outcome != ec.FetchFailed || r.Mapped != nil {
		t.Errorf("%+v", r)
	}
	if _, err := c.Lookup(testContext(t), "k"); err != nil {
		t.Errorf("%v", err)
	}
}
