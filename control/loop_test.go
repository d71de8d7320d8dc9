package control

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

// echo answers on the owner goroutine.
type echo struct{ r *Router }

func (e *echo) Serve(r *Router) { e.r = r }
func (e *echo) Message(from Source, body []byte) {
	e.r.Send(from.ID, append([]byte(nil), body...))
}

func TestManyGoroutinesMaySend(t *testing.T) {
	const senders, each = 16, 500
	server, client, h := newTestLoop(t, Options{}), newTestLoop(t, Options{}), newRecorder()
	r, err := server.Listen(t.Context(), "127.0.0.1", 0, &echo{})
	if err != nil {
		t.Fatal(err)
	}
	var dealers []*Dealer
	for range 4 {
		d, err := client.Dial(t.Context(), hostPort(r), h)
		if err != nil {
			t.Fatal(err)
		}
		h.next(t, "up")
		dealers = append(dealers, d)
	}
	var sending sync.WaitGroup
	for s := range senders {
		sending.Go(func() {
			body := binary.BigEndian.AppendUint64(nil, uint64(s))
			for range each {
				for errors.Is(dealers[s%4].Send(body), ErrQueueFull) {
					runtime.Gosched()
				}
			}
		})
	}
	var got [senders]int
	for range senders * each {
		got[binary.BigEndian.Uint64([]byte(h.next(t, "message").body))]++
	}
	sending.Wait()
	for s, n := range got {
		if n != each {
			t.Errorf("sender %d got %d answers, want %d", s, n, each)
		}
	}
}

func TestCloseWhileBusyEndsEverythingAndIsIdempotent(t *testing.T) {
	for range 20 {
		server, client := newTestLoop(t, Options{}), newTestLoop(t, Options{})
		h := newRecorder()
		r, err := server.Listen(t.Context(), "127.0.0.1", 0, &echo{})
		if err != nil {
			t.Fatal(err)
		}
		d, err := client.Dial(t.Context(), hostPort(r), h)
		if err != nil {
			t.Fatal(err)
		}
		var work sync.WaitGroup
		for range 4 {
			work.Go(func() {
				for !errors.Is(d.Send([]byte("x")), ErrClosed) {
					runtime.Gosched()
				}
			})
			work.Go(func() {
				for {
					other, err := client.Dial(context.Background(), hostPort(r), newRecorder())
					if err != nil {
						if !errors.Is(err, ErrClosed) {
							t.Error(err)
						}
						return
					}
					other.Close()
					client.call(context.Background(), func() error { return nil }) // no faster than it can
				}
			})
		}
		h.next(t, "up")
		h.next(t, "message")
		for _, l := range []*Loop{server, client} {
			work.Go(func() { l.Close() })
			work.Go(func() { l.Close() })
		}
		work.Wait()
		for _, l := range []*Loop{server, client} {
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			<-l.Done()
		}
		after := len(h.c)
		if err := errors.Join(d.Close(), r.Close(), d.Close(), r.Close()); err != nil {
			t.Error(err)
		}
		if err := r.Send("x", nil); !errors.Is(err, ErrClosed) {
			t.Errorf("Router.Send after Close: %v", err)
		}
		if _, err := server.Listen(t.Context(), "127.0.0.1", 0, &echo{}); !errors.Is(err, ErrClosed) {
			t.Errorf("Listen after Close: %v", err)
		}
		if len(h.c) != after {
			t.Errorf("a handler was called after Close")
		}
	}
}

