// Package node is the daemon of one machine: it owns the pools, answers peers, and serves the engines of this machine.
package node

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// Node is a running node. Its methods are safe for concurrent use.
type Node struct {
	s           *settings
	log         *slog.Logger
	started     time.Time
	id          string
	pools       []*pool
	planes      []transfer.Plane
	loop        *control.Loop
	router      *control.Router
	producer    *ec.Producer
	socket      *engineSocket
	engines     *engines
	planeHealth *planeHealth
	admin       *adminServer // nil: off
	ready       Ready

	closers []closer // in the order of bringing up
	busy    bool     // something may still touch the pools: they stay mapped
	serving bool     // the start has succeeded

	done     chan struct{}
	failOnce sync.Once
	err      error // set before done is closed

	closeOnce sync.Once
	closed    chan struct{}
	closeErr  error
}

// closer takes down one part.
type closer struct {
	name  string
	close func(ctx context.Context) error
}

// Ready is what `ferry node` prints when it serves.
type Ready struct {
	Event    string `json:"event"` // "ready"
	Socket   string `json:"socket"`
	PeerHost string `json:"peer_host"`
	PeerPort int    `json:"peer_port"`
	Admin    string `json:"admin"`  // "" if it is off
	Region   string `json:"region"` // of the first pool; /v1/status has all
	PID      int    `json:"pid"`
}

// Start brings a node up, or says why not; nothing is left behind by a start that fails. ctx bounds the start only. A nil log is
// slog.Default().
func Start(ctx context.Context, c Config, log *slog.Logger) (*Node, error) {
	if log == nil {
		log = slog.Default()
	}
	s, err := c.check()
	if err != nil {
		return nil, err
	}
	n := &Node{s: s, log: log, started: time.Now(), done: make(chan struct{}), closed: make(chan struct{})}
	if err := n.start(ctx); err != nil {
		// The caller's context may be what ended the start.
		downCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer cancel()
		return nil, errors.Join(err, n.takeDown(downCtx))
	}
	n.watch()
	go n.planeHealth.watch(n.closed)
	go watchFiles(n.closed, n.lostFiles, n.log)
	n.log.Info("node ready", "socket", n.ready.Socket, "side_channel", net.JoinHostPort(s.host, strconv.Itoa(n.ready.PeerPort)),
		"advertised", n.ready.PeerHost, "admin", n.ready.Admin, "planes", n.planeList(), "ec_protocol", s.ECProtocol, "instance", s.Instance)
	return n, nil
}

func (n *Node) start(ctx context.Context) error {
	s := n.s
	if err := checkFiles(); err != nil {
		return err
	}
	n.warn()
	n.id = nodeID(s)
	// What another process may have comes first: a start that fails for it has touched no region. What serves peers comes late.
	for _, step := range []func(context.Context) error{
		n.bindSocket, n.bindAdmin, s.tryPorts, n.startPools, n.startPlanes, n.startPeers, n.startConsumers, n.startEngines,
	} {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := step(ctx); err != nil {
			return err
		}
	}
	n.ready = Ready{
		Event: "ready", Socket: s.socket, PeerHost: s.advertise, PeerPort: n.router.Port(),
		Region: n.pools[0].region.Path(), PID: os.Getpid(),
	}
	if n.admin != nil {
		n.ready.Admin = n.admin.addr
	}
	n.serving = true
	for _, p := range n.pools {
		p.grantedBefore = nil
	}
	for _, p := range n.planes {
		leaveFormers(p, false)
	}
	if n.admin != nil {
		n.admin.serve(n)
		n.up("admin", n.admin.close)
	}
	return nil
}

