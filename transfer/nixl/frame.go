package nixl

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/fields"
)

// What a plane and an agent process say to each other, over a pair of unix stream sockets: frames of a length (4 bytes, of what
// follows), a kind (1 byte), an id (8 bytes) and a body, all little endian. Every request but dropPeer, detach, attend and end is answered by one
// reply with its id: a code, a text, and what was asked for. Both ends are one build, so there is no version; takeOver and end, which
// another build may send, stay as they are.
type frameKind uint8

const (
	frameHello        frameKind = iota + 1 // JSON of hello; reply: JSON of facts
	frameAttach                            // memory id, offset, length, how, epoch; a descriptor; reply: base, agent metadata
	frameDetach                            // memory id
	frameAddPeer                           // metadata; reply: peer id
	frameDropPeer                          // peer id
	frameRead                              // peer id, whether to notify, the message, the memory type, pieces
	frameAttend                            // nothing
	frameReply                             // to the plane
	frameNotification                      // to the plane: the message
	frameTakeOver                          // a descriptor of the region: first on a connection to an agent that outlived its plane; reply: nothing
	frameEnd                               // the process is to end
)

const (
	frameHeader = 4 + 1 + 8
	maxFrame    = 4 << 20 // a READ of maxPieces has 2.3 MB
	pieceBytes  = 4 + 4*8
	writeStall  = 10 * time.Second // an agent process that reads nothing for so long is given up
	maxBacklog  = 64 << 20         // bytes that wait to be written, of frames that may be refused
)

type frame struct {
	kind frameKind
	id   uint64
	body []byte // valid until the next one is read
}

var errBadFrame = errors.New("nixl: malformed frame of an agent process")

// wire is one end. Reading is one goroutine's; writing is anybody's, and never waits: what the socket does not take at once is written
// by a goroutine, in order, for as long as the other end is there.
type wire struct {
	conn *net.UnixConn
	raw  syscall.RawConn

	buf        []byte
	start, end int
	fds        []*os.File // received, in order

	mu      sync.Mutex
	out     []byte
	stall   time.Duration // the other end may read nothing for so long; 0: for ever
	backlog []chunk       // not written yet
	waiting int           // bytes of it
	writing bool          // a goroutine writes the backlog
	broken  error         // nothing can be written any more
}

// chunk is a frame, or the rest of one.
type chunk struct {
	bytes []byte
	file  *os.File // goes with the first byte; owned; nil: none
}

// errBacklog refuses a frame because too much waits already. The wire goes on.
var errBacklog = errors.New("nixl: too much waits to be written to an agent process")

func newWire(f *os.File) (*wire, error) {
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("nixl: socket of an agent process: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		_ = c.Close()
		return nil, fmt.Errorf("nixl: descriptor %d is no unix socket", f.Fd())
	}
	return wireOf(u), nil
}

func wireOf(c *net.UnixConn) *wire {
	raw, err := c.SyscallConn() // fails only on a connection that was never made
	return &wire{conn: c, raw: raw, broken: err, buf: make([]byte, 64<<10)}
}

// send writes one frame, with a file if f is not nil, or leaves it to be written. body appends what follows the header. After
// ErrBadRequest and errBacklog, which a frame of a kind that cannot be missed (urgent) does not get, the wire goes on; after other
// errors it is over.
func (w *wire) send(kind frameKind, id uint64, f *os.File, body func([]byte) []byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.broken != nil {
		return w.broken
	}
	b := append(w.out[:0], 0, 0, 0, 0, byte(kind))
	b = binary.LittleEndian.AppendUint64(b, id)
	if body != nil {
		b = body(b)
	}
	if cap(b) <= 1<<20 {
		w.out = b
	}
	if len(b) > maxFrame {
		return fmt.Errorf("%w: nixl: a frame of %d bytes, at most %d", transfer.ErrBadRequest, len(b), maxFrame)
	}
	binary.LittleEndian.PutUint32(b, uint32(len(b)-4))
	if w.writing {
		if w.waiting+len(b) > maxBacklog && !kind.urgent() {
			return errBacklog
		}
		return w.later(slices.Clone(b), f)
	}
	n, err := w.now(b, f)
	switch {
	case err != nil:
		w.breakOff(err)
		return err
	case n == len(b):
		return nil
	case n > 0:
		f = nil
	}
	return w.later(slices.Clone(b[n:]), f)
}

