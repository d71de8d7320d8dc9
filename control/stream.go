package control

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The local path is a unix stream socket. A message is a word, its length in little-endian order, and that many bytes. Words from
// firstSign on are signs instead, with nothing behind them.
const (
	wordSize  = 4
	signReady = 0xffff_ff01 // the router's first word: it has accepted the connection
	signPing  = 0xffff_ff02 // answer with something
	signPong  = 0xffff_ff03
	firstSign = 0xffff_ff00
)

const (
	// readSize is how much a stream reads at once. The loop has one buffer for all streams.
	readSize = 256 << 10
	// readBudget is how often a stream reads in one turn.
	readBudget = 4
)

// keptInput is how much memory a stream without input may keep for the next message that comes in parts.
const keptInput = 64 << 10

// errFrame is for what no peer of this package sends. It ends the connection.
var errFrame = errors.New("not a message")

// errStalled is for an end that sends and does not read.
var errStalled = errors.New("the other end took nothing of what waits for it")

// streamUser is whose stream it is. All calls are on the owner goroutine.
type streamUser interface {
	message(body []byte) // body is valid only during the call
	accepted()           // by the router
	lost(err error)      // the connection has ended by itself; the stream is released
	over() bool          // takes no more calls
}

// stream is a connection of the local path. Any goroutine writes; the owner reads, and writes what did not fit.
type stream struct {
	standing
	l     *Loop
	user  streamUser
	limit uint32 // of an incoming message, in bytes

	mu     sync.Mutex  // before Loop.mu
	fd     int         // -1 when released
	out    []outFrame  // accepted and not written
	few    [4]outFrame // memory for out, which mostly does
	at     int         // bytes of out[0] that are written, its word included
	queued int64       // bytes of bodies in out, counted in Loop.total
	full   bool        // the epoll looks for room; else out waits for the end of the turn, or for Loop.late
	corked bool        // the owner takes in messages
	late   bool        // in Loop.late; guarded by Loop.mu
	moved  time.Time   // when the other end last took something, or full was set

	// Owner only.
	in       []byte // come and not handled: part of a message, or more if the last turn ended before that
	behind   bool   // in may hold a whole message
	greeted  bool   // signReady came, or is not expected
	asked    bool   // a sign of life is due by deadline
	deadline time.Time
	alarm    alarm // next look at the two
}

// outFrame is a message on its way out.
type outFrame struct {
	word [wordSize]byte
	body []byte
}

func newOutFrame(word uint32, body []byte) (f outFrame) {
	binary.LittleEndian.PutUint32(f.word[:], word)
	f.body = body
	return f
}

func (f *outFrame) size() int { return wordSize + len(f.body) }

// start takes over a connected, non-blocking descriptor, whatever it returns. greeted says that no signReady is expected. Owner only.
func (s *stream) start(fd int, maxMessage int64, greeted bool) error {
	l := s.l
	s.fd, s.greeted = fd, greeted
	s.limit = uint32(min(maxMessage, firstSign-1))
	s.alarm = alarm{m: s, index: -1}
	if err := l.watch(fd, s); err != nil {
		unix.Close(fd)
		s.fd = -1
		return err
	}
	l.members[s] = struct{}{}
	now := time.Now()
	if !greeted {
		s.asked, s.deadline = true, now.Add(l.opts.ConnectTimeout)
	}
	s.setAlarm(now)
	return nil
}

// release implements member. Idempotent.
func (s *stream) release() {
	l := s.l
	s.mu.Lock()
	if s.fd >= 0 {
		l.unwatch(s.fd)
		unix.Close(s.fd)
		s.fd = -1
	}
	queued := s.queued
	s.out, s.at, s.queued, s.full = nil, 0, 0, false
	s.mu.Unlock()
	l.mu.Lock()
	l.total.bytes -= queued
	l.mu.Unlock()
	s.in = nil
	l.alarms.stop(&s.alarm)
	delete(l.members, s)
}

// turn implements member.
func (s *stream) turn() bool {
	if s.done() {
		return false
	}
	rang := s.alarm.index < 0
	s.flush()
	err := s.receive()
	if s.done() {
		return false
	}
	if err == nil && rang && !s.behind { // after reading all: we may have been stopped, and not the other end
		err = s.beat(time.Now())
	}
	if err != nil {
		s.release()
		s.user.lost(err)
		return false
	}
	if s.behind {
		return true
	}
	s.l.mu.Lock()
	s.ready = false // the epoll says so if there is more to read
	s.l.mu.Unlock()
	return false
}

