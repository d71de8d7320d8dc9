package ec

import (
	"time"

	"github.com/tensorferry/tensorferry/transfer"
)

// A producer that goes on with the entries of one that died may find agents that outlived it. They serve acks that this producer
// knows nothing of: not who has them, nor how many. So no ack names these agents again, their notifications mean nothing, and they are
// retired as after a rotation, with two differences: they do not end before sessionGone is over since their process died, and every session that is acked in that
// time counts as one that knows them, until it has READ by the new one. Those that come later count as gone. Until these agents are over
// the entries that were granted, which the region records, are pinned.

// Successor may be implemented by a PlainServer that goes on with agents of a process that died.
type Successor interface {
	// Formers are the agents that were taken over, the oldest first. Agent never gives them.
	Formers() []transfer.Former
}

// fresh says whether sessions that only the process before knew may still come: all their connections ended with it.
func (i *incarnation) fresh() bool { return i.inherited && time.Since(i.acked) < sessionGone }

// succeed retires what is left of the process before, and takes its granted entries.
func (p *Producer) succeed(pool *servedPool, granted []*Pin) {
	pool.granted, pool.inherited = granted, len(granted)
	var formers []transfer.Former
	for _, s := range []any{pool.former, pool.plain} {
		if s, ok := s.(Successor); ok {
			formers = append(formers, s.Formers()...)
		}
	}
	if len(formers) == 0 {
		pool.releaseGranted()
		return
	}
	r := &pool.rotation
	for _, f := range formers {
		r.heirs = append(r.heirs, &incarnation{gone: f.Gone, acked: f.Left, inherited: true})
	}
	heirs := r.heirs
	r.running, r.retiring, r.since = true, heirs[0], heirs[0].acked
	for _, pin := range granted {
		for _, e := range pin.Info().Extents {
			r.kept += int(e.Count)
		}
	}
	p.watchers.Go(func() {
		defer p.rotated(pool, 0)
		over := true
		for i, h := range heirs {
			p.mu.Lock()
			r.retiring, r.since = h, h.acked
			p.mu.Unlock()
			p.retire(pool, h, formers[i].End)
			over = over && h.over()
		}
		if over {
			pool.releaseGranted()
		}
	})
}

// releaseGranted is called once no former agent lives: by succeed's goroutine, or by Close after it.
func (sp *servedPool) releaseGranted() {
	for _, pin := range sp.granted {
		pin.Release()
	}
	sp.granted = nil
}
