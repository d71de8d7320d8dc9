package slab

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
)

// Bounds of what is kept of producers, for each plane.
const (
	peerIdle       = 5 * time.Minute  // one that nobody has read from for so long is let go
	peersIdle      = 64               // of those at most, the last used ones
	addTimeout     = 10 * time.Second // of adding one: dialling, a handshake
	unreachable    = 5 * time.Second  // one that could not be reached is not tried again before
	maxUnreachable = 256              // remembered
)

// peers are the producers that are known on one plane, by their metadata. What is in use is bounded by the READs under way, what is not by
// peersIdle.
type peers struct {
	plane transfer.Plane
	work  *sync.WaitGroup // peers being added or closed

	mu     sync.Mutex
	closed bool
	byMeta map[string]*peer
	failed int                // of these that could not be added
	idle   int                // of these that nobody uses
	open   map[*peer]struct{} // whose link is not closed yet: also those that are not in byMeta any more
}

// peer is one registration of another process. Guarded by peers.mu, but for what is set before added is closed.
type peer struct {
	metadata string
	added    chan struct{}
	link     transfer.Peer // nil if it could not be added
	err      error
	until    time.Time // err is given until then

	users int
	last  time.Time // when users became 0
	gone  bool      // not in byMeta any more: it is closed when nobody uses it

	closing sync.Once
}

func (p *peers) init(plane transfer.Plane, work *sync.WaitGroup) {
	p.plane, p.work, p.byMeta, p.open = plane, work, map[string]*peer{}, map[*peer]struct{}{}
}

// get gives the peer with that metadata, and adds it if it is not known. The caller puts it back.
func (p *peers) get(ctx context.Context, metadata []byte) (*peer, error) {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, ErrClosed
	}
	e := p.byMeta[string(metadata)]
	if e != nil && e.err != nil && !time.Now().Before(e.until) {
		p.forget(e)
		e = nil
	}
	if e == nil {
		e = p.add(string(metadata))
	}
	if e.users++; e.users == 1 && e.link != nil {
		p.idle--
	}
	p.mu.Unlock()
	select {
	case <-e.added:
	case <-ctx.Done():
		p.put(e, false)
		return nil, ctx.Err()
	}
	if e.err != nil {
		p.put(e, false)
		return nil, e.err
	}
	return e, nil
}

// add starts to add a peer: for whoever wants it, so not in the time of the first. With the lock.
func (p *peers) add(metadata string) *peer {
	e := &peer{metadata: metadata, added: make(chan struct{})}
	p.byMeta[metadata] = e
	p.work.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), addTimeout)
		defer cancel()
		link, err := p.plane.AddPeer(ctx, []byte(metadata))
		p.mu.Lock()
		defer p.mu.Unlock()
		defer close(e.added)
		if err == nil && p.closed {
			late := link
			p.work.Go(func() { _ = late.Close() })
			link, err = nil, ErrClosed
		}
		if e.link, e.err = link, err; err != nil {
			p.remember(e)
			return
		}
		p.open[e] = struct{}{}
		if e.users == 0 {
			p.unused(e)
		}
	})
	return e
}

// remember keeps that a peer cannot be reached, for a while; another error is not the peer's. With the lock.
func (p *peers) remember(e *peer) {
	if e.gone {
		return
	}
	p.failed++
	if !errors.Is(e.err, transfer.ErrUnreachable) {
		p.forget(e)
		return
	}
	e.until = time.Now().Add(unreachable)
	p.trim(&p.failed, maxUnreachable, func(o *peer) bool { return o.err != nil && o != e })
}

// put ends a use. lost says that the peer failed: it is added anew at its next use.
func (p *peers) put(e *peer, lost bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if lost {
		p.forget(e)
	}
	if e.users--; e.users == 0 && e.link != nil {
		p.unused(e)
	}
}

// unused keeps a peer that nobody uses for its return, or closes it. With the lock.
func (p *peers) unused(e *peer) {
	if e.gone {
		p.part(e)
		return
	}
	e.last = time.Now()
	p.idle++
	p.trim(&p.idle, peersIdle, func(o *peer) bool { return o.link != nil && o.users == 0 })
}

// trim lets go of the longest unused of those that fit until they are at most limit. With the lock.
func (p *peers) trim(count *int, limit int, fits func(*peer) bool) {
	for *count > limit {
		var oldest *peer
		for _, e := range p.byMeta {
			if fits(e) && (oldest == nil || e.last.Before(oldest.last)) {
				oldest = e
			}
		}
		if oldest == nil {
			return
		}
		p.forget(oldest)
	}
}

// forget takes a peer out, and closes it if nobody uses it. With the lock.
func (p *peers) forget(e *peer) {
	if e.gone {
		return
	}
	e.gone = true
	delete(p.byMeta, e.metadata)
	switch {
	case e.err != nil:
		p.failed--
	case e.link != nil && e.users == 0:
		p.idle--
		p.part(e)
	}
}

// part closes a peer, which may take a while, so elsewhere. With the lock.
func (p *peers) part(e *peer) {
	if !p.closed { // else close does
		p.work.Go(func() { p.end(e) })
	}
}

// end closes a peer, and with it all READs from it. Calls after the first wait for it.
func (p *peers) end(e *peer) {
	e.closing.Do(func() { _ = e.link.Close() }) // what it may say is of a plane that is ending
	p.mu.Lock()
	delete(p.open, e)
	p.mu.Unlock()
}

// tidy lets go of what has not been used for peerIdle.
func (p *peers) tidy(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.byMeta {
		if e.link != nil && e.users == 0 && now.Sub(e.last) >= peerIdle || e.err != nil && !now.Before(e.until) {
			p.forget(e)
		}
	}
}

// close ends all peers and their READs, and lets nobody add one any more. One that is being added is closed by who adds it.
func (p *peers) close() {
	p.mu.Lock()
	p.closed = true
	for _, e := range p.byMeta {
		p.forget(e)
	}
	open := slices.Collect(maps.Keys(p.open))
	p.mu.Unlock()
	var closing sync.WaitGroup
	for _, e := range open {
		closing.Go(func() { p.end(e) })
	}
	closing.Wait()
}

// lost says whether a READ's error means that the peer has to be added anew.
func lost(err error) bool {
	return errors.Is(err, transfer.ErrPeerLost) || errors.Is(err, transfer.ErrUnreachable)
}

// drop has the peer added anew at its next use, whoever still uses it.
func (p *peers) drop(e *peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.forget(e)
}
