package ec

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tensorferry/tensorferry/region"
)

func TestWhatWasToldOfAnEntryStaysWhenItsMemoryIsUsedAgain(t *testing.T) {
	c := newTestCache(t, 4, 4, CacheOptions{})
	r := reserve(t, c, "a", 4)
	told, err := r.Commit(nil)
	if err != nil {
		t.Fatal(err)
	}
	shape, extents := slices.Clone(told.Spec.Shape), slices.Clone(told.Extents)
	for _, n := range []int{4, 1, 2, 3, 4} { // the first takes the place of a
		put(t, c, string(rune('a'+n)), n)
	}
	if !slices.Equal(told.Spec.Shape, shape) || !slices.Equal(told.Extents, extents) {
		t.Errorf("%v at %v, was %v at %v", told.Spec.Shape, told.Extents, shape, extents)
	}
	if d := cmp.Diff(Info{Gen: told.Gen}, r.Info()); d != "" || r.Buffers() != nil {
		t.Errorf("a reservation whose entry is gone shows %s, buffers %v", d, r.Buffers())
	}
}

func TestReleasedPinShowsNothing(t *testing.T) {
	c := newTestCache(t, 2, 2, CacheOptions{})
	put(t, c, "a", 2)
	p := pin(t, c, "a")
	p.Release()
	put(t, c, "b", 2)
	if d := cmp.Diff(Info{}, p.Info()); d != "" || p.Buffers() != nil {
		t.Errorf("shows %s, buffers %v", d, p.Buffers())
	}
}

func TestEntryOfTheSameSizeTakesThePlaceOfTheFirstToGo(t *testing.T) {
	c := newTestCache(t, 6, 6, CacheOptions{})
	var places [][]region.Extent
	for _, k := range []string{"a", "b", "c"} {
		places = append(places, put(t, c, k, 2).Extents)
	}
	for i, k := range []string{"d", "e", "f", "g"} {
		if x := put(t, c, k, 2).Extents; !slices.Equal(x, places[i%3]) {
			t.Errorf("%s is at %v, want %v", k, x, places[i%3])
		}
	}
	if got := keys(c); !slices.Equal(got, []string{"e", "f", "g"}) {
		t.Errorf("left: %v", got)
	}
}
