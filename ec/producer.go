package ec

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Defaults of ProducerOptions.
const (
	DefaultSourceShare = 0.25
	DefaultTotalShare  = 0.5
)

// ProducerOptions configure a Producer.
type ProducerOptions struct {
	Pools      []ServedPool
	Generation int // 1 or 2: what plain peers speak
	Node       string
	Epoch      uint64
	Timeouts   Timeouts
	Log        *slog.Logger // nil: slog.Default()

	// SourceShare and TotalShare are the parts of a pool's blocks that may be under grants to one source address (default
	// 0.25) and to all together (default 0.5), so that there is always room for saves and for other peers. Own and plain peers are
	// counted apart; together they have at most half of what TotalShare leaves. A source that has no grant is not refused by its
	// share, however large the entry, and one that has few gets past TotalShare by a quarter of what that leaves. A request over a
	// share is answered NOT_READY where it passes soon: of an own peer, and of a plain one of which a grant ended, or whose first was
	// made, within a lease. Else, and if the source has 1,024 grants, it is answered MISSING: the peer encodes for itself.
	SourceShare, TotalShare float64
}

// ServedPool is one pool on offer. Requests are matched to pools by the compatibility hash.
type ServedPool struct {
	Cache  *Cache
	Compat wire.Compat
	Memory transfer.Memory  // the pool; registered on every plane by NewProducer
	Planes []transfer.Plane // by preference

	// Granted is what AdoptCache gave. NewProducer takes the pins, and holds them for as long as an agent of the process before
	// may serve them (see Successor).
	Granted []*Pin
	// Former has the agents of the process before that the caller took over because none of the planes does. Nil: there are none. The
	// caller closes it after the producer.
	Former Successor
}

// messenger is what a Producer needs of a control.Router.
type messenger interface {
	Send(id string, body []byte) error
	SendShared(id string, head []byte, tail *control.Shared) error
}

// offering is a registration of a pool on one plane.
type offering struct {
	name   string
	tokens bool
	reg    transfer.Registration
}

// servedPool is a ServedPool that is registered.
type servedPool struct {
	cache     *Cache
	compat    wire.Compat
	blocks    int
	offerings []offering
	plain     PlainServer // nil: no plane of this pool speaks to plain peers
	former    Successor   // nil: none but plain

	// Under the producer's lock: the agent that plain peers were told of last, and what is granted of this pool.
	agent     *incarnation
	total     usage
	ownHeld   held
	plainHeld held
	burned    usage // of plainHeld: past its lease and not read
	burnedBy  usages
	rotation  rotation
	granted   []*Pin // by the process before, whose agents still serve; under no lock: see succeed
	inherited int    // entries of granted, at first
	left      bool   // its agents outlive the producer, see Leave
}

// Producer answers peers that ask for entries of its pools: pin, grant, ack, and let go at verify, notification or lease.
// It answers on the control loop's goroutine, at once, whatever any engine does: it takes no lock that is held during I/O or a
// copy, and memory is revoked, which may wait for a plane, on a goroutine of its own.
type Producer struct {
	o     ProducerOptions
	lease time.Duration
	log   *throttledLog
	pools map[string]*servedPool // by compatibility hash
	order []*servedPool          // as configured

	mu       sync.Mutex
	router   messenger
	local    string              // name of the router's local socket; "": it has none
	ownAddrs map[netip.Addr]bool // of this machine, loopback left out
	grants   grantTable
	timer    *time.Timer // next lease to end
	armed    bool
	stats    ProducerStats
	stopped  bool // nothing more is granted
	closed   bool

	reaper   *reaper
	closing  chan struct{}
	watchers sync.WaitGroup // of agents
}

