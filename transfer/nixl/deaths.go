package nixl

import (
	"os"
	"strings"
	"sync/atomic"
	"syscall"
)

// Death is how an agent in a process of its own died that nobody had ended.
type Death int

const (
	DeathAbort   Death = iota // SIGABRT: UCX and NIXL end a process so in which they cannot go on
	DeathFault                // SIGSEGV or SIGBUS
	DeathKilled               // SIGKILL, of which the process says nothing: a hand, or a kernel without memory
	DeathGivenUp              // the plane killed it, as it read nothing any more or what it said made no sense
	DeathExit                 // it ended otherwise, as in a panic
	DeathUnknown              // a serve agent of a process before this one: its end is seen, and not why
	deaths
)

// Deaths are all of them, each a valid index of DeathCounts.
func Deaths() []Death {
	all := make([]Death, deaths)
	for i := range all {
		all[i] = Death(i)
	}
	return all
}

// String gives a word for labels and logs.
func (d Death) String() string {
	if d < 0 || d >= deaths {
		return "invalid"
	}
	return [deaths]string{"abort", "fault", "killed", "given_up", "exit", "unknown"}[d]
}

// DeathCounts are how many agents of a role died, by Death.
type DeathCounts [deaths]uint64

// Counts are of what has happened to a plane's agents, since it was made.
type Counts struct {
	Serve, Fetch DeathCounts // died, and not ended by the plane; agents in this process never are

	Unsettled uint64 // READs that failed, in several pieces mostly, whose destinations were kept until the fetch agent was over
	Retired   uint64 // fetch agents that were replaced for those
}

// Counts says what has happened to the agents. It never blocks for long.
func (p *Plane) Counts() Counts {
	p.fetch.mu.Lock()
	c := p.fetch.counts
	p.fetch.mu.Unlock()
	p.deaths.read(roleServe, &c.Serve)
	p.deaths.read(roleFetch, &c.Fetch)
	return c
}

// deathTable counts.
type deathTable struct{ serve, fetch [deaths]atomic.Uint64 }

func (t *deathTable) of(r role) *[deaths]atomic.Uint64 {
	if r == roleServe {
		return &t.serve
	}
	return &t.fetch
}

func (t *deathTable) add(r role, d Death) { t.of(r)[d].Add(1) }

func (t *deathTable) read(r role, into *DeathCounts) {
	for d := range into {
		into[d] = t.of(r)[d].Load()
	}
}

// lastWords tells from a line that an agent process printed how it dies. Go's runtime exits with status 2 after a signal that it cannot
// go on after, and says which: "SIGABRT: abort", or "[signal SIGSEGV: segmentation violation code=..." below a panic.
func lastWords(line string) (Death, bool) {
	if said, ok := strings.CutPrefix(line, "[signal "); ok {
		line = said
	}
	switch {
	case strings.HasPrefix(line, "SIGABRT: "):
		return DeathAbort, true
	case strings.HasPrefix(line, "SIGSEGV: "), strings.HasPrefix(line, "SIGBUS: "):
		return DeathFault, true
	}
	return 0, false
}

// deathOf tells from the end of a process how it died. It was given up first if givenUp.
func deathOf(s *os.ProcessState, givenUp bool) Death {
	w, ok := s.Sys().(syscall.WaitStatus)
	if !ok || !w.Signaled() {
		return DeathExit
	}
	switch w.Signal() {
	case syscall.SIGABRT:
		return DeathAbort
	case syscall.SIGSEGV, syscall.SIGBUS:
		return DeathFault
	case syscall.SIGKILL:
		if givenUp {
			return DeathGivenUp
		}
		return DeathKilled
	}
	return DeathExit
}
