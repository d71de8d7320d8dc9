package control

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// Connected says whether the other end, or its process, had the connection open at the time of the call. The kernel is asked: unlike
// Down it is not late. True of a connection that has not been accepted yet.
func (d *LocalDealer) Connected() bool { return !d.s.ended(d.s.l) && d.s.connected() }

func (s *stream) connected() bool {
	s.mu.Lock() // the descriptor stays while it is held
	defer s.mu.Unlock()
	if s.fd < 0 {
		return false
	}
	p := []unix.PollFd{{Fd: int32(s.fd), Events: unix.POLLRDHUP}}
	for {
		_, err := unix.Poll(p, 0)
		if err == syscall.EINTR {
			continue
		}
		return err == nil && p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) == 0
	}
}
