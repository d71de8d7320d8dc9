package stage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/internal/sparselog"
	"github.com/tensorferry/tensorferry/stage/wire"
)

const (
	// DefaultMaxWaiting gets may wait for a put: about 1 KB each.
	DefaultMaxWaiting = 4096
	// waitingShare is what part of that one connection may have.
	waitingShare = 4
	// quickBytes is what is copied into a reply on the loop's goroutine (a few microseconds), quickTensors what is described there.
	// All other answers have a goroutine of their own.
	quickBytes   = 64 << 10
	quickTensors = 64
	// maxAnswering is how many such goroutines there are at most, each with an answer of up to about 9 MiB (65,536 tensors). More gets hold
	// up the loop, and so their senders.
	maxAnswering = 32
	// linger is what an answer is given to get away before the socket is closed: 50 ms were too few once, on a machine with three times as
	// much to do as processors.
	linger = 250 * time.Millisecond
)

// ServerOptions of a Server.
type ServerOptions struct {
	Loop  *control.Loop // the caller's
	Store *Store        // the caller's
	Host  string        // to bind
	Port  int           // 0: any free one
	Node  string        // our instance, told to own readers

	MaxWaiting int // gets that wait for a put, of all connections; default 4,096. Beyond: NotFound at once
	Log        *slog.Logger
}

// Server answers claims: of own readers and of plain ones, on one socket.
//
// A claim of an own reader (its request has the extension) belongs to its connection: nobody else can end it, and it ends with it. A
// claim of a plain one belongs to whoever knows its id, over any connection.
type Server struct {
	o      ServerOptions
	store  *Store
	router *control.Router // set before the first message
	local  string          // name of its local socket
	began  time.Time
	pushed atomic.Int64 // when the last answer was, or the last request that will have one, in nanoseconds after began

	mu        sync.Mutex
	waiting   map[string]map[wire.ID]*parked // by connection and claim
	waiters   int
	answering int // goroutines that answer
	closed    bool
	work      sync.WaitGroup // those goroutines; added to under mu, unless closed

	counts                          serverCounts
	malformedLog, offerLog, fullLog sparselog.Cause
}

// Serve binds and starts to answer. The caller closes it before the loop, and after the store, whose readers it hears until then. Errors:
// ErrOptions, and those of control.Loop.Listen.
func Serve(ctx context.Context, o ServerOptions) (*Server, error) {
	if o.Loop == nil || o.Store == nil || o.MaxWaiting < 0 || len(o.Node) > wire.MaxNode {
		return nil, fmt.Errorf("%w: a server needs a loop, a store, MaxWaiting of 0 or more (%d) and a node of at most %d bytes (%q)",
			ErrOptions, o.MaxWaiting, wire.MaxNode, o.Node)
	}
	if o.MaxWaiting == 0 {
		o.MaxWaiting = DefaultMaxWaiting
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	s := &Server{o: o, store: o.Store, waiting: make(map[string]map[wire.ID]*parked), began: time.Now()}
	if _, err := o.Loop.Listen(ctx, o.Host, o.Port, (*serverHandler)(s)); err != nil {
		return nil, err
	}
	local, err := s.router.ListenLocal(ctx)
	if err != nil { // readers of this machine come by tcp then
		o.Log.Warn("readers of this machine have no short way", "error", err)
	}
	s.local = local
	return s, nil
}

// Port is the bound port.
func (s *Server) Port() int { return s.router.Port() }

// Local names the way to this server for own readers of this machine, see control.Router; "" if there is none.
func (s *Server) Local() string { return s.local }

// Close tells gets that wait that we are closing, and stops answering once what was answered is on its way (250 ms).
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	var told []*parked
	for _, conn := range s.waiting {
		for _, w := range conn {
			told = append(told, w)
		}
	}
	for _, w := range told {
		s.unpark(w)
	}
	s.mu.Unlock()
	for _, w := range told {
		s.refuse(w.from, w.c, ErrClosing)
	}
	s.work.Wait()
	// A router drops what it has not sent when it is closed, and its peers are told nothing. The last of them may be told right now that its
	// claim held.
	time.Sleep(time.Until(s.began.Add(time.Duration(s.pushed.Load()) + linger)))
	return s.router.Close()
}