func (n *Node) warn() {
	s := n.s
	if !hostname.Loopback(s.host) {
		n.log.Warn("side_channel is open to the network, and peers are not authenticated: whoever can connect can read this node's encodings", "side_channel", s.SideChannel)
	}
	if s.Admin != AdminOff && !hostname.Loopback(s.adminHost) {
		n.log.Warn("admin is open to the network", "admin", s.Admin)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(s.ShmDir, &st); err == nil && st.Type != unix.TMPFS_MAGIC { // if not, the region says why
		n.log.Warn("shm_dir is not on a tmpfs: encodings are written back to a disk; name a directory on a tmpfs", "shm_dir", s.ShmDir)
	}
	if hostname.Loopback(s.advertise) {
		n.log.Info("announcements carry a loopback address: only nodes of this machine can pull; for others set side_channel and trusted_network", "advertised", s.advertise)
	}
}

// up notes how to take a part down again.
func (n *Node) up(name string, f func(ctx context.Context) error) {
	n.closers = append(n.closers, closer{name, f})
}

func (n *Node) startPools(ctx context.Context) error {
	sweepRegions(n.s.ShmDir, n.log)
	for _, ps := range n.s.pools {
		p, err := openPool(ctx, n.s, ps, n.log)
		if err != nil {
			return err
		}
		n.pools = append(n.pools, p)
		n.up("region "+p.region.Path(), func(ctx context.Context) error {
			if !n.serving && p.region.Adopted() {
				p.handBack(ctx, n.log)
			}
			p.region.KeepFor(n.s.Timeouts.Adopt)
			remove := n.removes(p)
			if p.left && remove { // else its name says for how long
				p.region.ServeFor(n.s.Timeouts.Adopt)
			}
			switch {
			case !n.busy:
				p.clients.close()
				return p.region.Close(remove)
			case remove:
				// Better a mapping that ends with the process than a fault in the middle of a READ.
				return p.region.Unlink()
			}
			return nil
		})
	}
	n.up("regions' sign of life", n.keepRegions())
	return nil
}

// bindSocket takes the engine socket's path, or finds the node that is there already before memory is asked for a second time.
func (n *Node) bindSocket(ctx context.Context) error {
	var err error
	if n.socket, err = bindEngine(ctx, n.s.socket); err != nil {
		return err
	}
	n.up("engine socket's path", func(context.Context) error { return n.socket.release() })
	return nil
}

func (n *Node) bindAdmin(ctx context.Context) error {
	if n.s.Admin == AdminOff {
		return nil
	}
	var err error
	if n.admin, err = listenAdmin(ctx, n.s); err != nil {
		return bad("admin", n.s.Admin, "%w; %s", err, listenFix(err, "use a free port, 0 for any, or off"))
	}
	n.up("admin's port", func(context.Context) error { return n.admin.unbind() })
	return nil
}

// tryPorts finds out which of the ports that must be had is in use, and whether the side channel's host is one of this machine's. They are
// bound in earnest once there is a region to serve.
func (s *settings) tryPorts(ctx context.Context) error {
	try := func(host string, port int) error {
		var lc net.ListenConfig
		l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			return err
		}
		return l.Close()
	}
	if err := try(s.host, s.port); err != nil {
		return badSideChannel(s, err)
	}
	if s.DataPort != 0 && (s.Planes == nil || slices.Contains(s.Planes, transfer.TCP)) {
		if err := try(s.host, s.DataPort); err != nil {
			return badPlane(transfer.TCP, err)
		}
	}
	return nil
}

func (n *Node) startPlanes(ctx context.Context) error {
	planes, err := openPlanes(ctx, n.s, n.log)
	if err != nil {
		return err
	}
	n.planes, n.planeHealth = planes, newPlaneHealth(planes, n.log)
	for _, p := range planes {
		leaveFormers(p, true) // until the start has succeeded
		n.up("plane "+p.Name(), func(context.Context) error { return p.Close() })
	}
	return nil
}

