package ec

// CountGrants sets Grants and Burned of what Cache.Entries gave for a cache that p serves. A grant that came or went in between may
// be missed.
func (p *Producer) CountGrants(c *Cache, entries []Info) {
	byGen := make(map[uint64]*Info, len(entries))
	for i := range entries {
		byGen[entries[i].Gen] = &entries[i]
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.grants.byID {
		if g.pool.cache != c {
			continue
		}
		if i := byGen[g.info.Gen]; i != nil {
			i.Grants++
			if g.burned {
				i.Burned++
			}
		}
	}
}
