package connect

import (
	"context"
	"errors"
	"log/slog"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
)

// Stat asks once what there is under a key: stage.Client's Stat with a client of its own, which has no planes and no memory.
func Stat(ctx context.Context, r stage.Request, log *slog.Logger) (_ *wire.Metadata, err error) {
	loop, err := control.NewLoop(control.Options{Log: log})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, loop.Close()) }()
	c, err := stage.NewClient(stage.ClientOptions{Loop: loop, Slab: &fitting{}, Node: Name(), Log: log})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, c.Close(ctx)) }()
	return c.Stat(ctx, r)
}
