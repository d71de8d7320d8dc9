package stage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/internal/sparselog"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

var (
	// ErrUnreachable: there is no connection to the producer.
	ErrUnreachable = errors.New("stage: the producer cannot be reached")
	// ErrEndpoint: request and metadata name no place where claims can go, or one that makes no sense.
	ErrEndpoint = errors.New("stage: no usable endpoint")
	// ErrLost: the claim did not hold until the payload was read, so that what was read may be wrong. It is given to nobody.
	ErrLost = errors.New("stage: the claim was lost")
	// ErrCorrupt: what was read has not the checksum that the producer made when it was put.
	ErrCorrupt = errors.New("stage: wrong checksum")
)

// Defaults of ClientOptions. Query and Answer are the peers' own (metadata query and handshake timeout).
const (
	DefaultQuery  = 10 * time.Millisecond
	DefaultAnswer = 5 * time.Second
	DefaultInline = 64 << 10
	// DefaultInlineMapped is that where the producer is on this machine and memory can be shared: two processes took 0.12 ms for 32 KiB
	// either way, at 64 KiB 0.18 ms inline, and 0.13 ms by a copy and a verify.
	DefaultInlineMapped = 32 << 10
)

// Bounds that nobody has needed to set.
const (
	// answersToEnd is for how many Options.Answer a claim is tried to be ended at its producer before it is given up.
	answersToEnd = 12
	// maxEndings is how many claims may be ended in the background at once; beyond, they are given up.
	maxEndings = 1024
)

// Space is where a Client puts what it gets: a *slab.Slab, or something that makes one when it is needed first. See there.
type Space interface {
	Planes() []string
	Alloc(ctx context.Context, sizes []int64) (*slab.Buffer, error)
	Read(ctx context.Context, m *wire.Metadata, into *slab.Buffer) (plane string, err error)
	View(ctx context.Context, m *wire.Metadata) (tensors [][]byte, plane string, release func() (vouched bool), err error)
}

// ClientOptions of a Client. Zero times are the peers' defaults.
type ClientOptions struct {
	Loop *control.Loop // the caller's
	Slab Space         // the caller's
	Node string        // our instance, told to own producers

	Query    time.Duration // between two questions to a plain producer that has not put yet; default 10 ms
	Answer   time.Duration // how long one answer may take before the claim is repeated on a new connection; default 5 s
	Transfer time.Duration // of a get whose context has no deadline; default 300 s
	Inline   int64         // payloads up to it come inside the reply of an own producer; 0: DefaultInline or DefaultInlineMapped, below 0: none

	inlineLocal int64 // Inline for producers of this machine

	// AllowHost, if set, is asked before a host is dialled; an error refuses it.
	AllowHost func(host string) error
	Log       *slog.Logger
}

