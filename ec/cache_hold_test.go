package ec

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func mustHold(t testing.TB, c *Cache, key string) {
	t.Helper()
	if err := c.Hold(key); err != nil {
		t.Fatal(err)
	}
}

func TestHeldEntryIsEvictedOnlyWhenNothingElseDoes(t *testing.T) {
	var evicted, dropped []string
	c := newTestCache(t, 4, 8, CacheOptions{
		HoldShare:   1,
		Evicted:     func(k string, _ int64) { evicted = append(evicted, k) },
		HoldDropped: func(k string, _ int64) { dropped = append(dropped, k) },
	})
	for _, k := range []string{"a", "b", "c", "d"} {
		put(t, c, k, 1)
	}
	mustHold(t, c, "b")
	mustHold(t, c, "a")
	mustHold(t, c, "a")
	p := pin(t, c, "d")
	for _, k := range []string{"e", "f", "g"} { // c, then each other
		r := reserve(t, c, k, 1)
		if _, err := r.Commit(nil); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(evicted, []string{"c", "e", "f"}) || len(dropped) != 0 {
		t.Fatalf("evicted %v, dropped %v", evicted, dropped)
	}
	r := reserve(t, c, "h", 3) // needs a and b too; b was announced first
	if !slices.Equal(evicted[3:], []string{"g", "b", "a"}) || !slices.Equal(dropped, []string{"b", "a"}) {
		t.Errorf("evicted %v, dropped %v", evicted[3:], dropped)
	}
	if s := c.Stats(); s.HoldsDropped != 3 || s.Holds != 0 || s.HeldBlocks != 0 {
		t.Errorf("%+v", s)
	}
	r.Discard()
	p.Release()
}

func TestHoldsAreKeptWhenDroppingThemWouldNotDo(t *testing.T) {
	c := newTestCache(t, 4, 8, CacheOptions{HoldShare: 1})
	put(t, c, "a", 1)
	put(t, c, "b", 3)
	mustHold(t, c, "a")
	defer pin(t, c, "b").Release()
	before := freeze(t, c)
	if _, err := c.Reserve("c", spec(2), 1); !errors.Is(err, ErrFull) {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, freeze(t, c)); d != "" {
		t.Error(d)
	}
}

func TestHoldsTakeAtMostTheirShare(t *testing.T) {
	var dropped []string
	c := newTestCache(t, 10, 10, CacheOptions{HoldDropped: func(k string, n int64) { dropped = append(dropped, k) }}) // share: 5 blocks
	for i, n := range []int{2, 2, 1, 2} {
		put(t, c, fmt.Sprint(i), n)
		mustHold(t, c, fmt.Sprint(i))
	}
	if !slices.Equal(dropped, []string{"0"}) {
		t.Fatalf("dropped %v", dropped)
	}
	mustHold(t, c, "1") // announced again: no longer the oldest
	mustHold(t, c, "0")
	if !slices.Equal(dropped, []string{"0", "2", "3"}) {
		t.Errorf("dropped %v", dropped)
	}
	if s := c.Stats(); s.HeldBlocks != 4 || s.Holds != 3 || s.HoldsDropped != 3 {
		t.Errorf("%+v", s)
	}
}

func TestHoldLargerThanTheShareIsDroppedAtOnceAndCostsNoOther(t *testing.T) {
	var dropped []string
	c := newTestCache(t, 10, 10, CacheOptions{HoldDropped: func(k string, _ int64) { dropped = append(dropped, k) }})
	put(t, c, "small", 1)
	put(t, c, "large", 6)
	mustHold(t, c, "small")
	mustHold(t, c, "large")
	if !slices.Equal(dropped, []string{"large"}) {
		t.Errorf("dropped %v", dropped)
	}
	if i, _ := c.Lookup("small"); i.Holds != 1 {
		t.Errorf("%+v", i)
	}
}

func TestHoldEndsWithItsLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newTestCache(t, 2, 4, CacheOptions{HoldShare: 1})
		put(t, c, "a", 2)
		holds := func() int { i, _ := c.Lookup("a"); return i.Holds }
		mustHold(t, c, "a")
		time.Sleep(DefaultHoldLease / 2)
		mustHold(t, c, "a")
		time.Sleep(DefaultHoldLease/2 - 1)
		if holds() != 2 {
			t.Fatalf("%d holds before the first ends", holds())
		}
		time.Sleep(1)
		if holds() != 1 {
			t.Fatalf("%d holds after the first ended", holds())
		}
		time.Sleep(DefaultHoldLease / 2)
		s := c.Stats()
		if s.Holds != 0 || s.HeldBlocks != 0 || s.HoldsLapsed != 2 || s.HoldsDropped != 0 {
			t.Fatalf("%+v", s)
		}
		put(t, c, "b", 1) // a may go again, and no hold was dropped for it
		if s := c.Stats(); s.Evictions != 1 || s.HoldsDropped != 0 {
			t.Errorf("%+v", s)
		}
	})
}

func TestHoldOnAnEntryBeingFilledProtectsItOnceReady(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	r := reserve(t, c, "a", 1)
	mustHold(t, c, "a")
	if s := c.Stats(); s.HeldBlocks != 1 {
		t.Errorf("%+v", s)
	}
	if _, err := r.Commit(nil); err != nil {
		t.Fatal(err)
	}
	put(t, c, "b", 3)
	put(t, c, "c", 3)
	if got := keys(c); !slices.Equal(got, []string{"a", "c"}) {
		t.Errorf("%v", got)
	}
	gone := reserve(t, c, "d", 1)
	mustHold(t, c, "d")
	gone.Quarantine().Settle()
	if s := c.Stats(); s.Holds != 1 || s.HeldBlocks != 1 {
		t.Errorf("the holds of an entry must end with it: %+v", s)
	}
}

func TestOnePullDropsOneHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newTestCache(t, 4, 4, CacheOptions{})
		put(t, c, "a", 1)
		mustHold(t, c, "a")
		time.Sleep(time.Second)
		mustHold(t, c, "a")
		c.DropHold("a") // the older
		time.Sleep(DefaultHoldLease - time.Second)
		if i, _ := c.Lookup("a"); i.Holds != 1 {
			t.Errorf("%d holds", i.Holds)
		}
		c.DropHold("a")
		c.DropHold("a")
		c.DropHold("never there")
		if i, _ := c.Lookup("a"); i.Holds != 0 {
			t.Errorf("%d holds", i.Holds)
		}
	})
}

func TestHoldsOfOneEntryAreBounded(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	put(t, c, "a", 1)
	for range maxHoldsOfEntry + 10 {
		mustHold(t, c, "a")
	}
	if s := c.Stats(); s.Holds != maxHoldsOfEntry || s.HoldsDropped != 10 || s.HeldBlocks != 1 {
		t.Errorf("%+v", s)
	}
}
