package control

import (
	"errors"
	"fmt"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

const patience = 20 * time.Second // for what must happen; not asserted

func newTestLoop(t testing.TB, o Options) *Loop {
	t.Helper()
	l, err := NewLoop(o)
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

func hostPort(r *Router) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(r.Port())) }

// received is what a recorder saw.
type received struct {
	what string // "message", "left", "up", "down"
	from Source
	body string
	err  error
}

func (r received) String() string {
	return fmt.Sprintf("%s from %v: %.40q %v", r.what, r.from, r.body, r.err)
}

// recorder is a handler of both kinds that passes on what it gets.
type recorder struct{ c chan received }

func newRecorder() recorder { return recorder{make(chan received, 1<<16)} }

func (h recorder) asRouter() RouterHandler { return routerRecorder{h} }

func (h recorder) Message(body []byte) { h.c <- received{what: "message", body: string(body)} }
func (h recorder) Up()                 { h.c <- received{what: "up"} }
func (h recorder) Down(err error)      { h.c <- received{what: "down", err: err} }

type routerRecorder struct{ h recorder }

func (r routerRecorder) Message(from Source, body []byte) {
	r.h.c <- received{what: "message", from: from, body: string(body)}
}
func (r routerRecorder) Left(from Source) { r.h.c <- received{what: "left", from: from} }

// next gives the next thing that happened, which must be of the kind.
func (h recorder) next(t testing.TB, what string) received {
	t.Helper()
	select {
	case r := <-h.c:
		if r.what != what {
			t.Fatalf("got %v, want %s", r, what)
		}
		return r
	case <-time.After(patience):
		t.Fatalf("nothing for %v, want %s", patience, what)
		panic("unreachable")
	}
}

// rawContext and rawSocket make sockets of plain libzmq, as other programs use it.
func rawContext(t testing.TB) *zmq4.Context {
	t.Helper()
	ctx, err := zmq4.NewContext()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ctx.Term() })
	return ctx
}

func rawSocket(t testing.TB, ctx *zmq4.Context, kind zmq4.Type) *zmq4.Socket {
	t.Helper()
	s, err := ctx.NewSocket(kind)
	if err != nil {
		t.Fatal(err)
	}
	s.SetLinger(0)
	s.SetRcvtimeo(patience)
	t.Cleanup(func() { s.Close() })
	return s
}

func wantGone(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, ErrGone) {
		t.Fatalf("got %v, want ErrGone", err)
	}
}

func timeout() <-chan time.Time { return time.After(patience) }
