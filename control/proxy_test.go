package control

import (
	"bytes"
	"net"
	"sync"
	"testing"
	"time"
)

// proxy passes a TCP connection on and looks for ZMTP commands on the way.
type proxy struct {
	addr string

	mu    sync.Mutex
	seen  map[string][]byte // all bytes, by direction: "to" the target, "from" it
	conns int
}

func newProxy(t *testing.T, target string) *proxy {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{addr: ln.Addr().String(), seen: map[string][]byte{}}
	var running sync.WaitGroup
	var open []net.Conn
	running.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			d, err := net.Dial("tcp", target)
			if err != nil {
				c.Close()
				continue
			}
			p.mu.Lock()
			p.conns++
			open = append(open, c, d)
			p.mu.Unlock()
			running.Go(func() { p.pass("to", d, c) })
			running.Go(func() { p.pass("from", c, d) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		p.mu.Lock()
		for _, c := range open {
			c.Close()
		}
		p.mu.Unlock()
		running.Wait()
	})
	return p
}

func (p *proxy) pass(way string, dst, src net.Conn) {
	defer dst.Close()
	buf := make([]byte, 4096)
	for {
		n, err := src.Read(buf)
		p.mu.Lock()
		p.seen[way] = append(p.seen[way], buf[:n]...)
		p.mu.Unlock()
		if _, werr := dst.Write(buf[:n]); err != nil || werr != nil {
			return
		}
	}
}

// count says how often a command passed, and what followed its name the first time.
func (p *proxy) count(way, command string) (int, []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	name := append([]byte{byte(len(command))}, command...)
	i := bytes.Index(p.seen[way], name)
	if i < 0 {
		return 0, nil
	}
	return bytes.Count(p.seen[way], name), bytes.Clone(p.seen[way][i+len(name):])
}

func (p *proxy) connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conns
}

// eventually waits until ok says so.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
