// Package control carries small messages between nodes and engines over ZeroMQ (libzmq): ROUTER on the producer's side, DEALER
// on the consumer's, with heartbeats and the socket monitor for the death of a peer.
//
// Two ends of this package on one machine can do without ZeroMQ: Router.ListenLocal and Loop.DialLocal connect them by a unix socket,
// with the same handlers, limits and heartbeats. A round trip then wakes two threads and not eight.
//
// A Loop owns a set of sockets on one goroutine; no other goroutine receives from them. It sleeps in epoll and wakes only for work:
// there is no polling. Handlers are called on it and must not block; they may call Send, Close, Dial, DialLocal, Listen and ListenLocal.
// Sending is safe from any goroutine and never blocks: queues are bounded, in messages and in bytes, each and all together.
//
// On ZeroMQ's wire a message is ["", payload] at the DEALER and [id, "", payload] at the ROUTER. Anything else is dropped and counted.
package control

import (
	"errors"
	"fmt"
	"log/slog"
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

// Defaults of Options.
const (
	// DefaultRouterMessage limits what a ROUTER takes in: a request is about 200 bytes, 1.2 KB with a long key.
	DefaultRouterMessage = 64 << 10
	// DefaultDealerMessage limits what a DEALER takes in. A plain producer describes every block of its region in an ack, about
	// 14 bytes a block: 134 MB for 64 GiB of 7 KiB blocks.
	DefaultDealerMessage = 256 << 20
	// DefaultQueue and DefaultQueueBytes limit what waits for one destination.
	DefaultQueue      = 1000
	DefaultQueueBytes = 64 << 20
	// DefaultTotalBytes limits what waits for all destinations of a loop: as much as four queues, or 35 acks for a plain region of
	// 1 GiB (7.3 MB each).
	DefaultTotalBytes = 256 << 20
	// DefaultConnectTimeout limits resolving a name, connecting and the handshake, each.
	DefaultConnectTimeout = 4 * time.Second
	// DefaultReconnectMin and DefaultReconnectMax are the first and the longest pause before a dealer tries again.
	DefaultReconnectMin = 100 * time.Millisecond
	DefaultReconnectMax = 2 * time.Second
)

// Options of a loop and of every socket in it. Zero values mean the defaults.
type Options struct {
	// HeartbeatInterval is the time between PINGs, HeartbeatTimeout how long an answer may take until the connection counts as
	// lost, HeartbeatTTL what we ask the peer to wait for a sign of us. The TTL travels in tenths of a second, at most 6,553 s.
	HeartbeatInterval, HeartbeatTimeout, HeartbeatTTL time.Duration
	// MaxMessage limits a frame of an incoming message, in bytes; a larger one drops the connection (ZMQ_MAXMSGSIZE). libzmq has no
	// limit to the number of frames: a Router cuts a peer that has sent 8 MiB and more of a message that has not ended, a Dealer one that
	// has sent so much beyond MaxMessage, and both whoever has much on its way while the process grows by 1 GiB.
	// Default: DefaultRouterMessage for a Router, DefaultDealerMessage for a Dealer.
	MaxMessage int64
	// Queue limits the messages waiting per destination, and again those that libzmq holds for it. What comes in has no limit but that
	// of the owner's speed: see the note at ZMQ_RCVHWM in socket.go.
	Queue int
	// QueueBytes limits the bytes waiting per destination, among them what libzmq holds in bodies of 8 KiB and more. A larger body is
	// refused with ErrTooLarge.
	QueueBytes int64
	// TotalBytes limits the bytes waiting for all destinations of a loop together, counted as for QueueBytes. Beyond it bodies of 8 KiB
	// and more are refused; smaller ones pass, so that peers are still answered, if with less. At least QueueBytes. The peers of one
	// address may use a quarter of it, or QueueBytes if that is more.
	// Default: DefaultTotalBytes, or QueueBytes if that is more.
	TotalBytes int64
	// ConnectTimeout limits each step of an attempt to connect, and the handshake of a peer that connects to a Router.
	ConnectTimeout time.Duration
	// ReconnectMin and ReconnectMax limit the pause between a dealer's attempts; it doubles from one to the other.
	ReconnectMin, ReconnectMax time.Duration
	// Log gets warnings, at most one line per cause and ten seconds for what a peer can provoke. Default: slog.Default().
	Log *slog.Logger

	stall time.Duration // stallTimeout, but for tests
	swell uint64        // swellRoom, but for tests
}

func (o Options) withDefaults() Options {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.HeartbeatInterval, HeartbeatInterval)
	def(&o.HeartbeatTimeout, HeartbeatTimeout)
	def(&o.HeartbeatTTL, HeartbeatTTL)
	def(&o.ConnectTimeout, DefaultConnectTimeout)
	def(&o.ReconnectMin, DefaultReconnectMin)
	def(&o.ReconnectMax, max(DefaultReconnectMax, o.ReconnectMin))
	if o.Queue == 0 {
		o.Queue = DefaultQueue
	}
	if o.QueueBytes == 0 {
		o.QueueBytes = DefaultQueueBytes
	}
	if o.TotalBytes == 0 {
		o.TotalBytes = max(DefaultTotalBytes, o.QueueBytes)
	}
	def(&o.stall, stallTimeout)
	if o.swell == 0 {
		o.swell = swellRoom
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}

// maxMessage is the limit of an incoming message where def is the default.
func (o *Options) maxMessage(def int64) int64 {
	if o.MaxMessage > 0 {
		return o.MaxMessage
	}
	return def
}

func (o Options) check() error {
	const tick = time.Millisecond // the unit of libzmq's options
	for _, d := range []struct {
		name string
		v    time.Duration
		min  time.Duration
	}{
		{"HeartbeatInterval", o.HeartbeatInterval, tick},
		{"HeartbeatTimeout", o.HeartbeatTimeout, tick},
		{"HeartbeatTTL", o.HeartbeatTTL, 100 * time.Millisecond},
		{"ConnectTimeout", o.ConnectTimeout, tick},
		{"ReconnectMin", o.ReconnectMin, tick},
		{"ReconnectMax", o.ReconnectMax, o.ReconnectMin},
	} {
		if d.v < d.min {
			return fmt.Errorf("control: option %s is %v: the least is %v", d.name, d.v, d.min)
		}
	}
	if o.Queue < 0 || o.QueueBytes < 0 || o.MaxMessage < 0 {
		return fmt.Errorf("control: options Queue %d, QueueBytes %d, MaxMessage %d: none may be negative", o.Queue, o.QueueBytes, o.MaxMessage)
	}
	if o.TotalBytes < o.QueueBytes {
		return fmt.Errorf("control: option TotalBytes is %d: the least is QueueBytes, %d", o.TotalBytes, o.QueueBytes)
	}
	return nil
}

// Source says where a message came from.
type Source struct {
	ID   string // routing id: one per connection
	Addr string // IP of the peer as libzmq saw it, "" if unknown

	// Local says that it came by the router's local socket: the peer is a process of this machine, and of this user or root. Addr is "".
	Local bool
}

// RouterHandler receives on the owner goroutine.
type RouterHandler interface {
	// Message gets the payload of a `[id, "", payload]` message. body is valid only during the call.
	Message(from Source, body []byte)
}

// ServeHandler may be implemented by a RouterHandler that answers by the router.
type ServeHandler interface {
	// Serve is called once, on the owner goroutine, when the router is bound and before the first Message.
	Serve(r *Router)
}

// LeaveHandler may be implemented by a RouterHandler that keeps state per connection.
type LeaveHandler interface {
	// Left says that the connection of a peer that has sent something has ended. What the peer sent before may still arrive:
	// Left is then called again after each such message. It is called on the owner goroutine.
	Left(from Source)
}

// DealerHandler receives on the owner goroutine.
type DealerHandler interface {
	// Message gets the payload of a `["", payload]` message. body is valid only during the call.
	Message(body []byte)
	// Up says that a connection stands, handshake included.
	Up()
	// Down says that the connection was lost, or that the first attempt since Dial or since the loss failed; err wraps ErrGone.
	// Whatever Send had accepted and was not yet on its way is dropped by then, so the owner asks again after Up.
	// The dealer goes on connecting; attempts that fail after the first are not reported.
	Down(err error)
}
