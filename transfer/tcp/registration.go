package tcp

import (
	"crypto/rand"
	"fmt"
	"sync"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/span"
)

// registration is memory on offer: its grants, and what is on the way under them.
type registration struct {
	plane    *Plane
	id       uint64
	memory   transfer.Memory // File is our own duplicate
	notify   func(transfer.Notification)
	metadata []byte

	mu     sync.Mutex
	closed bool
	byID   map[string]*grant
	byTok  map[token]*grant
	conns  map[*serverConn]struct{}
}

// grant is a set of bytes that may be read under a token. Its fields are guarded by registration.mu.
type grant struct {
	id    string
	token token
	cover span.Cover
	sends map[*send]struct{}
}

// send is the bytes of one read request, from the check of its grant until the reader has said, by commit or by its next request
// on the connection, that they arrived, or the connection is gone.
type send struct {
	conn   *serverConn
	grant  *grant
	readID uint64
	idle   chan struct{} // closed when the memory is not touched any more
}

func newRegistration(p *Plane, m transfer.Memory, notify func(transfer.Notification)) *registration {
	return &registration{
		plane: p, memory: m, notify: notify,
		byID: map[string]*grant{}, byTok: map[token]*grant{}, conns: map[*serverConn]struct{}{},
	}
}

// Metadata implements transfer.Registration.
func (r *registration) Metadata() []byte { return r.metadata }

// Grant implements transfer.Registration.
func (r *registration) Grant(id string, spans []region.Span) ([]byte, error) {
	if err := transfer.CheckGrant(id, spans, int64(len(r.memory.Bytes))); err != nil {
		return nil, err
	}
	g := &grant{id: id, cover: span.NewCover(spans), sends: map[*send]struct{}{}}
	_, _ = rand.Read(g.token[:]) // never fails
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("tcp: grant %q: %w", id, transfer.ErrClosed)
	}
	if r.byID[id] != nil {
		return nil, fmt.Errorf("%w: tcp: grant %q is live", transfer.ErrBadRequest, id)
	}
	r.byID[id], r.byTok[g.token] = g, g
	return append([]byte(nil), g.token[:]...), nil
}

// Revoke implements transfer.Registration. It resets connections that have bytes of the grant on the way, and waits at most for
// one system call of each.
func (r *registration) Revoke(id string) {
	r.mu.Lock()
	g := r.byID[id]
	if g == nil {
		r.mu.Unlock()
		return
	}
	delete(r.byID, id)
	delete(r.byTok, g.token)
	sends := g.sends
	g.sends = nil
	r.mu.Unlock()
	for s := range sends {
		r.plane.aborted.Add(1)
		abort(s.conn.tcp)
	}
	for s := range sends {
		<-s.idle
	}
}

// Close implements transfer.Registration. It may be called from notify.
func (r *registration) Close() error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return nil
	}
	r.closed = true
	var ids []string
	for id := range r.byID {
		ids = append(ids, id)
	}
	var conns []*serverConn
	for c := range r.conns {
		conns = append(conns, c)
	}
	r.mu.Unlock()

	r.plane.mu.Lock()
	delete(r.plane.regs, r.id)
	r.plane.mu.Unlock()
	for _, id := range ids {
		r.Revoke(id)
	}
	for _, c := range conns {
		abort(c.tcp)
	}
	if r.memory.File != nil {
		return r.memory.File.Close()
	}
	return nil
}

// join ties a connection to the registration, so that Close ends it.
func (r *registration) join(c *serverConn) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return false
	}
	r.conns[c] = struct{}{}
	return true
}

func (r *registration) leave(c *serverConn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
}

// begin checks a read request and books its bytes as on the way.
func (r *registration) begin(c *serverConn, q request) (*send, status) {
	if _, err := transfer.CheckSpans(q.spans, int64(len(r.memory.Bytes))); err != nil {
		return nil, statusBadRequest
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.byTok[q.token]
	if g == nil {
		return nil, statusDenied
	}
	for _, s := range q.spans {
		if !g.cover.Contains(s) {
			return nil, statusDenied
		}
	}
	s := &send{conn: c, grant: g, readID: q.readID, idle: make(chan struct{})}
	g.sends[s] = struct{}{}
	return s, statusOK
}

// arrived books the bytes of s as no longer on the way.
func (r *registration) arrived(s *send) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(s.grant.sends, s)
}

// commit says whether the grant is still live, which makes every byte read under it good, and tells the owner.
func (r *registration) commit(q request) status {
	r.mu.Lock()
	g := r.byTok[q.token]
	if g == nil {
		r.mu.Unlock()
		return statusDenied
	}
	for s := range g.sends {
		if s.readID == q.readID {
			delete(g.sends, s)
		}
	}
	r.mu.Unlock()
	if r.notify != nil {
		r.notify(transfer.Notification{Grant: g.id, Message: q.message})
	}
	return statusOK
}
