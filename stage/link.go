package stage

import (
	"context"
	"errors"
	"log/slog"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/tensor"
)

// LinkOptions of a Link.
type LinkOptions struct {
	Slab *slab.Slab // the caller's
	Node string     // our instance id; default: random

	// Bind is where claims are answered; a Link without it only gets. Port 0 takes any free one. Advertise is the host that metadata
	// names; default Bind's, which must then not be a wildcard.
	Bind      *Endpoint
	Advertise string

	Store  Options
	Client ClientOptions // Loop, Slab and Node are the Link's
	Sum    bool          // keep a checksum of each payload, which own readers verify
	Log    *slog.Logger
}

// Link is a Connector over the control plane of vLLM-Omni's NixlConnector and our data planes.
type Link struct{}

// NewLink binds and starts. The caller closes it.
func NewLink(ctx context.Context, o LinkOptions) (*Link, error) { return nil, errors.New("not built") }

// Put implements Connector.
func (l *Link) Put(ctx context.Context, key string, root tensor.Node, o PutOptions) (*Published, error) {
	return nil, ErrClosing
}

// Get implements Connector.
func (l *Link) Get(ctx context.Context, r Request) (*Got, error) { return nil, ErrClosing }

// Republish puts what was got under another key, without a copy: got is the Link's from then on, whatever the error.
func (l *Link) Republish(ctx context.Context, key string, got *Got, o PutOptions) (*Published, error) {
	return nil, ErrClosing
}

// Endpoint is where claims go; the zero Endpoint if the Link only gets.
func (l *Link) Endpoint() Endpoint { return Endpoint{} }

// Cleanup implements Connector.
func (l *Link) Cleanup(key string) error { return nil }

// Abort implements Connector.
func (l *Link) Abort(key, reason string) {}

// Healthy implements Connector.
func (l *Link) Healthy() bool { return false }

// Close implements Connector.
func (l *Link) Close(ctx context.Context) error { return nil }

var _ Connector = (*Link)(nil)
