// Package tcp is the data plane between our own nodes. A node listens on one port; readers keep up to a few warm connections to
// each peer and ask for spans under a grant's random token; the bytes go from the region's file to the socket by sendfile and
// from the socket straight into the reader's memory. frame.go has the protocol.
//
// # When memory may be reused
//
// Sendfile queues references to the file's pages, not copies: what is still queued in a kernel, here or (on one host) at the
// reader, changes if the memory is written. So the bytes of a READ mean nothing until the producer has been asked, after the last
// one arrived, whether the grant is still live. The reader does that for each READ (commit), and only then reports success; the
// notification rides on it. Revoke ends the grant first, so that no commit can succeed any more, then resets every connection
// that still has bytes of the grant on the way, and returns when no goroutine sends from it. A reader may thus see bytes of the
// memory's next user, but never in a READ that succeeded.
//
// # Trust
//
// Tokens are the only authentication, and bytes travel in the clear: listen on loopback or on a network that is trusted.
package tcp

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/transfer"
)

// Options configure a Plane. Zero values mean the defaults.
type Options struct {
	Host string // to listen on; default 127.0.0.1
	Port int    // 0: any free port
	// Advertise is the host that goes into metadata. Default: Host, which must then not be a wildcard address.
	Advertise string
	// AllowHost, if set, is asked before a host from a peer's metadata is resolved or dialled; an error refuses the peer.
	AllowHost func(host string) error

	Streams         int           // connections to one peer at most; default 4
	ProgressTimeout time.Duration // a READ fails if no byte comes, or can be sent, for so long; default 20 s
	DialTimeout     time.Duration // connecting and greeting; default 5 s
	QueueTimeout    time.Duration // a READ waits so long for a free connection; default 60 s
	IdleTimeout     time.Duration // a server drops a connection that asks nothing for so long; default 30 min
	MaxConns        int           // accepted connections in all; default 1024
	MaxConnsSource  int           // accepted connections of one source address; default 256

	Log *slog.Logger // default slog.Default()
}

func (o Options) withDefaults() Options {
	def := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	num := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	if o.Host == "" {
		o.Host = "127.0.0.1"
	}
	if o.Advertise == "" {
		o.Advertise = o.Host
	}
	num(&o.Streams, 4)
	num(&o.MaxConns, 1024)
	num(&o.MaxConnsSource, 256)
	def(&o.ProgressTimeout, 20*time.Second)
	def(&o.DialTimeout, 5*time.Second)
	def(&o.QueueTimeout, 60*time.Second)
	def(&o.IdleTimeout, 30*time.Minute)
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}

// Stats are counters since New, but for Conns.
type Stats struct {
	Conns   int   // accepted connections that are open
	Refused int64 // connections over a limit, closed at once
	Garbage int64 // connections dropped because what came was not the protocol
	Denied  int64 // READs without a live grant
	Aborted int64 // connections reset because a grant ended while bytes of it were on the way
	Dials   int64 // connections made to peers
}

// Plane is the tcp plane of one process.
type Plane struct {
	opts     Options
	instance [16]byte
	listener net.Listener
	location location // without registration and length

	refused, garbage, denied, aborted, dials atomic.Int64

	running sync.WaitGroup // accept loop and connections
	ended   chan struct{}  // closed when nothing is accepted any more
	mu      sync.Mutex
	closed  bool
	nextReg uint64
	regs    map[uint64]*registration
	peers   map[*peer]struct{}
	conns   map[*serverConn]struct{}
	sources map[netip.Addr]int
}

