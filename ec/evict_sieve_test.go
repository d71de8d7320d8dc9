package ec

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/tensorferry/tensorferry/region"
)

// use pins and releases.
func use(t testing.TB, c *Cache, key string, times int) {
	for range times {
		pin(t, c, key).Release()
	}
}

func TestSieveKeepsWhatWasUsedAgainForOneRound(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{Policy: PolicySIEVE})
	for _, k := range []string{"a", "b", "c", "d"} {
		put(t, c, k, 1)
	}
	use(t, c, "a", 2)
	use(t, c, "b", 1) // the use it was made for
	for _, step := range []struct {
		add  string
		left []string
	}{
		{"e", []string{"a", "c", "d", "e"}}, // the hand passes a, and clears its mark
		{"f", []string{"a", "d", "e", "f"}},
		{"g", []string{"a", "e", "f", "g"}},
		{"h", []string{"a", "f", "g", "h"}}, // newer ones first: the hand has yet to come to them
		{"i", []string{"a", "g", "h", "i"}},
	} {
		put(t, c, step.add, 1)
		if got := keys(c); !slices.Equal(got, step.left) {
			t.Fatalf("after %q: %v, want %v", step.add, got, step.left)
		}
	}
	use(t, c, "g", 2)
	use(t, c, "h", 2)
	use(t, c, "i", 2)
	put(t, c, "j", 1) // the hand passes all three and comes round to a
	if got, want := keys(c), []string{"g", "h", "i", "j"}; !slices.Equal(got, want) {
		t.Fatalf("%v, want %v", got, want)
	}
}

func TestSieveWaitsARoundForWhatWasPinnedAsTheHandCame(t *testing.T) {
	c := newTestCache(t, 3, 3, CacheOptions{Policy: PolicySIEVE})
	for _, k := range []string{"a", "b", "c"} {
		put(t, c, k, 1)
	}
	p := pin(t, c, "a")
	put(t, c, "d", 1)
	p.Release()
	for i := range 4 {
		put(t, c, fmt.Sprint(i), 1)
		if _, state := c.Lookup("a"); state != Ready {
			t.Fatalf("a went at step %d", i)
		}
	}
}

func TestPolicyThatDoesNotExistIsRefused(t *testing.T) {
	g := region.Geometry{BlockBytes: testBlock, Blocks: 1, Slots: 1}
	_, err := newCache(CacheOptions{Policy: "lru"}, g, make([]byte, g.PoolBytes()), newAuditTable(t, 1))
	if !errors.Is(err, ErrOptions) {
		t.Error(err)
	}
}
