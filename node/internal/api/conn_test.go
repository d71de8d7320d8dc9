package api

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// socketPair is two connected unix stream sockets.
func socketPair(t testing.TB) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) *net.UnixConn {
		f := os.NewFile(uintptr(fd), "pair")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c.(*net.UnixConn)
	}
	return conn(fds[0]), conn(fds[1])
}

func newPair(t testing.TB, o ConnOptions) (a, b *Conn) {
	t.Helper()
	sa, sb := socketPair(t)
	a, errA := NewConn(sa, o)
	b, errB := NewConn(sb, o)
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	return a, b
}

var roomy = ConnOptions{InLimit: MaxReplyFrame, Backlog: 64 << 20}

// receivers are the two ways to receive.
var receivers = map[string]func(*Conn) (Message, error){
	"Receive": (*Conn).Receive,
	"Take": func(c *Conn) (Message, error) {
		for {
			if m, ok, err := c.Take(); ok || err != nil {
				return m, err
			}
			if err := c.Await(); err != nil {
				return nil, err
			}
		}
	},
}

func TestFramesOfAllSendersArriveWhole(t *testing.T) {
	for name, receive := range receivers {
		t.Run(name, func(t *testing.T) { framesOfAllSendersArriveWhole(t, receive) })
	}
}

func framesOfAllSendersArriveWhole(t *testing.T, receive func(*Conn) (Message, error)) {
	a, b := newPair(t, roomy)
	const senders, each = 8, 50
	text := strings.Repeat("x", 100_000) // more than the socket takes at once
	var wg sync.WaitGroup
	for s := range senders {
		wg.Go(func() {
			for range each {
				if err := a.Send(MaxReplyFrame, &Reply{ID: uint64(s), Results: []Result{{Entry: []byte(text)}}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	counts := map[uint64]int{}
	for range senders * each {
		m, err := receive(b)
		if err != nil {
			t.Fatal(err)
		}
		r := m.(*Reply)
		if string(r.Results[0].Entry) != text {
			t.Fatal("a frame is damaged")
		}
		counts[r.ID]++
	}
	wg.Wait()
	for s := range uint64(senders) {
		if counts[s] != each {
			t.Errorf("sender %d: %d frames", s, counts[s])
		}
	}
	// The socket is free of the flusher's deadline again.
	if err := a.Send(MaxReplyFrame, &Bye{}); err != nil {
		t.Fatal(err)
	}
	if m, err := receive(b); err != nil {
		t.Fatal(m, err)
	}
}

func TestTakeGivesWholeFramesOnlyAndNeverWaits(t *testing.T) {
	small, err := AppendFrame(nil, &Reply{ID: 1}, MaxReplyFrame)
	if err != nil {
		t.Fatal(err)
	}
	large, err := AppendFrame(nil, &Reply{ID: 2, Results: []Result{{Entry: make([]byte, 2*inBuffer)}}}, MaxReplyFrame)
	if err != nil {
		t.Fatal(err)
	}
	sa, sb := socketPair(t)
	b, err := NewConn(sb, roomy)
	if err != nil {
		t.Fatal(err)
	}
	var got []uint64
	all := slices.Concat(small, large, small)
	for at := 0; at < len(all); {
		n := min(len(all)-len(small)-8-at, 1000)
		if at < len(small)+8 || n <= 0 { // byte by byte around the lengths
			n = 1
		}
		if _, err := sa.Write(all[at : at+n]); err != nil {
			t.Fatal(err)
		}
		at += n
		m, ok, err := b.Take()
		if err != nil {
			t.Fatal(err)
		}
		if whole := at == len(small) || at == len(small)+len(large) || at == len(all); ok != whole {
			t.Fatalf("after %d bytes: a message %t, want %t", at, ok, whole)
		}
		if ok {
			got = append(got, m.(*Reply).ID)
		}
	}
	if want := []uint64{1, 2, 1}; !slices.Equal(got, want) {
		t.Errorf("took %v, want %v", got, want)
	}
}

func TestWhatIsHeldGoesBeforeTheNextMessage(t *testing.T) {
	a, b := newPair(t, roomy)
	for id := range uint64(2) {
		if err := a.Hold(MaxReplyFrame, &Reply{ID: id}); err != nil {
			t.Fatal(err)
		}
	}
	if m, ok, err := b.Take(); ok || err != nil {
		t.Fatalf("%v, %v before anything was sent", m, err)
	}
	if err := a.Hold(1, &Reply{ID: 9}); !errors.Is(err, ErrLimit) {
		t.Errorf("%v; want ErrLimit", err)
	}
	if err := a.Send(MaxReplyFrame, &Reply{ID: 2}); err != nil {
		t.Fatal(err)
	}
	for id := range uint64(3) {
		m, ok, err := b.Take()
		if err != nil || !ok || m.(*Reply).ID != id {
			t.Errorf("message %d: %+v, %t, %v", id, m, ok, err)
		}
	}
	_ = a.Close()
	if err := a.Hold(MaxReplyFrame, &Reply{}); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v; want ErrClosed", err)
	}
}

func TestWhoDoesNotReadIsDisconnected(t *testing.T) {
	a, b := newPair(t, ConnOptions{InLimit: MaxReplyFrame, Backlog: 1 << 20})
	big := &Reply{Results: []Result{{Entry: make([]byte, 300_000)}}}
	var err error
	for n := 0; err == nil; n++ {
		if n > 100 {
			t.Fatal("30 MB were queued in a backlog of 1 MiB")
		}
		err = a.Send(MaxReplyFrame, big)
	}
	if !errors.Is(err, ErrBacklog) {
		t.Fatalf("%v; want ErrBacklog", err)
	}
	if err := a.Send(MaxReplyFrame, &Bye{}); !errors.Is(err, ErrBacklog) {
		t.Errorf("a later Send: %v", err)
	}
	for err = nil; err == nil; {
		_, err = b.Receive()
	}
	if !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		t.Errorf("the other end sees %v", err)
	}
}

func TestWhoStopsReadingIsDisconnectedAfterTheStall(t *testing.T) {
	a, _ := newPair(t, ConnOptions{InLimit: MaxReplyFrame, Backlog: 64 << 20, WriteStall: 20 * time.Millisecond})
	if err := a.Send(MaxReplyFrame, &Reply{Results: []Result{{Entry: make([]byte, 4<<20)}}}); err != nil {
		t.Fatal(err)
	}
	if err := a.Room(nil); !errors.Is(err, ErrBacklog) && err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if err := a.Send(MaxReplyFrame, &Bye{}); errors.Is(err, ErrBacklog) {
			return
		}
		if time.Now().After(end) {
			t.Fatal("still connected")
		}
	}
}

// A bye that came right behind a request: the reply to that meets a socket that is closed.
func TestWhatWasSentBeforeTheEndIsReceivedAfterASendThatFailed(t *testing.T) {
	for name, receive := range receivers {
		t.Run(name, func(t *testing.T) {
			a, b := newPair(t, roomy)
			if err := b.Send(MaxRequestFrame, &Request{ID: 1}, &Request{ID: 2}, &Bye{}); err != nil {
				t.Fatal(err)
			}
			if m, err := receive(a); err != nil || m.(*Request).ID != 1 {
				t.Fatalf("%+v, %v", m, err)
			}
			if err := b.Close(); err != nil {
				t.Fatal(err)
			}
			if err := a.Send(MaxReplyFrame, &Reply{ID: 1}); !errors.Is(err, unix.EPIPE) || !errors.Is(a.Err(), unix.EPIPE) {
				t.Fatalf("%v, %v; want EPIPE", err, a.Err())
			}
			if m, err := receive(a); err != nil || m.(*Request).ID != 2 {
				t.Fatalf("%+v, %v", m, err)
			}
			if m, err := receive(a); err != nil || *m.(*Bye) != (Bye{}) {
				t.Fatalf("%+v, %v", m, err)
			}
			if m, err := receive(a); !errors.Is(err, io.EOF) {
				t.Errorf("%+v, %v; want EOF", m, err)
			}
		})
	}
}

// Who reads nothing any more, but goes on sending, is not listened to for ever.
func TestNotMuchIsReceivedAfterASendThatFailed(t *testing.T) {
	sa, sb := socketPair(t)
	a, err := NewConn(sa, roomy)
	if err != nil {
		t.Fatal(err)
	}
	if err := sb.CloseRead(); err != nil {
		t.Fatal(err)
	}
	frame, err := AppendFrame(nil, &Request{ID: 1, Ops: []Op{{Kind: OpFetch, Key: "k", Entry: make([]byte, 60_000)}}}, MaxRequestFrame)
	if err != nil {
		t.Fatal(err)
	}
	sent := make(chan error)
	go func() {
		var err error
		for err == nil {
			_, err = sb.Write(frame)
		}
		sent <- err
	}()
	if err := a.Send(MaxReplyFrame, &Reply{ID: 1}); !errors.Is(err, unix.EPIPE) {
		t.Fatalf("%v; want EPIPE", err)
	}
	got := 0
	for err = nil; err == nil; got += len(frame) {
		_, err = a.Receive()
	}
	if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) || got > restBytes+2*len(frame) {
		t.Errorf("%d bytes, then %v", got, err)
	}
	_ = a.Close()
	<-sent
}

func TestRoomWaitsUntilTheOtherEndHasRead(t *testing.T) {
	a, b := newPair(t, ConnOptions{InLimit: MaxReplyFrame, Backlog: 8 << 20})
	for range 2 {
		if err := a.Send(MaxReplyFrame, &Reply{Results: []Result{{Entry: make([]byte, 3<<20)}}}); err != nil {
			t.Fatal(err)
		}
	}
	gone := make(chan struct{})
	close(gone)
	if err := a.Room(gone); !errors.Is(err, ErrClosed) {
		t.Fatalf("Room with a full backlog and a caller that has gone: %v", err)
	}
	got := make(chan error, 1)
	go func() { got <- a.Room(nil) }()
	for range 2 {
		if _, err := b.Receive(); err != nil {
			t.Fatal(err)
		}
	}
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

func TestALengthIsCheckedBeforeMemoryIsTaken(t *testing.T) {
	sa, sb := socketPair(t)
	b, err := NewConn(sb, ConnOptions{InLimit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for name, receive := range receivers {
		if _, err := sa.Write(binary.BigEndian.AppendUint32(nil, 1<<20+1)); err != nil {
			t.Fatal(err)
		}
		if _, err := receive(b); !errors.Is(err, ErrLimit) {
			t.Errorf("%s: %v; want ErrLimit", name, err)
		}
	}
}

func TestAnEndInsideAFrameIsToldFromAnEndBetweenFrames(t *testing.T) {
	for _, c := range []struct {
		name  string
		bytes []byte
		want  error
	}{
		{"between", nil, io.EOF},
		{"in the length", []byte{0, 0}, io.ErrUnexpectedEOF},
		{"after the length", []byte{0, 0, 0, 9}, io.ErrUnexpectedEOF},
		{"in the payload", []byte{0, 0, 0, 9, 1, 2}, io.ErrUnexpectedEOF},
	} {
		for name, receive := range receivers {
			sa, sb := socketPair(t)
			b, err := NewConn(sb, roomy)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := sa.Write(c.bytes); err != nil {
				t.Fatal(err)
			}
			_ = sa.Close()
			if _, err := receive(b); err != c.want {
				t.Errorf("%s, by %s: %v, want %v", c.name, name, err, c.want)
			}
		}
	}
}

func TestAFileTravelsWithTheFirstFrame(t *testing.T) {
	a, b := newPair(t, roomy)
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteString("content"); err != nil {
		t.Fatal(err)
	}
	if err := a.SendWithFile(&Welcome{Node: "n"}, MaxReplyFrame, f, time.Second); err != nil {
		t.Fatal(err)
	}
	if err := a.Send(MaxReplyFrame, &Bye{}); err != nil {
		t.Fatal(err)
	}
	m, got, err := b.ReceiveWithFile()
	if err != nil || got == nil {
		t.Fatal(m, got, err)
	}
	defer got.Close()
	text := make([]byte, 7)
	if _, err := got.ReadAt(text, 0); err != nil || string(text) != "content" || m.(*Welcome).Node != "n" {
		t.Errorf("%q, %v, %+v", text, err, m)
	}
	if flags, err := unix.FcntlInt(got.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("the descriptor would be inherited by children (flags %#x, %v)", flags, err)
	}
	if m, err := b.Receive(); err != nil {
		t.Fatal(m, err)
	}
}

func TestAFirstFrameWithoutAFileHasNone(t *testing.T) {
	a, b := newPair(t, roomy)
	if err := a.Send(MaxReplyFrame, &Refused{Code: CodeDenied}); err != nil {
		t.Fatal(err)
	}
	m, f, err := b.ReceiveWithFile()
	if err != nil || f != nil || m.(*Refused).Code != CodeDenied {
		t.Errorf("%+v, %v, %v", m, f, err)
	}
}

func TestThePeerOfASocketIsKnownAndWatched(t *testing.T) {
	sa, _ := socketPair(t)
	p, err := PeerOf(sa, true)
	if err != nil {
		t.Fatal(err)
	}
	if p.PID != os.Getpid() || p.UID != os.Getuid() || p.Process == nil {
		t.Fatalf("%+v", p)
	}
	waited := make(chan error, 1)
	go func() { waited <- WaitExit(p.Process) }()
	if err := p.Process.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err == nil {
		t.Error("a live process was taken for dead")
	}
}
