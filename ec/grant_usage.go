package ec

import "time"

// usage counts grants, and the blocks that they keep in place: an entry that is granted many times is there once.
type usage struct {
	grants, blocks int
	entries        map[uint64]int // grants by generation of the entry
	moved          time.Time      // of usages: when there was the first grant, or later when one ended last
}

func (u *usage) add(g *grant) {
	if u.entries == nil {
		u.entries = map[uint64]int{}
	}
	u.grants++
	if u.entries[g.info.Gen]++; u.entries[g.info.Gen] == 1 {
		u.blocks += g.blocks
	}
}

func (u *usage) remove(g *grant) {
	u.grants--
	if u.entries[g.info.Gen]--; u.entries[g.info.Gen] <= 0 {
		delete(u.entries, g.info.Gen)
		u.blocks -= g.blocks
	}
}

// with is the number of blocks once g is added.
func (u *usage) with(g *grant) int {
	if u.entries[g.info.Gen] > 0 {
		return u.blocks
	}
	return u.blocks + g.blocks
}

// usages are counted by source, without the empty ones.
type usages map[string]*usage

func (us usages) of(source string) *usage {
	if u := us[source]; u != nil {
		return u
	}
	return &usage{}
}

func (us usages) add(g *grant) {
	u := us[g.source]
	if u == nil {
		u = &usage{moved: time.Now()}
		us[g.source] = u
	}
	u.add(g)
}

func (us usages) remove(g *grant) {
	if u := us[g.source]; u.grants > 1 {
		u.remove(g)
		u.moved = time.Now()
		return
	}
	delete(us, g.source)
}
