package ec

import (
	"log/slog"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// ProducerOptions configure a Producer.
type ProducerOptions struct {
	Cache      *Cache
	Compat     wire.Compat
	Generation int
	Node       string
	Epoch      uint64
	Planes     []Offer
	Timeouts   Timeouts
	Log        *slog.Logger
}

// Offer is a plane together with the pool's registration on it.
type Offer struct {
	Name string
	Reg  transfer.Registration
}

// Producer answers peers that ask for entries of a Cache: pin, grant, ack, and let go at verify, notification or lease.
// It answers on the control loop's goroutine, at once, whatever any engine does.
type Producer struct{}

func NewProducer(o ProducerOptions) (*Producer, error) { return nil, ErrSpec }

// Serve is called with the router once it is bound; Message may be called from then on.
func (p *Producer) Serve(r *control.Router) {}

// Message implements control.RouterHandler.
func (p *Producer) Message(from control.Source, body []byte) {}

// Notify takes a plane's notifications.
func (p *Producer) Notify(n transfer.Notification) {}

// Close releases all grants.
func (p *Producer) Close() error { return nil }