// startPeers brings up what answers peers: the control loop, the producer, the side channel.
func (n *Node) startPeers(ctx context.Context) error {
	var err error
	if n.loop, err = control.NewLoop(control.Options{Log: n.log}); err != nil {
		return err
	}
	n.up("control loop", func(context.Context) error { return n.loop.Close() })
	o := ec.ProducerOptions{
		Generation: n.s.ECProtocol,
		Node:       n.id,
		Epoch:      n.pools[0].region.Epoch(),
		Timeouts:   n.s.Timeouts.ec(),
		Log:        n.log,

		SourceShare: n.s.SourceShare,
		TotalShare:  n.s.TotalShare,
	}
	for _, p := range n.pools {
		sp, err := p.served(n.planes)
		if err != nil {
			return err
		}
		defer func() { _ = sp.Memory.File.Close() }()
		if p.region.Adopted() && !n.s.takesOver(n.planes) {
			heirs, err := nixl.TakeOver(ctx, sp.Memory.File, n.log)
			if err != nil {
				return fmt.Errorf("region %s: %w", p.region.Path(), err)
			}
			if len(p.granted) == 0 { // nobody has anything to READ by them
				_ = heirs.Close() // gives nil
			} else {
				sp.Former = heirs
				n.up("agents of the node before", func(context.Context) error {
					if !n.serving {
						heirs.Leave()
					}
					return heirs.Close()
				})
			}
		}
		o.Pools = append(o.Pools, sp)
	}
	if n.producer, err = ec.NewProducer(ctx, o); err != nil {
		return err
	}
	for _, p := range n.pools {
		p.producer = n.producer
	}
	n.up("producer", func(context.Context) error { return n.producer.Close() })
	answerer := &probes{Producer: n.producer, pools: n.pools, generation: n.s.ECProtocol, checksums: n.s.Checksums}
	if n.router, err = n.listen(ctx, answerer); err != nil {
		return err
	}
	n.up("side channel", func(context.Context) error { return n.router.Close() })
	n.producer.Serve(n.router)
	if name, err := n.router.ListenLocal(ctx); err == nil {
		n.producer.ServeLocal(name)
	} else {
		n.log.Warn("nodes of this machine are served by the side channel only, which is slower", "error", err)
	}
	for _, p := range n.pools {
		p.region.SetPort(n.router.Port())
	}
	return nil
}

func (n *Node) startConsumers(context.Context) error {
	for _, p := range n.pools {
		c, err := ec.NewConsumer(ec.ConsumerOptions{
			Cache:      p.cache,
			Compat:     p.compat,
			Generation: n.s.ECProtocol,
			ItemSize:   p.itemSize,
			Loop:       n.loop,
			Planes:     n.planes,
			Node:       n.id,
			Epoch:      p.region.Epoch(),
			Verify:     n.s.Checksums,
			Timeouts:   n.s.Timeouts.ec(),
			AllowHost:  n.s.hosts.allow,
			Log:        n.log,
		})
		if err != nil {
			return err
		}
		p.consumer = c
		n.up("consumer", func(ctx context.Context) error {
			ended := make(chan error, 1)
			go func() { ended <- c.Close() }()
			select {
			case err := <-ended:
				n.busy = n.busy || err != nil
				return err
			case <-ctx.Done():
				n.busy = true
				return ctx.Err()
			}
		})
	}
	return nil
}

func (n *Node) startEngines(context.Context) error {
	if err := n.socket.listen(); err != nil {
		return err
	}
	id := identity{node: n.id, peerHost: n.s.advertise, peerPort: n.router.Port(), generation: n.s.ECProtocol}
	n.engines = newEngines(n.socket, n.pools, id, n.s.Checksums, n.s.KeepRegion, n.log)
	go n.engines.serve()
	n.up("engine socket", func(ctx context.Context) error {
		ended, err := n.engines.close(ctx)
		n.busy = n.busy || !ended
		return err
	})
	return nil
}

// watch ends the node's service when a part of it has ended by itself.
func (n *Node) watch() {
	parts := []<-chan struct{}{n.loop.Done(), n.engines.loop}
	if n.admin != nil {
		parts = append(parts, n.admin.done)
	}
	for _, p := range n.planes {
		if l, ok := p.(listener); ok {
			parts = append(parts, l.Done())
		}
	}
	for _, ended := range parts {
		go func() {
			select {
			case <-ended:
			case <-n.closed:
				return
			}
			if err := n.over(); err != nil && !errors.Is(err, errEnding) {
				n.log.Error("node cannot serve any more", "error", err)
				n.fail(err)
			}
		}()
	}
}

