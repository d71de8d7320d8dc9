package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// session is one engine's connection. Everything an engine has of the pool belongs to its session. When that ends, finish cancels fetches
// and waits, and gives the rest to the engine's client, exactly once.
//
// An engine may be in the middle of writing what it reserved, or of reading what it pinned, also one that was disconnected because it
// does not read its socket. So the blocks of a reservation that a connection leaves behind are quarantined, and its pins stay, until the
// process is dead (its pidfd says so: not the socket, which a thread or a device may outlive by a moment), the engine has come back on
// another connection and said what it still has, or it has said bye, which it does after it unmapped the pool (see clients). The key of
// a reservation is free for others at once.
type session struct {
	e    *engines
	id   uint64
	sock *net.UnixConn
	conn *api.Conn
	log  *slog.Logger

	// Set by the greeting, read by others once greeted is set.
	peer    api.Peer
	pool    *pool
	client  *knownClient
	name    string
	greeted atomic.Bool

	bye   bool          // the reader's own
	ended chan struct{} // closed when the client has nothing of this session any more

	ctx    context.Context // ends with the connection
	cancel context.CancelFunc
	work   sync.WaitGroup // fetches, waits and listings

	listing chan struct{} // holds the listing that is under way

	mu           sync.Mutex
	async        map[uint64]context.CancelCauseFunc // by ref
	handles      uint64                             // the last one given
	reservations map[uint64]reserved
	pins         map[uint64]*ec.Pin
}

// run serves the connection from hello to end.
func (s *session) run() {
	defer func() { _ = s.conn.Close() }()
	defer close(s.ended)
	if err := s.greet(); err != nil {
		s.e.counters.refused.Add(1)
		s.e.refusals.Info(s.log, "engine refused", "pid", s.peer.PID, "uid", s.peer.UID, "error", err)
		switch {
		case s.client != nil:
			s.pool.clients.leave(s.client, nil, nil, false, s.peer.Process, s.watch())
		case s.peer.Process != nil:
			_ = s.peer.Process.Close()
		}
		return
	}
	s.reservations, s.pins = map[uint64]reserved{}, map[uint64]*ec.Pin{}
	s.async = map[uint64]context.CancelCauseFunc{}
	s.ctx, s.cancel = context.WithCancel(s.e.ctx)
	s.greeted.Store(true)
	s.e.arrivals.Info(s.log, "engine connected", "name", s.name, "pid", s.peer.PID, "model", s.pool.Model)

	dead := s.watch()
	err := s.serve()
	s.finish(err, dead)
}

// watch ends the connection when the process is dead, and closes the channel. It ends when the pidfd is closed.
func (s *session) watch() <-chan struct{} {
	dead := make(chan struct{})
	s.e.work.Go(func() {
		if api.WaitExit(s.peer.Process) == nil {
			close(dead)
			_ = s.conn.Close() // a child that inherited the socket must not keep a dead engine's session
		}
	})
	return dead
}

func (s *session) greet() error {
	peer, err := api.PeerOf(s.sock, true)
	s.peer = peer
	if err != nil {
		return s.refuse(&api.Refused{Code: api.CodeOf(err), Message: err.Error()})
	}
	if err := s.conn.SetReceiveDeadline(time.Now().Add(helloTimeout)); err != nil {
		return err
	}
	m, err := s.conn.Receive()
	if errors.Is(err, api.ErrMalformed) || errors.Is(err, api.ErrLimit) {
		return s.refuse(&api.Refused{Code: api.CodeBadRequest, Message: err.Error()})
	}
	if err != nil {
		return err
	}
	hello, ok := m.(*api.Hello)
	if !ok {
		return s.refuse(&api.Refused{Code: api.CodeBadRequest, Message: fmt.Sprintf("a connection begins with hello, not with %T", m)})
	}
	if err := s.conn.SetReceiveDeadline(time.Time{}); err != nil {
		return err
	}
	s.name = strings.ToValidUTF8(hello.Name[:min(len(hello.Name), maxName)], "")
	pool, welcome, refused := s.e.welcome(s.id, peer, hello)
	if refused != nil {
		return s.refuse(refused)
	}
	s.pool = pool
	if s.client, welcome.Token, err = pool.clients.connect(s, hello.Token); err != nil {
		return s.refuse(&api.Refused{Code: api.CodeOf(err), Message: err.Error()})
	}
	// A freshly opened description: the node's own is locked, and that lock must not travel.
	f, err := pool.region.Reopen(true)
	if api.Exhausted(err) {
		err = fmt.Errorf("%w: %w", api.ErrLimit, err)
	}
	if err != nil {
		return s.refuse(&api.Refused{Code: api.CodeOf(err), Message: err.Error()})
	}
	defer func() { _ = f.Close() }()
	return s.conn.SendWithFile(welcome, api.MaxReplyFrame, f, helloTimeout)
}