func (s *stream) done() bool { return s.ended(s.l) || s.user.over() }

// receive hands on what has come: about turnBudget messages, then behind is set.
func (s *stream) receive() error {
	s.cork()
	defer s.uncork()
	budget := turnBudget
	if s.behind {
		rest, err := s.handle(s.in, &budget)
		if err != nil || s.done() {
			return err
		}
		if s.keep(s.in, rest); s.behind {
			return nil
		}
	}
	for range readBudget {
		n, err := s.read()
		if n == 0 || err != nil {
			return err
		}
		s.asked = false
		data := s.l.read[:n]
		if len(s.in) > 0 {
			s.in = append(s.in, data...)
			data = s.in
		}
		rest, err := s.handle(data, &budget)
		if err != nil || s.done() {
			return err
		}
		if s.keep(data, rest); s.behind || n < len(s.l.read) {
			break
		}
	}
	return nil
}

// read fills the loop's buffer with what is there, which may be nothing.
func (s *stream) read() (int, error) {
	for {
		n, err := unix.Read(s.fd, s.l.read)
		switch {
		case err == syscall.EINTR:
			continue
		case err == syscall.EAGAIN:
			return 0, nil
		case err != nil:
			return 0, fmt.Errorf("the connection was lost: %w", err)
		case n == 0:
			return 0, fmt.Errorf("the connection was lost: %w", io.EOF)
		}
		return n, nil
	}
}

// keep holds on to rest, the end of data, which may be in s.in or in the loop's buffer.
func (s *stream) keep(data, rest []byte) {
	if len(rest) == len(data) && len(s.in) == len(data) {
		return // a part of a message that has grown
	}
	if cap(s.in) > keptInput && len(rest) < keptInput {
		s.in = nil
	}
	s.in = append(s.in[:0], rest...) // moves to the front what is in s.in
}

// handle hands on the whole messages at the start of data and returns what is left.
func (s *stream) handle(data []byte, budget *int) (rest []byte, err error) {
	s.behind = false
	ping := false
	for len(data) >= wordSize {
		word := binary.LittleEndian.Uint32(data)
		if word < firstSign {
			switch {
			case word > s.limit:
				return data, fmt.Errorf("%w: its length is %d, the limit is %d", errFrame, word, s.limit)
			case !s.greeted:
				return data, fmt.Errorf("%w: it came before the router's sign", errFrame)
			}
			end := wordSize + int(word)
			if len(data) < end {
				break
			}
			if *budget--; *budget < 0 {
				s.behind = true
				break
			}
			body := data[wordSize:end:end]
			data = data[end:]
			s.user.message(body)
			if s.done() {
				return nil, nil
			}
			continue
		}
		data = data[wordSize:]
		switch {
		case word == signReady && !s.greeted:
			s.greeted = true
			s.user.accepted()
			if s.done() {
				return nil, nil
			}
		case word == signPing && s.greeted:
			ping = true
		case word == signPong && s.greeted:
		default:
			return data, fmt.Errorf("%w: sign %#x", errFrame, word)
		}
	}
	if ping {
		s.sign(signPong)
	}
	return data, nil
}

// stalled says whether there has been no room for what waits for too long.
func (s *stream) stalled(now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.full && now.Sub(s.moved) >= s.l.opts.stall
}

// beat asks for a sign of life, or ends the wait for one. Any byte is one.
func (s *stream) beat(now time.Time) error {
	switch {
	case s.stalled(now):
		return fmt.Errorf("%w for %v", errStalled, s.l.opts.stall)
	case !s.asked:
		s.asked, s.deadline = true, now.Add(s.l.opts.HeartbeatTimeout)
		s.sign(signPing)
	case !now.Before(s.deadline) && !s.greeted:
		return fmt.Errorf("the router did not accept the connection within %v", s.l.opts.ConnectTimeout)
	case !now.Before(s.deadline):
		return fmt.Errorf("the other end gave no sign of life within %v", s.l.opts.HeartbeatTimeout)
	}
	s.setAlarm(now)
	return nil
}

func (s *stream) setAlarm(now time.Time) {
	next := now.Add(s.l.opts.HeartbeatInterval)
	if s.asked && s.deadline.Before(next) {
		next = s.deadline
	}
	s.l.alarms.set(&s.alarm, next)
}