// New listens and starts to serve. ctx bounds the listening only. The caller closes the plane.
func New(ctx context.Context, o Options) (*Plane, error) {
	o = o.withDefaults()
	if hostname.Unspecified(o.Advertise) {
		return nil, fmt.Errorf("%w: tcp: host %s cannot be advertised: set Advertise to an address that peers can reach", transfer.ErrBadRequest, o.Advertise)
	}
	if len(o.Advertise) > maxHost {
		return nil, fmt.Errorf("%w: tcp: advertised host of %d bytes", transfer.ErrBadRequest, len(o.Advertise))
	}
	l, err := listen(ctx, net.JoinHostPort(o.Host, strconv.Itoa(o.Port)), o.ProgressTimeout)
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	p := &Plane{
		opts: o, listener: l, ended: make(chan struct{}),
		regs: map[uint64]*registration{}, peers: map[*peer]struct{}{},
		conns: map[*serverConn]struct{}{}, sources: map[netip.Addr]int{},
	}
	_, _ = rand.Read(p.instance[:]) // never fails: crypto/rand ends the process first
	p.location = location{host: o.Advertise, port: uint16(l.Addr().(*net.TCPAddr).Port), id: endpointID{instance: p.instance}}
	p.running.Go(p.accept)
	return p, nil
}

// Name implements transfer.Plane.
func (p *Plane) Name() string { return transfer.TCP }

// Addr is where the plane listens.
func (p *Plane) Addr() netip.AddrPort { return p.listener.Addr().(*net.TCPAddr).AddrPort() }

// Done is closed when the plane takes no connection any more: after Close, or because its listener has died.
func (p *Plane) Done() <-chan struct{} { return p.ended }

// Capabilities implements transfer.Plane.
func (p *Plane) Capabilities() transfer.Capabilities {
	return transfer.Capabilities{Notify: true, Cancel: true, Tokens: true}
}

// Stats gives the counters.
func (p *Plane) Stats() Stats {
	p.mu.Lock()
	n := len(p.conns)
	p.mu.Unlock()
	return Stats{
		Conns: n, Refused: p.refused.Load(), Garbage: p.garbage.Load(), Denied: p.denied.Load(), Aborted: p.aborted.Load(),
		Dials: p.dials.Load(),
	}
}

// Register implements transfer.Plane. Memory without a file is sent by copying it into the socket. notify may call Revoke.
func (p *Plane) Register(ctx context.Context, m transfer.Memory, notify func(transfer.Notification)) (transfer.Registration, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := m.Check(); err != nil {
		return nil, err
	}
	if m.File != nil {
		fd, err := unix.FcntlInt(m.File.Fd(), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			return nil, fmt.Errorf("tcp: dup %s: %w", m.Path, err)
		}
		m.File = os.NewFile(uintptr(fd), m.Path)
	}
	r := newRegistration(p, m, notify)
	p.mu.Lock()
	err := p.admit(r)
	p.mu.Unlock()
	if err != nil && m.File != nil {
		m.File.Close()
	}
	if err != nil {
		return nil, err
	}
	return r, nil
}

func (p *Plane) admit(r *registration) error {
	if p.closed {
		return fmt.Errorf("tcp: register: %w", transfer.ErrClosed)
	}
	for _, o := range p.regs {
		if o.memory.Overlaps(r.memory) {
			return fmt.Errorf("%w: tcp: the memory overlaps memory that is registered", transfer.ErrBadRequest)
		}
	}
	p.nextReg++
	r.id = p.nextReg
	l := p.location
	l.id.registration, l.length = r.id, int64(len(r.memory.Bytes))
	r.metadata = l.encode()
	p.regs[r.id] = r
	return nil
}

// registration finds what a hello asked for.
func (p *Plane) registration(id endpointID) *registration {
	if id.instance != p.instance {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.regs[id.registration]
}

// Close implements transfer.Plane. What is still open is closed: READs in flight end with ErrClosed here and with ErrPeerLost at
// readers elsewhere.
func (p *Plane) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		p.running.Wait()
		return nil
	}
	p.closed = true
	var peers []*peer
	for c := range p.peers {
		peers = append(peers, c)
	}
	var regs []*registration
	for _, r := range p.regs {
		regs = append(regs, r)
	}
	p.mu.Unlock()
	errs := []error{p.listener.Close()}
	for _, c := range peers {
		errs = append(errs, c.Close())
	}
	for _, r := range regs {
		errs = append(errs, r.Close())
	}
	p.mu.Lock()
	for c := range p.conns {
		abort(c.tcp)
	}
	p.mu.Unlock()
	p.running.Wait()
	return errors.Join(errs...)
}

// random gives a number that a peer cannot guess.
func random() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.LittleEndian.Uint64(b[:])
}
