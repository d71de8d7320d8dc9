package ec

import (
	"context"
	"time"

	"github.com/tensorferry/tensorferry/control"
)

// localConn is what a Consumer needs of a control.LocalDealer.
type localConn interface {
	conn
	Connected() bool
}

// dialLocalFunc connects by the local path.
type dialLocalFunc func(ctx context.Context, name string, h control.DealerHandler) (localConn, error)

// localLink is a second connection to a producer of this machine, by the local path. Acks that come by the first name that path's
// socket. It goes with the first connection, and is not made again while that stands.
type localLink struct {
	path
	p     *peer
	alive localConn // the path's connection, also after it is lost; under peer.mu, as the next
	up    bool
}

// useLocal begins to connect by the local path, once for a name while the first connection stands. Called with the lock held, by the
// control goroutine, which dialling waits for.
func (p *peer) useLocal(name string) {
	if p.closed || p.c.dialLocal == nil || p.localName == name {
		return
	}
	l := &localLink{path: path{session: newSession()}, p: p}
	p.local, p.localName, p.localSession = l, name, l.session
	p.c.work.Go(func() {
		ctx, cancel := context.WithTimeout(p.c.ctx, p.c.t.Connect)
		defer cancel()
		conn, err := p.c.dialLocal(ctx, name, l)
		p.mu.Lock()
		wanted := p.local == l
		switch {
		case err == nil && wanted:
			l.conn, l.alive = conn, conn
		case wanted:
			p.local = nil
		}
		p.mu.Unlock()
		if err == nil && !wanted {
			_ = conn.Close()
		}
	})
}

// dropLocal takes the local connection out. The caller closes it once it has let go of the lock.
func (p *peer) dropLocal() localConn {
	l := p.local
	p.local, p.localName = nil, ""
	if l == nil {
		return nil
	}
	l.conn = nil
	return l.alive
}

// Up implements control.DealerHandler.
func (l *localLink) Up() {
	l.p.mu.Lock()
	defer l.p.mu.Unlock()
	l.up = true
}

// Down implements control.DealerHandler. Answers may have been lost with it, so whoever waits for one asks again.
func (l *localLink) Down(error) {
	p := l.p
	p.mu.Lock()
	defer p.mu.Unlock()
	l.up, l.conn = false, nil
	if p.local == l {
		p.local = nil // and localName stays: it is not tried again
		p.signal()
	}
}

// Message implements control.DealerHandler.
func (l *localLink) Message(body []byte) { l.p.message(body, &l.path) }

// vouches tells whether a grant that came by a path, and was asked for at asked, still stands: its lease has not ended, and the process
// that gave it, which is on this machine and has the same clock, is there. Of a grant that stands after a READ the entry was pinned all
// the while, so that there is nothing to verify. Only the local path can vouch.
func (p *peer) vouches(via *path, asked time.Time, lease time.Duration) bool {
	p.mu.Lock()
	var conn localConn
	if l := p.local; l != nil && via == &l.path {
		conn = l.alive
	}
	p.mu.Unlock()
	return conn != nil && conn.Connected() && !asked.IsZero() && time.Since(asked) < lease
}