// serverHandler is what the loop calls: a Server, on the loop's goroutine.
type serverHandler Server

// Serve implements control.ServeHandler.
func (h *serverHandler) Serve(r *control.Router) { h.router = r }

// Message implements control.RouterHandler. Nothing in it waits.
func (h *serverHandler) Message(from control.Source, body []byte) {
	s := (*Server)(h)
	q, err := wire.DecodeRequest(body)
	if err != nil { // the peers do not answer it either
		s.counts.malformed.Add(1)
		s.malformedLog.Warn(s.o.Log, "dropped a request that makes no sense", "peer", from.Addr, "error", err)
		return
	}
	// What ends here may be what a Close waits for: the answer to it is on its way from now on, see linger.
	s.pushed.Store(int64(time.Since(s.began)))
	c := Claim{Key: q.Key, Generation: q.Generation, ID: q.Claim, Source: from.Addr, Ask: q.Ferry}
	if q.Ferry != nil {
		c.Owner = from.ID
	}
	if c.Source == "" {
		c.Source = from.ID
	}
	switch q.Op {
	case wire.Get:
		s.counts.gets.Add(1)
		s.get(from, c)
	case wire.Done:
		s.counts.dones.Add(1)
		s.end(c, s.store.done)
		s.send(from.ID, c.Ask, &wire.Reply{Status: wire.Acked})
	case wire.Verify:
		s.counts.verifies.Add(1)
		s.unparkClaim(c)
		answer, withdraw := s.store.verify(c)
		behind(withdraw)
		if answer == wire.Lost {
			s.counts.lost.Add(1)
		}
		s.send(from.ID, c.Ask, &wire.Reply{Status: answer})
	case wire.Fail:
		s.counts.fails.Add(1)
		s.send(from.ID, c.Ask, &wire.Reply{Status: s.end(c, s.store.fail)})
	case wire.Stat:
		s.counts.stats.Add(1)
		s.stat(from, c)
	default:
		s.counts.unknown.Add(1)
		s.send(from.ID, c.Ask, &wire.Reply{Status: wire.NotFound})
	}
}

// stat says what a reader would get. It is for own readers: plain ones do not ask.
func (s *Server) stat(from control.Source, c Claim) {
	m, err := s.store.Stat(c.Key, c.Generation)
	if err != nil || c.Ask == nil {
		s.refuse(from, c, errors.Join(err, ErrNotFound))
		return
	}
	m.Ferry.Try, m.Ferry.Node, m.Ferry.Local = c.Ask.Try, s.o.Node, s.local
	s.push(from.ID, wire.AppendMetadata(nil, m))
}

// Left implements control.LeaveHandler.
func (h *serverHandler) Left(from control.Source) {
	s := (*Server)(h)
	s.mu.Lock()
	s.unparkAll(from.ID)
	s.mu.Unlock()
	s.store.Drop(from.ID)
	s.counts.left.Add(1)
}

// end ends a claim, and what waits for it. Its grant is withdrawn behind: that may take time.
func (s *Server) end(c Claim, how func(Claim) (held bool, withdraw func())) wire.Status {
	s.unparkClaim(c)
	held, withdraw := how(c)
	behind(withdraw)
	if held {
		return wire.Held
	}
	return wire.Lost
}

// unparkClaim ends what waits for a claim of an own reader.
func (s *Server) unparkClaim(c Claim) {
	if c.Owner != "" {
		s.mu.Lock()
		s.unpark(s.waiting[c.Owner][c.ID])
		s.mu.Unlock()
	}
}

