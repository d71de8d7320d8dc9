// Package client is the Go client of a node's engine API (docs/engine-api.md): what an engine on the node's machine uses to save,
// announce, fetch and map encodings.
//
// A Client is one connection at a time. When that is lost the client connects again by itself, says so once, and restates what it
// has: Reservations and Mapped go on working, calls under way are repeated, and calls that begin meanwhile wait for a while
// (Options.Wait). So a node that is restarted costs its engines a pause. Methods are safe for concurrent use; each takes one round
// trip, and Batch takes one for a whole step.
//
// Buffers of reservations and of mapped entries are slices of the pool itself: nothing is copied. They stay mapped until Commit,
// Discard or Release, also when the connection is lost; Mapped.Valid tells if they still hold the entry. After that, and after Close,
// the memory may be unmapped: touching such a slice is then a fault that ends the program, never a silent write into memory that by
// then is another's.
//
// A node that ended for good, or could not go on with its region, leaves a file without a name. A Client lets go of it as soon as
// nothing in it is reserved or mapped, connected or not: the node that comes next may need the memory before it can start.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
)

// Errors of a connection. Errors about a key wrap those of package ec.
var (
	ErrClosed      = api.ErrClosed      // over: Close was called, or the node refuses this client for good
	ErrProtocol    = api.ErrMalformed   // the other end does not speak the engine API
	ErrVersion     = api.ErrVersion     // no protocol version in common
	ErrNoPool      = api.ErrNoPool      // no such pool, or several and none named
	ErrDenied      = api.ErrDenied      // another user's node, or a process that the node cannot watch
	ErrLimit       = api.ErrLimit       // a limit of the protocol or of the connection
	ErrBadRequest  = api.ErrBadRequest  // a field is missing or impossible
	ErrUnsupported = api.ErrUnsupported // an older node, which does not know the operation
	ErrClosing     = api.ErrClosing     // the node is ending

	// ErrDisconnected means that there is no connection now and the client is making one: try again later. Of a call that ends so
	// it is not known whether it was carried out; what it had reserved or mapped is given back.
	ErrDisconnected = errors.New("engine api: connection lost, connecting again")
)

// Error is an outcome that came from the node: operation, key, code, the node's text. errors.Is sees the sentinel behind the code.
type Error = api.Error

const (
	handshakeTimeout = 10 * time.Second // of Dial, where its context has no earlier deadline
	byeTimeout       = time.Second      // of Close, until a node that has not read for a while has taken the last requests and the bye
	backlogBytes     = 64 << 20         // requests that may wait for the node to read

	// DefaultWait is Options.Wait where none is given: a node's restart without the verification of a large pool.
	DefaultWait = 5 * time.Second
)

// Options of Dial.
type Options struct {
	Name string // shows in logs and lists
	Pool string // compatibility hash of the pool wanted; "" if the node has just one

	// Once makes the client one connection: its loss is the end, as Close is.
	Once bool
	// Wait is how long a call waits for a lost connection to come back before it ends with ErrDisconnected; 0: DefaultWait,
	// negative: not at all.
	Wait time.Duration
	Log  *slog.Logger // nil: slog.Default()
}

// Pool describes the pool that the connection uses.
type Pool struct {
	Group       string
	Model       string
	Dtype       string
	VLLMVersion string
	BlockBytes  int64
	Blocks      int
	Region      string // path, for people
	Node        string
	Epoch       uint64
	PeerHost    string
	PeerPort    int
	Generation  int
}

// Client is an engine's end of the connections to its node.
type Client struct {
	socket string
	o      Options
	ctx    context.Context // ends what connects again
	cancel context.CancelFunc

	// memory is held for reading while a method of the client itself touches a mapping, and for writing to change or unmap one.
	memory   sync.RWMutex
	mapping  *mapping   // of the pool as it was at the last connection; nil once closed
	earlier  []*mapping // of files before that, in which something is still reserved or mapped
	closing  sync.Once
	closeErr error

	mu     sync.Mutex
	pool   Pool
	token  []byte
	link   *link         // the connection, or the last one
	up     chan struct{} // closed when link has a successor
	nextID uint64
	calls  map[uint64]*call  // requests without a reply
	refs   map[uint64]pushee // operations that answer by pushes
	filled map[*Reservation]struct{}
	pinned map[*Mapped]struct{}
	err    error // set before done is closed
	done   chan struct{}
	reader sync.WaitGroup
}

// link is one connection. What was given on it means nothing on another.
type link struct {
	conn    *api.Conn
	mapping *mapping      // of the pool that it speaks of
	gone    chan struct{} // closed when it is lost
	err     error         // why; set before gone is closed

	reading sync.Mutex // held by whoever receives and carries out what came; before Client.mu
	readErr error      // the end of that
}

// mapping is a mapped pool file.
type mapping struct {
	*region.Mapping
	file  *os.File
	bytes []byte // nil once unmapped; under Client.memory
	table *region.SlotTable
	dev   uint64
	ino   uint64
	uses  int  // Reservations and Mapped that are not over; under Client.mu
	said  bool // that it is kept, though no node will go on with it; under Client.mu
}

