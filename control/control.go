// Package control carries small messages between nodes and engines over ZeroMQ (libzmq): ROUTER on the producer's side, DEALER
// on the consumer's, with heartbeats and the socket monitor for the death of a peer.
//
// A Loop owns a set of sockets on one goroutine with its own thread; no other goroutine touches them. Handlers are called on it
// and must not block. Sending is safe from any goroutine and never blocks: queues are bounded.
package control

import (
	"context"
	"errors"
	"time"
)

var (
	ErrQueueFull = errors.New("control: outgoing queue is full")
	ErrClosed    = errors.New("control: closed")
	ErrTooLarge  = errors.New("control: message larger than the limit")
	ErrGone      = errors.New("control: the peer is not connected")
)

// Heartbeat defaults, those of vLLM's consumer (spec: interval 2 s, timeout 4 s, TTL 8 s).
const (
	HeartbeatInterval = 2 * time.Second
	HeartbeatTimeout  = 4 * time.Second
	HeartbeatTTL      = 8 * time.Second
)

// Options of a loop and of every socket in it. Zero values mean the defaults.
type Options struct {
	HeartbeatInterval, HeartbeatTimeout, HeartbeatTTL time.Duration
	MaxMessage                                        int64 // bytes of an incoming message; larger ones drop the connection (ZMQ_MAXMSGSIZE)
	Queue                                             int   // messages waiting per destination
}

// Loop is one owner goroutine.
type Loop struct{}

func NewLoop(o Options) (*Loop, error) { return nil, ErrClosed }

// Close ends all sockets of the loop and waits for the goroutine. Idempotent.
func (l *Loop) Close() error { return nil }

// Source says where a message came from.
type Source struct {
	ID   string // routing id: one per connection
	Addr string // IP of the peer as libzmq saw it, "" if unknown
}

// RouterHandler receives on the owner goroutine.
type RouterHandler interface {
	// Message gets the payload of a `[id, "", payload]` message. body is valid only during the call.
	Message(from Source, body []byte)
}

// Router is a bound ROUTER socket.
type Router struct{}

// Listen binds tcp://host:port; port 0 takes any free one. A bind that fails is an error here that names the address.
func (l *Loop) Listen(ctx context.Context, host string, port int, h RouterHandler) (*Router, error) {
	return nil, ErrClosed
}

// Port is the bound port.
func (r *Router) Port() int { return 0 }

// Send queues `[id, "", body]`. body must not be changed afterwards. ErrGone if no such peer is connected (best effort),
// ErrQueueFull if its queue is full.
func (r *Router) Send(id string, body []byte) error { return ErrClosed }

// Dropped counts messages dropped: wrong frame count, outgoing queue full, unroutable.
func (r *Router) Dropped() (frames, full, unroutable uint64) { return }

func (r *Router) Close() error { return nil }

// DealerHandler receives on the owner goroutine.
type DealerHandler interface {
	Message(body []byte)
	Up()            // connected and handshaken
	Down(err error) // connection lost or refused; libzmq goes on reconnecting
}

// Dealer is a DEALER socket connected to one peer.
type Dealer struct{}

// Dial starts connecting to tcp://addr and returns at once.
func (l *Loop) Dial(ctx context.Context, addr string, h DealerHandler) (*Dealer, error) {
	return nil, ErrClosed
}

// Send queues `["", body]`.
func (d *Dealer) Send(body []byte) error { return ErrClosed }

func (d *Dealer) Close() error { return nil }
