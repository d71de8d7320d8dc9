package ec

import (
	"log/slog"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
)

// ProducerStats is a snapshot for metrics. Counters only grow; the others are of now.
type ProducerStats struct {
	Acks           [wire.NackNotReady + 1]uint64 // by status
	Granted        uint64                        // grants made
	Renewals       uint64                        // requests for a grant that was still there
	BytesGranted   uint64                        // bytes of encodings, once a grant
	LeaseExpiries  uint64
	VerifiesOK     uint64 // own peers whose READ was of the granted bytes
	VerifiesFailed uint64 // own peers that were told to read again
	Notified       uint64 // plain peers' READs complete
	LetGo          uint64 // grants given up before a READ was complete
	BadFrames      uint64 // frames and notifications that were dropped
	Capped         uint64 // requests over a limit, answered MISSING
	PlainRefused   uint64 // plain peers that no plane here serves
	SendFailed     uint64 // answers that could not be queued

	Grants        int // live
	GrantedBlocks int // blocks under live grants, counted once a grant
	Burned        int // grants of plain peers that are past their lease and not read
	BurnedBlocks  int
}

// Stats is a snapshot.
func (p *Producer) Stats() ProducerStats {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.stats
	s.Grants = len(p.grants.byID)
	for _, pool := range p.order {
		s.GrantedBlocks += pool.total.blocks
	}
	s.Burned, s.BurnedBlocks = p.grants.burned.grants, p.grants.burned.blocks
	return s
}

// throttledLog writes at most one line of a kind about one subject in logInterval, and says how many it left out: what peers
// send must not fill the log.
type throttledLog struct {
	log  *slog.Logger
	mu   sync.Mutex
	seen map[[2]string]*logged
}

type logged struct {
	at   time.Time
	held int
}

func newThrottledLog(l *slog.Logger) *throttledLog {
	if l == nil {
		l = slog.Default()
	}
	return &throttledLog{log: l, seen: map[[2]string]*logged{}}
}

// warn logs, unless a line of that kind about that peer was logged a moment ago.
func (t *throttledLog) warn(kind, peer, msg string, args ...any) {
	t.mu.Lock()
	now := time.Now()
	l := t.subject([2]string{kind, peer}, now)
	if now.Sub(l.at) < logInterval {
		l.held++
		t.mu.Unlock()
		return
	}
	held := l.held
	l.at, l.held = now, 0
	t.mu.Unlock()
	if peer != "" {
		args = append(args, "peer", peer)
	}
	if held > 0 {
		args = append(args, "not_logged_before", held)
	}
	t.log.Warn(msg, args...)
}

// subject finds or makes the record of a subject. When there are too many, the rest of a kind share one.
func (t *throttledLog) subject(k [2]string, now time.Time) *logged {
	if l := t.seen[k]; l != nil {
		return l
	}
	if len(t.seen) >= maxLogSubjects {
		for old, l := range t.seen {
			if now.Sub(l.at) >= logInterval && l.held == 0 {
				delete(t.seen, old)
			}
		}
		if len(t.seen) >= maxLogSubjects {
			k[1] = "*"
			if l := t.seen[k]; l != nil {
				return l
			}
		}
	}
	l := &logged{at: now.Add(-logInterval)}
	t.seen[k] = l
	return l
}