// unmap is idempotent. Called with Client.memory held for writing.
func (m *mapping) unmap() error {
	m.bytes, m.table = nil, nil
	err := m.Close()
	if closeErr := m.file.Close(); !errors.Is(closeErr, os.ErrClosed) {
		err = errors.Join(err, closeErr)
	}
	return err
}

// orphaned says that the file has no name any more: no node will go on with it.
func (m *mapping) orphaned() bool {
	var st unix.Stat_t
	raw, err := m.file.SyscallConn()
	if err != nil {
		return false
	}
	statErr := unix.EBADF
	err = raw.Control(func(fd uintptr) { statErr, _ = unix.Fstat(int(fd), &st).(unix.Errno) })
	return err == nil && statErr == 0 && st.Nlink == 0
}

// call is a request that waits for its reply.
type call struct {
	ops       []api.Op
	reply     func([]api.Result) // called once, by the reader; nil: nobody wants it
	abandoned bool               // the caller has gone: what the reply grants is given back
}

// pushee takes the pushes of one operation. Both methods are called with Client.mu held and must not block. push says whether it
// took the pin that came along.
type pushee interface {
	push(p *api.Push) (took bool)
	lost(err error)
}

// Dial connects to the node's unix socket, says who it is and maps the pool. A node that ends or starts meanwhile (nobody listens, or
// the connection is lost before the welcome) is tried again until ctx ends, or for 10 s. A socket that does not exist is an error at
// once.
func Dial(ctx context.Context, socket string, o Options) (*Client, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	c, err := dial(ctx, socket, o)
	if err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w (%w)", ctx.Err(), err)
		}
		return nil, fmt.Errorf("dial node %s: %w", socket, err)
	}
	return c, nil
}

func dial(ctx context.Context, socket string, o Options) (*Client, error) {
	if o.Wait == 0 {
		o.Wait = DefaultWait
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	conn, welcome, file, err := firstConnection(ctx, socket, &api.Hello{Name: o.Name, Pool: o.Pool})
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	m, err := mapPool(welcome, file, nil)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	c := &Client{
		socket:  socket,
		o:       o,
		mapping: m,
		link:    &link{conn: conn, mapping: m, gone: make(chan struct{})},
		up:      make(chan struct{}),
		calls:   make(map[uint64]*call),
		refs:    make(map[uint64]pushee),
		filled:  make(map[*Reservation]struct{}),
		pinned:  make(map[*Mapped]struct{}),
		done:    make(chan struct{}),
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.welcomed(welcome)
	c.reader.Go(func() { c.run(c.link) })
	return c, nil
}

// firstConnection is connect, with patience for a node that is on its way down or up.
func firstConnection(ctx context.Context, socket string, hello *api.Hello) (*api.Conn, *api.Welcome, *os.File, error) {
	var before error // of the last attempt
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		conn, welcome, file, err := connect(ctx, socket, hello)
		switch {
		case err == nil:
			return conn, welcome, file, nil
		case ctx.Err() != nil:
			return nil, nil, nil, errors.Join(before, err)
		// A node that ended cleanly has taken its socket along; the next one makes another.
		case !restarting(err) && !(before != nil && errors.Is(err, os.ErrNotExist)):
			return nil, nil, nil, err
		}
		before = err
		select {
		case <-time.After(pause/2 + rand.N(pause)/2):
		case <-ctx.Done():
			return nil, nil, nil, err
		}
	}
}

// restarting says that a node was there, or still is, and that another may be soon. EAGAIN is that of a node that has not accepted for a
// while: as many wait as its socket takes.
func restarting(err error) bool {
	for _, e := range []error{io.EOF, io.ErrUnexpectedEOF, unix.ECONNRESET, unix.EPIPE, unix.ECONNREFUSED, unix.EAGAIN, ErrClosing} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// connect makes a connection up to the welcome. The file is the caller's to close.
func connect(ctx context.Context, socket string, hello *api.Hello) (*api.Conn, *api.Welcome, *os.File, error) {
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, nil, nil, err
	}
	sock := nc.(*net.UnixConn)
	conn, err := api.NewConn(sock, api.ConnOptions{InLimit: api.MaxReplyFrame, Backlog: backlogBytes})
	if err != nil {
		_ = sock.Close()
		return nil, nil, nil, err
	}
	welcome, file, err := handshake(ctx, sock, conn, hello)
	if err != nil {
		if file != nil {
			_ = file.Close()
		}
		_ = conn.Close()
		return nil, nil, nil, err
	}
	return conn, welcome, file, nil
}

func handshake(ctx context.Context, sock *net.UnixConn, conn *api.Conn, hello *api.Hello) (*api.Welcome, *os.File, error) {
	// The pool of another user could be cut short under our feet.
	peer, err := api.PeerOf(sock, false)
	if err != nil {
		return nil, nil, err
	}
	if uid := os.Getuid(); peer.UID != 0 && peer.UID != uid {
		return nil, nil, fmt.Errorf("%w: the node runs as uid %d, this process as %d", ErrDenied, peer.UID, uid)
	}

	stop := context.AfterFunc(ctx, func() { _ = conn.SetReceiveDeadline(time.Unix(1, 0)) })
	defer stop()
	hello.Version, hello.MinVersion = api.Version, api.MinVersion
	// An error here can be that the node has refused us and closed: its last frame says why.
	sendErr := conn.Send(api.MaxRequestFrame, hello)
	m, file, err := conn.ReceiveWithFile()
	if err != nil {
		return nil, file, errors.Join(sendErr, err)
	}
	switch m := m.(type) {
	case *api.Refused:
		return nil, file, &api.Error{Code: m.Code, Message: m.Message}
	case *api.Welcome:
		if m.Version < api.MinVersion || m.Version > api.Version {
			return nil, file, fmt.Errorf("%w: the node chose %d, this client speaks %d to %d", ErrVersion, m.Version, api.MinVersion, api.Version)
		}
		if file == nil {
			return nil, nil, fmt.Errorf("%w: the welcome came without the pool's file", ErrProtocol)
		}
		return m, file, nil
	}
	return nil, file, fmt.Errorf("%w: a %T where the welcome belongs", ErrProtocol, m)
}

// mapPool maps the pool's file, unless it is the one that is mapped already.
func mapPool(w *api.Welcome, file *os.File, have *mapping) (*mapping, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return nil, err
	}
	m := have
	if have == nil || have.dev != uint64(st.Dev) || have.ino != st.Ino {
		attached, err := region.Attach(file, true)
		if err != nil {
			return nil, err
		}
		fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, errors.Join(err, attached.Close())
		}
		m = &mapping{
			Mapping: attached, file: os.NewFile(uintptr(fd), file.Name()), bytes: attached.Pool(), table: attached.Slots(),
			dev: uint64(st.Dev), ino: st.Ino,
		}
	}
	if g := m.Geometry(); g.BlockBytes != w.Pool.BlockBytes || g.Blocks != w.Pool.Blocks {
		if m != have {
			_ = m.unmap()
		}
		return nil, fmt.Errorf("%w: the node speaks of %d blocks of %d bytes, the file has %d of %d",
			ErrProtocol, w.Pool.Blocks, w.Pool.BlockBytes, g.Blocks, g.BlockBytes)
	}
	return m, nil
}

