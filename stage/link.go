package stage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
)

// ErrDevice: a tensor on a device that cannot be put as it was asked to.
var ErrDevice = errors.New("stage: a tensor on a device")

// closeGrace is how long Close has to stop readers that did not end in time: a serving agent is rotated in seconds.
const closeGrace = 10 * time.Second

// LinkOptions of a Link.
type LinkOptions struct {
	Slab *slab.Slab // the caller's
	Node string     // our instance id; default: random

	// Bind is where claims are answered; a Link without it only gets. Port 0 takes any free one, no host is 127.0.0.1. Advertise is
	// the host that metadata names; default Bind's, which must then not be a wildcard.
	Bind      *Endpoint
	Advertise string

	// Store's MaxBytes is the part of the slab that is set aside for puts (slab.Slab.Divide), so that they find room however many
	// gets hold the rest; default half. As much as the slab has, or more: nothing is set aside, and a put can wait for what was got.
	Store  Options
	Client ClientOptions // Loop, Slab and Node are the Link's
	// Sum keeps a checksum of each payload, which own readers verify. None is made of what is on a device, nor verified by a reader
	// that has some of it on one.
	Sum bool
	Log *slog.Logger
}

// complete fills in defaults. The error wraps ErrOptions.
func (o *LinkOptions) complete() error {
	if o.Slab == nil {
		return fmt.Errorf("%w: a link needs a slab", ErrOptions)
	}
	if o.Node == "" {
		o.Node = wire.NewID().String()
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Store.Log == nil {
		o.Store.Log = o.Log
	}
	if o.Client.Log == nil {
		o.Client.Log = o.Log
	}
	if o.Bind == nil {
		return nil
	}
	if err := o.divide(); err != nil {
		return err
	}
	b := *o.Bind
	if o.Bind = &b; b.Host == "" {
		b.Host = "127.0.0.1"
	}
	if o.Advertise == "" {
		o.Advertise = b.Host
	}
	if wildcard(o.Advertise) || len(o.Advertise) > wire.MaxHost {
		return fmt.Errorf("%w: Advertise is %.64q, which no reader can dial; give the host by which they reach this machine", ErrOptions, o.Advertise)
	}
	return nil
}

// divide sets the part for puts aside.
func (o *LinkOptions) divide() error {
	if o.Store.MaxBytes == 0 {
		o.Store.MaxBytes = o.Slab.Bytes() / 2
	}
	if o.Store.MaxBytes < 0 || o.Store.MaxBytes >= o.Slab.Bytes() {
		return nil // NewStore refuses the first
	}
	part, err := o.Slab.Divide(o.Store.MaxBytes)
	if err != nil {
		return fmt.Errorf("%w: %w; make the link first, or give MaxBytes all of the slab", ErrOptions, err)
	}
	o.Store.MaxBytes = min(o.Store.MaxBytes, part) // another link may have divided it
	return nil
}

// wildcard is true for a host that names all interfaces, or none.
func wildcard(host string) bool {
	return host == "" || host == "*" || host == "auto" || hostname.Unspecified(host)
}

// Link is a Connector over the control plane of vLLM-Omni's NixlConnector and our data planes.
type Link struct {
	o      LinkOptions
	loop   *control.Loop
	store  *Store  // nil without Bind
	server *Server // nil without Bind
	client *Client

	closing context.Context // done once Close began
	begin   context.CancelFunc
	once    sync.Once
	err     error // of Close
}

// NewLink binds and starts. The caller closes it. On an error nothing is left.
func NewLink(ctx context.Context, o LinkOptions) (_ *Link, err error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	l := &Link{o: o}
	l.closing, l.begin = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close(ctx))
		}
	}()
	if l.loop, err = control.NewLoop(control.Options{Log: o.Log}); err != nil {
		return nil, err
	}
	if o.Bind != nil {
		if err := l.serve(ctx); err != nil {
			return nil, err
		}
	}
	c := o.Client
	c.Loop, c.Slab, c.Node = l.loop, o.Slab, o.Node
	if l.client, err = NewClient(c); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *Link) serve(ctx context.Context) (err error) {
	if l.store, err = NewStore(l.o.Store); err != nil {
		return err
	}
	l.server, err = Serve(ctx, ServerOptions{Loop: l.loop, Store: l.store, Host: l.o.Bind.Host, Port: l.o.Bind.Port, Node: l.o.Node, Log: l.o.Log})
	if err == nil && !hostname.Loopback(l.o.Bind.Host) {
		l.o.Log.Warn("stage payloads are served off loopback: whoever reaches this address and knows a key can read its payload",
			"host", l.o.Bind.Host, "port", l.server.Port())
	}
	return err
}

// live gives a context that also ends when Close begins; its cause is then ErrClosing.
func (l *Link) live(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.closing, func() { cancel(ErrClosing) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// Get implements Connector.
func (l *Link) Get(ctx context.Context, r Request) (*Got, error) {
	if l.closing.Err() != nil {
		return nil, ErrClosing
	}
	return l.client.Get(ctx, r)
}

// Endpoint is where claims go; the zero Endpoint if the Link only gets.
func (l *Link) Endpoint() Endpoint {
	if l.server == nil {
		return Endpoint{}
	}
	return Endpoint{l.o.Advertise, l.server.Port()}
}

// Cleanup implements Connector.
func (l *Link) Cleanup(key string) error {
	if l.store == nil {
		return nil
	}
	return l.store.Cleanup(key)
}

// Abort implements Connector.
func (l *Link) Abort(key, reason string) {
	if l.store != nil {
		l.store.Abort(key, reason)
	}
}

// Healthy implements Connector.
func (l *Link) Healthy() bool {
	select {
	case <-l.loop.Done():
		return false
	default:
		return l.closing.Err() == nil
	}
}

// LinkStats counts what a Link did. Store and Server are zero if it only gets.
type LinkStats struct {
	Store  Stats
	Server ServerStats
	Client ClientStats
}

// Stats counts.
func (l *Link) Stats() LinkStats {
	st := LinkStats{Client: l.client.Stats()}
	if l.store != nil {
		st.Store, st.Server = l.store.Stats(), l.server.Stats()
	}
	return st
}

// Close implements Connector. Gets under way end at once. Readers have until ctx is done, then 10 s to be stopped; what cannot be
// stopped is never released (ErrBusy). The slab stays the caller's. Later calls wait for the first, and give what it gave.
func (l *Link) Close(ctx context.Context) error {
	l.begin()
	l.once.Do(func() { l.err = l.close(ctx) })
	return l.err
}

func (l *Link) close(ctx context.Context) error {
	var errs [4]error
	var both sync.WaitGroup
	if l.client != nil {
		both.Go(func() { errs[0] = l.client.Close(ctx) })
	}
	if l.store != nil {
		both.Go(func() { errs[1] = l.store.Close(ctx, closeGrace) })
	}
	both.Wait()
	if l.server != nil {
		errs[2] = l.server.Close()
	}
	if l.loop != nil {
		errs[3] = l.loop.Close()
	}
	return errors.Join(errs[:]...)
}

var _ Connector = (*Link)(nil)
