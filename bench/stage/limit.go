package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/bench/internal/memcpy"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

// limit is what a put and a get by mapped cannot do without: one copy by memcpy in each process, on two cores from splitBytes on, and a
// byte to the producer and back before the second. It implements what the benchmark asks of a stage.Connector.
type limit struct {
	stage.Connector
	memory [2][]byte // mapped by both processes' own, and touched
	listen net.Listener
	conn   net.Conn
}

// splitBytes is from where a second core is used.
const splitBytes = 4 * mib

// openLimit is the producer's end if at is nil, which gives the name of its socket as a host; else the consumer's.
func openLimit(at *stage.Endpoint) (_ *limit, _ *stage.Endpoint, err error) {
	l := &limit{}
	for i := range l.memory {
		if l.memory[i], err = unix.Mmap(-1, 0, 256*mib, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_POPULATE); err != nil {
			return nil, nil, fmt.Errorf("map memory: %w", err)
		}
	}
	if at != nil {
		l.conn, err = net.Dial("unix", at.Host)
		return l, nil, err
	}
	at = &stage.Endpoint{Host: "@" + keyPrefix() + "limit"}
	if l.listen, err = net.Listen("unix", at.Host); err != nil {
		return nil, nil, err
	}
	go func() {
		if c, err := l.listen.Accept(); err == nil {
			_, _ = io.Copy(onlyWriter{c}, onlyReader{c}) // until the consumer ends
			_ = c.Close()
		}
	}()
	return l, at, nil
}

// Without these io.Copy would splice, between a socket and itself.
type (
	onlyReader struct{ io.Reader }
	onlyWriter struct{ io.Writer }
)

// Put implements stage.Connector.
func (l *limit) Put(_ context.Context, _ string, root tensor.Node, _ stage.PutOptions) (*stage.Published, error) {
	at := 0
	eachTensor(root, func(b []byte) {
		split(l.memory[0][at:at+len(b)], b)
		at += len(b)
	})
	return &stage.Published{Size: int64(at)}, nil
}

// copied is what a get copies: as much as the load has.
func (l *limit) copied(q *load) error {
	b := []byte{0}
	if _, err := l.conn.Write(b); err != nil {
		return err
	}
	if _, err := io.ReadFull(l.conn, b); err != nil {
		return err
	}
	n := q.total()
	split(l.memory[0][:n], l.memory[1][:n])
	return nil
}

// Close implements stage.Connector.
func (l *limit) Close(context.Context) error {
	if l.conn != nil {
		return l.conn.Close()
	}
	return l.listen.Close()
}

func split(dst, src []byte) {
	half := len(src) / 2
	if len(src) < splitBytes {
		memcpy.Copy(dst, src)
		return
	}
	var other sync.WaitGroup
	other.Go(func() { memcpy.Copy(dst[half:], src[half:]) })
	memcpy.Copy(dst[:half], src[:half])
	other.Wait()
}

func eachTensor(n tensor.Node, f func([]byte)) {
	switch n := n.(type) {
	case tensor.Tensor:
		f(n.Data())
	case tensor.List:
		for _, x := range n {
			eachTensor(x, f)
		}
	case tensor.Map:
		for _, x := range n {
			eachTensor(x.Value, f)
		}
	}
}