// urgent frames are few, or bounded by what they answer.
func (k frameKind) urgent() bool { return k != frameRead && k != frameNotification }

// now writes what the socket takes without waiting. With the lock, and without a backlog.
func (w *wire) now(b []byte, f *os.File) (n int, err error) {
	var rights []byte
	if f != nil {
		rights = unix.UnixRights(int(f.Fd()))
	}
	e := w.raw.Write(func(fd uintptr) bool {
		for n < len(b) {
			var k int
			k, err = unix.SendmsgN(int(fd), b[n:], rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
			switch {
			case err == unix.EINTR:
				continue
			case err == unix.EAGAIN:
				err = nil
				return true
			case err != nil:
				return true
			}
			n, rights = n+k, nil
		}
		return true
	})
	return n, errors.Join(e, err)
}

// later leaves b, which it takes, to be written. With the lock.
func (w *wire) later(b []byte, f *os.File) error {
	c := chunk{bytes: b}
	if f != nil { // the caller may close it when send returns
		fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("%w: nixl: descriptor for an agent process: %w", transfer.ErrBadRequest, err)
		}
		c.file = os.NewFile(uintptr(fd), f.Name())
	}
	w.backlog = append(w.backlog, c)
	w.waiting += len(b)
	if !w.writing {
		w.writing = true
		go w.write()
	}
	return nil
}

// write writes the backlog and ends when there is none.
func (w *wire) write() {
	for {
		w.mu.Lock()
		if len(w.backlog) == 0 {
			w.writing = false
			w.backlog = nil
			w.mu.Unlock()
			return
		}
		c, stall := w.backlog[0], w.stall
		w.mu.Unlock()
		err := w.writeOut(c, stall)
		w.mu.Lock()
		if err != nil {
			w.breakOff(err)
			w.mu.Unlock()
			return
		}
		w.backlog[0] = chunk{}
		w.backlog = w.backlog[1:]
		w.waiting -= len(c.bytes)
		w.mu.Unlock()
		if c.file != nil {
			_ = c.file.Close()
		}
	}
}

func (w *wire) writeOut(c chunk, stall time.Duration) error {
	var rights []byte
	if c.file != nil {
		rights = unix.UnixRights(int(c.file.Fd()))
	}
	for b := c.bytes; len(b) > 0; {
		var deadline time.Time
		if stall > 0 {
			deadline = time.Now().Add(stall)
		}
		if err := w.conn.SetWriteDeadline(deadline); err != nil {
			return err
		}
		// In parts, so that the deadline is that of some progress.
		n, _, err := w.conn.WriteMsgUnix(b[:min(len(b), 64<<10)], rights, nil)
		if err != nil {
			return err
		}
		b, rights = b[n:], nil
	}
	return w.conn.SetWriteDeadline(time.Time{})
}

// breakOff ends the wire at both ends: a part of a frame may have been written, so nothing can follow. With the lock.
func (w *wire) breakOff(err error) {
	w.broken = err
	for _, c := range w.backlog {
		if c.file != nil {
			_ = c.file.Close()
		}
	}
	w.backlog, w.waiting = nil, 0
	_ = w.conn.CloseWrite() // both fail only on a connection that is gone
	_ = w.conn.CloseRead()
}

// failure is what ended the writing; nil: nothing did.
func (w *wire) failure() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.broken
}

// next reads one frame.
func (w *wire) next() (frame, error) {
	for {
		if have := w.end - w.start; have >= 4 {
			n := int(binary.LittleEndian.Uint32(w.buf[w.start:]))
			if n < frameHeader-4 || n > maxFrame {
				return frame{}, fmt.Errorf("%w: length %d", errBadFrame, n)
			}
			if have >= 4+n {
				b := w.buf[w.start+4 : w.start+4+n]
				w.start += 4 + n
				return frame{frameKind(b[0]), binary.LittleEndian.Uint64(b[1:]), b[9:]}, nil
			}
			w.room(4 + n)
		} else {
			w.room(frameHeader)
		}
		if err := w.fill(); err != nil {
			return frame{}, err
		}
	}
}

