package ec

import "github.com/tensorferry/tensorferry/ec/wire"

// ProducerStats is a snapshot for metrics. Counters only grow; the others are of now.
type ProducerStats struct {
	Acks           [wire.NackNotReady + 1]uint64 // by status
	Granted        uint64                        // grants made
	Renewals       uint64                        // requests for a grant that was still there
	BytesGranted   uint64                        // bytes of encodings, once a grant
	LeaseExpiries  uint64
	VerifiesOK     uint64 // own peers whose READ was of the granted bytes
	VerifiesFailed uint64 // own peers that were told to read again
	Pulled         uint64 // READs of own peers that asked nobody
	Notified       uint64 // plain peers' READs complete
	AgentGone      uint64 // grants of plain peers that ended with the agent that served them
	Rotations      uint64 // of the agent that serves plain peers
	LetGo          uint64 // grants given up before a READ was complete
	BadFrames      uint64 // frames and notifications that were dropped
	Capped         uint64 // requests over a limit, answered MISSING
	PlainRefused   uint64 // plain peers that no plane here serves
	SendFailed     uint64 // answers that could not be queued

	Grants        int // live
	GrantedBlocks int // blocks under live grants, each counted once
	Burned        int // grants of plain peers that are past their lease and not read
	BurnedBlocks  int
	Retiring      int // pools whose former agent still serves sessions that know it
}

// Stats is a snapshot.
func (p *Producer) Stats() ProducerStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Grants = len(p.grants.byID)
	for _, pool := range p.order {
		s.GrantedBlocks += pool.total.blocks
		s.Burned += pool.burned.grants
		s.BurnedBlocks += pool.burned.blocks
		if pool.rotation.retiring != nil {
			s.Retiring++
		}
	}
	return s
}