// listener is implemented by data planes that peers connect to. Done is closed when they no longer can.
type listener interface{ Done() <-chan struct{} }

// failed says which listener has ended, nil if none has.
func (n *Node) failed() error {
	var errs []error
	select {
	case <-n.loop.Done():
		errs = append(errs, fmt.Errorf("side channel: %w", errors.Join(n.loop.Err(), control.ErrClosed)))
	default:
	}
	if err := n.engines.failed(); err != nil {
		errs = append(errs, err)
	}
	for _, p := range n.planes {
		if l, ok := p.(listener); ok {
			select {
			case <-l.Done():
				errs = append(errs, fmt.Errorf("plane %s: its listener has died", p.Name()))
			default:
			}
		}
	}
	if n.admin != nil {
		if err := n.admin.failed(); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (n *Node) fail(err error) {
	n.failOnce.Do(func() {
		n.err = err
		close(n.done)
	})
}

// Ready says where the node serves.
func (n *Node) Ready() Ready { return n.ready }

// Done is closed if the node can no longer serve, or once it is closed; Err says why, nil after a clean Close.
func (n *Node) Done() <-chan struct{} { return n.done }

// Err is nil until Done is closed.
func (n *Node) Err() error {
	select {
	case <-n.done:
		return n.err
	default:
		return nil
	}
}

// Close ends it cleanly: engines are disconnected, fetches canceled, grants ended, the socket and (unless keep_region) the regions
// removed. Plain peers get a moment to READ what they were acked; the agents that serve what they have not READ by then go on without the
// node. ctx bounds the wait for work under way; what is then still writing keeps its memory mapped until the process ends.
// Idempotent; a second call waits for the first.
func (n *Node) Close(ctx context.Context) error {
	n.closeOnce.Do(func() {
		close(n.closed)
		n.settle(ctx)
		n.closeErr = n.takeDown(ctx)
		n.fail(nil)
		n.log.Info("node ended", "error", n.closeErr)
	})
	return n.closeErr
}

// takeDown ends all parts that are up, the last first.
func (n *Node) takeDown(ctx context.Context) error {
	var errs []error
	for _, c := range slices.Backward(n.closers) {
		if err := c.close(ctx); err != nil {
			errs = append(errs, fmt.Errorf("ending %s: %w", c.name, err))
		}
	}
	n.closers = nil
	return errors.Join(errs...)
}

func (n *Node) planeList() []string {
	names := make([]string, len(n.planes))
	for i, p := range n.planes {
		names[i] = p.Name()
	}
	return names
}

func (t TimeoutConfig) ec() ec.Timeouts {
	return ec.Timeouts{
		AckOwn: t.AckOwn, AckPlain: t.AckPlain, Connect: t.Connect, Read: t.Read, Quarantine: t.Quarantine,
		Item: t.Item, GrantLease: t.GrantLease, PlainLease: t.PlainLease, Idle: t.Idle,
	}
}

// nodeID tells this node from every other, on whatever machine: two machines may well use one socket path, and so one instance.
// It is the same after a restart.
func nodeID(s *settings) string {
	h := sha256.New()
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // without it the rest still tells much
	_, _ = h.Write(boot)
	// Containers share the boot id and may share paths; they do not share a directory's device and inode.
	var st unix.Stat_t
	if unix.Stat(filepath.Dir(s.socket), &st) == nil {
		fmt.Fprintf(h, "%d:%d:", st.Dev, st.Ino)
	}
	fmt.Fprintf(h, "%s:%s:%d", s.Instance, filepath.Base(s.socket), s.Rank)
	const digits = 8
	return s.Instance[:min(len(s.Instance), wire.MaxNode-digits-1)] + "-" + hex.EncodeToString(h.Sum(nil)[:digits/2])
}
