package stage

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/slab"
)

// ClientOptions of a Client. Zero times are the peers' defaults.
type ClientOptions struct {
	Loop *control.Loop // the caller's
	Slab *slab.Slab    // the caller's
	Node string        // our instance, told to own producers

	Query    time.Duration // between two questions to a plain producer that has not put yet; default 10 ms
	Answer   time.Duration // how long one answer may take before the claim is repeated on a new connection; default 5 s
	Transfer time.Duration // of a get whose context has no deadline; default 300 s
	Inline   int64         // payloads up to it come inside the reply of an own producer; 0: 64 KiB, below 0: none

	// AllowHost, if set, is asked before a host is dialled; an error refuses it.
	AllowHost func(host string) error
	Log       *slog.Logger
}

// Client gets payloads. All methods are safe for concurrent use.
type Client struct{}

// NewClient makes a client. The caller closes it.
func NewClient(o ClientOptions) (*Client, error) { return nil, errors.New("not built") }

// Get is that of Connector.
func (c *Client) Get(ctx context.Context, r Request) (*Got, error) { return nil, ErrClosing }

// Close refuses new gets, ends those under way, and waits for what has to be told to producers (claims that ended, or that may have
// been granted in a lost answer) until ctx is done.
func (c *Client) Close(ctx context.Context) error { return nil }
