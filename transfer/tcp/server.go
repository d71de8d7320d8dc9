package tcp

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/transfer/internal/span"
)

// copyBelow is the size up to which bytes are copied into the socket from the mapping: cheaper than page references for small
// READs (bench/results).
const copyBelow = 2 << 20

// keepBuffer bounds what an idle connection keeps of its largest request.
const keepBuffer = 16 << 10

// serverConn is an accepted connection. Its goroutine is the only one that reads and writes it; others may only abort it.
type serverConn struct {
	plane *Plane
	tcp   *net.TCPConn
	raw   syscall.RawConn
	in    *bufio.Reader
	reg   *registration
	last  *send // of the latest read request, until it has arrived
	buf   []byte
	head  []byte
}

// accept takes connections until the listener is closed or dead.
func (p *Plane) accept() {
	const pause = 100 * time.Millisecond // after an error such as EMFILE
	defer close(p.ended)
	for {
		c, err := p.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EBADF) { // no socket that listens any more
			p.opts.Log.Error("tcp: the listener has died", "err", err)
			return
		}
		if err != nil {
			p.opts.Log.Warn("tcp: accept", "err", err)
			time.Sleep(pause)
			continue
		}
		p.take(c.(*net.TCPConn))
	}
}

// take starts to serve c, or closes it if a limit is reached.
func (p *Plane) take(c *net.TCPConn) {
	source := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	p.mu.Lock()
	if p.closed || len(p.conns) >= p.opts.MaxConns || p.sources[source] >= p.opts.MaxConnsSource {
		p.mu.Unlock()
		p.refused.Add(1)
		p.opts.Log.Debug("tcp: connection refused: too many", "source", source)
		abort(c)
		return
	}
	s := &serverConn{plane: p, tcp: c, in: bufio.NewReaderSize(c, 4096)}
	p.conns[s] = struct{}{}
	p.sources[source]++
	p.mu.Unlock()
	p.running.Go(func() {
		err := s.serve()
		if errors.Is(err, errGarbage) {
			p.garbage.Add(1)
			p.opts.Log.Debug("tcp: connection dropped", "source", source, "err", err)
		}
		s.end(source)
	})
}

func (s *serverConn) end(source netip.Addr) {
	_ = s.tcp.Close()
	if s.last != nil {
		s.reg.arrived(s.last)
	}
	if s.reg != nil {
		s.reg.leave(s)
	}
	p := s.plane
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, s)
	if p.sources[source]--; p.sources[source] == 0 {
		delete(p.sources, source)
	}
}

// serve answers requests until the connection ends.
func (s *serverConn) serve() error {
	var err error
	if s.raw, err = s.tcp.SyscallConn(); err != nil {
		return err
	}
	if err := s.greet(); err != nil {
		return err
	}
	for {
		if err := s.tcp.SetReadDeadline(time.Now().Add(s.plane.opts.IdleTimeout)); err != nil {
			return err
		}
		h, err := readHeader(s.in)
		if err != nil {
			return err
		}
		if err := s.tcp.SetReadDeadline(time.Now().Add(s.plane.opts.ProgressTimeout)); err != nil {
			return err
		}
		if s.buf, err = readBody(s.in, s.buf, h.length, maxBody); err != nil {
			return err
		}
		if s.last != nil { // the reader asks on: it has the bytes
			s.reg.arrived(s.last)
			s.last = nil
		}
		if err := s.answer(h.kind); err != nil {
			return err
		}
		if cap(s.buf) > keepBuffer {
			s.buf = nil
		}
	}
}

// greet takes the hello, which must come at once, and answers it.
func (s *serverConn) greet() error {
	if err := s.tcp.SetDeadline(time.Now().Add(s.plane.opts.DialTimeout)); err != nil {
		return err
	}
	id, err := s.hello()
	switch {
	case errors.Is(err, errVersion):
		_ = s.say(kindWelcome, statusBadRequest, fmt.Sprintf("this is version %d", protocolVersion))
		return err
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("%w: no hello: %w", errGarbage, err)
	case err != nil:
		return err
	}
	r := s.plane.registration(id)
	if r == nil || !r.join(s) {
		_ = s.say(kindWelcome, statusUnknown, "no such instance or registration here")
		return net.ErrClosed
	}
	s.reg = r
	return s.say(kindWelcome, statusOK, "")
}

func (s *serverConn) hello() (id endpointID, err error) {
	h, err := readHeader(s.in)
	if err != nil {
		return id, err
	}
	if h.kind != kindHello {
		return id, fmt.Errorf("%w: kind %d before hello", errGarbage, h.kind)
	}
	b, err := readBody(s.in, nil, h.length, helloBytes)
	if err != nil {
		return id, err
	}
	return parseHello(b)
}

func (s *serverConn) answer(k kind) error {
	if k != kindRead && k != kindCommit {
		return errGarbage
	}
	q, err := parseRequest(k, s.buf)
	if err != nil {
		return err
	}
	if k == kindCommit {
		st := s.reg.commit(q)
		return s.say(kindDone, st, text[st])
	}
	sd, st := s.reg.begin(s, q)
	if st != statusOK {
		s.plane.denied.Add(1)
		return s.say(kindData, st, text[st])
	}
	s.last = sd
	defer close(sd.idle)
	return s.send(q)
}

// text explains refusals.
var text = map[status]string{
	statusDenied:     "no such grant, or it ended, or it does not have these spans",
	statusBadRequest: "spans outside the memory",
}

// say writes an answer without data.
func (s *serverConn) say(k kind, st status, text string) error {
	if err := s.tcp.SetWriteDeadline(time.Now().Add(s.plane.opts.ProgressTimeout)); err != nil {
		return err
	}
	s.head = append(header{kind: k, status: st, length: int64(len(text))}.append(s.head[:0]), text...)
	_, err := s.tcp.Write(s.head)
	return err
}

// send writes the data of a read whose grant was found live.
func (s *serverConn) send(q request) error {
	var total int64
	for _, sp := range q.spans {
		total += sp.Length
	}
	s.head = header{kind: kindData, length: total}.append(s.head[:0])
	m, progress := s.reg.memory, s.plane.opts.ProgressTimeout
	if m.File == nil || total <= copyBelow {
		return write(s.tcp, append([][]byte{s.head}, span.Slices(m.Bytes, q.spans)...), progress)
	}
	if err := write(s.tcp, [][]byte{s.head}, progress); err != nil {
		return err
	}
	for _, sp := range q.spans {
		if err := sendFile(s.tcp, s.raw, m.File, m.FileOffset, sp, progress); err != nil {
			return err
		}
	}
	return nil
}

// write sends bufs in batches, each with its own deadline.
func write(c *net.TCPConn, bufs [][]byte, progress time.Duration) error {
	for _, p := range batches(bufs, sendfileChunk) {
		if err := c.SetWriteDeadline(time.Now().Add(progress)); err != nil {
			return err
		}
		b := net.Buffers(p)
		if _, err := b.WriteTo(c); err != nil {
			return err
		}
	}
	return nil
}

// batches cuts bufs into runs of at most limit bytes.
func batches(bufs [][]byte, limit int) [][][]byte {
	var out [][][]byte
	var run [][]byte
	room := limit
	for _, b := range bufs {
		for len(b) > 0 {
			n := min(len(b), room)
			run = append(run, b[:n])
			b = b[n:]
			if room -= n; room == 0 {
				out, run, room = append(out, run), nil, limit
			}
		}
	}
	if len(run) > 0 {
		out = append(out, run)
	}
	return out
}
