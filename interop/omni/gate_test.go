package omni

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"

	"github.com/tensorferry/tensorferry/stage"
)

// gate is a TCP proxy in front of a producer's control port that can hold back its answers. Commands of ZMTP, such as those of the
// handshake, pass.
type gate struct {
	listener net.Listener
	target   string

	mu      sync.Mutex
	closed  bool
	back    []func() // frames that are held back
	whole   int      // messages among them
	conns   []net.Conn
	running sync.WaitGroup
}

func newGate(t *testing.T, target stage.Endpoint) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	g := &gate{listener: l, target: net.JoinHostPort(target.Host, strconv.Itoa(target.Port))}
	g.running.Go(g.accept)
	t.Cleanup(func() {
		_ = l.Close()
		g.mu.Lock()
		for _, c := range g.conns {
			_ = c.Close()
		}
		g.mu.Unlock()
		g.running.Wait()
	})
	return g
}

func (g *gate) at() stage.Endpoint {
	return stage.Endpoint{Host: "127.0.0.1", Port: g.listener.Addr().(*net.TCPAddr).Port}
}

func (g *gate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
}

// held is how many answers wait.
func (g *gate) held() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.whole
}

// release lets go of what was held back, in its order.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, send := range g.back {
		send()
	}
	g.closed, g.back, g.whole = false, nil, 0
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
			if end := func() { _ = in.Close() }; g.closed {
				g.back = append(g.back, end) // who waits for the answer is not told that the producer is gone
			} else {
				end()
			}
		})
	}
}

// answers passes on what comes from a producer, frame by frame of ZMTP 3.
func (g *gate) answers(to io.Writer, from io.Reader) {
	const greeting, more, long, command = 64, 1, 2, 4
	r := bufio.NewReader(from)
	if _, err := io.CopyN(to, r, greeting); err != nil {
		return
	}
	for {
		head := make([]byte, 2, 9)
		if _, err := io.ReadFull(r, head); err != nil {
			return
		}
		size := uint64(head[1])
		if head[0]&long != 0 {
			head = head[:9]
			if _, err := io.ReadFull(r, head[2:]); err != nil {
				return
			}
			size = binary.BigEndian.Uint64(head[1:])
		}
		frame := append(head, make([]byte, size)...)
		if _, err := io.ReadFull(r, frame[len(head):]); err != nil {
			return
		}
		send := func() { _, _ = to.Write(frame) } // it may be gone
		g.mu.Lock()
		if g.closed && head[0]&command == 0 {
			g.back = append(g.back, send)
			if head[0]&more == 0 {
				g.whole++
			}
		} else {
			send()
		}
		g.mu.Unlock()
	}
}