// NewProducer registers the pools with their planes. Registrations are undone if it fails.
func NewProducer(ctx context.Context, o ProducerOptions) (*Producer, error) {
	if o.Generation != wire.Generation1 && o.Generation != wire.Generation2 {
		return nil, fmt.Errorf("ec: protocol generation %d: want 1 or 2", o.Generation)
	}
	if o.SourceShare == 0 {
		o.SourceShare = DefaultSourceShare
	}
	if o.TotalShare == 0 {
		o.TotalShare = DefaultTotalShare
	}
	if o.SourceShare < 0 || o.SourceShare > 1 || o.TotalShare < 0 || o.TotalShare > 1 {
		return nil, fmt.Errorf("ec: shares of grants %v and %v: want 0 to 1", o.SourceShare, o.TotalShare)
	}
	p := &Producer{
		o:       o,
		lease:   o.Timeouts.WithDefaults().GrantLease,
		log:     newThrottledLog(o.Log),
		pools:   map[string]*servedPool{},
		grants:  newGrantTable(),
		reaper:  newReaper(),
		closing: make(chan struct{}),
	}
	for _, sp := range o.Pools {
		if err := p.register(ctx, sp); err != nil {
			return nil, errors.Join(err, p.Close())
		}
	}
	return p, nil
}

func (p *Producer) register(ctx context.Context, sp ServedPool) error {
	hash := sp.Compat.Hash()
	if _, twice := p.pools[hash]; twice {
		return fmt.Errorf("ec: two pools with the same compatibility hash (%s)", describe(sp.Compat))
	}
	pool := &servedPool{
		cache: sp.Cache, compat: sp.Compat, blocks: sp.Cache.Stats().Blocks,
		ownHeld: held{bySource: usages{}}, plainHeld: held{bySource: usages{}}, burnedBy: usages{}, former: sp.Former,
	}
	p.pools[hash] = pool
	p.order = append(p.order, pool)
	for _, plane := range sp.Planes {
		reg, err := plane.Register(ctx, sp.Memory, func(n transfer.Notification) { p.notified(pool, n) })
		if err != nil {
			return fmt.Errorf("ec: register the pool on plane %s: %w", plane.Name(), err)
		}
		pool.offerings = append(pool.offerings, offering{plane.Name(), plane.Capabilities().Tokens, reg})
		if ps, ok := reg.(PlainServer); ok && pool.plain == nil {
			pool.plain = ps
		}
	}
	p.succeed(pool, sp.Granted)
	return nil
}

// Serve is called with the router once it is bound; Message may be called from then on.
func (p *Producer) Serve(r *control.Router) { p.serve(r) }

// ServeLocal is called, before or after Serve, with the name of the router's local socket. Own peers of this machine are told it.
func (p *Producer) ServeLocal(name string) {
	own := machineAddrs()
	p.mu.Lock()
	p.local, p.ownAddrs = name, own
	p.mu.Unlock()
}

func (p *Producer) serve(m messenger) {
	p.mu.Lock()
	p.router = m
	p.mu.Unlock()
}

// Message implements control.RouterHandler. It never waits. After Close it is silent: a peer that hears nothing asks the next
// producer at this address, which a NACK would keep it from.
func (p *Producer) Message(from control.Source, body []byte) {
	p.mu.Lock()
	closed, stopped := p.closed, p.stopped
	p.mu.Unlock()
	if closed {
		return
	}
	m, err := wire.DecodeAtProducer(body, p.o.Generation)
	if err != nil {
		p.count(func(s *ProducerStats) { s.BadFrames++ })
		p.log.warn("bad frame", from.Addr, "a frame was dropped", "bytes", len(body), "err", err)
		return
	}
	switch m := m.(type) {
	case *wire.Request:
		if !stopped {
			p.request(from, m)
		}
	case *wire.Verify:
		p.verify(from, m)
	case *wire.Pulled:
		p.pulled(m)
	}
}

// answer is an ack to be sent.
type answer struct {
	ack       wire.Ack
	shared    *control.Shared // nil, or what ack.MemDescriptor would be
	described bool            // it has a descriptor
}

