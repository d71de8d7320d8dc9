package ec

import (
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
)

// Limits of what peers may be granted, beside the shares of a pool (see ProducerOptions).
const (
	minGrants       = 1024    // a source that has more and is over a share is told MISSING
	maxSourceGrants = 1 << 16 // of one source, however little they keep in place
	fewGrants       = 8       // a source with fewer may draw on the reserve
)

// held is what peers of one kind, own or plain, were granted of a pool. The kinds are counted apart: what plain peers keep for as long
// as an agent lives must not be in the way of own ones, whose grants end with a lease or are revoked.
type held struct {
	total    usage
	bySource usages
}

func (h *held) add(g *grant) {
	h.total.add(g)
	h.bySource.add(g)
}

func (h *held) remove(g *grant) {
	h.total.remove(g)
	h.bySource.remove(g)
}

func (sp *servedPool) heldBy(plain bool) *held {
	if plain {
		return &sp.plainHeld
	}
	return &sp.ownHeld
}

// overLimit names the limit that one more grant would break, and the answer to that; OK if there is none. Called with the lock held.
func (p *Producer) overLimit(g *grant) (limit string, answer wire.Status) {
	if s := p.grants.sessions[g.conn]; s[g.session] == 0 && len(s) >= maxSessions {
		return fmt.Sprintf("%d sessions a connection", maxSessions), wire.NackMissing
	}
	held := g.pool.heldBy(g.plain)
	source := held.bySource.of(g.source)
	if source.grants >= maxSourceGrants {
		return fmt.Sprintf("%d grants to one source", maxSourceGrants), wire.NackMissing
	}
	// Of what the total leaves, both kinds together have half, and a quarter is in reserve for sources of a kind that have little.
	rest := 1 - p.o.TotalShare
	reserve := rest / 4
	little := source.grants == 0 ||
		source.grants < fewGrants && float64(source.with(g)) <= reserve/4*float64(g.pool.blocks)
	total := p.o.TotalShare
	if little {
		total += reserve
	}
	if g.plain {
		if limit := g.pool.overBurned(g.source, little); limit != "" {
			return limit, wire.NackMissing
		}
	}
	// Blocks that are kept in place already cost nothing more. Whatever its size, one entry can be had, of either kind.
	over := func(u *usage, share float64) bool {
		with := u.with(g)
		return u.grants > 0 && with > u.blocks && float64(with) > share*float64(g.pool.blocks)
	}
	switch {
	case over(source, p.o.SourceShare):
		limit = fmt.Sprintf("%.0f%% of the pool to one source", 100*p.o.SourceShare)
	case over(&held.total, total):
		limit = fmt.Sprintf("%.0f%% of the pool to all peers of its kind", 100*total)
	case held.total.grants > 0 && over(&g.pool.total, p.o.TotalShare+rest/2):
		limit = fmt.Sprintf("%.0f%% of the pool to own and plain peers", 100*(p.o.TotalShare+rest/2))
	default:
		return "", wire.OK
	}
	// A burst of large entries: there is room when the first of them have been READ. Own peers' leases make room in any case; plain
	// peers may never, and a vLLM engine that is told NOT_READY asks in each of its steps, until its request fails.
	if source.grants < minGrants && (!g.plain || source.grants > 0 && time.Since(source.moved) < p.lease) {
		return limit, wire.NackNotReady
	}
	return limit, wire.NackMissing
}
