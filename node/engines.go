package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/internal/sparselog"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// Limits of the engine API's server.
const (
	maxSessions  = 1024
	maxName      = 128 // bytes of an engine's name in logs and lists
	helloTimeout = 5 * time.Second
	writeStall   = 10 * time.Second // an engine that reads nothing for so long is disconnected
	backlogBytes = 32 << 20         // or that leaves so much unread
	maxListings  = 16               // under way at once, of all engines: each holds what it has to say
	engineLines  = 64               // log lines of engines that come, and that go, before they are spaced out
)

// engines serves the engine API: one session a connection.
type engines struct {
	sock     *engineSocket
	pools    []*pool
	identity identity
	sums     bool
	keep     bool // at the end, leave engines what they have, for the next node
	log      *slog.Logger
	listings chan struct{} // holds those under way

	ctx    context.Context // ends all sessions' work
	cancel context.CancelFunc
	work   sync.WaitGroup // sessions and what they leave behind
	loop   chan struct{}  // closed when nothing is accepted any more

	mu       sync.Mutex
	closing  bool
	err      error
	next     uint64
	sessions map[uint64]*session

	byProcess map[uint64]int // sessions, by what processOf gives
	share     int            // how many of them one process may have

	counters engineCounters

	refusals, arrivals, departures sparselog.Cause
}

// identity is what a node tells engines and peers about itself.
type identity struct {
	node       string
	peerHost   string
	peerPort   int
	generation int
}

// engineCounters count what became of connections and requests.
type engineCounters struct {
	accepted, refused, malformed, slow, requests, operations atomic.Uint64
	quarantined                                              atomic.Uint64 // reservations that a connection left unfinished
}

func newEngines(sock *engineSocket, pools []*pool, id identity, sums, keep bool, log *slog.Logger) *engines {
	e := &engines{sock: sock, pools: pools, identity: id, sums: sums, keep: keep, log: log, listings: make(chan struct{}, maxListings), loop: make(chan struct{}), sessions: map[uint64]*session{}, byProcess: map[uint64]int{}, share: processSessions}
	e.arrivals.Burst, e.departures.Burst = engineLines, engineLines
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e
}

// serve accepts until the socket is closed.
func (e *engines) serve() {
	defer close(e.loop)
	pause := time.Duration(0)
	for {
		c, err := e.sock.AcceptUnix()
		switch {
		case err == nil:
			pause = 0
			e.accept(c)
		case errors.Is(err, net.ErrClosed):
			e.end(nil)
			return
		default:
			// Out of descriptors or memory: engines that are there go on, and room may come.
			pause = min(max(2*pause, 5*time.Millisecond), time.Second)
			e.log.Warn("engine not accepted", "error", err, "again_in", pause)
			select {
			case <-time.After(pause):
			case <-e.ctx.Done():
			}
		}
	}
}

func (e *engines) end(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.closing {
		e.err = errors.Join(errors.New("the engine socket was closed"), err)
	}
}

// failed is nil while engines are accepted.
func (e *engines) failed() error {
	select {
	case <-e.loop:
	default:
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

func (e *engines) accept(sock *net.UnixConn) {
	conn, err := api.NewConn(sock, api.ConnOptions{InLimit: api.MaxRequestFrame, Backlog: backlogBytes, WriteStall: writeStall})
	if err != nil {
		_ = sock.Close()
		return
	}
	// Without a name (another PID namespace) processes count as one.
	peer, err := api.PeerOf(sock, false)
	process := processOf(peer.PID)
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.counters.refused.Add(1)
		_ = conn.Close()
		return
	}
	if e.closing {
		e.counters.refused.Add(1)
		_ = conn.Send(api.MaxReplyFrame, &api.Refused{Code: api.CodeClosing, Message: "the node is ending"})
		_ = conn.Close()
		return
	}
	if len(e.sessions) >= maxSessions {
		e.counters.refused.Add(1)
		_ = conn.Send(api.MaxReplyFrame, &api.Refused{Code: api.CodeLimit, Message: fmt.Sprintf("the node serves at most %d engines", maxSessions)})
		_ = conn.Close()
		return
	}
	if n := e.byProcess[process]; n >= e.share {
		e.counters.refused.Add(1)
		_ = conn.Send(api.MaxReplyFrame, &api.Refused{Code: api.CodeLimit, Message: fmt.Sprintf("pid %d has %d of the %d connections that the node serves, and may have no more: close some",
			peer.PID, n, maxSessions)})
		_ = conn.Close()
		return
	}
	e.counters.accepted.Add(1)
	e.next++
	e.byProcess[process]++
	s := &session{e: e, id: e.next, sock: sock, conn: conn, log: e.log.With("conn", e.next), ended: make(chan struct{}), listing: make(chan struct{}, 1)}
	e.sessions[s.id] = s
	e.work.Add(1)
	go func() {
		defer e.work.Done()
		s.run()
		e.mu.Lock()
		delete(e.sessions, s.id)
		if e.byProcess[process]--; e.byProcess[process] == 0 {
			delete(e.byProcess, process)
		}
		e.mu.Unlock()
	}()
}

// keeps says that the node is ending and another one will go on.
func (e *engines) keeps() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.closing && e.keep
}