// welcomed takes in what a welcome says. Called with the lock held, but for the first.
func (c *Client) welcomed(w *api.Welcome) {
	c.token = w.Token
	c.pool = Pool{
		Group: w.Pool.Group, Model: w.Pool.Model, Dtype: w.Pool.Dtype, VLLMVersion: w.Pool.VLLMVersion,
		BlockBytes: w.Pool.BlockBytes, Blocks: w.Pool.Blocks, Region: w.Pool.Region,
		Node: w.Node, Epoch: w.Epoch, PeerHost: w.PeerHost, PeerPort: w.PeerPort, Generation: w.Generation,
	}
}

// Pool describes the pool, as of the last connection: Epoch changes when the node is restarted.
func (c *Client) Pool() Pool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pool
}

// Done is closed when the client is over: by Close, or because the node refuses it for good, or with Options.Once by the loss of
// the connection. Err says why.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err is nil while there is a connection, wraps ErrDisconnected while one is being made, and ErrClosed once the client is over.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	select {
	case <-c.link.gone:
		return c.link.err
	default:
		return nil
	}
}

// Close ends it; what was reserved is discarded, what was mapped is released. The pool is unmapped first: no slice of it may be
// touched any more. It waits for Puts that are copying. Idempotent.
func (c *Client) Close() error {
	c.closing.Do(func() {
		c.memory.Lock()
		maps := append(c.earlier, c.mapping)
		c.mapping, c.earlier = nil, nil
		for _, m := range maps {
			c.closeErr = errors.Join(c.closeErr, m.unmap())
		}
		c.memory.Unlock()
		c.cancel()
		// Best effort: without it the node keeps what was reserved here out of use until this process ends.
		c.mu.Lock()
		if c.link.conn.Send(api.MaxRequestFrame, &api.Bye{}) == nil {
			_ = c.link.conn.Flush(byeTimeout)
		}
		c.endLocked(ErrClosed)
		c.mu.Unlock()
		c.reader.Wait()
	})
	return c.closeErr
}

// end makes the client over, once: every call and every ref learns of it.
func (c *Client) end(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endLocked(err)
}

func (c *Client) endLocked(err error) {
	if c.err != nil {
		return
	}
	c.err = err
	close(c.done)
	c.lose(err)
	c.shedLocked()
}

// lose ends the connection: its calls and refs learn of it. Called with the lock held.
func (c *Client) lose(err error) {
	l := c.link
	select {
	case <-l.gone:
		return
	default:
	}
	l.err = err
	close(l.gone)
	_ = l.conn.Close()
	clear(c.calls)
	for ref, p := range c.refs {
		delete(c.refs, ref)
		p.lost(err)
	}
}
