package ec

import "time"

// A producer that goes on with the entries of one that died may find agents that outlived it. They serve acks that this producer
// knows nothing of: not who has them, nor how many. So no ack names these agents again, their notifications mean nothing, and they are
// retired as after a rotation, with two differences: they do not end before sessionGone is over, and every session that is acked in that
// time counts as one that knows them, until it has READ by the new one. Those that come later count as gone. Until these agents are over
// the entries that were granted, which the region records, are pinned.

// Successor may be implemented by a PlainServer that goes on with agents of a process that died.
type Successor interface {
	// Former is about the agents that were taken over. Agent never gives them. gone is closed when nothing can be read by them any
	// more; it is nil if there are none. end ends them and returns then.
	Former() (gone <-chan struct{}, end func())
}

// fresh says whether sessions that only the process before knew may still come: all their connections ended with it.
func (i *incarnation) fresh() bool { return i.inherited && time.Since(i.acked) < sessionGone }

// succeed retires what is left of the process before, and takes its granted entries.
func (p *Producer) succeed(pool *servedPool, granted []*Pin) {
	pool.granted = granted
	var gone <-chan struct{}
	var end func()
	if s, ok := pool.plain.(Successor); ok {
		gone, end = s.Former()
	}
	if gone == nil {
		pool.releaseGranted()
		return
	}
	former := &incarnation{gone: gone, acked: time.Now(), inherited: true}
	pool.rotation.running, pool.rotation.retiring, pool.rotation.since = true, former, former.acked
	for _, pin := range granted {
		for _, e := range pin.Info().Extents {
			pool.rotation.kept += int(e.Count)
		}
	}
	p.watchers.Go(func() {
		defer p.rotated(pool, 0)
		p.retire(pool, former, end)
		if former.over() {
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
