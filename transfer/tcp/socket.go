package tcp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
)

// sendfileChunk bounds one sendfile call, and so the time for which a Revoke may wait for it.
const sendfileChunk = 4 << 20

// control sets what must be set before connect or listen. cubic because bbr, a common default, reaches half the speed between
// machines that are close; the receive buffer is left alone because fixing it turns autotuning off. Kernels that lack one of
// these options still work, so errors are ignored.
func control(userTimeout time.Duration) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(userTimeout.Milliseconds()))
		})
	}
}

// keepAlive finds a dead host behind an idle connection within 30 s.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3}

func listen(ctx context.Context, address string, userTimeout time.Duration) (net.Listener, error) {
	lc := net.ListenConfig{Control: control(userTimeout), KeepAliveConfig: keepAlive}
	return lc.Listen(ctx, "tcp", address)
}

func dial(ctx context.Context, address string, userTimeout time.Duration) (*net.TCPConn, error) {
	d := net.Dialer{Control: control(userTimeout), KeepAliveConfig: keepAlive}
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// abort ends a connection with RST: what is queued in the kernel is dropped, not sent. It wakes whoever reads or writes and
// returns when the socket is closed.
func abort(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}

// sendFile sends one span of f, whose memory starts at offset base, page references and no copy. Each chunk has its own deadline.
func sendFile(c *net.TCPConn, rc syscall.RawConn, f *os.File, base int64, s region.Span, progress time.Duration) error {
	in, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = in.Control(func(fd uintptr) { failed = sendFD(c, rc, int(fd), base+s.Offset, s.Length, progress) })
	if err != nil {
		return err
	}
	return failed
}

func sendFD(c *net.TCPConn, rc syscall.RawConn, in int, offset, left int64, progress time.Duration) error {
	for left > 0 {
		if err := c.SetWriteDeadline(time.Now().Add(progress)); err != nil {
			return err
		}
		var n int
		var failed error
		err := rc.Write(func(fd uintptr) bool {
			for {
				n, failed = unix.Sendfile(int(fd), in, &offset, int(min(left, sendfileChunk)))
				if failed != unix.EINTR {
					return failed != unix.EAGAIN
				}
			}
		})
		switch {
		case err != nil:
			return err
		case failed != nil:
			return os.NewSyscallError("sendfile", failed)
		case n == 0:
			return os.NewSyscallError("sendfile", unix.ENODATA) // the file was cut short
		}
		left -= int64(n)
	}
	return nil
}

// patience is how long a wait for bytes stays unmentioned in the log.
const patience = 5 * time.Second

// receive fills bufs from the connection, with no buffer between, and gives up if no byte comes for progress. slow is called each
// time that nothing has come for the length of patience.
func receive(c *net.TCPConn, rc syscall.RawConn, bufs [][]byte, progress time.Duration, slow func()) error {
	bufs = slices.Clone(bufs) // the caller may need its own for another try
	var quiet time.Duration
	for len(bufs) > 0 {
		wait := progress - quiet
		if quiet == 0 {
			wait = min(wait, patience)
		}
		if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		var n int
		var failed error
		err := rc.Read(func(fd uintptr) bool {
			for {
				n, failed = unix.Readv(int(fd), bufs[:min(len(bufs), maxIovecs)])
				if failed != unix.EINTR {
					return failed != unix.EAGAIN
				}
			}
		})
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if quiet += wait; quiet >= progress {
				return err
			}
			slow()
			continue
		case err != nil:
			return err
		case failed != nil:
			return os.NewSyscallError("readv", failed)
		case n == 0:
			return io.ErrUnexpectedEOF
		}
		quiet = 0
		bufs = advance(bufs, n)
	}
	return nil
}

// maxIovecs bounds the slices given to one readv; the kernel's own limit is 1024.
const maxIovecs = 64

// advance drops the first n bytes of bufs.
func advance(bufs [][]byte, n int) [][]byte {
	for n > 0 && n >= len(bufs[0]) {
		n -= len(bufs[0])
		bufs = bufs[1:]
	}
	if n > 0 {
		bufs[0] = bufs[0][n:]
	}
	return bufs
}
