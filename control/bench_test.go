package control

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pebbe/zmq4"
)

// window keeps a number of requests on their way until n have been answered.
type window struct {
	d    Conn
	up   chan struct{}
	body []byte
	left int // to send
	wait int // to be answered
	done chan struct{}
}

func (w *window) Up()        { close(w.up) }
func (w *window) Down(error) {}
func (w *window) Message([]byte) {
	if w.wait--; w.wait == 0 {
		close(w.done)
		return
	}
	if w.left > 0 {
		w.left--
		w.d.Send(w.body)
	}
}

func benchmarkEcho(b *testing.B, depth, size int) {
	r, err := newTestLoop(b, Options{}).Listen(b.Context(), "127.0.0.1", 0, &echo{})
	if err != nil {
		b.Fatal(err)
	}
	benchmarkWindow(b, depth, size, func(l *Loop, h DealerHandler) (Conn, error) { return l.Dial(b.Context(), hostPort(r), h) })
}

// benchmarkWindow asks from the handler, so that a round trip wakes two threads.
func benchmarkWindow(b *testing.B, depth, size int, dial func(*Loop, DealerHandler) (Conn, error)) {
	w := &window{up: make(chan struct{}), body: make([]byte, size), done: make(chan struct{})}
	var err error
	if w.d, err = dial(newTestLoop(b, Options{}), w); err != nil {
		b.Fatal(err)
	}
	<-w.up
	first := min(depth, b.N)
	w.left, w.wait = b.N-first, b.N
	b.ReportAllocs()
	b.ResetTimer()
	for range first {
		if err := w.d.Send(w.body); err != nil {
			b.Fatal(err)
		}
	}
	<-w.done
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "acks/s")
}

// caller hands the answers to the goroutine that asked.
type caller struct {
	up      chan struct{}
	answers chan struct{}
}

func (c *caller) Up()            { close(c.up) }
func (c *caller) Down(error)     {}
func (c *caller) Message([]byte) { c.answers <- struct{}{} }

// benchmarkCallers asks from goroutines that wait for their answers, each on a connection of its own, as a caller of a client does.
func benchmarkCallers(b *testing.B, callers, size int, dial func(*Loop, DealerHandler) (Conn, error)) {
	l := newTestLoop(b, Options{})
	type end struct {
		*caller
		Conn
	}
	var ends []end
	for range callers {
		c := &caller{make(chan struct{}), make(chan struct{}, 1)}
		d, err := dial(l, c)
		if err != nil {
			b.Fatal(err)
		}
		<-c.up
		ends = append(ends, end{c, d})
	}
	var left atomic.Int64
	left.Store(int64(b.N))
	var all sync.WaitGroup
	body := make([]byte, size)
	b.ReportAllocs()
	b.ResetTimer()
	for _, e := range ends {
		all.Go(func() {
			for left.Add(-1) >= 0 {
				if err := e.Send(body); err != nil {
					b.Error(err)
					return
				}
				<-e.answers
			}
		})
	}
	all.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "acks/s")
}

// Round trips between two processes of one machine, by the local path and by ZeroMQ over TCP.
func BenchmarkLocalRoundTrip(b *testing.B) {
	for _, path := range []struct {
		name, role string
		dial       func(b *testing.B, at string) func(*Loop, DealerHandler) (Conn, error)
	}{
		{"local", "local-echo", func(b *testing.B, at string) func(*Loop, DealerHandler) (Conn, error) {
			return func(l *Loop, h DealerHandler) (Conn, error) { return l.DialLocal(b.Context(), at, h) }
		}},
		{"zmq", "zmq-echo", func(b *testing.B, at string) func(*Loop, DealerHandler) (Conn, error) {
			return func(l *Loop, h DealerHandler) (Conn, error) { return l.Dial(b.Context(), "127.0.0.1:"+at, h) }
		}},
	} {
		for _, depth := range []int{1, 16} {
			b.Run(fmt.Sprintf("%s/handler/%d", path.name, depth), func(b *testing.B) {
				benchmarkWindow(b, depth, 160, path.dial(b, startPeer(b, path.role, "").port))
			})
			b.Run(fmt.Sprintf("%s/callers/%d", path.name, depth), func(b *testing.B) {
				benchmarkCallers(b, depth, 160, path.dial(b, startPeer(b, path.role, "").port))
			})
		}
	}
}

// One request at a time: the latency of a round trip.
func BenchmarkRoundTrip(b *testing.B) { benchmarkEcho(b, 1, 160) }

// Many on their way: what a node answers in a second, with the asking side on the same cores.
func BenchmarkPipelined(b *testing.B) { benchmarkEcho(b, 128, 160) }

// What libzmq itself takes, blocking on both ends with a thread each: to compare the above with, in the same run.
func BenchmarkPlainRoundTrip(b *testing.B) {
	server, client := rawContext(b), rawContext(b)
	rs, ds := rawSocket(b, server, zmq4.ROUTER), rawSocket(b, client, zmq4.DEALER)
	if err := rs.Bind("tcp://127.0.0.1:*"); err != nil {
		b.Fatal(err)
	}
	at, err := rs.GetLastEndpoint()
	if err != nil {
		b.Fatal(err)
	}
	if err := ds.Connect(at); err != nil {
		b.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			m, err := rs.RecvMessageBytes(0)
			if err != nil || len(m[2]) == 0 {
				return
			}
			rs.SendMessage(m)
		}
	}()
	body := make([]byte, 160)
	for b.Loop() {
		ds.SendMessage("", body)
		if _, err := ds.RecvMessageBytes(0); err != nil {
			b.Fatal(err)
		}
	}
	ds.SendMessage("", "")
	<-ended
}
