package node

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
)

const (
	tokenBytes = 16

	// restateGrace is how long a key that an engine was filling when the node before this one died is kept for that engine. After
	// it others may fill the key, in other blocks; the engine's blocks stay as they are. Engines reconnect within a second.
	restateGrace = 10 * time.Second

	// takeoverTimeout bounds the wait for a client's earlier connection to end.
	takeoverTimeout = 5 * time.Second
)

// clients are the engines that a pool's memory is open to, connected or not. Each has a row in the region for as long as it may
// still write to blocks that it reserved, or read what it had pinned, so that a node that takes the region over after this one's
// death knows whom to wait for.
//
// A client that is away ends in one of these ways: it comes back with its token and restates what it has, and what it does not
// restate is free; it says bye; or its process is proven dead. No clock ends it.
type clients struct {
	log   *slog.Logger
	table *region.ClientTable
	ctx   context.Context // ends the watches
	stop  context.CancelFunc
	work  sync.WaitGroup

	mu      sync.Mutex
	free    []int // rows
	byID    map[uint64]*knownClient
	rows    int // of clients that one process may have
	limit   int // blocks that one process may have reserved, 0: all
	refused uint64
	// accounts are by process. A client's process is the one that it was known by first.
	accounts map[region.Client]*account
	exits    map[uint64]*exit // by process: those that clients that are away wait for
	waiting  int              // adopted clients that are not accounted for
	pinned   []*ec.Pin        // what adopted clients had pinned, while any is waited for
}

// knownClient is one of them. All fields are under clients.mu, but for id.
type knownClient struct {
	id      uint64
	row     int
	region  region.Client
	session *session
	account *account
	adopted bool                // known from the node before, and not accounted for yet
	left    map[uint64]reserved // by generation: what it may still write, and no session has
	pins    map[uint64]*ec.Pin  // by generation, one an entry: what it may still read, and no session has
	back    chan struct{}       // closed when it is not away any more; nil: it is connected
}

// newClients takes over what an adopted region says of its clients. One process may have limit of its blocks reserved, 0: all.
func newClients(r *region.Region, a *ec.Adopted, limit int, log *slog.Logger) *clients {
	c := &clients{log: log, table: r.Clients(), byID: map[uint64]*knownClient{}, rows: processClients, limit: limit, accounts: map[region.Client]*account{}, exits: map[uint64]*exit{}}
	c.ctx, c.stop = context.WithCancel(context.Background())
	for row := c.table.Len() - 1; row >= 0; row-- {
		rc, ok := c.table.Load(row)
		switch {
		case !ok:
			c.free = append(c.free, row)
		case c.byID[rc.ID] != nil: // the node died while it gave a client another row
			c.table.Clear(row)
			c.free = append(c.free, row)
		default:
			cl := &knownClient{id: rc.ID, row: row, region: rc, adopted: true, left: map[uint64]reserved{}, pins: map[uint64]*ec.Pin{}, back: make(chan struct{})}
			c.byID[rc.ID] = cl
			c.enlist(cl)
		}
	}
	unknown := 0
	for _, res := range a.Filling {
		i := res.Info()
		if cl := c.byID[i.Owner]; cl != nil {
			cl.left[i.Gen] = reserved{res, blocksOf(&i)}
			cl.account.blocks += blocksOf(&i)
		} else {
			res.Quarantine() // a row is older than what its client reserves, so this one cannot be; and nobody can prove its end
			unknown++
		}
	}
	if unknown > 0 {
		log.Error("reservations of clients that the region does not name: their blocks stay out of use", "reservations", unknown)
	}
	c.pinned, c.waiting = a.Pinned, len(c.byID)
	c.release()
	for _, cl := range slices.Collect(maps.Values(c.byID)) {
		c.watch(cl)
	}
	c.work.Go(c.giveUpKeys)
	return c
}

// watchAgain is how long a process that cannot be watched now is left alone: descriptors may be free by then, or it may be dead.
const watchAgain = 5 * time.Second

// watch waits for the death of an adopted client's process, or sees that it is dead. A process of another namespace cannot be
// watched: only the client's return ends it.
func (c *clients) watch(cl *knownClient) {
	if cl.region.Process == 0 || cl.region.Namespace != pidNamespace() {
		c.log.Warn("an engine of the node before is in another PID namespace: what it has stays until it comes back",
			"client", cl.id, "reservations", len(cl.left))
		return
	}
	if c.tryWatch(cl, cl.region.Process, cl.back) {
		return
	}
	c.log.Warn("an engine of the node before cannot be watched for now: what it has stays until it comes back, or is seen to be dead",
		"client", cl.id, "pid", cl.region.Process>>startBits)
	process, back := cl.region.Process, cl.back // another's once it is back
	c.work.Go(func() {
		tick := time.NewTicker(watchAgain)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if c.tryWatch(cl, process, back) {
					return
				}
			case <-back:
				return
			case <-c.ctx.Done():
				return
			}
		}
	})
}