// request answers one XferReq.
func (p *Producer) request(from control.Source, r *wire.Request) {
	own := r.Ferry != nil && r.Ferry.V >= wire.ExtensionVersion
	a := answer{ack: wire.Ack{Key: r.Key}}
	if own {
		a.ack.Ferry = p.ferry(from, r)
	}
	var fresh *grant
	pool, status := p.screen(from, r)
	if status == wire.OK {
		fresh, status = p.grant(from, r, pool, own, &a)
	}
	a.ack.Status = status
	p.count(func(s *ProducerStats) {
		if int(status) < len(s.Acks) {
			s.Acks[status]++
		}
	})
	err := p.send(from.ID, &a)
	if err == nil || status != wire.OK {
		return
	}
	if !own {
		if g := p.unsent(grantKey{pool, true, r.Session, r.Key}, a.described); g != nil {
			p.end(g, endVerified)
		}
	}
	if fresh != nil {
		// Nobody will ever hear of this grant.
		p.end(fresh, endLetGo)
	}
	if errors.Is(err, control.ErrQueueFull) {
		// Large acks wait in line where small ones pass.
		nack := answer{ack: wire.Ack{Key: r.Key, Status: wire.NackNotReady}}
		if own {
			nack.ack.Ferry = p.ferry(from, r)
		}
		_ = p.send(from.ID, &nack)
	}
}

// ferry is what every ack to an own peer says.
func (p *Producer) ferry(from control.Source, r *wire.Request) *wire.FerryAck {
	f := &wire.FerryAck{V: wire.ExtensionVersion, Try: r.Ferry.Try, Node: p.o.Node, Epoch: p.o.Epoch}
	if from.Local {
		return f
	}
	ip, err := netip.ParseAddr(from.Addr)
	if err != nil {
		return f
	}
	ip = ip.Unmap().WithZone("")
	p.mu.Lock()
	defer p.mu.Unlock()
	if ip.IsLoopback() || p.ownAddrs[ip] {
		f.Local = p.local
	}
	return f
}

// screen does the checks that need no entry, in the peers' order: version, compatibility hash, session.
func (p *Producer) screen(from control.Source, r *wire.Request) (*servedPool, wire.Status) {
	if r.Version != p.o.Generation {
		p.log.warn("version", from.Addr, "a peer speaks another connector version: answered NACK_VERSION",
			"theirs", r.Version, "ours", p.o.Generation, "fix", "set ec_protocol to the peers' version")
		return nil, wire.NackVersion
	}
	pool := p.pools[r.CompatHash]
	if pool == nil {
		p.logMismatch(from, r)
		return nil, wire.NackIncompat
	}
	if r.Session == "" {
		p.log.warn("session", from.Addr, "a request names no session: answered NACK_INTERNAL", "key", r.Key)
		return nil, wire.NackInternal
	}
	return pool, wire.OK
}

// grant pins the entry and fills in the ack. It returns the grant if it is new, so that it can be taken back if the ack cannot
// be sent.
func (p *Producer) grant(from control.Source, r *wire.Request, pool *servedPool, own bool, a *answer) (*grant, wire.Status) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.stopped {
		return nil, wire.NackInternal // since the request came
	}
	id := grantKey{pool, !own, r.Session, r.Key}
	if g := p.grants.byKey[id]; g != nil {
		if g.plain && !p.servable(id) {
			return nil, wire.NackNotReady
		}
		p.grants.renew(g, from.ID, time.Now().Add(p.lease))
		p.arm()
		p.stats.Renewals++
		p.fill(a, g, r)
		return nil, wire.OK
	}

	pin, err := pool.cache.Pin(r.Key)
	switch {
	case errors.Is(err, ErrNotReady):
		return nil, wire.NackNotReady
	case err != nil:
		return nil, wire.NackMissing
	}
	g := &grant{grantKey: id, pin: pin, info: pin.Info(), conn: from.ID, source: source(from)}
	for _, e := range g.info.Extents {
		g.blocks += int(e.Count)
	}
	if status := p.offer(from, r, g); status != wire.OK {
		pin.Release()
		return nil, status
	}
	if g.plain {
		pin.KeepGranted()
	}
	g.expires = time.Now().Add(p.lease)
	p.grants.add(g)
	p.arm()
	p.stats.Granted++
	p.stats.BytesGranted += uint64(g.info.Spec.Bytes)
	p.fill(a, g, r)
	return g, wire.OK
}

