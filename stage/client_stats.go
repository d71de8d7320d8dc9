package stage

import (
	"context"
	"errors"
	"sync/atomic"
)

// ClientStats is a snapshot for metrics. Counters only grow; the others are of now.
type ClientStats struct {
	Gets     uint64 // calls of Get
	OK       uint64
	Bytes    uint64 // of those
	NotFound uint64 // ended by ErrNotFound, also at the deadline
	TimedOut uint64 // by the deadline, with another reason
	Failed   uint64 // by another error
	Canceled uint64 // by the caller, or by Close

	Questions  uint64 // claims asked for, repetitions included
	Timeouts   uint64 // questions without an answer in time
	Retries    uint64 // whole tries that followed a lost claim, a wrong checksum or a failed READ
	Reverified uint64 // verifies that were repeated, since their answer was lost
	Lost       uint64 // claims that did not hold until the payload was read
	Corrupt    uint64 // wrong checksums
	Late       uint64 // answers that nobody waited for any more
	Bad        uint64 // answers that made no sense
	Recoveries uint64 // claims that were asked for again only to end them
	GivenUp    uint64 // claims that could not be ended

	Pending     int // gets, and claims that are not ended yet
	Connections int
}

type clientCounters struct {
	gets, ok, bytes, notFound, timedOut, failed, canceled                       atomic.Uint64
	questions, timeouts, retries, lost, corrupt, late, bad, recoveries, givenUp atomic.Uint64
	reverified                                                                  atomic.Uint64

	connections, endings atomic.Int64
}

func (n *clientCounters) ended(got *Got, err error) {
	switch {
	case err == nil:
		n.ok.Add(1)
		n.bytes.Add(uint64(got.Size))
	case errors.Is(err, ErrNotFound):
		n.notFound.Add(1)
	case errors.Is(err, context.DeadlineExceeded):
		n.timedOut.Add(1)
	case errors.Is(err, context.Canceled), errors.Is(err, ErrClosing):
		n.canceled.Add(1)
	default:
		n.failed.Add(1)
	}
}

// Stats is a snapshot.
func (c *Client) Stats() ClientStats {
	n := &c.stats
	return ClientStats{
		Gets:        n.gets.Load(),
		OK:          n.ok.Load(),
		Bytes:       n.bytes.Load(),
		NotFound:    n.notFound.Load(),
		TimedOut:    n.timedOut.Load(),
		Failed:      n.failed.Load(),
		Canceled:    n.canceled.Load(),
		Questions:   n.questions.Load(),
		Timeouts:    n.timeouts.Load(),
		Retries:     n.retries.Load(),
		Reverified:  n.reverified.Load(),
		Lost:        n.lost.Load(),
		Corrupt:     n.corrupt.Load(),
		Late:        n.late.Load(),
		Bad:         n.bad.Load(),
		Recoveries:  n.recoveries.Load(),
		GivenUp:     n.givenUp.Load(),
		Pending:     c.work.count(),
		Connections: int(n.connections.Load()),
	}
}
