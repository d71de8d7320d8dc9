// Package client is the Go client of a node's engine API (docs/engine-api.md): what an engine on the node's machine uses to save,
// announce, fetch and map encodings.
//
// A Client is one connection. The node treats its end, however it comes, as the death of the engine: reservations are
// discarded, pins released. Methods are safe for concurrent use; each takes one round trip, and Batch takes one for a whole step.
//
// Buffers of reservations and of mapped entries are slices of the pool itself: nothing is copied. They stay valid when the
// connection is lost, and until Close. After Close the memory is unmapped: touching such a slice is a fault that ends the program,
// never a silent write into memory that by then is another's.
package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
)

// Errors of a connection. Errors about a key wrap those of package ec.
var (
	ErrClosed      = api.ErrClosed      // the connection is over: Close was called, or the node has gone
	ErrProtocol    = api.ErrMalformed   // the other end does not speak the engine API
	ErrVersion     = api.ErrVersion     // no protocol version in common
	ErrNoPool      = api.ErrNoPool      // no such pool, or several and none named
	ErrDenied      = api.ErrDenied      // another user's node, or a process that the node cannot watch
	ErrLimit       = api.ErrLimit       // a limit of the protocol or of the connection
	ErrBadRequest  = api.ErrBadRequest  // a field is missing or impossible
	ErrUnsupported = api.ErrUnsupported // an older node, which does not know the operation
	ErrClosing     = api.ErrClosing     // the node is ending
)

// Error is an outcome that came from the node: operation, key, code, the node's text. errors.Is sees the sentinel behind the code.
type Error = api.Error

const (
	handshakeTimeout = 10 * time.Second // of Dial, where its context has no earlier deadline
	backlogBytes     = 64 << 20         // requests that may wait for the node to read
)

// Options of Dial.
type Options struct {
	Name string // shows in logs and lists
	Pool string // compatibility hash of the pool wanted; "" if the node has just one
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

// Client is a connection to a node.
type Client struct {
	conn    *api.Conn
	pool    Pool
	mapping *region.Mapping

	// memory is held for reading while a method of the client itself touches the mapping, and for writing to unmap it.
	memory   sync.RWMutex
	bytes    []byte // the pool; nil once unmapped
	closing  sync.Once
	closeErr error

	mu     sync.Mutex
	nextID uint64
	calls  map[uint64]*call  // requests without a reply
	refs   map[uint64]pushee // operations that answer by pushes
	err    error             // set before done is closed
	done   chan struct{}
	reader sync.WaitGroup
}

// call is a request that waits for its reply.
type call struct {
	ops       []api.Op
	reply     chan []api.Result // takes the one reply without blocking the reader; nil: nobody wants it
	abandoned bool              // the caller has gone: what the reply grants is given back
}

// pushee takes the pushes of one operation. Both methods are called with Client.mu held and must not block. push says whether it
// took the pin that came along.
type pushee interface {
	push(p *api.Push) (took bool)
	lost(err error)
}

// Dial connects to the node's unix socket, says who it is and maps the pool.
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
	var d net.Dialer
	nc, err := d.DialContext(ctx, "unix", socket)
	if err != nil {
		return nil, err
	}
	sock := nc.(*net.UnixConn)
	conn, err := api.NewConn(sock, api.ConnOptions{InLimit: api.MaxReplyFrame, Backlog: backlogBytes})
	if err != nil {
		_ = sock.Close()
		return nil, err
	}
	welcome, file, err := handshake(ctx, sock, conn, o)
	if file != nil {
		defer func() { _ = file.Close() }()
	}
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	c, err := newClient(conn, welcome, file)
	if err != nil {
		_ = conn.Close()
		return nil, err
	}
	return c, nil
}

func handshake(ctx context.Context, sock *net.UnixConn, conn *api.Conn, o Options) (*api.Welcome, *os.File, error) {
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
	hello := &api.Hello{Version: api.Version, MinVersion: api.MinVersion, Name: o.Name, Pool: o.Pool}
	// An error here can be that the node has refused us and closed: its last frame says why.
	sendErr := conn.Send(hello, api.MaxRequestFrame)
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

func newClient(conn *api.Conn, w *api.Welcome, file *os.File) (*Client, error) {
	mapping, err := region.Attach(file, true)
	if err != nil {
		return nil, err
	}
	if g := mapping.Geometry(); g.BlockBytes != w.Pool.BlockBytes || g.Blocks != w.Pool.Blocks {
		_ = mapping.Close()
		return nil, fmt.Errorf("%w: the node speaks of %d blocks of %d bytes, the file has %d of %d",
			ErrProtocol, w.Pool.Blocks, w.Pool.BlockBytes, g.Blocks, g.BlockBytes)
	}
	c := &Client{
		conn:    conn,
		mapping: mapping,
		bytes:   mapping.Pool(),
		pool: Pool{
			Group: w.Pool.Group, Model: w.Pool.Model, Dtype: w.Pool.Dtype, VLLMVersion: w.Pool.VLLMVersion,
			BlockBytes: w.Pool.BlockBytes, Blocks: w.Pool.Blocks, Region: w.Pool.Region,
			Node: w.Node, Epoch: w.Epoch, PeerHost: w.PeerHost, PeerPort: w.PeerPort, Generation: w.Generation,
		},
		calls: make(map[uint64]*call),
		refs:  make(map[uint64]pushee),
		done:  make(chan struct{}),
	}
	c.reader.Add(1)
	go c.read()
	return c, nil
}

// Pool describes the pool of this connection.
func (c *Client) Pool() Pool { return c.pool }

// Done is closed when the connection is lost or closed; Err says why.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err is nil while the connection lives, then an error that wraps ErrClosed.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// Close ends the connection; what was reserved is discarded, what was mapped is released. The pool is unmapped first: no slice of
// it may be touched any more. It waits for Puts that are copying. Idempotent.
func (c *Client) Close() error {
	c.closing.Do(func() {
		c.memory.Lock()
		c.bytes = nil
		c.closeErr = c.mapping.Close()
		c.memory.Unlock()
		// Best effort: without it the node keeps what was reserved here out of use until this process ends.
		_ = c.conn.Send(&api.Bye{}, api.MaxRequestFrame)
		c.lose(ErrClosed)
		c.reader.Wait()
	})
	return c.closeErr
}

// lose ends the connection once: every call and every ref learns of it.
func (c *Client) lose(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return
	}
	c.err = err
	close(c.done)
	_ = c.conn.Close()
	for ref, p := range c.refs {
		delete(c.refs, ref)
		p.lost(err)
	}
	clear(c.calls)
}
