package nixl

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
)

// A fetch agent that dies was most likely ended by a peer that it was adding or reading from: by UCX and what that peer sent. Such
// peers are suspects: the next agent starts at once for all others, and suspects are tried one at a time. Who is at work again at the
// death of another agent waits ever longer for his next try; who was not a suspect before is not blamed beside him.
const (
	suspectBackoffFirst = time.Second // longer than a start, about 0.5 s
	suspectBackoffMost  = time.Minute
	trialMost           = time.Second // for a try to show something, before the next suspect has his
	maxSuspects         = 256         // remembered
)

// suspects of one plane, by the names of their agents. The zero value has none.
type suspects struct {
	n atomic.Int32 // len(all): 0 costs those who ask no lock

	mu    sync.Mutex
	all   map[string]*suspect
	trial *trial
	last  death
}

type suspect struct {
	times int       // it was at work when an agent died
	until time.Time // not tried before
	since agent     // the last one that did
}

// trial is the try of a suspect.
type trial struct {
	name  string
	until time.Time
	over  chan struct{}
}

// death of an agent for which somebody was blamed.
type death struct {
	agent  agent
	former bool     // they were suspects before
	fresh  []string // those that were not
}

// admit waits for the turn of a peer that is a suspect. ErrPeerLost: it is not to be tried yet.
func (s *suspects) admit(ctx context.Context, name string) error {
	for s.n.Load() > 0 {
		s.mu.Lock()
		x := s.all[name]
		if x == nil {
			s.mu.Unlock()
			return nil
		}
		now := time.Now()
		if wait := x.until.Sub(now); wait > 0 {
			times := x.times
			s.mu.Unlock()
			return fmt.Errorf("%w: nixl: the agent that reads died %d times while it had to do with this peer, the next try is in %v", transfer.ErrPeerLost, times, wait.Round(time.Millisecond))
		}
		t := s.trial
		if t == nil || t.name == name || !now.Before(t.until) {
			if t == nil || t.name != name {
				s.endTrial()
				s.trial = &trial{name, now.Add(trialMost), make(chan struct{})}
			}
			s.mu.Unlock()
			return nil
		}
		s.mu.Unlock()
		timer := time.NewTimer(t.until.Sub(now))
		select {
		case <-t.over:
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return fmt.Errorf("nixl: another peer that may have ended the agent that reads is tried first: %w", ctx.Err())
		}
		timer.Stop()
	}
	return nil
}

// endTrial lets the next suspect have his. With the lock.
func (s *suspects) endTrial() {
	if s.trial != nil {
		close(s.trial.over)
		s.trial = nil
	}
}

// acquit is for a peer by which an agent has lived.
func (s *suspects) acquit(name string) {
	if s.n.Load() == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(name)
	if s.trial != nil && s.trial.name == name {
		s.endTrial()
	}
}

func (s *suspects) forget(name string) {
	delete(s.all, name)
	s.n.Store(int32(len(s.all)))
}

// blame is for a peer that a, which died, was adding or reading from.
func (s *suspects) blame(a agent, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last.agent != a {
		s.last = death{agent: a}
		s.endTrial()
	}
	x := s.all[name]
	switch {
	case x != nil && x.since == a: // for another READ
	case x != nil:
		x.until = time.Now().Add(min(suspectBackoffFirst<<min(x.times-1, 10), suspectBackoffMost))
		x.times++
		x.since = a
		s.last.former = true
		for _, other := range s.last.fresh {
			s.forget(other)
		}
		s.last.fresh = nil
	case s.last.former:
	default:
		if s.all == nil {
			s.all = map[string]*suspect{}
		}
		for other := range s.all {
			if len(s.all) < maxSuspects {
				break
			}
			s.forget(other)
		}
		s.all[name] = &suspect{times: 1, since: a}
		s.last.fresh = append(s.last.fresh, name)
		s.n.Store(int32(len(s.all)))
	}
}

// blamed says whether somebody is for the death of a.
func (s *suspects) blamed(a agent) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.last.agent == a
}
