package slab

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
)

// links is a plane that only adds peers, and counts those that are open.
type links struct {
	transfer.Plane
	added, open atomic.Int64
	fail        func(metadata string) error
}

func (l *links) AddPeer(ctx context.Context, metadata []byte) (transfer.Peer, error) {
	l.added.Add(1)
	if l.fail != nil {
		if err := l.fail(string(metadata)); err != nil {
			return nil, err
		}
	}
	l.open.Add(1)
	return &aLink{plane: l}, nil
}

type aLink struct {
	transfer.Peer
	plane *links
}

func (c *aLink) Close() error {
	c.plane.open.Add(-1)
	return nil
}

func withPeers(t *testing.T, test func(t *testing.T, l *links, p *peers)) {
	synctest.Test(t, func(t *testing.T) {
		l := &links{}
		var p peers
		var work sync.WaitGroup
		p.init(l, &work)
		test(t, l, &p)
		p.close()
		work.Wait()
		if n := l.open.Load(); n != 0 {
			t.Errorf("%d peers are open at the end", n)
		}
		if _, err := p.get(t.Context(), []byte("x")); !errors.Is(err, ErrClosed) {
			t.Errorf("get after close: %v", err)
		}
	})
}

func TestAThousandProducersLeaveFewPeers(t *testing.T) {
	withPeers(t, func(t *testing.T, l *links, p *peers) {
		for i := range 1000 {
			e, err := p.get(t.Context(), fmt.Append(nil, i))
			must(t, err)
			p.put(e, false)
			time.Sleep(time.Millisecond) // synthetic time: who came when
		}
		synctest.Wait()
		if n := l.open.Load(); n != peersIdle || len(p.byMeta) != peersIdle {
			t.Errorf("%d are open, %d known", n, len(p.byMeta))
		}
		e, err := p.get(t.Context(), []byte("999"))
		must(t, err)
		if l.added.Load() != 1000 {
			t.Error("the last one was not kept")
		}
		p.put(e, false)
		time.Sleep(peerIdle)
		p.tidy(time.Now())
		synctest.Wait()
		if n := l.open.Load(); n != 0 || p.idle != 0 {
			t.Errorf("%d are open after a long time, %d idle", n, p.idle)
		}
	})
}

func TestAPeerInUseIsNotClosed(t *testing.T) {
	withPeers(t, func(t *testing.T, l *links, p *peers) {
		first, err := p.get(t.Context(), []byte("a"))
		must(t, err)
		for i := range 200 {
			e, err := p.get(t.Context(), fmt.Append(nil, i))
			must(t, err)
			p.put(e, false)
		}
		time.Sleep(peerIdle)
		p.tidy(time.Now())
		synctest.Wait()
		if n := l.open.Load(); n != 1 {
			t.Errorf("%d are open", n)
		}
		second, err := p.get(t.Context(), []byte("a"))
		must(t, err)
		if second != first {
			t.Error("added twice")
		}
		p.put(first, true) // it failed
		third, err := p.get(t.Context(), []byte("a"))
		must(t, err)
		if third == second {
			t.Error("a peer that failed is used again")
		}
		synctest.Wait()
		if n := l.open.Load(); n != 2 {
			t.Errorf("%d are open", n)
		}
		p.put(second, true)
		synctest.Wait()
		if n := l.open.Load(); n != 1 {
			t.Errorf("%d are open after the failed one's last use", n)
		}
		p.put(third, false)
	})
}

func TestAnUnreachablePeerIsNotTriedForAWhile(t *testing.T) {
	withPeers(t, func(t *testing.T, l *links, p *peers) {
		l.fail = func(md string) error {
			if md == "other" {
				return transfer.ErrPeerLost
			}
			return transfer.ErrUnreachable
		}
		try := func(md string, want error, added int64) {
			t.Helper()
			if _, err := p.get(t.Context(), []byte(md)); !errors.Is(err, want) || l.added.Load() != added {
				t.Errorf("%s: %v, added %d times, want %d", md, err, l.added.Load(), added)
			}
		}
		try("a", transfer.ErrUnreachable, 1)
		try("a", transfer.ErrUnreachable, 1)
		time.Sleep(unreachable)
		try("a", transfer.ErrUnreachable, 2)
		try("other", transfer.ErrPeerLost, 3)
		try("other", transfer.ErrPeerLost, 4) // which says nothing about the next time
		for i := range 2 * maxUnreachable {
			_, _ = p.get(t.Context(), fmt.Append(nil, i))
		}
		if len(p.byMeta) > maxUnreachable || p.failed > maxUnreachable {
			t.Errorf("%d are remembered, %d counted", len(p.byMeta), p.failed)
		}
		time.Sleep(unreachable)
		p.tidy(time.Now())
		if len(p.byMeta) != 0 || p.failed != 0 {
			t.Errorf("%d are remembered for ever, %d counted", len(p.byMeta), p.failed)
		}
	})
}

func TestAPeerIsAddedOnceForAllWhoWant(t *testing.T) {
	withPeers(t, func(t *testing.T, l *links, p *peers) {
		hold := make(chan struct{})
		l.fail = func(string) error { <-hold; return nil }
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for i := range 10 {
			all.Go(func() {
				of := t.Context()
				if i == 0 {
					of = ctx
				}
				e, err := p.get(of, []byte("a"))
				if (i == 0) != errors.Is(err, context.Canceled) {
					t.Errorf("%d: %v", i, err)
				}
				if err == nil {
					p.put(e, false)
				}
			})
			synctest.Wait()
		}
		cancel() // the first gives up, the others get it
		synctest.Wait()
		close(hold)
		all.Wait()
		if l.added.Load() != 1 || p.idle != 1 {
			t.Errorf("added %d times, %d idle", l.added.Load(), p.idle)
		}
	})
}

func TestAPeerThatIsStillBeingAddedAtCloseIsClosed(t *testing.T) {
	withPeers(t, func(t *testing.T, l *links, p *peers) {
		hold := make(chan struct{})
		l.fail = func(string) error { <-hold; return nil }
		got := make(chan error)
		go func() {
			_, err := p.get(t.Context(), []byte("a"))
			got <- err
		}()
		synctest.Wait()
		p.close()
		close(hold)
		if err := <-got; !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}
