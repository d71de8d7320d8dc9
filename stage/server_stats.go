package stage

import "sync/atomic"

// ServerStats counts what a Server was asked and answered.
type ServerStats struct {
	Waiting int // gets that wait for a put now

	Gets     uint64 // requests, repeated ones too
	Dones    uint64
	Verifies uint64
	Fails    uint64
	Stats    uint64
	Unknown  uint64 // requests of no known kind
	// Malformed requests were not answered.
	Malformed uint64

	Granted     uint64 // gets that were answered with metadata
	Woken       uint64 // of those, after they had waited
	NotFound    uint64
	Failed      uint64 // told that the producer failed, or cannot offer the payload
	Closing     uint64
	Full        uint64 // told NotFound because of a bound on claims
	WaitRefused uint64 // told NotFound at once because of the bound on waiting
	Lost        uint64 // verifies of claims that had ended
	Unsent      uint64 // answers that did not get away
	Left        uint64 // connections that asked something and have ended
}

type serverCounts struct {
	gets, dones, verifies, fails, stats, unknown, malformed                          atomic.Uint64
	granted, woken, notFound, failed, closing, full, waitRefused, lost, unsent, left atomic.Uint64
}

// Stats counts.
func (s *Server) Stats() ServerStats {
	s.mu.Lock()
	waiting := s.waiters
	s.mu.Unlock()
	c := &s.counts
	return ServerStats{
		Waiting: waiting,
		Gets:    c.gets.Load(), Dones: c.dones.Load(), Verifies: c.verifies.Load(), Fails: c.fails.Load(), Stats: c.stats.Load(), Unknown: c.unknown.Load(),
		Malformed: c.malformed.Load(), Granted: c.granted.Load(), Woken: c.woken.Load(), NotFound: c.notFound.Load(),
		Failed: c.failed.Load(), Closing: c.closing.Load(), Full: c.full.Load(), WaitRefused: c.waitRefused.Load(), Lost: c.lost.Load(),
		Unsent: c.unsent.Load(), Left: c.left.Load(),
	}
}
