package control

import (
	"github.com/pebbe/zmq4"
	"testing"
)

// window keeps a number of requests on their way until n have been answered.
type window struct {
	d    *Dealer
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
	server, client := newTestLoop(b, Options{}), newTestLoop(b, Options{})
	r, err := server.Listen(b.Context(), "127.0.0.1", 0, &echo{})
	if err != nil {
		b.Fatal(err)
	}
	w := &window{up: make(chan struct{}), body: make([]byte, size), done: make(chan struct{})}
	if w.d, err = client.Dial(b.Context(), hostPort(r), w); err != nil {
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
