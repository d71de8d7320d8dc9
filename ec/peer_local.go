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

// localLink is a second connection to a producer of this machine, by the local path. Its acks name that path's socket. It goes with
// the first connection and is not made again: what is sent while it is not up goes by the first.
type localLink struct {
	p    *peer
	conn localConn // nil until it is dialled; under peer.mu
	up   bool      // under peer.mu
}

// useLocal begins to connect by the local path, once for a name while the first connection stands. Called with the lock held, by the
// control goroutine, which dialling waits for.
func (p *peer) useLocal(name string) {
	if p.closed || p.c.dialLocal == nil || p.localName == name {
		return
	}
	l := &localLink{p: p}
	p.local, p.localName = l, name
	p.c.work.Go(func() {
		ctx, cancel := context.WithTimeout(p.c.ctx, p.c.t.Connect)
		defer cancel()
		conn, err := p.c.dialLocal(ctx, name, l)
		p.mu.Lock()
		wanted := p.local == l
		switch {
		case err == nil:
			l.conn = conn
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
	return l.conn
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
	l.up = false
	if p.local == l {
		p.local = nil // and localName stays: it is not tried again
		p.signal()
	}
}

// Message implements control.DealerHandler.
func (l *localLink) Message(body []byte) { l.p.message(body, l) }

// vouches tells whether a grant that was asked for at asked, over this connection, still stands: its lease has not ended, and the
// process that gave it, which is on this machine and has the same clock, is there. Of a grant that stands after a READ the entry was
// pinned all the while, so that there is nothing to verify.
func (l *localLink) vouches(asked time.Time, lease time.Duration) bool {
	l.p.mu.Lock()
	conn := l.conn
	l.p.mu.Unlock()
	return conn != nil && conn.Connected() && !asked.IsZero() && time.Since(asked) < lease
}
