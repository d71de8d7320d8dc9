package control

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

func dial(t testing.TB, o Options, addr string) (*Dealer, recorder) {
	t.Helper()
	h := newRecorder()
	d, err := newTestLoop(t, o).Dial(t.Context(), addr, h)
	if err != nil {
		t.Fatal(err)
	}
	return d, h
}

// attempts is how many attempts to connect have failed in a row.
func attempts(t testing.TB, d *Dealer) (n int) {
	t.Helper()
	if err := d.l.call(t.Context(), func() error { n = d.failures; return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestRefusedPeerIsReportedOnceAndFoundWhenItComes(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().(*net.TCPAddr)
	ln.Close()
	d, h := dial(t, Options{ReconnectMin: 5 * time.Millisecond, ReconnectMax: 20 * time.Millisecond}, addr.String())
	if err := d.Send([]byte("dropped with the first attempt")); err != nil && !errors.Is(err, ErrGone) {
		t.Fatal(err)
	}
	down := h.next(t, "down")
	wantGone(t, down.err)
	if !strings.Contains(down.err.Error(), addr.String()) {
		t.Errorf("the error does not name the peer: %v", down.err)
	}
	eventually(t, "more attempts", func() bool { return attempts(t, d) >= 5 })
	if len(h.c) != 0 {
		t.Fatalf("%v after the first Down", <-h.c)
	}
	server := newRecorder()
	if _, err := newTestLoop(t, Options{}).Listen(t.Context(), "127.0.0.1", addr.Port, server.asRouter()); err != nil {
		t.Fatal(err)
	}
	h.next(t, "up")
	if err := d.Send([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if m := server.next(t, "message"); m.body != "hello" {
		t.Fatalf("got %v: what was accepted before Down must not arrive", m)
	}
}

func TestMessageSentRightAfterDialArrives(t *testing.T) {
	r, server := listen(t, Options{})
	d, _ := dial(t, Options{}, hostPort(r))
	for i := range 100 {
		if err := d.Send([]byte(fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 100 {
		if m := server.next(t, "message"); m.body != fmt.Sprint(i) {
			t.Fatalf("got %v, want %d", m, i)
		}
	}
}

func TestDialRefusesAddressesThatMakeNoSense(t *testing.T) {
	l := newTestLoop(t, Options{})
	for _, addr := range []string{"", "host", "host:", "host:0", "host:65536", "host:http", ":5601", "*:5601", "::1:5601:", "tcp://h:1"} {
		if d, err := l.Dial(t.Context(), addr, newRecorder()); err == nil || d != nil {
			t.Errorf("Dial(%q) = %v, %v: want an error", addr, d, err)
		}
	}
}

func TestNameThatDoesNotResolveIsReported(t *testing.T) {
	_, h := dial(t, Options{ConnectTimeout: 200 * time.Millisecond}, "no-such-host.invalid:5601")
	down := h.next(t, "down")
	wantGone(t, down.err)
	if !strings.Contains(down.err.Error(), "no-such-host.invalid") {
		t.Errorf("the error does not name the host: %v", down.err)
	}
}

func TestPeerIsDialledByName(t *testing.T) {
	r, _ := listen(t, Options{})
	_, h := dial(t, Options{}, fmt.Sprintf("localhost:%d", r.Port()))
	h.next(t, "up")
}

// Something that listens and is no ROUTER: silent, or another protocol.
func TestPeerThatDoesNotSpeakZmtpIsReported(t *testing.T) {
	for _, greeting := range []string{"", "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" + strings.Repeat(" ", 64)} {
		t.Run(fmt.Sprintf("%.8s", greeting), func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			go func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					defer c.Close()
					c.Write([]byte(greeting))
				}
			}()
			d, h := dial(t, Options{ConnectTimeout: 100 * time.Millisecond, ReconnectMin: 5 * time.Millisecond}, ln.Addr().String())
			wantGone(t, h.next(t, "down").err)
			eventually(t, "another attempt", func() bool { return attempts(t, d) >= 2 })
			if len(h.c) != 0 {
				t.Fatalf("%v after the first Down", <-h.c)
			}
		})
	}
}

// libzmq alone gives up for good on a connection that broke a rule.
func TestDealerComesBackAfterAnOversizeMessage(t *testing.T) {
	s := rawSocket(t, rawContext(t), zmq4.ROUTER)
	if err := s.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	at, err := s.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	d, h := dial(t, Options{MaxMessage: 1000}, at[len("tcp://"):])
	for range 2 {
		h.next(t, "up")
		if err := d.Send([]byte("ask")); err != nil {
			t.Fatal(err)
		}
		m, err := s.RecvMessage(0)
		if err != nil {
			t.Fatal(err)
		}
		say(t, s, m[0], "", "fine")
		h.next(t, "message")
		say(t, s, m[0], "", strings.Repeat("x", 1001))
		wantGone(t, h.next(t, "down").err)
	}
}

func TestFramesOfAnotherShapeDoNotReachADealersHandler(t *testing.T) {
	s := rawSocket(t, rawContext(t), zmq4.ROUTER)
	if err := s.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	at, err := s.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	d, h := dial(t, Options{}, at[len("tcp://"):])
	h.next(t, "up")
	if err := d.Send([]byte("ask")); err != nil {
		t.Fatal(err)
	}
	m, err := s.RecvMessage(0)
	if err != nil {
		t.Fatal(err)
	}
	id := m[0]
	say(t, s, id, "one")
	say(t, s, id, "x", "y")
	say(t, s, id, "", "a", "b", "c")
	say(t, s, id, "", "good")
	if m := h.next(t, "message"); m.body != "good" {
		t.Fatalf("got %v", m)
	}
	if n := d.Dropped(); n != 3 {
		t.Fatalf("%d counted as dropped, want 3", n)
	}
}

// A producer that does not read: requests pile up to the limit and no further, and all that were accepted arrive when it reads.
func TestRequestsToAPeerThatDoesNotReadAreBounded(t *testing.T) {
	s := rawSocket(t, rawContext(t), zmq4.ROUTER)
	s.SetRcvhwm(1)
	if err := s.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	at, err := s.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	d, h := dial(t, Options{Queue: 10, HeartbeatInterval: time.Hour}, at[len("tcp://"):])
	h.next(t, "up")
	accepted := 0
	eventually(t, "a full queue", func() bool {
		for {
			err := d.Send(fmt.Appendf(nil, "%08d%060000d", accepted, 0))
			if err != nil {
				// Full for good only once libzmq is full as well.
				full := false
				d.l.call(t.Context(), func() error { full = d.full; return nil })
				return errors.Is(err, ErrQueueFull) && full
			}
			accepted++
		}
	})
	for i := range accepted {
		m, err := s.RecvMessage(0)
		if err != nil || len(m) != 3 || m[2][:8] != fmt.Sprintf("%08d", i) {
			t.Fatalf("message %d of %d: %d parts, %v", i, accepted, len(m), err)
		}
	}
	eventually(t, "room again", func() bool { return d.Send(nil) == nil })
}
