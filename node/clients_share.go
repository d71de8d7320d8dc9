package node

import (
	"fmt"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
)

// What one process can have of what there is for all: connections (see engines.accept), rows of a pool's clients, and, where the
// configuration says so, blocks of entries that are not ready. A process may have several connections, each a client of its own. A half
// leaves room for two more with what they need; nobody is known to use more than one a worker.
const (
	processSessions = maxSessions / 2
	processClients  = region.MaxClients / 2
)

// shareOf is how many of a pool's blocks one process may have reserved, 0: all.
func (s *settings) shareOf(blocks int) int {
	if s.EngineShare >= 1 {
		return 0
	}
	return max(1, int(s.EngineShare*float64(blocks)))
}

// reserved is a reservation and its size.
type reserved struct {
	*ec.Reservation
	blocks int
}

func blocksOf(i *ec.Info) (n int) {
	for _, x := range i.Extents {
		n += int(x.Count)
	}
	return n
}

// account is what one process has. It is under clients.mu.
type account struct {
	process region.Client // without an ID
	clients int
	blocks  int // that its clients reserved, or left and may still write
}

// enlist gives a client its process's account. One whose process has no name that is seen from here has one of its own.
func (c *clients) enlist(cl *knownClient) {
	who := cl.region
	who.ID = 0
	a := c.accounts[who]
	if a == nil {
		a = &account{process: who}
	}
	if who.Process != 0 {
		c.accounts[who] = a
	}
	a.clients++
	cl.account = a
}

// delist is for a client that has nothing any more.
func (c *clients) delist(cl *knownClient) {
	a := cl.account
	if a.clients--; a.clients == 0 {
		delete(c.accounts, a.process)
	}
}

// overShare is to an engine what a full pool is: it goes on without saving, or commits first what it has.
type overShare struct{ has, more, limit int }

func (e *overShare) Error() string {
	return fmt.Sprintf("this process has %d blocks reserved, and %d more would be over its share of the pool, %d (engine_share): commit or discard first",
		e.has, e.more, e.limit)
}

func (e *overShare) Unwrap() error { return ec.ErrFull }

// charge counts blocks that a client is about to reserve. ErrFull: its process has its share. One that has nothing may reserve one entry
// of any size.
func (c *clients) charge(cl *knownClient, blocks int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	a := cl.account
	if c.limit > 0 && a.blocks > 0 && a.blocks+blocks > c.limit {
		c.refused++
		return &overShare{a.blocks, blocks, c.limit}
	}
	a.blocks += blocks
	return nil
}

// credit takes blocks off that are ready, or free again.
func (c *clients) credit(cl *knownClient, blocks int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	cl.account.blocks -= blocks
}

// reservedBy is how many blocks a client's process has reserved.
func (c *clients) reservedBy(cl *knownClient) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return cl.account.blocks
}

// shares is the most that a process has reserved, in blocks, and how many reservations were over a share.
func (c *clients) shares() (most int, refused uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cl := range c.byID {
		most = max(most, cl.account.blocks)
	}
	return most, c.refused
}
