package ec

import (
	"container/list"
	"crypto/rand"
	"encoding/hex"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// Limits of what peers may hold.
const (
	maxSessions        = 4           // sessions with grants on one connection
	maxDescriptors     = 8           // acks of one plain session that carry the descriptor before its first READ is complete, at once
	descriptorEvery    = time.Second // afterwards, until that READ: one
	maxPlainSessions   = 4096        // plain sessions remembered, for the rule above
	grantIDRandomBytes = 16
)

// grantKey names what a grant is for. Asking again under the same name renews the grant: one pin, however often it is asked.
type grantKey struct {
	pool         *servedPool
	plain        bool
	session, key string
}

// grant is the right of one session to READ one entry, which stays pinned until the grant ends: by Verify (own peers), by the
// READ's notification (plain peers), or by its lease (own peers only).
//
// Plain peers re-check nothing and may READ at any time after an ack, so no clock frees what they were granted: their grant is
// burned when its lease ends, which only counts it. It ends with the agent that its acks named, if no notification comes.
type grant struct {
	grantKey
	id      string
	pin     *Pin
	info    Info
	blocks  int
	conn    string // routing id of the connection that asked last
	source  string
	burned  bool
	told    []*incarnation // plain: of the agent, by acks for this grant
	acks    int            // plain: sent for this grant; the peer may act on each of them
	read    int            // plain: READs complete
	offers  []wire.PlaneOffer
	revoke  []transfer.Registration
	expires time.Time
	lease   *list.Element // place in grantTable.leases, nil if burned or over
	over    bool
}

// grantTable is the producer's grants and what follows from them. It is guarded by the producer's lock.
type grantTable struct {
	byKey    map[grantKey]*grant
	byID     map[string]*grant
	leases   *list.List                // of *grant, the next to end first: all leases are equally long, so a renewed one goes to the back
	sessions map[string]map[string]int // connection -> session -> grants
	plain    map[string]*plainSession  // by session
	forgot   bool                      // a plain session that may still know an agent
}

// plainSession is what is known of one session of a plain peer. It decides whether an ack carries the descriptor of the whole
// region, and when an incarnation of the agent may end.
type plainSession struct {
	agent       *incarnation // that the counts below are about
	descriptors int
	described   time.Time // the last of them
	read        bool      // a READ is complete, so the peer has the agent and its descriptor
	grants      int
	moving      time.Time // since when it waits to be told of another agent; zero: it does not

	warm    bool           // it may know an agent: a READ was complete, if ever so long ago
	conn    string         // routing id of the connection that asked last
	gone    time.Time      // when that connection ended; zero while it stands
	knows   []*incarnation // of a process that died, which may have told it of them
	moved   *incarnation   // the newest on which a READ is complete that can have used no other
	movedAt time.Time
}

func newGrantTable() grantTable {
	return grantTable{
		byKey:    map[grantKey]*grant{},
		byID:     map[string]*grant{},
		leases:   list.New(),
		sessions: map[string]map[string]int{},
		plain:    map[string]*plainSession{},
	}
}

func (t *grantTable) add(g *grant) {
	t.byKey[g.grantKey] = g
	t.byID[g.id] = g
	g.lease = t.leases.PushBack(g)
	t.join(g)
	g.pool.total.add(g)
	g.pool.heldBy(g.plain).add(g)
	if g.plain {
		t.plainSession(g.session).grants++
	}
}

// renew starts the lease anew. The connection may be another one: a peer that reconnects keeps its session.
func (t *grantTable) renew(g *grant, conn string, expires time.Time) {
	g.expires = expires
	if g.conn != conn {
		t.leave(g)
		g.conn = conn
		t.join(g)
	}
	if g.burned {
		t.unburn(g)
		g.lease = t.leases.PushBack(g)
		return
	}
	t.leases.MoveToBack(g.lease)
}

// remove takes a grant out; false if it is over already.
func (t *grantTable) remove(g *grant) bool {
	if g.over {
		return false
	}
	g.over = true
	delete(t.byKey, g.grantKey)
	delete(t.byID, g.id)
	if g.burned {
		t.unburn(g)
	} else {
		t.leases.Remove(g.lease)
	}
	t.leave(g)
	g.pool.total.remove(g)
	g.pool.heldBy(g.plain).remove(g)
	if g.plain {
		t.plainSession(g.session).grants--
	}
	return true
}

func (t *grantTable) removeAll() []*grant {
	var all []*grant
	for _, g := range t.byID {
		t.remove(g)
		all = append(all, g)
	}
	return all
}

// burn keeps a plain peer's grant after its lease.
func (t *grantTable) burn(g *grant) {
	t.leases.Remove(g.lease)
	g.lease, g.burned = nil, true
	g.pool.burned.add(g)
	g.pool.burnedBy.add(g)
	// The peer may have dropped the ack that carried the descriptor.
	s := t.plainSession(g.session)
	s.descriptors, s.read = 0, false
}

func (t *grantTable) unburn(g *grant) {
	g.burned = false
	g.pool.burned.remove(g)
	g.pool.burnedBy.remove(g)
}

func (t *grantTable) join(g *grant) {
	s := t.sessions[g.conn]
	if s == nil {
		s = map[string]int{}
		t.sessions[g.conn] = s
	}
	s[g.session]++
}

func (t *grantTable) leave(g *grant) {
	s := t.sessions[g.conn]
	if s[g.session]--; s[g.session] <= 0 {
		delete(s, g.session)
	}
	if len(s) == 0 {
		delete(t.sessions, g.conn)
	}
}

// plainSession finds or makes one. Where there are too many, one that is gone and has no grants is forgotten, else one that has no
// grants: it gets a descriptor once more, and an agent that it knows may end before it has another.
func (t *grantTable) plainSession(session string) *plainSession {
	s := t.plain[session]
	if s == nil {
		if len(t.plain) >= maxPlainSessions {
			victim := ""
			for name, old := range t.plain {
				if old.grants == 0 {
					victim = name
					if !old.gone.IsZero() {
						break
					}
				}
			}
			if old := t.plain[victim]; old != nil && old.warm && (old.gone.IsZero() || time.Since(old.gone) < sessionGone) {
				t.forgot = true
			}
			delete(t.plain, victim)
		}
		s = &plainSession{warm: t.forgot}
		t.plain[session] = s
	}
	return s
}

// descriptorDue decides whether an ack to that session must carry the descriptor, and counts it if so.
func (t *grantTable) descriptorDue(session string, agent *incarnation) bool {
	s := t.plainSession(session)
	if s.agent != agent {
		s.agent, s.descriptors, s.read, s.moving = agent, 0, false, time.Time{}
	}
	if s.read {
		return false
	}
	s.descriptors++
	s.described = time.Now()
	return true
}

// descriptorWithheld says whether an ack that names agent would be of no use to the session: it may lack the descriptor, as it has READ
// nothing, and has been sent so many that it must wait for the next.
func (s *plainSession) descriptorWithheld(agent *incarnation) bool {
	return s.agent == agent && !s.read && s.descriptors >= maxDescriptors && time.Since(s.described) < descriptorEvery
}

// How a grant ends.
type ending uint8

const (
	endVerified ending = iota // its READ is complete
	endLetGo                  // the peer gave it up, or could not be told of it
)

// end takes a grant out and has its memory let go; false if it was over already.
func (p *Producer) end(g *grant, how ending) bool {
	p.mu.Lock()
	ok := p.grants.remove(g)
	if ok && how == endLetGo {
		p.stats.LetGo++
	}
	p.mu.Unlock()
	if ok {
		p.reaper.add(g)
	}
	return ok
}

// arm sets the one timer to the next lease to end, unless it is set: to that one, or to one that has been renewed or ended since,
// in which case it is set anew when it fires. Called with the lock held.
func (p *Producer) arm() {
	first := p.grants.leases.Front()
	if first == nil || p.armed {
		return
	}
	p.armed = true
	d := time.Until(first.Value.(*grant).expires)
	if p.timer == nil {
		p.timer = time.AfterFunc(d, p.expire)
		return
	}
	p.timer.Reset(d)
}

// expire ends the leases that are over.
func (p *Producer) expire() {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	p.armed = false
	now := time.Now()
	var ended []*grant
	for e := p.grants.leases.Front(); e != nil; e = p.grants.leases.Front() {
		g := e.Value.(*grant)
		if g.expires.After(now) {
			break
		}
		p.stats.LeaseExpiries++
		if g.plain {
			p.grants.burn(g)
			continue
		}
		p.grants.remove(g)
		ended = append(ended, g)
	}
	p.arm()
	for _, pool := range p.order {
		p.considerRotation(pool)
	}
	p.mu.Unlock()
	p.reaper.add(ended...)
}

// reaper revokes grants that have ended and then unpins their entries. A plane's Revoke may wait until a READ under way has
// stopped, which the control goroutine must not.
type reaper struct {
	mu     sync.Mutex
	queue  []*grant
	wake   chan struct{} // capacity 1
	closed bool
	done   chan struct{}
}

func newReaper() *reaper {
	r := &reaper{wake: make(chan struct{}, 1), done: make(chan struct{})}
	go r.run()
	return r
}

// add never waits. A grant on planes without tokens has nothing to revoke and is unpinned here.
func (r *reaper) add(ended ...*grant) {
	r.mu.Lock()
	for _, g := range ended {
		if len(g.revoke) == 0 {
			g.pin.Release()
			continue
		}
		r.queue = append(r.queue, g)
	}
	r.mu.Unlock()
	r.signal()
}

func (r *reaper) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

func (r *reaper) run() {
	defer close(r.done)
	for range r.wake {
		r.mu.Lock()
		batch, closed := r.queue, r.closed
		r.queue = nil
		r.mu.Unlock()
		for _, g := range batch {
			for _, reg := range g.revoke {
				reg.Revoke(g.id)
			}
			g.pin.Release()
		}
		if closed {
			return
		}
	}
}

// close returns when everything added before is let go.
func (r *reaper) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.signal()
	<-r.done
}

// newGrantID is not guessable: who knows it may end the grant.
func newGrantID() string {
	var b [grantIDRandomBytes]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// spansOf gives the bytes of an entry of that many bytes in those extents.
func spansOf(extents []region.Extent, blockBytes, total int64) []region.Span {
	spans := make([]region.Span, 0, len(extents))
	for _, e := range extents {
		s := region.Span{Offset: int64(e.Start) * blockBytes, Length: min(int64(e.Count)*blockBytes, total)}
		total -= s.Length
		spans = append(spans, s)
	}
	return spans
}