func (s *session) refuse(r *api.Refused) error {
	return errors.Join(errors.New(r.Message), s.conn.Send(api.MaxReplyFrame, r))
}

// serve carries out requests until the connection ends; nil: it ended as connections do.
func (s *session) serve() error {
	for {
		m, err := s.conn.Receive()
		cut := s.conn.Err()
		switch {
		case cut != nil && err != nil && !errors.Is(cut, api.ErrClosed):
			return cut
		case errors.Is(err, api.ErrMalformed), errors.Is(err, api.ErrLimit):
			s.e.counters.malformed.Add(1)
			_ = s.conn.Send(api.MaxReplyFrame, &api.Refused{Code: api.CodeBadRequest, Message: err.Error()})
			return err
		case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, net.ErrClosed), errors.Is(err, syscall.ECONNRESET):
			return nil
		case err != nil:
			return err
		}
		switch m := m.(type) {
		case *api.Request:
			if cut != nil {
				continue // nobody hears the answer; but a bye may follow
			}
			if err := s.request(m); err != nil && s.conn.Err() == nil {
				return err
			}
		case *api.Bye:
			s.bye = true
			return nil
		default:
			s.e.counters.malformed.Add(1)
			return fmt.Errorf("%w: a %T from an engine", api.ErrMalformed, m)
		}
	}
}

func (s *session) request(m *api.Request) error {
	s.e.counters.requests.Add(1)
	s.e.counters.operations.Add(uint64(len(m.Ops)))
	reply := &api.Reply{ID: m.ID, Results: make([]api.Result, len(m.Ops))}
	var t turn
	for i := range m.Ops {
		if err := s.do(&m.Ops[i], &reply.Results[i], &t); err != nil {
			reply.Results[i].Code, reply.Results[i].Message = api.CodeOf(err), err.Error()
		}
	}
	// Pushes come after the reply to what they answer.
	pushes := t.inline()
	var err error
	if m.Late && len(pushes) == 0 && len(t.fetches) == len(m.Ops) {
		// Each ends with a push. Sent now, the reply would only wake the engine in the middle of the pull.
		err = s.conn.Hold(api.MaxReplyFrame, reply)
	} else {
		err = s.conn.Send(api.MaxReplyFrame, append([]api.Message{reply}, pushes...)...)
	}
	t.run(s)
	return err
}

// finish gives back all that the engine had.
func (s *session) finish(cause error, dead <-chan struct{}) {
	s.cancel()
	_ = s.conn.Close()
	if errors.Is(s.conn.Err(), api.ErrBacklog) {
		s.e.counters.slow.Add(1)
		s.log.Warn("engine does not read: disconnected", "name", s.name, "pid", s.peer.PID)
	}
	s.work.Wait() // a fetch may just have pinned what it brought
	log := s.log.With("name", s.name, "pid", s.peer.PID, "said_bye", s.bye, "pins", len(s.pins), "reservations", len(s.reservations))
	if s.e.keeps() && !s.bye {
		// The engine goes on with what it has, and restates it to the node that takes the region over.
		s.e.departures.Info(log, "engine left to the next node")
		_ = s.peer.Process.Close() // ends the watch
		return
	}
	left, pins := slices.Collect(maps.Values(s.reservations)), slices.Collect(maps.Values(s.pins))
	if !s.bye {
		s.e.counters.quarantined.Add(uint64(len(left)))
	}
	s.e.departures.Info(log, "engine gone", "error", cause)
	s.pool.clients.leave(s.client, left, pins, s.bye, s.peer.Process, dead)
}
