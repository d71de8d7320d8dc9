package transfer

import "time"

// Former is an agent of a process that died. It goes on serving peers that know it what that process granted, and nobody knows how many
// acks name it.
type Former struct {
	Left time.Time       // when its process died at the latest: no ack has named it since
	Gone <-chan struct{} // closed when it is over: nothing can be read by it any more
	End  func()          // ends it and returns then
}
