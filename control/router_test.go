package control

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

func listen(t testing.TB, o Options) (*Router, recorder) {
	t.Helper()
	h := newRecorder()
	r, err := newTestLoop(t, o).Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	return r, h
}

// connect makes a plain libzmq DEALER of its own context, so that nothing of it outlives the test.
func connect(t testing.TB, r *Router, set ...func(*zmq4.Socket) error) *zmq4.Socket {
	t.Helper()
	s := rawSocket(t, rawContext(t), zmq4.DEALER)
	for _, f := range set {
		if err := f(s); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Connect("tcp://" + hostPort(r)); err != nil {
		t.Fatal(err)
	}
	return s
}

func say(t testing.TB, s *zmq4.Socket, parts ...any) {
	t.Helper()
	if _, err := s.SendMessage(parts...); err != nil {
		t.Fatal(err)
	}
}

func TestRouterAnswersALibzmqDealer(t *testing.T) {
	r, h := listen(t, Options{})
	s := connect(t, r)
	for _, size := range []int{0, 1, 33, 34, 8191, 8192, 8193, 1 << 20, 20 << 20} {
		say(t, s, "", "ask")
		m := h.next(t, "message")
		if m.body != "ask" || m.from.Addr != "127.0.0.1" || m.from.ID == "" {
			t.Fatalf("got %v", m)
		}
		want := bytes.Repeat([]byte{byte(size), 7}, size/2+1)[:size]
		if err := r.Send(m.from.ID, want); err != nil {
			t.Fatal(err)
		}
		got, err := s.RecvMessageBytes(0)
		if err != nil || len(got) != 2 || len(got[0]) != 0 || !bytes.Equal(got[1], want) {
			t.Fatalf("%d bytes: got %d parts, %v", size, len(got), err)
		}
	}
}

func TestBindThatFailsNamesTheAddressAndTheReason(t *testing.T) {
	r, _ := listen(t, Options{})
	l := newTestLoop(t, Options{})
	for _, c := range []struct {
		host  string
		port  int
		is    error
		names string
	}{
		{"127.0.0.1", r.Port(), syscall.EADDRINUSE, fmt.Sprintf("tcp://127.0.0.1:%d", r.Port())},
		{"localhost", r.Port(), syscall.EADDRINUSE, fmt.Sprintf("tcp://127.0.0.1:%d", r.Port())},
		{"192.0.2.1", 5601, syscall.EADDRNOTAVAIL, "tcp://192.0.2.1:5601"},
		{"", 5601, nil, `host ""`},
		{"127.0.0.1", -1, nil, "port -1"},
		{"127.0.0.1", 65536, nil, "port 65536"},
	} {
		_, err := l.Listen(t.Context(), c.host, c.port, newRecorder().asRouter())
		if err == nil || c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.names) {
			t.Errorf("Listen(%q, %d): %v: want %v and %q", c.host, c.port, err, c.is, c.names)
		}
	}
	if _, err := l.Listen(t.Context(), "127.0.0.1", 0, newRecorder().asRouter()); err != nil {
		t.Errorf("the loop must go on after a bind that failed: %v", err)
	}
}

