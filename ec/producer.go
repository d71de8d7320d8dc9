package ec

import (
	"context"
	"log/slog"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// ProducerOptions configure a Producer.
type ProducerOptions struct {
	Pools      []ServedPool
	Generation int // 1 or 2: what plain peers speak
	Node       string
	Epoch      uint64
	Timeouts   Timeouts
	Log        *slog.Logger
}

// ServedPool is one pool on offer. Requests are matched to pools by the compatibility hash.
type ServedPool struct {
	Cache  *Cache
	Compat wire.Compat
	Memory transfer.Memory  // the pool; registered on every plane by NewProducer
	Planes []transfer.Plane // by preference
}

// Producer answers peers that ask for entries of its pools: pin, grant, ack, and let go at verify, notification or lease.
// It answers on the control loop's goroutine, at once, whatever any engine does.
type Producer struct{}

// NewProducer registers the pools with their planes.
func NewProducer(ctx context.Context, o ProducerOptions) (*Producer, error) { return nil, ErrSpec }

// Serve is called with the router once it is bound; Message may be called from then on.
func (p *Producer) Serve(r *control.Router) {}

// Message implements control.RouterHandler.
func (p *Producer) Message(from control.Source, body []byte) {}

// Close releases all grants and registrations.
func (p *Producer) Close() error { return nil }
