package ec

import "sync/atomic"

// ConsumerStats is a snapshot for metrics. Counters only grow; the others are of now.
type ConsumerStats struct {
	Outcomes       [outcomes]uint64 // by Outcome, one a call of Fetch
	Bytes          uint64           // pulled from peers
	OneSided       uint64           // pulls that asked nobody
	Overtaken      uint64           // READs of such pulls that were of no use, mostly because the entry went meanwhile
	Requests       uint64
	NotReady       uint64 // answers NOT_READY
	AckTimeouts    uint64
	ReadErrors     uint64
	Retries        uint64 // pulls that began again after a failed READ or verification
	VerifyFailed   uint64 // READs of an entry that had changed
	ChecksumFailed uint64
	LateAcks       uint64 // OK acks that nobody waited for
	BadAcks        uint64 // OK acks that made no sense
	BadFrames      uint64 // frames that were dropped
	Quarantines    uint64
	Overdue        uint64 // quarantines that took longer than Timeouts.Quarantine

	Quarantined int // destinations that a READ may still write
	Flights     int // pulls under way
	Peers       int // connections
}

type consumerCounters struct {
	outcomes [outcomes]atomic.Uint64

	bytes, oneSided, overtaken, requests, notReady, ackTimeouts, readErrors, retries, verifyFailed, checksumFailed, lateAcks, badAcks, badFrames,
	quarantines, overdue atomic.Uint64

	quarantined, flights atomic.Int64
}

// Stats is a snapshot.
func (c *Consumer) Stats() ConsumerStats {
	n := &c.stats
	s := ConsumerStats{
		Bytes:          n.bytes.Load(),
		OneSided:       n.oneSided.Load(),
		Overtaken:      n.overtaken.Load(),
		Requests:       n.requests.Load(),
		NotReady:       n.notReady.Load(),
		AckTimeouts:    n.ackTimeouts.Load(),
		ReadErrors:     n.readErrors.Load(),
		Retries:        n.retries.Load(),
		VerifyFailed:   n.verifyFailed.Load(),
		ChecksumFailed: n.checksumFailed.Load(),
		LateAcks:       n.lateAcks.Load(),
		BadAcks:        n.badAcks.Load(),
		BadFrames:      n.badFrames.Load(),
		Quarantines:    n.quarantines.Load(),
		Overdue:        n.overdue.Load(),
		Quarantined:    int(n.quarantined.Load()),
		Flights:        int(n.flights.Load()),
	}
	for o := range s.Outcomes {
		s.Outcomes[o] = n.outcomes[o].Load()
	}
	c.mu.Lock()
	s.Peers = len(c.peers)
	c.mu.Unlock()
	return s
}