func TestListenTakesAnyKindOfHost(t *testing.T) {
	for _, host := range []string{"127.0.0.1", "localhost", "*", "0.0.0.0", "::1", "[::1]"} {
		t.Run(host, func(t *testing.T) {
			at := "127.0.0.1"
			if strings.Contains(host, ":") {
				at = "::1"
				ln, err := net.Listen("tcp", "[::1]:0")
				if err != nil {
					t.Skipf("no IPv6 here: %v", err)
				}
				ln.Close()
			}
			l, server, client := newTestLoop(t, Options{}), newRecorder(), newRecorder()
			r, err := l.Listen(t.Context(), host, 0, server.asRouter())
			if err != nil {
				t.Fatal(err)
			}
			d, err := l.Dial(t.Context(), net.JoinHostPort(at, fmt.Sprint(r.Port())), client)
			if err != nil {
				t.Fatal(err)
			}
			if err := d.Send([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			if m := server.next(t, "message"); m.from.Addr != at {
				t.Fatalf("from %q, want %q", m.from.Addr, at)
			}
		})
	}
}

// logBuffer is a log that many goroutines may write.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestFramesOfAnotherShapeAreDroppedCountedAndLoggedOnce(t *testing.T) {
	const bad = 20_000
	var log logBuffer
	r, h := listen(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	s := connect(t, r)
	shapes := [][]any{{"no delimiter"}, {"x", "delimiter not empty"}, {"", "a", "b"}, {"", "", "", "", ""}, {""}}
	for i := range bad {
		say(t, s, shapes[i%len(shapes)]...)
	}
	say(t, s, "", "good")
	if m := h.next(t, "message"); m.body != "good" {
		t.Fatalf("got %v", m)
	}
	if frames, full, unroutable := r.Dropped(); frames != bad || full != 0 || unroutable != 0 {
		t.Errorf("counted %d, %d, %d: want %d, 0, 0", frames, full, unroutable, bad)
	}
	if n := strings.Count(log.String(), "\n"); n < 1 || len(log.String()) > 4096 {
		t.Errorf("%d bytes in %d lines of log for %d bad frames: want a line or so", len(log.String()), n, bad)
	}
	if !strings.Contains(log.String(), "peer=127.0.0.1") {
		t.Errorf("the log does not say who it was: %s", log.String())
	}
}

func TestOversizeMessageEndsItsConnectionOnly(t *testing.T) {
	r, h := listen(t, Options{})
	good, greedy := connect(t, r), connect(t, r)
	say(t, good, "", "hello")
	h.next(t, "message")
	say(t, greedy, "", strings.Repeat("x", DefaultRouterMessage))
	m := h.next(t, "message")
	if len(m.body) != DefaultRouterMessage {
		t.Fatalf("%d bytes, want the largest message allowed", len(m.body))
	}
	say(t, greedy, "", strings.Repeat("x", DefaultRouterMessage+1))
	if left := h.next(t, "left"); left.from != m.from {
		t.Fatalf("%v left, want %v", left.from, m.from)
	}
	say(t, good, "", "still here")
	if m := h.next(t, "message"); m.body != "still here" {
		t.Fatalf("got %v", m)
	}
}

// A peer that asks and does not read gets a bounded number of bytes; others are served meanwhile; what was accepted arrives in order.
func TestUnreadAcksAreBounded(t *testing.T) {
	for _, c := range []struct {
		name     string
		size     int
		messages int // the most that may be accepted beyond what the kernel's buffers hold
	}{
		{"large", 1 << 20, 64},
		{"small", 1000, 2 * DefaultQueue}, // ours and libzmq's
	} {
		t.Run(c.name, func(t *testing.T) {
			// No heartbeats: libzmq answers none while it has stopped reading, and may abort in a test's own sockets (see RCVHWM).
			r, h := listen(t, Options{HeartbeatInterval: time.Hour})
			lazy := connect(t, r, func(s *zmq4.Socket) error { return s.SetRcvhwm(1) }, func(s *zmq4.Socket) error { return s.SetRcvbuf(1 << 16) })
			say(t, lazy, "", "ask")
			id := h.next(t, "message").from.ID
			kernel := 32 << 20 / c.size // socket buffers grow to a few MiB each
			accepted := 0
			body := bytes.Repeat([]byte("x"), c.size)
			for ; accepted <= c.messages+kernel; accepted++ {
				if err := r.Send(id, fmt.Appendf(nil, "%08d%s", accepted, body)); err != nil {
					if !errors.Is(err, ErrQueueFull) {
						t.Fatal(err)
					}
					break
				}
			}
			if accepted < 10 || accepted > c.messages+kernel {
				t.Fatalf("%d messages of %d bytes accepted and not read: want a limit, at %d and what the kernel holds", accepted, c.size, c.messages)
			}
			if _, full, _ := r.Dropped(); full != 1 {
				t.Errorf("%d counted as refused, want 1", full)
			}

			other := connect(t, r)
			say(t, other, "", "me too")
			if err := r.Send(h.next(t, "message").from.ID, []byte("sure")); err != nil {
				t.Fatal(err)
			}
			if m, err := other.RecvMessage(0); err != nil || m[1] != "sure" {
				t.Fatalf("got %q, %v", m, err)
			}

			for i := range accepted {
				m, err := lazy.RecvMessageBytes(0)
				if err != nil || len(m) != 2 || string(m[1][:8]) != fmt.Sprintf("%08d", i) {
					t.Fatalf("message %d of %d: %d parts, %v", i, accepted, len(m), err)
				}
			}
			eventually(t, "room again", func() bool { return r.Send(id, body) == nil })
		})
	}
}

func TestBodyLargerThanAQueueIsRefused(t *testing.T) {
	r, h := listen(t, Options{QueueBytes: 1000})
	s := connect(t, r)
	say(t, s, "", "ask")
	id := h.next(t, "message").from.ID
	if err := r.Send(id, make([]byte, 1001)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v, want ErrTooLarge", err)
	}
	if err := r.Send(id, make([]byte, 1000)); err != nil {
		t.Error(err)
	}
	wantGone(t, r.Send("nobody", []byte("x")))
}

// Connections that come and go at once, so that descriptors are used again while messages of dead ones wait to be read.
func TestEveryPeerLeavesAndNothingOfItStays(t *testing.T) {
	const peers = 300
	r, h := listen(t, Options{})
	ctx := rawContext(t)
	for i := range peers {
		s, err := ctx.NewSocket(zmq4.DEALER)
		if err != nil {
			t.Fatal(err)
		}
		s.SetLinger(patience)
		if err := s.Connect("tcp://" + hostPort(r)); err != nil {
			t.Fatal(err)
		}
		for j := range 3 {
			say(t, s, "", fmt.Sprint(i, j))
		}
		s.Close()
	}
	messages, here := 0, map[string]bool{}
	for messages < 3*peers || len(here) > 0 {
		select {
		case e := <-h.c:
			switch e.what {
			case "message":
				messages++
				here[e.from.ID] = true
			case "left":
				delete(here, e.from.ID)
			}
		case <-timeout():
			t.Fatalf("%d messages, %d peers that did not leave", messages, len(here))
		}
	}
	eventually(t, "the router forgets them", func() bool { return peersOf(t, r) == 0 })
}

// peersOf is how many peers and connections the router keeps.
func peersOf(t testing.TB, r *Router) (n int) {
	t.Helper()
	if err := r.l.call(t.Context(), func() error { n = len(r.peers) + len(r.conns) + len(r.dirty) + len(r.blocked); return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

func identity(s *zmq4.Socket) error { return s.SetIdentity("me") }

func TestPeerWithAnIdOfItsOwnComesBackByANewConnection(t *testing.T) {
	r, h := listen(t, Options{})
	for i := range 5 {
		var s *zmq4.Socket
		var m received
		// libzmq ignores a connection whose id it has not yet let go of, so a peer may need a few.
		eventually(t, "a message", func() bool {
			s = connect(t, r, identity)
			say(t, s, "", fmt.Sprint(i))
			select {
			case m = <-h.c:
				return m.what == "message"
			case <-time.After(100 * time.Millisecond):
				s.Close()
				return false
			}
		})
		if m.from.ID != "me" || m.body != fmt.Sprint(i) {
			t.Fatalf("got %v", m)
		}
		if err := r.Send("me", []byte(m.body)); err != nil {
			t.Fatal(err)
		}
		if got, err := s.RecvMessage(0); err != nil || got[1] != m.body {
			t.Fatalf("got %q, %v", got, err)
		}
		s.Close()
		h.next(t, "left")
	}
}

func TestIdInUseCannotBeTakenOver(t *testing.T) {
	r, h := listen(t, Options{})
	s := connect(t, r, identity)
	say(t, s, "", "mine")
	h.next(t, "message")
	thief := connect(t, r, identity)
	say(t, thief, "", "give me what is theirs")
	d, dealer := dial(t, Options{}, hostPort(r)) // comes after the thief
	dealer.next(t, "up")
	if err := d.Send([]byte("another")); err != nil {
		t.Fatal(err)
	}
	if m := h.next(t, "message"); m.body != "another" {
		t.Fatalf("got %v", m)
	}
	if err := r.Send("me", []byte("yours")); err != nil {
		t.Fatal(err)
	}
	if got, err := s.RecvMessage(0); err != nil || got[1] != "yours" {
		t.Fatalf("got %q, %v", got, err)
	}
}

// An unread queue is dropped with its peer, and counted.
func TestMessagesOfAPeerThatLeavesAreCountedAsUnroutable(t *testing.T) {
	r, h := listen(t, Options{Queue: 10, HeartbeatInterval: time.Hour})
	s := connect(t, r, func(s *zmq4.Socket) error { return s.SetRcvhwm(1) })
	say(t, s, "", "ask")
	id := h.next(t, "message").from.ID
	fill(t, r, id)
	s.Close()
	h.next(t, "left")
	if _, _, unroutable := r.Dropped(); unroutable < 10 {
		t.Errorf("%d counted as unroutable, want the 10 that waited", unroutable)
	}
}

// serveOrder checks that a handler knows its router before the first message.
type serveOrder struct {
	r    *Router
	c    chan error
	once sync.Once
}

func (s *serveOrder) Serve(r *Router) { s.r = r }
func (s *serveOrder) Message(from Source, body []byte) {
	s.once.Do(func() {
		if s.r == nil {
			s.c <- errors.New("Message before Serve")
			return
		}
		s.c <- s.r.Send(from.ID, bytes.Clone(body))
	})
}

func TestHandlerIsGivenItsRouterBeforeTheFirstMessage(t *testing.T) {
	h := &serveOrder{c: make(chan error, 1)}
	r, err := newTestLoop(t, Options{}).Listen(t.Context(), "127.0.0.1", 0, h)
	if err != nil {
		t.Fatal(err)
	}
	say(t, connect(t, r), "", "hello")
	if err := <-h.c; err != nil {
		t.Fatal(err)
	}
}

// fill sends to a peer that does not read until its queue is full, and libzmq too. It returns how many messages that took.
func fill(t testing.TB, r *Router, id string) (accepted int) {
	t.Helper()
	eventually(t, "a full queue, and no room in libzmq", func() bool {
		for r.Send(id, make([]byte, 1<<20)) == nil {
			accepted++
		}
		full := false
		r.l.call(t.Context(), func() error {
			full = len(r.blocked) == 1 && r.peers[id].q.n == r.l.opts.Queue
			return nil
		})
		return full
	})
	return accepted
}

// A turn has a budget, and full destinations can be more than that: the loop must come to rest all the same.
func TestManyFullDestinationsDoNotKeepTheLoopAwake(t *testing.T) {
	r, h := listen(t, Options{Queue: 10, HeartbeatInterval: time.Hour})
	s := connect(t, r, func(s *zmq4.Socket) error { return s.SetRcvhwm(1) })
	say(t, s, "", "ask")
	id := h.next(t, "message").from.ID
	accepted := fill(t, r, id)
	// The one stands for many: a try of each costs the same.
	r.l.call(t.Context(), func() error {
		for range 4 * turnBudget {
			r.blocked = append(r.blocked, r.blocked[0])
		}
		return nil
	})
	other := connect(t, r)
	say(t, other, "", "wake up")
	if err := r.Send(h.next(t, "message").from.ID, []byte("I am")); err != nil {
		t.Fatal(err)
	}
	if m, err := other.RecvMessage(0); err != nil || m[1] != "I am" {
		t.Fatalf("got %q, %v", m, err)
	}
	eventually(t, "the owner sleeps", func() bool {
		r.l.mu.Lock()
		defer r.l.mu.Unlock()
		return r.l.asleep
	})
	for range accepted {
		if _, err := s.RecvMessageBytes(0); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "none is full", func() bool {
		left := 0
		r.l.call(t.Context(), func() error { left = len(r.blocked); return nil })
		return left == 0
	})
}
