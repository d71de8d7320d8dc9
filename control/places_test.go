package control

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"
)

// One router has some places. Who finds none is turned away, and comes in when another has left.
func TestARouterTurnsAwayConnectionsOverItsPlaces(t *testing.T) {
	var log logBuffer
	r, h := listen(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	r.l.call(t.Context(), func() error { r.places.far = 3; return nil })
	var in []zmtp
	for range 3 {
		z := dialZMTP(t, hostPort(r))
		z.write(askFrame)
		h.next(t, "message")
		in = append(in, z)
	}
	extra := connect(t, r, func(s *zmq4.Socket) error { return s.SetReconnectIvl(10 * time.Millisecond) })
	say(t, extra, "", "late")
	eventually(t, "it is turned away", func() bool { return r.TurnedAway() > 0 })
	if n := peersOf(t, r); n > 6 {
		t.Errorf("%d peers and connections, want 3 and 3", n)
	}
	if !strings.Contains(log.String(), "connected=3") {
		t.Errorf("the log does not say how many there are: %s", log.String())
	}
	in[0].Close()
	for e := range h.c {
		if e.body == "late" {
			break
		}
	}
}

// opener answers each message with what comes of opening some files.
type opener struct{ r *Router }

func (o *opener) Serve(r *Router) { o.r = r }
func (o *opener) Message(from Source, _ []byte) {
	answer := "opened"
	for range 32 {
		f, err := os.Open(os.DevNull)
		if err != nil {
			answer = err.Error()
			break
		}
		defer f.Close()
	}
	o.r.Send(from.ID, []byte(answer))
}

// serveWithFewFiles plays a process that may open so many descriptors.
func serveWithFewFiles(files string) error {
	n, err := strconv.ParseUint(files, 10, 64)
	if err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: n}); err != nil {
		return err
	}
	l, err := NewLoop(Options{})
	if err != nil {
		return err
	}
	r, err := l.Listen(context.Background(), "127.0.0.1", 0, &opener{})
	if err != nil {
		return err
	}
	fmt.Println("ready", r.Port())
	<-l.Done()
	return l.Err()
}

func TestMoreConnectionsThanDescriptorsLeaveSomeForTheProcess(t *testing.T) {
	p := startPeer(t, "few-files", "256")
	addr := "127.0.0.1:" + p.port
	d, h := dial(t, Options{}, addr)
	h.next(t, "up")
	ask := func() string {
		if err := d.Send([]byte("open")); err != nil {
			t.Fatal(err)
		}
		return h.next(t, "message").body
	}
	var crowd []net.Conn
	for range 400 {
		if c, err := net.Dial("tcp", addr); err == nil { // else it was turned away before it knew that it was connected
			defer c.Close()
			crowd = append(crowd, c)
		}
	}
	if len(crowd) < 100 {
		t.Fatalf("%d connections, want at least those that there are places for", len(crowd))
	}
	eventually(t, "descriptors, with all its places taken", func() bool { return ask() == "opened" })
	for _, c := range crowd {
		c.Close()
	}
	late, lateH := dial(t, Options{ReconnectMin: time.Millisecond, ReconnectMax: 10 * time.Millisecond}, addr)
	for e := range lateH.c {
		if e.what == "up" {
			break
		}
	}
	if err := late.Send([]byte("open")); err != nil {
		t.Fatal(err)
	}
	if got := lateH.next(t, "message").body; got != "opened" {
		t.Errorf("a peer that comes later: %s", got)
	}
}