// close ends the socket and all sessions. False: ctx ended before they did, so that something may still use the pools.
func (e *engines) close(ctx context.Context) (ended bool, err error) {
	e.mu.Lock()
	e.closing = true
	for _, s := range e.sessions {
		_ = s.conn.Send(api.MaxReplyFrame, &api.Refused{Code: api.CodeClosing, Message: "the node is ending"})
		_ = s.conn.Close()
	}
	e.mu.Unlock()
	e.cancel()
	for _, p := range e.pools {
		p.clients.stop()
	}
	err = e.sock.close()
	done := make(chan struct{})
	go func() {
		e.work.Wait()
		<-e.loop
		close(done)
	}()
	select {
	case <-done:
		return true, err
	case <-ctx.Done():
		return false, errors.Join(err, fmt.Errorf("engines: %w", ctx.Err()))
	}
}

// welcome checks who connects and what it wants. A nil welcome comes with the refusal.
func (e *engines) welcome(id uint64, peer api.Peer, h *api.Hello) (*pool, *api.Welcome, *api.Refused) {
	refuse := func(code api.Code, format string, a ...any) (*pool, *api.Welcome, *api.Refused) {
		return nil, nil, &api.Refused{Code: code, Message: fmt.Sprintf(format, a...)}
	}
	uid := os.Getuid()
	switch {
	case peer.UID != uid && peer.UID != 0:
		return refuse(api.CodeDenied, "this node serves uid %d and root, not uid %d", uid, peer.UID)
	case peer.Process == nil:
		return refuse(api.CodeDenied, "the node cannot watch your process, so it would not know when what you reserve is free again: "+
			"share the PID namespace (docker --pid, shareProcessNamespace) or use Linux 6.5 or later")
	case h.MinVersion > api.Version || h.Version < api.MinVersion:
		return refuse(api.CodeVersion, "this node speaks versions %d to %d of the engine API, you %d to %d", api.MinVersion, api.Version, h.MinVersion, h.Version)
	}
	p, err := e.choose(h.Pool)
	if err != nil {
		return refuse(api.CodeNoPool, "%v", err)
	}
	return p, &api.Welcome{
		Version:    min(h.Version, api.Version),
		Node:       e.identity.node,
		Epoch:      p.region.Epoch(),
		Conn:       id,
		PeerHost:   e.identity.peerHost,
		PeerPort:   e.identity.peerPort,
		Generation: e.identity.generation,
		Pool: api.PoolInfo{
			Group: p.group, Model: p.Model, Dtype: p.Dtype, VLLMVersion: p.VLLMVersion,
			BlockBytes: p.BlockBytes, Blocks: p.blocks, Offset: p.region.PoolOffset(), Region: p.region.Path(), Checksums: e.sums,
		},
	}, nil
}

func (e *engines) choose(group string) (*pool, error) {
	if group == "" && len(e.pools) == 1 {
		return e.pools[0], nil
	}
	text := ""
	for _, p := range e.pools {
		if p.group == group {
			return p, nil
		}
		text += fmt.Sprintf("; %s is model %s, dtype %s, block_bytes %d, vllm_version %s", p.group, p.Model, p.Dtype, p.BlockBytes, p.VLLMVersion)
	}
	if group == "" {
		return nil, fmt.Errorf("this node has %d pools, name one%s", len(e.pools), text)
	}
	return nil, fmt.Errorf("no pool %q here%s", group, text)
}

// list is the engines that are connected, for people.
func (e *engines) list() []engineStatus {
	e.mu.Lock()
	defer e.mu.Unlock()
	out := make([]engineStatus, 0, len(e.sessions))
	for _, s := range e.sessions {
		if s.greeted.Load() {
			out = append(out, engineStatus{
				Conn: s.id, Owner: s.client.id, Name: s.name, PID: s.peer.PID, Pool: s.pool.group, ReservedBlocks: s.pool.clients.reservedBy(s.client),
			})
		}
	}
	slices.SortFunc(out, func(a, b engineStatus) int { return cmp.Compare(a.Conn, b.Conn) })
	return out
}
