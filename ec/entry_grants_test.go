package ec

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestGrantsAreCountedByEntryAndBurnedOnesAmongThem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, _ := plainStand(t, 200) // large: few burned blocks start no rotation
		for _, k := range []string{"burned", "granted", "idle"} {
			save(t, s.cache, k, 2)
		}
		s.session("burned", "s-1", "1")
		s.session("burned", "s-2", "2")
		s.session("granted", "s-3", "3")
		time.Sleep(time.Minute) // past the leases
		s.session("granted", "s-4", "4")
		synctest.Wait()

		entries := s.cache.Entries()
		s.producer.CountGrants(s.cache, entries)
		for _, i := range entries {
			want := map[string][2]int{"burned": {2, 2}, "granted": {2, 1}}[i.Key]
			if got := [2]int{i.Grants, i.Burned}; got != want {
				t.Errorf("%s: grants and burned %v, want %v", i.Key, got, want)
			}
		}
		other := newTestCache(t, 1, 1, CacheOptions{})
		put(t, other, "burned", 1)
		entries = other.Entries()
		if s.producer.CountGrants(other, entries); entries[0].Grants != 0 {
			t.Errorf("the entry of another cache: %+v", entries[0])
		}
	})
}
