package control

import (
	"fmt"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	// gather is how many messages one write may take.
	gather = 32
	// flushBudget is how many bytes a stream may write in one turn, while other goroutines cannot send by it.
	flushBudget = 1 << 20
	// corkBytes is how much may wait for the end of a turn: what a reader takes in at once.
	corkBytes = readSize
)

// send writes a message, or queues what the kernel has no room for. Its message waits while the stream is corked; soon says that it may
// also wait for the next one, or until the owner has nothing else to do. It is called by any goroutine. ErrGone when the connection has
// ended.
func (s *stream) send(body []byte, soon bool) error {
	size := int64(len(body))
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return ErrGone
	}
	if err := s.admit(size); err != nil {
		return err
	}
	f := newOutFrame(uint32(size), body)
	switch waits := s.corked && len(s.out) < gather && s.queued <= corkBytes || soon && s.l.flushLater(s); {
	case waits || s.full:
		s.queue(f)
	case len(s.out) > 0:
		s.queue(f)
		s.flushLocked()
	default:
		n, err := s.write([]outFrame{f}, 0)
		if err != nil || n == f.size() {
			s.settle(size)
			return err
		}
		s.queueRest(f, n)
	}
	return nil
}

// cork makes the messages that are sent from now on wait until uncork, so that the answers to what came together go together.
func (s *stream) cork() {
	s.mu.Lock()
	s.corked = true
	s.mu.Unlock()
}

func (s *stream) uncork() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.corked = false
	if !s.full {
		s.flushLocked()
	}
}

// admit counts a body as queued, or says why it cannot be. Caller holds mu.
func (s *stream) admit(size int64) error {
	o := &s.l.opts
	if most := min(o.QueueBytes, firstSign-1); size > most {
		return fmt.Errorf("%w: %d bytes, where Options.QueueBytes allows %d", ErrTooLarge, size, most)
	}
	if len(s.out) >= o.Queue || s.queued+size > o.QueueBytes {
		return ErrQueueFull
	}
	s.l.mu.Lock()
	defer s.l.mu.Unlock()
	if err := s.l.total.fits(size); err != nil {
		return err
	}
	s.queued += size
	s.l.total.bytes += size
	return nil
}

// settle takes back what admit counted. Caller holds mu.
func (s *stream) settle(bytes int64) {
	s.queued -= bytes
	s.l.mu.Lock()
	s.l.total.bytes -= bytes
	s.l.mu.Unlock()
}

// sign sends a sign, if nothing waits: else the other end has not yet read what was sent before, which is as good a sign.
func (s *stream) sign(word uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 || len(s.out) > 0 {
		return
	}
	f := newOutFrame(word, nil)
	if n, err := s.write([]outFrame{f}, 0); err == nil && 0 < n && n < f.size() {
		s.queueRest(f, n)
	}
}

// queue puts f behind what waits. Caller holds mu.
func (s *stream) queue(f outFrame) {
	if len(s.out) == 0 {
		s.out = s.few[:0]
	}
	grows := len(s.out) == cap(s.out)
	if s.out = append(s.out, f); grows {
		clear(s.few[:])
	}
}

// queueRest makes the owner write the rest of f, of which n bytes are written, when there is room. Nothing waits. Caller holds mu.
func (s *stream) queueRest(f outFrame, n int) {
	s.queue(f)
	s.at = n
	s.setFull(true)
}

// setFull lets the owner write when there is room, or no longer. Caller holds mu.
func (s *stream) setFull(full bool) {
	if s.full == full {
		return
	}
	s.full = full
	if full {
		s.moved = time.Now()
		s.interest(unix.EPOLLIN | unix.EPOLLOUT)
	} else {
		s.interest(unix.EPOLLIN)
	}
}

func (s *stream) interest(events uint32) {
	unix.EpollCtl(s.l.epoll, unix.EPOLL_CTL_MOD, s.fd, &unix.EpollEvent{Events: events, Fd: int32(s.fd)}) // cannot fail: fd is there
}

// flush writes what waits, as far as there is room. An error shows again when the owner reads.
func (s *stream) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flushLocked()
}

func (s *stream) flushLocked() {
	for budget := flushBudget; len(s.out) > 0 && budget > 0; {
		n, err := s.write(s.out, s.at)
		if err != nil {
			return
		}
		if n == 0 {
			break
		}
		budget -= n
		s.at += n
		s.moved = time.Now()
		done, bytes := 0, int64(0)
		for done < len(s.out) && s.at >= s.out[done].size() {
			s.at -= s.out[done].size()
			bytes += int64(len(s.out[done].body))
			s.out[done].body = nil // let go of it now: it may be large
			done++
		}
		s.out = s.out[done:]
		s.settle(bytes)
	}
	s.setFull(len(s.out) > 0)
	if len(s.out) == 0 {
		s.out = nil
	}
}

// write writes frames without waiting, less the first at bytes, and returns how many bytes that was: 0 if there is no room. After an error
// the connection is shut down, so that the owner notices. Caller holds mu.
func (s *stream) write(frames []outFrame, at int) (int, error) {
	var parts [2 * gather]unix.Iovec
	n := 0
	add := func(b []byte) {
		skip := min(at, len(b))
		at -= skip
		if b = b[skip:]; len(b) > 0 {
			parts[n].Base = unsafe.SliceData(b)
			parts[n].SetLen(len(b))
			n++
		}
	}
	for i := range frames[:min(len(frames), gather)] {
		add(frames[i].word[:])
		add(frames[i].body)
	}
	msg := unix.Msghdr{Iov: &parts[0]}
	msg.SetIovlen(n)
	for {
		sent, _, errno := unix.Syscall(unix.SYS_SENDMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&msg)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		runtime.KeepAlive(frames)
		switch errno {
		case 0:
			return int(sent), nil
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return 0, nil
		}
		unix.Shutdown(s.fd, unix.SHUT_RDWR)
		return 0, fmt.Errorf("%w: %w", ErrGone, errno)
	}
}
