package control

import (
	"fmt"
	"os"
	"time"
)

const (
	// swellRoom is how much the process may grow while more than swellBytes are on their way by a connection: four of the largest
	// messages. libzmq takes 64 bytes and more for a frame that is 2 bytes on the wire, so that the wire's bytes alone say too little.
	swellRoom  = 1 << 30
	swellBytes = 256 << 10
	// swellLasts is how long nothing may have been on its way until what the process has counts as its own again.
	swellLasts = 4 * floodLook
)

// swell notices that messages on their way fill the memory of the process. Owner only.
type swell struct {
	room uint64
	calm uint64    // the process's own memory when they began to
	busy time.Time // of the last look that found a connection with more than swellBytes
	grew bool      // since calm, beyond swellRoom
}

// grown says whether the process has grown too much since messages are on their way. behind is the most that a connection has.
func (s *swell) grown(behind int64) bool {
	now := time.Now()
	switch {
	case behind > swellBytes:
		if s.busy.IsZero() {
			s.calm = ownMemory()
		}
		s.busy = now
		s.grew = s.grew || ownMemory() > s.calm+s.room
	case !s.busy.IsZero() && now.Sub(s.busy) > swellLasts:
		if s.grew {
			trim() // what was cut is freed by now, and libzmq's allocator keeps it
		}
		*s = swell{room: s.room}
	}
	return s.grew
}

// ownMemory is what the process has in memory that belongs to it alone: Go's heap and C's, not the pools. 0 if the kernel does not say.
func ownMemory() uint64 {
	text, err := os.ReadFile("/proc/self/statm") // proc(5): size, resident, shared, in pages
	if err != nil {
		return 0
	}
	var size, resident, shared uint64
	if _, err := fmt.Sscan(string(text), &size, &resident, &shared); err != nil || shared > resident {
		return 0
	}
	return (resident - shared) * uint64(os.Getpagesize())
}
