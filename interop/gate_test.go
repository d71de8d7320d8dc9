package interop

import (
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// gate is a TCP proxy in front of a side channel that can hold back what the producer answers.
type gate struct {
	listener net.Listener
	target   string

	mu      sync.Mutex
	open    chan struct{} // closed: answers go through
	waiting int           // bytes held back
	from    time.Time     // since when the first of them is
	conns   []net.Conn
	keep    bool // a peer is not told that the producer is gone
	running sync.WaitGroup
}

func newGate(t testing.TB, target string) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	g := &gate{listener: l, target: target, open: make(chan struct{})}
	close(g.open)
	g.running.Go(g.accept)
	t.Cleanup(func() {
		_ = l.Close()
		g.cut()
		g.release()
		g.running.Wait()
	})
	return g
}

func (g *gate) address() string { return g.listener.Addr().String() }

func (g *gate) hold() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = make(chan struct{})
	g.waiting = 0
}

func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
	default:
		close(g.open)
	}
}

// held is the number of bytes that wait.
func (g *gate) held() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.waiting
}

func (g *gate) since() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.from
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
			keep := g.keep
			g.mu.Unlock()
			if !keep {
				_ = in.Close()
			}
		})
	}
}

func (g *gate) answers(to, from net.Conn) {
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		g.mu.Lock()
		if g.waiting == 0 {
			g.from = time.Now()
		}
		g.waiting += n
		open := g.open
		g.mu.Unlock()
		<-open
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}