// offer decides whether the grant may be made and readies it on the planes that it will be read by. On anything but OK nothing
// is left on any plane.
func (p *Producer) offer(from control.Source, r *wire.Request, g *grant) wire.Status {
	if limit, answer := p.overLimit(g); answer != wire.OK {
		p.stats.Capped++
		p.log.warn("capped", from.Addr, "a peer is over a limit of grants", "limit", limit, "answered", answer)
		return answer
	}
	g.id = newGrantID()
	if g.plain {
		if g.pool.plain == nil || g.pool.blocks > maxPlainBlocks {
			p.refusePlain(from, r, g.pool)
			return wire.NackInternal
		}
		if !p.servable(g.grantKey) {
			return wire.NackNotReady
		}
		return wire.OK
	}
	for _, name := range r.Ferry.Planes {
		i := slices.IndexFunc(g.pool.offerings, func(o offering) bool { return o.name == name })
		if i < 0 || slices.ContainsFunc(g.offers, func(o wire.PlaneOffer) bool { return o.Name == name }) {
			continue
		}
		o := g.pool.offerings[i]
		var token []byte
		if o.tokens {
			t, err := o.reg.Grant(g.id, spansOf(g.info.Extents, g.pool.compat.BlockBytes, g.info.Spec.Bytes))
			if err != nil {
				p.log.warn("grant", from.Addr, "a data plane refused a grant and is left out of the ack", "plane", name, "key", r.Key, "err", err)
				continue
			}
			token = t
			g.revoke = append(g.revoke, o.reg)
		}
		g.offers = append(g.offers, wire.PlaneOffer{Name: name, Metadata: o.reg.Metadata(), Token: token})
	}
	if len(g.offers) == 0 {
		p.log.warn("planes", from.Addr, "a peer and this node have no data plane in common: answered NACK_INTERNAL",
			"key", r.Key, "theirs", r.Ferry.Planes, "ours", g.pool.planes())
		return wire.NackInternal
	}
	return wire.OK
}

// fill writes what an OK ack says about a grant.
func (p *Producer) fill(a *answer, g *grant, r *wire.Request) {
	a.ack.Session = g.session
	if g.plain {
		p.fillPlain(a, g)
		return
	}
	f := a.ack.Ferry
	f.Gen, f.Slot, f.Grant = g.info.Gen, uint32(g.info.Slot), g.id
	f.Rows, f.Bytes = g.info.Spec.Shape[0], g.info.Spec.Bytes
	f.LeaseMS = p.lease.Milliseconds()
	for _, e := range g.info.Extents {
		f.Extents = append(f.Extents, [2]uint32{e.Start, e.Count})
	}
	if r.Ferry.Sum && g.info.HasChecksum {
		sum := g.info.Checksum
		f.Sum = &sum
	}
	f.Planes = g.offers
}

// verify ends a grant after its READ and says whether the bytes read were those granted: the grant is still there, so the entry
// has been pinned all the while, and has the generation that was granted.
func (p *Producer) verify(from control.Source, v *wire.Verify) {
	p.mu.Lock()
	g := p.grants.byID[v.Grant]
	known := g != nil && !g.plain && g.session == v.Session && g.key == v.Key
	p.mu.Unlock()
	if v.Failed {
		if known {
			p.end(g, endLetGo)
		}
		return
	}
	ok := false
	if known && g.info.Gen == v.Gen {
		now, state := g.pool.cache.Lookup(v.Key)
		// end is what decides a race with the lease: a grant that has just lapsed is no longer known.
		ok = state == Ready && now.Gen == v.Gen && p.end(g, endVerified)
	}
	switch {
	case ok:
		g.pool.cache.DropHold(v.Key)
	case known:
		p.end(g, endLetGo)
	}
	p.count(func(s *ProducerStats) {
		if ok {
			s.VerifiesOK++
		} else {
			s.VerifiesFailed++
		}
	})
	body := wire.AppendVerified(nil, &wire.Verified{Key: v.Key, Session: v.Session, Grant: v.Grant, Gen: v.Gen, OK: ok})
	_ = p.sendBy(func(r messenger) error { return r.Send(from.ID, body) })
}

