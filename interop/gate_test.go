package interop

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"testing"
)

// gate is a TCP proxy in front of a side channel that can hold back what the producer answers. Heartbeats pass, so that nobody takes the
// other one for dead meanwhile.
type gate struct {
	listener net.Listener
	target   string

	mu      sync.Mutex
	closed  bool // answers are held back
	back    []answer
	conns   []net.Conn
	keep    bool // a peer is not told that the producer is gone
	running sync.WaitGroup
}

// answer is a message of ZMTP, all its frames.
type answer struct {
	to   net.Conn
	text []byte
}

func newGate(t testing.TB, target string) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	g := &gate{listener: l, target: target}
	g.running.Go(g.accept)
	t.Cleanup(func() {
		_ = l.Close()
		g.cut()
		g.running.Wait()
	})
	return g
}

func (g *gate) address() string { return g.listener.Addr().String() }

func (g *gate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// release lets go of what was held back, in its order.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, a := range g.back {
		_, _ = a.to.Write(a.text) // it may be gone
	}
	g.closed, g.back = false, nil
}

// held is the number of answers that wait.
func (g *gate) held() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.back)
}

// hide keeps the peers' connections while the producer goes, until cut.
func (g *gate) hide() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.keep = true
}

func (g *gate) cut() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.keep = false
	for _, c := range g.conns {
		_ = c.Close()
	}
	g.conns = nil
}

func (g *gate) accept() {
	for {
		in, err := g.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", g.target)
		if err != nil {
			_ = in.Close()
			continue
		}
		g.mu.Lock()
		g.conns = append(g.conns, in, out)
		g.mu.Unlock()
		g.running.Go(func() {
			_, _ = io.Copy(out, in)
			_ = out.Close()
		})
		g.running.Go(func() {
			g.answers(in, out)
			g.mu.Lock()
			defer g.mu.Unlock()
			if !g.keep {
				_ = in.Close()
				return
			}
			_, _ = in.Write(ping)
		})
	}
}

// ping of a producer that is hidden. Its time to live of 0 takes back that of the producer's own one, after which the peer would end
// the connection.
var ping = []byte("\x04\x07\x04PING\x00\x00")

// greeting is how many bytes ZMTP begins with.
const greeting = 64

// answers passes on what comes from a producer, by the frames of ZMTP 3.
func (g *gate) answers(to net.Conn, from io.Reader) {
	const more, long, command = 1, 2, 4
	r := bufio.NewReader(from)
	if _, err := io.CopyN(to, r, greeting); err != nil {
		return
	}
	var message []byte
	for {
		flags, err := r.ReadByte()
		if err != nil {
			return
		}
		head := []byte{flags, 0}
		if flags&long != 0 {
			head = make([]byte, 9)
			head[0] = flags
		}
		if _, err := io.ReadFull(r, head[1:]); err != nil {
			return
		}
		size := uint64(head[1])
		if flags&long != 0 {
			size = binary.BigEndian.Uint64(head[1:])
		}
		at := len(message) + len(head)
		message = append(append(message, head...), make([]byte, size)...)
		if _, err := io.ReadFull(r, message[at:]); err != nil {
			return
		}
		if flags&more == 0 {
			g.pass(answer{to, message}, flags&command != 0)
			message = nil
		}
	}
}

func (g *gate) pass(a answer, command bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.closed || command {
		_, _ = a.to.Write(a.text)
		return
	}
	g.back = append(g.back, a)
}
