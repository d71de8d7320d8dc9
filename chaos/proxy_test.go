package chaos

import (
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// proxy is a bad network between two addresses: it forwards connections, late, in pieces, with standstills, and cuts some of them in
// the middle. It stands in for delay and loss in the kernel where that has no netem.
type proxy struct {
	listener net.Listener
	target   string
	seed     uint64
	next     atomic.Uint64 // connections so far
	good     atomic.Bool   // the network has healed
	work     sync.WaitGroup

	mu    sync.Mutex
	conns map[net.Conn]struct{} // nil once it is closed
}

func newProxy(t *testing.T, listen, target string, seed uint64) *proxy {
	t.Helper()
	l, err := net.Listen("tcp", listen)
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{listener: l, target: target, seed: seed, conns: map[net.Conn]struct{}{}}
	p.work.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.mu.Lock()
		for c := range p.conns {
			_ = c.Close()
		}
		p.conns = nil
		p.mu.Unlock()
		p.work.Wait()
	})
	return p
}

func (p *proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		rng := rand.New(rand.NewPCG(p.seed, p.next.Add(1)))
		p.work.Go(func() { p.forward(c, rng) })
	}
}

// keep notes a connection, so that the end of the test ends it; false: that has been.
func (p *proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.conns == nil {
		_ = c.Close()
		return false
	}
	p.conns[c] = struct{}{}
	return true
}

func (p *proxy) forward(a net.Conn, rng *rand.Rand) {
	if !p.keep(a) {
		return
	}
	if !p.good.Load() && rng.IntN(10) == 0 {
		p.cut(a)
		return
	}
	b, err := net.DialTimeout("tcp", p.target, time.Second)
	if err != nil || !p.keep(b) {
		p.cut(a)
		return
	}
	back := rand.New(rand.NewPCG(rng.Uint64(), 0))
	var both sync.WaitGroup
	both.Go(func() { p.pipe(a, b, rng) })
	both.Go(func() { p.pipe(b, a, back) })
	both.Wait()
	p.cut(a)
	p.cut(b)
}

// cut resets a connection.
func (p *proxy) cut(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
	p.mu.Lock()
	delete(p.conns, c)
	p.mu.Unlock()
}

// pipe carries one direction. When it ends, so does the other.
func (p *proxy) pipe(from, to net.Conn, rng *rand.Rand) {
	buf := make([]byte, 256<<10)
	for {
		n, err := from.Read(buf[:1+rng.IntN(len(buf))])
		if n > 0 {
			if !p.good.Load() {
				switch d := rng.IntN(400); {
				case d == 0:
					p.cut(from)
					p.cut(to)
					return
				case d < 4:
					time.Sleep(time.Duration(rng.Int64N(int64(time.Second)))) // all that is on the way stands still
				case d < 200:
					time.Sleep(time.Duration(rng.Int64N(int64(3 * time.Millisecond))))
				}
			}
			if _, werr := to.Write(buf[:n]); werr != nil {
				p.cut(from)
				return
			}
		}
		if err == io.EOF {
			if tcp, ok := to.(*net.TCPConn); ok {
				_ = tcp.CloseWrite()
			}
			return
		}
		if err != nil {
			p.cut(to)
			return
		}
	}
}