// pulled counts as uses of entries what own peers read without asking, and ends a hold for each. It says nothing of generations that are
// gone.
func (p *Producer) pulled(m *wire.Pulled) {
	pool := p.pools[m.CompatHash]
	if pool == nil {
		return
	}
	for _, e := range m.Entries {
		pin, err := pool.cache.Pin(e.Key)
		if err != nil {
			continue
		}
		if pin.Info().Gen == e.Gen {
			pool.cache.DropHold(e.Key)
		}
		pin.Release()
	}
	p.count(func(s *ProducerStats) { s.Pulled += uint64(len(m.Entries)) })
}

// notified is called by planes: the READ of a plain peer is complete. Own peers verify instead.
func (p *Producer) notified(pool *servedPool, n transfer.Notification) {
	if len(n.Message) == 0 {
		return // of an own peer
	}
	session, key, err := wire.ParseNotification(n.Message)
	if err != nil {
		p.count(func(s *ProducerStats) { s.BadFrames++ })
		p.log.warn("notification", "", "a notification was dropped", "err", err)
		return
	}
	if g := p.readByPlain(grantKey{pool, true, session, key}); g != nil && p.end(g, endVerified) {
		g.pool.cache.DropHold(key)
	}
}

func (p *Producer) send(id string, a *answer) error {
	return p.sendBy(func(r messenger) error {
		if a.shared != nil {
			return r.SendShared(id, wire.AppendAckHead(nil, &a.ack, a.shared.Len()), a.shared)
		}
		return r.Send(id, wire.AppendAck(nil, &a.ack))
	})
}

// sendBy is the only I/O of the control goroutine.
func (p *Producer) sendBy(send func(messenger) error) error {
	p.mu.Lock()
	r := p.router
	p.mu.Unlock()
	err := control.ErrClosed
	if r != nil {
		err = send(r)
	}
	if err != nil {
		p.count(func(s *ProducerStats) { s.SendFailed++ })
	}
	return err
}

func (p *Producer) count(f func(*ProducerStats)) {
	p.mu.Lock()
	f(&p.stats)
	p.mu.Unlock()
}

func (sp *servedPool) planes() []string {
	names := make([]string, len(sp.offerings))
	for i, o := range sp.offerings {
		names[i] = o.name
	}
	return names
}

// source is what grants are counted by: the peer's address, or its connection where that is not known.
func source(from control.Source) string {
	if from.Addr != "" {
		return from.Addr
	}
	return "connection " + from.ID
}

// Close ends all grants and withdraws the pools from their planes: no byte of them is read by a peer after it returns, but of those whose
// agents were left (see Leave).
// Idempotent. The control loop may still call Message.
func (p *Producer) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed, p.stopped = true, true
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, pool := range p.order {
		if pool.rotation.due != nil {
			pool.rotation.due.Stop()
		}
	}
	ended := slices.DeleteFunc(p.grants.removeAll(), func(g *grant) bool { return g.plain && g.pool.left })
	p.mu.Unlock()

	close(p.closing)
	p.watchers.Wait()
	// The pools first: a READ that still succeeds is then of entries that were pinned, also for a peer that does not ask (see
	// localLink.vouches).
	var errs []error
	for _, pool := range p.order {
		for _, o := range pool.offerings {
			if err := o.reg.Close(); err != nil {
				errs = append(errs, fmt.Errorf("ec: withdraw the pool from plane %s: %w", o.name, err))
			}
		}
	}
	p.reaper.add(ended...)
	p.reaper.close()
	for _, pool := range p.order {
		if !pool.left {
			pool.releaseGranted()
		}
	}
	return errors.Join(errs...)
}