// tryWatch is false if nothing can be said of the client's process now.
func (c *clients) tryWatch(cl *knownClient, process uint64, back chan struct{}) bool {
	c.mu.Lock()
	x := c.exits[process]
	if x != nil {
		x.users++
	}
	c.mu.Unlock()
	if x != nil {
		c.await(cl, back, x)
		return true
	}
	f, dead := watchProcess(process)
	switch {
	case dead:
		c.ended(cl, back)
	case f == nil:
		return false
	default:
		end := make(chan struct{})
		c.work.Go(func() {
			if api.WaitExit(f) == nil {
				close(end)
			}
		})
		c.mu.Lock()
		x := c.exitOf(process, f, end)
		c.mu.Unlock()
		c.await(cl, back, x)
	}
	return true
}

// ended drops a client whose process is dead, unless it is not away any more as it was when back was made.
func (c *clients) ended(cl *knownClient, back chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if cl.back == back {
		c.drop(cl, "its process is dead")
	}
}

// exit is the death of a process that clients that are away wait for. All of a process share one, and so one descriptor: a process may
// leave more connections than the node has descriptors.
type exit struct {
	process uint64 // 0: it has no name that is seen from here, and the exit is one client's alone
	pidfd   *os.File
	dead    <-chan struct{}
	users   int // under clients.mu
}

// exitOf takes a process's pidfd over, and dead, which tells what that tells. Who gets it awaits it. Called with the lock held.
func (c *clients) exitOf(process uint64, pidfd *os.File, dead <-chan struct{}) *exit {
	x := c.exits[process]
	if x == nil {
		x = &exit{process: process, pidfd: pidfd, dead: dead}
		if process != 0 {
			c.exits[process] = x
		}
	} else {
		_ = pidfd.Close() // ends the wait for dead
	}
	x.users++
	return x
}

