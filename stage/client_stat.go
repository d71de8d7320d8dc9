package stage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// ErrPlain: a producer that is not ours has no answer to that question.
var ErrPlain = errors.New("stage: the producer is a plain one")

// Stat asks what there is under a key, without claiming it: metadata without descriptors. Of r, Wait and InPlace do not count.
// It takes no longer than Options.Answer. Errors: ErrNotFound, ErrFailed, ErrUnreachable, ErrEndpoint, ErrClosing, ctx's, and ErrPlain: a plain
// producer tells nothing but to who claims, and a claim that ends releases the payload.
func (c *Client) Stat(ctx context.Context, r Request) (*wire.Metadata, error) {
	h, err := c.handoff(r)
	if err != nil {
		return nil, err
	}
	if h.Legacy != nil {
		return h.Legacy, nil
	}
	if !c.begin() {
		return nil, ErrClosing
	}
	defer c.work.done()
	ctx, cancel := context.WithTimeout(ctx, c.o.Answer)
	defer cancel()
	e, err := c.enter(h)
	if err != nil {
		return nil, err
	}
	defer c.leave(e)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	a, err := (&ending{e: e, key: r.Key, generation: h.Generation}).question(ctx, e, timer, wire.Stat)
	if err == nil || !a.generation.IsZero() {
		defer e.release(a.call.s)
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("stage: stat %.64q at %s: %w", r.Key, e.addr, err)
	case !a.own:
		return nil, fmt.Errorf("%w: key %.64q at %s", ErrPlain, r.Key, e.addr)
	}
	switch a.reply.Status {
	case wire.Found:
		return a.reply.Metadata, nil
	case wire.NotFound:
		return nil, fmt.Errorf("%w: key %.64q at %s", ErrNotFound, r.Key, e.addr)
	case wire.Failed:
		return nil, &FailedError{r.Key, a.reply.Reason}
	case wire.Closing:
		return nil, fmt.Errorf("%w: the producer %s", ErrClosing, e.addr)
	}
	return nil, fmt.Errorf("%w: %s answers stat with status %v", wire.ErrMalformed, e.addr, a.reply.Status)
}