func TestPortIsFreeOnceTheLoopIsClosed(t *testing.T) {
	port := 0
	for range 10 {
		l := newTestLoop(t, Options{})
		r, err := l.Listen(t.Context(), "127.0.0.1", port, &echo{})
		if err != nil {
			t.Fatal(err)
		}
		port = r.Port()
		l.Close()
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

func TestDialAndCloseLeakNothing(t *testing.T) {
	l, server := newTestLoop(t, Options{ReconnectMin: time.Millisecond}), newRecorder()
	r, err := newTestLoop(t, Options{}).Listen(t.Context(), "127.0.0.1", 0, server.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	refused := ln.Addr().String()
	ln.Close()
	cycle := func() {
		h := newRecorder()
		d, err := l.Dial(t.Context(), hostPort(r), h)
		if err != nil {
			t.Fatal(err)
		}
		h.next(t, "up")
		if err := d.Send([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		server.next(t, "message")
		d.Close()
		server.next(t, "left")
		if d, err = l.Dial(t.Context(), refused, h); err != nil {
			t.Fatal(err)
		}
		h.next(t, "down")
		d.Close()
		if d, err = l.Dial(t.Context(), "localhost:1", h); err != nil { // closed while its name is looked up
			t.Fatal(err)
		}
		d.Close()
	}
	settled := func() (n [3]int) {
		l.call(t.Context(), func() error { n[2] = len(l.members) + len(l.watched) + len(l.alarms); return nil })
		n[0], n[1] = descriptors(t), runtime.NumGoroutine()
		return n
	}
	for range 10 {
		cycle()
	}
	var before [3]int
	eventually(t, "the loop is empty", func() bool { before = settled(); return before[2] == 0 })
	for range 200 {
		cycle()
	}
	var after [3]int
	defer func() {
		if t.Failed() {
			t.Logf("descriptors, goroutines, kept by the loop: %v, then %v", before, after)
		}
	}()
	eventually(t, "all is given back", func() bool {
		after = settled()
		return after[0] <= before[0] && after[1] <= before[1] && after[2] == 0
	})
	eventually(t, "the router forgets them", func() bool { return peersOf(t, r) == 0 })
}

func TestLoopsLeaveNothing(t *testing.T) {
	cycle := func() {
		l, err := NewLoop(Options{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Listen(t.Context(), "127.0.0.1", 0, &echo{}); err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	cycle()
	fds, routines := descriptors(t), runtime.NumGoroutine()
	for range 50 {
		cycle()
	}
	eventually(t, "all is given back", func() bool { return descriptors(t) <= fds && runtime.NumGoroutine() <= routines })
}

// relay does from a handler all that may be done from one: it dials, listens, sends and closes.
type relay struct {
	recorder
	t    *testing.T
	l    *Loop
	d    *Dealer
	more int
}

func (h *relay) Up() {
	if err := h.d.Send([]byte("from Up")); err != nil {
		h.t.Error(err)
	}
}

func (h *relay) Message(body []byte) {
	h.recorder.Message(body)
	if h.more == 0 {
		h.l.Close()
		return
	}
	r, err := h.l.Listen(context.Background(), "127.0.0.1", 0, &echo{})
	if err != nil {
		h.t.Error(err)
		return
	}
	next := &relay{recorder: h.recorder, t: h.t, l: h.l, more: h.more - 1}
	if next.d, err = h.l.Dial(context.Background(), hostPort(r), next); err != nil {
		h.t.Error(err)
	}
	h.d.Close()
}

func TestHandlersMayDialListenSendAndClose(t *testing.T) {
	l := newTestLoop(t, Options{})
	r, err := l.Listen(t.Context(), "127.0.0.1", 0, &echo{})
	if err != nil {
		t.Fatal(err)
	}
	h := &relay{recorder: newRecorder(), t: t, l: l, more: 3}
	// d is set before Up can run: on the owner goroutine.
	if err := l.call(t.Context(), func() (err error) {
		h.d, err = l.Dial(context.Background(), hostPort(r), h)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		h.next(t, "message")
	}
	<-l.Done()
	if len(h.c) != 0 {
		t.Errorf("%v after the last message", <-h.c)
	}
}

func TestDeathOfALoopIsSeen(t *testing.T) {
	var log logBuffer
	l, err := NewLoop(Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	h := newRecorder()
	d, err := l.Dial(t.Context(), "127.0.0.1:1", h)
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	l.post(func() { l.fail(broken) })
	<-l.Done()
	if err := l.Err(); !errors.Is(err, broken) {
		t.Errorf("Err: %v", err)
	}
	if err := l.Close(); !errors.Is(err, broken) {
		t.Errorf("Close: %v", err)
	}
	if err := d.Send(nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Send: %v", err)
	}
	if !strings.Contains(log.String(), "broken") {
		t.Errorf("the log does not say so: %s", log.String())
	}
}

func TestListenGivesUpWithItsContext(t *testing.T) {
	l := newTestLoop(t, Options{})
	held, let := make(chan struct{}), make(chan struct{})
	l.post(func() { close(held); <-let })
	<-held
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := l.Listen(ctx, "127.0.0.1", 0, &echo{})
	close(let)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	l.call(t.Context(), func() error {
		if len(l.members) != 0 {
			t.Error("the listener that was given up is there all the same")
		}
		return nil
	})
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{
		{HeartbeatInterval: -1}, {HeartbeatTimeout: time.Microsecond}, {HeartbeatTTL: time.Millisecond}, {ConnectTimeout: -1},
		{ReconnectMin: -1}, {ReconnectMin: time.Second, ReconnectMax: time.Millisecond}, {Queue: -1}, {QueueBytes: -1}, {MaxMessage: -1},
		{TotalBytes: -1}, {TotalBytes: 1000},
	} {
		if l, err := NewLoop(o); err == nil {
			l.Close()
			t.Errorf("%+v was accepted", o)
		}
	}
}

// Nothing but the hot path needs the handle of a socket, and it must be the one libzmq knows.
func TestHandleIsTheOneLibzmqKnows(t *testing.T) {
	l := newTestLoop(t, Options{})
	if err := l.call(t.Context(), func() error {
		var z zsock
		if err := z.open(l, zmq4.PAIR); err != nil {
			return err
		}
		defer z.Close()
		if _, errno := l.in.recv(z.raw); errno != syscall.EAGAIN {
			t.Errorf("got %v, want EAGAIN", errno)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}