func (o *ClientOptions) complete() error {
	if o.Loop == nil || o.Slab == nil {
		return fmt.Errorf("%w: a client needs a loop and a slab", ErrOptions)
	}
	if len(o.Node) > wire.MaxNode {
		return fmt.Errorf("%w: Node has %d bytes, at most %d", ErrOptions, len(o.Node), wire.MaxNode)
	}
	for _, d := range []struct {
		name  string
		v     *time.Duration
		usual time.Duration
	}{{"Query", &o.Query, DefaultQuery}, {"Answer", &o.Answer, DefaultAnswer}, {"Transfer", &o.Transfer, DefaultTransfer}} {
		if *d.v < 0 {
			return fmt.Errorf("%w: %s is %v; give a time above 0", ErrOptions, d.name, *d.v)
		}
		if *d.v == 0 {
			*d.v = d.usual
		}
	}
	switch {
	case o.Inline > wire.MaxInline:
		return fmt.Errorf("%w: Inline is %d bytes, at most %d", ErrOptions, o.Inline, wire.MaxInline)
	case o.Inline == 0:
		o.Inline, o.inlineLocal = DefaultInline, DefaultInline
		if slices.Contains(o.Slab.Planes(), transfer.Mapped) {
			o.inlineLocal = DefaultInlineMapped
		}
	default:
		o.Inline = max(o.Inline, 0)
		o.inlineLocal = o.Inline
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Client gets payloads. All methods are safe for concurrent use.
//
// A get claims its payload under an id of its own, which it repeats until an answer came, reads it, and ends the claim: whatever
// happens to the get. Where it cannot do so itself (an answer is outstanding, a READ is still under way) the client does it in the
// background. Towards a plain producer every end is a done; an own one is told whether the payload was got, and keeps it if not.
type Client struct {
	o      ClientOptions
	planes []string

	readsPlain bool // one of the planes reads from plain producers

	stopping context.Context // ends the gets
	stop     context.CancelFunc
	ctx      context.Context // ends what is done in the background
	cancel   context.CancelFunc
	work     tally          // gets, and claims that are not ended yet
	tasks    sync.WaitGroup // goroutines

	mu        sync.Mutex
	closing   bool // no new gets
	ended     bool // nothing more in the background
	endpoints map[string]*endpoint
	sweep     *time.Timer // runs while there are endpoints

	stats clientCounters

	badLog, endLog sparselog.Cause
}

// NewClient makes a client. The caller closes it, before loop and slab.
func NewClient(o ClientOptions) (*Client, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	c := &Client{o: o, planes: o.Slab.Planes(), endpoints: map[string]*endpoint{}}
	c.readsPlain = slices.Contains(c.planes, transfer.NIXL)
	c.stopping, c.stop = context.WithCancel(context.Background())
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c, nil
}

// Get is that of Connector. One deadline counts for all of it: that of ctx, else Options.Transfer from now.
//
// Errors are also ErrUnreachable, ErrEndpoint, ErrLost, ErrCorrupt, ErrOptions, and those of package wire for metadata that cannot be
// used. A plain producer's payload needs the nixl plane: without it the error wraps slab.ErrNoPlane, and nothing was claimed. At its
// deadline the error wraps context.DeadlineExceeded, and ErrNotFound or ErrUnreachable if that is what kept it waiting.
//
// A get that ends while its bytes, already read, are being verified may have used the payload up.
func (c *Client) Get(ctx context.Context, r Request) (*Got, error) {
	c.stats.gets.Add(1)
	got, err := c.get(ctx, r)
	c.stats.ended(got, err)
	return got, err
}

func (c *Client) get(ctx context.Context, r Request) (*Got, error) {
	h, err := c.handoff(r)
	if err != nil {
		return nil, err
	}
	if !c.begin() {
		return nil, ErrClosing
	}
	defer c.work.done()
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(c.o.Transfer)
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadline(ctx, deadline)
		defer cancel()
	}
	if h.Legacy != nil {
		g := get{c: c, r: &r}
		return g.read(ctx, granted{m: h.Legacy})
	}
	e, err := c.enter(h)
	if err != nil {
		return nil, err
	}
	defer c.leave(e)
	g := newGet(c, e, &r, h, deadline)
	defer g.end()
	return g.run(ctx)
}

// handoff finds out whom to ask for what, and checks that it makes sense.
func (c *Client) handoff(r Request) (*wire.Handoff, error) {
	if r.Key == "" || len(r.Key) > wire.MaxKey {
		return nil, fmt.Errorf("%w: a key of %d bytes; give 1 to %d", ErrOptions, len(r.Key), wire.MaxKey)
	}
	if r.InPlace && r.Device != nil || r.AllOnDevice && r.Device == nil {
		return nil, fmt.Errorf("%w: Device excludes InPlace, and AllOnDevice needs it", ErrOptions)
	}
	h := &wire.Handoff{}
	if r.Metadata != nil {
		var err error
		if h, err = wire.DecodeHandoff(r.Metadata); err != nil {
			return nil, fmt.Errorf("stage: the metadata of key %.64q: %w", r.Key, err)
		}
	}
	if h.Legacy != nil {
		return h, nil
	}
	if h.Host == "" {
		h.Host, h.Port = r.From.Host, r.From.Port
	}
	if err := checkEndpoint(h.Host, h.Port); err != nil {
		return nil, fmt.Errorf("%w for key %.64q: %w", ErrEndpoint, r.Key, err)
	}
	return h, nil
}

// checkEndpoint refuses what cannot be dialled. Names are looked up by the control channel.
func checkEndpoint(host string, port int) error {
	if host == "" && port == 0 {
		return errors.New("neither metadata nor request name one; give Request.From")
	}
	if port < 1 || port > 65535 {
		return fmt.Errorf("port %d of host %.64q; ports are 1 to 65535", port, host)
	}
	bare := strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if ip, err := netip.ParseAddr(bare); err == nil {
		if ip.IsUnspecified() || ip.IsMulticast() {
			return fmt.Errorf("host %.64q is no address of one machine; the producer has to advertise one", host)
		}
		return nil
	}
	name := func(r rune) bool {
		return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_' || r == '.'
	}
	if host == "" || len(host) > 253 || strings.Trim(host, ".-") == "" || strings.ContainsFunc(host, func(r rune) bool { return !name(r) }) {
		return fmt.Errorf("host %.64q is neither a name nor an address", host)
	}
	return nil
}

// begin counts a get, unless the client closes. It is over with work.done.
func (c *Client) begin() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return false
	}
	c.work.add()
	return true
}

