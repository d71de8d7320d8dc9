package stage

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/wire"
)

const (
	patience = 20 * time.Second       // for what must happen; not asserted
	silence  = 300 * time.Millisecond // for an answer that must not come
)

func newLoop(t testing.TB) *control.Loop {
	t.Helper()
	l, err := control.NewLoop(control.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Errorf("the loop ended by itself: %v", err)
		}
	})
	return l
}

// serve gives a server over a store; both are closed at the end, in that order.
func serve(t testing.TB, so Options, o ServerOptions) (*Store, *Server) {
	t.Helper()
	st, err := NewStore(so)
	if err != nil {
		t.Fatal(err)
	}
	o.Loop, o.Store, o.Host, o.Node = newLoop(t), st, "127.0.0.1", "producer"
	s, err := Serve(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		if err := errors.Join(st.Close(ctx, patience), s.Close()); err != nil {
			t.Error(err)
		}
	})
	return st, s
}

func address(s *Server) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port())) }

// rawSocket is a socket as a plain peer has it, of a context of its own, so that nothing of it outlives the test.
func rawSocket(t testing.TB, kind zmq4.Type, endpoint string) *zmq4.Socket {
	t.Helper()
	c, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		c.Term()
	})
	if err := errors.Join(s.SetLinger(0), s.SetRcvtimeo(patience), s.Connect("tcp://"+endpoint)); err != nil {
		t.Fatal(err)
	}
	return s
}

// exchange sends frames and gives those of the answer; nil if there is none within the socket's time.
func exchange(t testing.TB, s *zmq4.Socket, frames ...[]byte) [][]byte {
	t.Helper()
	if _, err := s.SendMessage(frames); err != nil {
		t.Fatal(err)
	}
	got, err := s.RecvMessageBytes(0)
	if errors.Is(err, zmq4.Errno(syscall.EAGAIN)) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// plain is a plain consumer's socket.
type plain struct {
	t testing.TB
	s *zmq4.Socket
}

func newPlain(t testing.TB, s *Server) plain { return plain{t, rawSocket(t, zmq4.REQ, address(s))} }

func (p plain) ask(op wire.Op, c Claim) *wire.Reply {
	p.t.Helper()
	got := exchange(p.t, p.s, wire.AppendRequest(nil, &wire.Request{Op: op, Key: c.Key, Generation: c.Generation, Claim: c.ID}))
	if len(got) != 1 {
		p.t.Fatalf("%d frames", len(got))
	}
	a, err := wire.DecodeReply(got[0])
	if err != nil {
		p.t.Fatal(err)
	}
	return a
}

// own is an own reader's connection.
type own struct {
	t       testing.TB
	d       interface{ Send([]byte) error }
	close   func() error
	answers chan *wire.Reply
	up      chan struct{}
}

func (o *own) Message(body []byte) {
	a, err := wire.DecodeReply(append([]byte(nil), body...))
	if err != nil {
		o.t.Error(err)
		return
	}
	o.answers <- a
}

func (o *own) Up()        { o.up <- struct{}{} }
func (o *own) Down(error) {}

func newOwn(t testing.TB, s *Server) *own {
	t.Helper()
	o := &own{t: t, answers: make(chan *wire.Reply, 1024), up: make(chan struct{}, 16)}
	d, err := newLoop(t).Dial(t.Context(), address(s), o)
	if err != nil {
		t.Fatal(err)
	}
	o.d, o.close = d, d.Close
	receive(t, o.up)
	return o
}

func newLocal(t testing.TB, s *Server) *own {
	t.Helper()
	o := &own{t: t, answers: make(chan *wire.Reply, 1024), up: make(chan struct{}, 16)}
	d, err := newLoop(t).DialLocal(t.Context(), s.Local(), o)
	if err != nil {
		t.Fatal(err)
	}
	o.d, o.close = d, d.Close
	receive(t, o.up)
	return o
}

func receive[T any](t testing.TB, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(patience):
		t.Fatal("it did not happen")
	}
	return v
}

// eventually waits for what is about to become true.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
	}
}

func (o *own) send(op wire.Op, c Claim, f wire.FerryRequest) {
	o.t.Helper()
	if err := o.d.Send(wire.AppendRequest(nil, &wire.Request{Op: op, Key: c.Key, Generation: c.Generation, Claim: c.ID, Ferry: &f})); err != nil {
		o.t.Fatal(err)
	}
}

func (o *own) ask(op wire.Op, c Claim, f wire.FerryRequest) *wire.Reply {
	o.t.Helper()
	o.send(op, c, f)
	return receive(o.t, o.answers)
}

// readGolden reads what vLLM-Omni 0.30 itself wrote.
func readGolden[T any](t testing.TB) (g T) {
	t.Helper()
	b, err := os.ReadFile("../interop/golden/omni.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &g); err != nil {
		t.Fatal(err)
	}
	return g
}

type hexBytes []byte

func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

func keyOf(i int) string { return fmt.Sprintf("key-%d", i) }