// room makes the buffer hold a frame of n bytes.
func (w *wire) room(n int) {
	if w.start+n <= len(w.buf) {
		return
	}
	to := w.buf
	if n > len(w.buf) {
		to = make([]byte, n)
	}
	w.end = copy(to, w.buf[w.start:w.end])
	w.start, w.buf = 0, to
}

func (w *wire) fill() error {
	if w.end == len(w.buf) {
		w.room(len(w.buf) - w.start + 1)
	}
	var oob [128]byte
	n, oobn, _, _, err := w.conn.ReadMsgUnix(w.buf[w.end:], oob[:])
	if err != nil {
		return err
	}
	if n == 0 && oobn == 0 {
		return io.EOF
	}
	w.end += n
	if oobn == 0 {
		return nil
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return fmt.Errorf("%w: %w", errBadFrame, err)
	}
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return fmt.Errorf("%w: %w", errBadFrame, err)
		}
		for _, fd := range fds {
			w.fds = append(w.fds, os.NewFile(uintptr(fd), "received"))
		}
	}
	return nil
}

// file takes the descriptor that came with the frame at hand.
func (w *wire) file() (*os.File, error) {
	if len(w.fds) == 0 {
		return nil, fmt.Errorf("%w: no descriptor", errBadFrame)
	}
	f := w.fds[0]
	w.fds = w.fds[1:]
	return f, nil
}

// Codes of replies: which of the contract's errors it is, or of ours. The last that fits counts.
var replyErrors = []error{
	nil, transfer.ErrBadRequest, transfer.ErrPeerLost, transfer.ErrUnreachable, transfer.ErrClosed, ErrMissing, binding.ErrUnsupported, errUnsettled,
}

func appendReply(b []byte, err error) []byte {
	code, text := 0, ""
	if err != nil {
		code, text = 2, err.Error()
		for i := len(replyErrors) - 1; i > 0; i-- {
			if errors.Is(err, replyErrors[i]) {
				code = i
				break
			}
		}
	}
	b = append(b, byte(code))
	return fields.AppendString(b, text[:min(len(text), 4096)])
}

// remoteError is an error of an agent process. Its text names the kind already.
type remoteError struct {
	kind error
	text string
}

func (e *remoteError) Error() string { return e.text }
func (e *remoteError) Unwrap() error { return e.kind }

// parseReply gives the error of a reply, and what follows it.
func parseReply(body []byte) (*fields.Reader, error) {
	r := fields.NewReader(body)
	code := r.Bytes(1)
	text := r.Str()
	switch {
	case !r.OK() || int(code[0]) >= len(replyErrors):
		return nil, fmt.Errorf("%w: %w: reply of %d bytes", transfer.ErrPeerLost, errBadFrame, len(body))
	case code[0] != 0:
		return nil, &remoteError{replyErrors[code[0]], text}
	}
	return r, nil
}

func appendRead(b []byte, r readOp) []byte {
	b = binary.LittleEndian.AppendUint64(b, r.peer)
	notify := byte(0)
	if r.notify {
		notify = 1
	}
	b = append(b, notify)
	b = fields.AppendString(b, string(r.note))
	b = append(b, byte(r.far))
	b = binary.LittleEndian.AppendUint32(b, uint32(len(r.pieces)))
	for _, p := range r.pieces {
		b = binary.LittleEndian.AppendUint32(b, p.memory)
		b = binary.LittleEndian.AppendUint64(b, p.offset)
		b = binary.LittleEndian.AppendUint64(b, p.remote)
		b = binary.LittleEndian.AppendUint64(b, p.length)
		b = binary.LittleEndian.AppendUint64(b, p.device)
	}
	return b
}

func parseRead(body []byte) (readOp, error) {
	r := fields.NewReader(body)
	op := readOp{peer: r.Uint64()}
	notify := r.Bytes(1)
	op.note = []byte(r.Str())
	far := r.Bytes(1)
	n := int(r.Uint32())
	if !r.OK() || n > maxPieces || r.Len() != n*pieceBytes {
		return readOp{}, errBadFrame
	}
	op.notify, op.far = notify[0] != 0, binding.MemoryType(far[0])
	op.pieces = make([]piece, n)
	for i := range op.pieces {
		op.pieces[i] = piece{r.Uint32(), r.Uint64(), r.Uint64(), r.Uint64(), r.Uint64()}
	}
	return op, nil
}