// await ends a client that is away when its process is dead.
func (c *clients) await(cl *knownClient, back chan struct{}, x *exit) {
	c.work.Go(func() {
		select {
		case <-x.dead:
			c.ended(cl, back)
		case <-back:
		case <-c.ctx.Done():
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if x.users--; x.users == 0 {
			if x.process != 0 {
				delete(c.exits, x.process)
			}
			_ = x.pidfd.Close() // ends the wait for dead
		}
	})
}

// giveUpKeys frees the keys of what clients were filling and did not come back for.
func (c *clients) giveUpKeys() {
	t := time.NewTimer(restateGrace)
	defer t.Stop()
	select {
	case <-t.C:
	case <-c.ctx.Done():
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	for _, cl := range c.byID {
		if !cl.adopted {
			continue
		}
		for _, res := range cl.left {
			res.Quarantine()
			n++
		}
	}
	if c.waiting > 0 {
		c.log.Warn("engines of the node before have not come back, and live: blocks that they may use stay as they are",
			"engines", c.waiting, "reservations", n, "pinned", len(c.pinned))
	}
}

// drop ends a client that is away: nothing of it is in use any more. Called with the lock held.
func (c *clients) drop(cl *knownClient, why string) {
	for _, res := range cl.left {
		res.Quarantine().Settle()
		cl.account.blocks -= res.blocks
	}
	if len(cl.left)+len(cl.pins) > 0 {
		c.log.Info("blocks of an engine are free again", "client", cl.id, "reservations", len(cl.left), "pins", len(cl.pins), "because", why)
	}
	cl.unpin()
	c.table.Clear(cl.row)
	c.free = append(c.free, cl.row)
	delete(c.byID, cl.id)
	c.delist(cl)
	c.arrived(cl)
	c.account(cl)
}

// unpin lets go of what the client had pinned before. Called with the lock held.
func (cl *knownClient) unpin() {
	for _, p := range cl.pins {
		p.Release()
	}
	clear(cl.pins)
}

// arrived ends the watch of a client that is away. Called with the lock held.
func (c *clients) arrived(cl *knownClient) {
	if cl.back != nil {
		close(cl.back)
		cl.back = nil
	}
}

// account is called once it is known what an adopted client still has. Called with the lock held.
func (c *clients) account(cl *knownClient) {
	if cl.adopted {
		cl.adopted = false
		c.waiting--
		c.release()
	}
}

// release lets go of what adopted clients had pinned, once all are accounted for. Who has it still has pinned it again.
func (c *clients) release() {
	if c.waiting > 0 {
		return
	}
	for _, p := range c.pinned {
		p.Release()
	}
	c.pinned = nil
}

// connect finds or makes the client of a new session, and gives the token for its welcome. The process that connects lives.
func (c *clients) connect(s *session, token []byte) (*knownClient, []byte, error) {
	now := region.Client{Process: processOf(s.peer.PID), Namespace: pidNamespace()}
	deadline := time.NewTimer(takeoverTimeout)
	defer deadline.Stop()
	for {
		c.mu.Lock()
		cl := c.known(token, now)
		if cl == nil {
			defer c.mu.Unlock()
			return c.add(s, now)
		}
		if cl.session == nil {
			defer c.mu.Unlock()
			c.arrived(cl)
			cl.session = s
			return cl, token, c.move(cl, now)
		}
		old := cl.session
		c.mu.Unlock()
		_ = old.conn.Close() // the client has given it up, and knows before us
		select {
		case <-old.ended:
		case <-deadline.C:
			return nil, nil, fmt.Errorf("%w: an earlier connection of this client is still ending", api.ErrLimit)
		}
	}
}

// known is the client that a token names, if the process is the one that the token was given to, as far as that can be told.
func (c *clients) known(token []byte, now region.Client) *knownClient {
	if len(token) != tokenBytes {
		return nil
	}
	cl := c.byID[idOf(token)]
	if cl == nil {
		return nil
	}
	if was := cl.region; was.Process != 0 && was.Namespace == now.Namespace && !sameProcess(was.Process, now.Process) {
		return nil
	}
	return cl
}

// idOf cuts 53 bits off a token, which every language has as a number.
func idOf(token []byte) uint64 { return binary.BigEndian.Uint64(token) >> 11 }

func (c *clients) add(s *session, rc region.Client) (*knownClient, []byte, error) {
	if len(c.free) == 0 {
		return nil, nil, fmt.Errorf("%w: the pool has %d clients, connected or not yet proven dead", api.ErrLimit, region.MaxClients)
	}
	if a := c.accounts[rc]; a != nil && a.clients >= c.rows {
		return nil, nil, fmt.Errorf("%w: process %d has %d of the pool's %d clients, connected or gone with something left, and may have no more",
			api.ErrLimit, s.peer.PID, a.clients, region.MaxClients)
	}
	token := make([]byte, tokenBytes)
	for rc.ID == 0 || c.byID[rc.ID] != nil {
		_, _ = rand.Read(token) // never fails
		rc.ID = idOf(token)
	}
	cl := &knownClient{id: rc.ID, region: rc, session: s, left: map[uint64]reserved{}, pins: map[uint64]*ec.Pin{}}
	if err := c.place(cl); err != nil {
		return nil, nil, err
	}
	c.byID[cl.id] = cl
	c.enlist(cl)
	return cl, token, nil
}

// place gives a client a row.
func (c *clients) place(cl *knownClient) error {
	last := len(c.free) - 1
	if err := c.table.Set(c.free[last], cl.region); err != nil {
		return err
	}
	cl.row = c.free[last]
	c.free = c.free[:last]
	return nil
}

// move writes down how the process of a client that came back is named now: this node may be in another PID namespace than the one
// before. The new row is there before the old one goes.
func (c *clients) move(cl *knownClient, now region.Client) error {
	now.ID = cl.id
	if now == cl.region || len(c.free) == 0 {
		return nil
	}
	old := cl.row
	cl.region = now
	if err := c.place(cl); err != nil {
		return err
	}
	c.table.Clear(old)
	c.free = append(c.free, old)
	return nil
}

// resume gives a session of the client what it had reserved before. The key may be given up by now: then Commit will say so.
func (c *clients) resume(cl *knownClient, gen uint64) (reserved, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	res, ok := cl.left[gen]
	delete(cl.left, gen)
	return res, ok
}

// restated says that the client has nothing but what it has restated.
func (c *clients) restated(cl *knownClient) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for gen, res := range cl.left {
		res.Quarantine().Settle()
		cl.account.blocks -= res.blocks
		delete(cl.left, gen)
	}
	cl.unpin()
	c.account(cl)
}

// leave ends a client's session. What it may still write or read stays with the client, whose process is watched; bye says that there is
// nothing.
func (c *clients) leave(cl *knownClient, left []reserved, pins []*ec.Pin, bye bool, pidfd *os.File, dead <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cl.session = nil
	for _, res := range left {
		res.Quarantine() // the key is free for others at once
		cl.left[res.Info().Gen] = res
	}
	for _, p := range pins {
		if gen := p.Info().Gen; cl.pins[gen] == nil {
			cl.pins[gen] = p
		} else {
			p.Release() // however often it is pinned, once is enough
		}
	}
	if bye || len(cl.left)+len(cl.pins) == 0 && !cl.adopted {
		c.drop(cl, "it said bye")
		_ = pidfd.Close()
		return
	}
	process := uint64(0)
	if cl.region.Namespace == pidNamespace() && !api.Exited(pidfd) { // while it lives its name is no other's
		process = cl.region.Process
	}
	cl.back = make(chan struct{})
	c.await(cl, cl.back, c.exitOf(process, pidfd, dead))
}

// away counts the clients that are not connected, what clients may still write of what they left, and what is pinned for them.
func (c *clients) away() (clients, reservations, pinned int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pinned = len(c.pinned)
	for _, cl := range c.byID {
		if cl.session == nil {
			clients++
		}
		reservations += len(cl.left)
		pinned += len(cl.pins)
	}
	return clients, reservations, pinned
}

// close ends the watches. The region keeps the rows.
func (c *clients) close() {
	c.stop()
	c.work.Wait()
}