// enter gives the endpoint of a handoff, until leave.
func (c *Client) enter(h *wire.Handoff) (*endpoint, error) {
	addr := hostPort(h.Host, h.Port)
	e := c.endpointAt(addr)
	if c.o.AllowHost != nil && !e.connected() {
		if err := c.o.AllowHost(h.Host); err != nil {
			c.leave(e)
			return nil, fmt.Errorf("stage: host %.64q: %w", h.Host, err)
		}
	}
	if h.Ferry != nil {
		e.learn(h.Ferry)
	}
	return e, nil
}

func hostPort(host string, port int) string {
	return net.JoinHostPort(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), strconv.Itoa(port))
}

// endpointAt gives the endpoint of an address, until leave.
func (c *Client) endpointAt(addr string) *endpoint {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.endpoints[addr]
	if e == nil {
		e = newEndpoint(c, addr)
		e.closed = c.ended
		c.endpoints[addr] = e
		c.sweepLater()
	}
	e.users++
	return e
}

func (c *Client) leave(e *endpoint) {
	c.mu.Lock()
	e.users--
	last := e.users == 0
	c.mu.Unlock()
	if last {
		e.rest()
	}
	if c.stats.connections.Load() > maxConnections {
		c.trim()
	}
}

// Close refuses new gets, ends those under way, and waits for what has to be told to producers (claims that ended, or that may have
// been granted in a lost answer) until ctx is done. What is not told by then is given up: an own producer ends such a claim with the
// connection, a plain one may keep its payload for ever; the error then wraps ctx's. Claims of payloads that are used in place end
// with the connections. Idempotent.
func (c *Client) Close(ctx context.Context) error {
	c.mu.Lock()
	c.closing = true
	if c.sweep != nil {
		c.sweep.Stop()
	}
	c.mu.Unlock()
	c.stop()
	err := c.work.wait(ctx)
	c.cancel()
	c.mu.Lock()
	c.ended = true
	endpoints := c.endpoints
	c.endpoints = map[string]*endpoint{}
	c.mu.Unlock()
	for _, e := range endpoints {
		e.close()
	}
	c.tasks.Wait()
	if err != nil {
		return fmt.Errorf("stage: claims could not be ended at their producers in time: %w", err)
	}
	return nil
}

// tally counts work.
type tally struct {
	mu   sync.Mutex
	n    int
	zero chan struct{} // closed when n is 0; nil: nobody waits
}

func (t *tally) add() {
	t.mu.Lock()
	t.n++
	t.mu.Unlock()
}

func (t *tally) done() {
	t.mu.Lock()
	if t.n--; t.n == 0 && t.zero != nil {
		close(t.zero)
		t.zero = nil
	}
	t.mu.Unlock()
}

func (t *tally) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n
}

// wait waits until there is no work. It is for one caller, or several.
func (t *tally) wait(ctx context.Context) error {
	t.mu.Lock()
	for t.n > 0 {
		if t.zero == nil {
			t.zero = make(chan struct{})
		}
		zero := t.zero
		t.mu.Unlock()
		select {
		case <-zero:
		case <-ctx.Done():
			return ctx.Err()
		}
		t.mu.Lock()
	}
	t.mu.Unlock()
	return nil
}