// behind withdraws what a claim leaves, which may take time; the store waits for it.
func behind(withdraw func()) {
	if withdraw != nil {
		go withdraw()
	}
}

// get claims, or waits for something to claim. The claim is recorded here, so that what the same connection says next finds it.
func (s *Server) get(from control.Source, c Claim) {
	s.mu.Lock()
	if c.Owner != "" {
		s.unpark(s.waiting[c.Owner][c.ID]) // asked again: the answer goes to the last
	}
	w := newParked(from, c)
	g, waits, err := s.claim(w)
	aside := g != nil && !quick(g) && s.answering < maxAnswering && !s.closed
	if aside {
		s.answering++
		s.work.Add(1)
	}
	s.mu.Unlock()
	switch {
	case aside:
		go func() {
			s.grant(from, g)
			s.mu.Lock()
			s.answering--
			s.mu.Unlock()
			s.work.Done()
		}()
	case g != nil:
		s.grant(from, g)
	case !waits:
		s.refuse(from, c, err)
	}
}

// quick is true if the answer may be made on the loop's goroutine. Plain readers need descriptors of an agent, which may have to start.
func quick(g *grant) bool {
	return g.Ask != nil && g.p.metadata.Size <= min(g.Ask.Inline, quickBytes) && len(g.p.metadata.Specs) <= quickTensors
}

// grant answers a claim with metadata. A claim whose answer did not get away, and that was never answered before, ends.
func (s *Server) grant(to control.Source, g *grant) {
	m, err := g.offer(s.store.ctx)
	if err != nil {
		behind(g.settle(false))
		s.refuse(to, g.Claim, err)
		return
	}
	if m.Ferry != nil {
		m.Ferry.Try, m.Ferry.Node = g.Ask.Try, s.o.Node
		if !to.Local {
			m.Ferry.Local = s.local
		}
	}
	sent := s.push(to.ID, wire.AppendMetadata(nil, m))
	if behind(g.settle(sent)); sent {
		s.counts.granted.Add(1)
	}
}

// refuse answers a get that got no claim.
func (s *Server) refuse(to control.Source, c Claim, err error) {
	a := wire.Reply{Status: wire.NotFound}
	var failed *FailedError
	switch {
	case errors.As(err, &failed):
		a.Status, a.Reason = wire.Failed, failed.Reason
		s.counts.failed.Add(1)
	case errors.Is(err, ErrClosing), errors.Is(err, context.Canceled):
		a.Status = wire.Closing
		s.counts.closing.Add(1)
	case errors.Is(err, ErrNotFound):
		s.counts.notFound.Add(1)
	case errors.Is(err, ErrFull):
		s.counts.full.Add(1)
		s.fullLog.Warn(s.o.Log, "refused a claim", "peer", to.Addr, "error", err)
	default:
		a.Status, a.Reason = wire.Failed, err.Error()
		s.counts.failed.Add(1)
		s.offerLog.Warn(s.o.Log, "a payload could not be offered", "key", c.Key, "peer", to.Addr, "error", err)
	}
	s.send(to.ID, c.Ask, &a)
}

// send answers a request; ask is its extension, nil if it had none.
func (s *Server) send(to string, ask *wire.FerryRequest, a *wire.Reply) {
	if ask != nil {
		a.Try = ask.Try
	}
	a.Reason = clip(a.Reason)
	s.push(to, wire.AppendReply(nil, a, ask != nil))
}

func (s *Server) push(to string, body []byte) (sent bool) {
	if s.router.Send(to, body) != nil {
		s.counts.unsent.Add(1) // the peer went away, or does not read: the router counts and logs which
		return false
	}
	s.pushed.Store(int64(time.Since(s.began)))
	return true
}

// clip makes a reason what the wire takes.
func clip(reason string) string {
	if len(reason) > wire.MaxReason {
		reason = reason[:wire.MaxReason]
	}
	return strings.ToValidUTF8(reason, "")
}
