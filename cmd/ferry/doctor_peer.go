package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/node/client"
)

// probeBlocks is the least pool of the doctor's own node: the probe and room to spare.
const probeBlocks = 4

// examinePeer checks the way to a live node with a small node inside this process, which is gone when it returns.
func (a *app) examinePeer(ctx context.Context, c node.Config, peer, source string, limit time.Duration) (_ []finding, err error) {
	host, portText, err := net.SplitHostPort(peer)
	port, portErr := strconv.Atoi(portText)
	if err != nil || portErr != nil || host == "" || port < 1 || port > 65535 {
		return nil, usage("--peer %q: want HOST:PORT, the peer's side channel", peer)
	}
	var params ec.Params
	if source != "" {
		if params, err = a.readParams(source); err != nil {
			return nil, err
		}
	}
	if len(c.Pools) != 1 {
		return nil, usage("--peer needs one pool, the peer's: give its --model, --dtype, --block-bytes and --vllm-version")
	}
	dir, err := os.MkdirTemp("", "ferry-doctor-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	n, err := a.ownNode(ctx, c, dir, params)
	if err != nil {
		return nil, err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
		defer cancel()
		err = errors.Join(err, n.Close(end))
	}()
	conn, err := client.Dial(ctx, n.Ready().Socket, client.Options{Name: "ferry doctor", Log: a.log})
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	d := &peerDoctor{conn: conn, host: host, port: port, limit: limit}
	found, alive, err := d.control(ctx)
	if err != nil || !alive {
		return append(found, finding{"data path", fail, "not checked: the control path does not work", ""}), err
	}
	data, err := d.probe(ctx, params)
	if err != nil {
		return nil, err
	}
	found = append(found, data)
	for _, key := range params.Keys() {
		one, err := d.entry(ctx, key, params)
		if err != nil {
			return nil, err
		}
		found = append(found, one)
	}
	return found, nil
}

// ownNode starts the small node: the peer's pool parameters, any free port on loopback, nothing kept.
func (a *app) ownNode(ctx context.Context, c node.Config, dir string, params ec.Params) (*node.Node, error) {
	blocks := int64(probeBlocks)
	for _, key := range params.Keys() {
		if p, ok := params.Get(key); ok && c.Pools[0].BlockBytes > 0 {
			blocks += p.SizeBytes / c.Pools[0].BlockBytes
		}
	}
	pool := c.Pools[0]
	pool.ECCPUBytes = strconv.FormatInt(blocks*pool.BlockBytes, 10)
	pool.Slots = 0
	c.Pools = []node.PoolConfig{pool}
	c.Instance = fmt.Sprintf("doctor-%d", os.Getpid())
	c.Socket = filepath.Join(dir, "node.sock")
	c.SideChannel, c.Advertise, c.Admin, c.KeepRegion = "127.0.0.1:0", "", node.AdminOff, false
	// The doctor's own report says what is wrong; of its node's log only what is more than that.
	n, err := node.Start(ctx, c, slog.New(atLeast{a.log.Handler(), slog.LevelWarn}))
	if errors.Is(err, node.ErrConfig) {
		err = usageError{err}
	}
	return n, err
}

// atLeast is a handler with a floor under its level.
type atLeast struct {
	slog.Handler
	floor slog.Level
}

func (h atLeast) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= h.floor && h.Handler.Enabled(ctx, l)
}

func (h atLeast) WithAttrs(as []slog.Attr) slog.Handler {
	return atLeast{h.Handler.WithAttrs(as), h.floor}
}
func (h atLeast) WithGroup(name string) slog.Handler {
	return atLeast{h.Handler.WithGroup(name), h.floor}
}

// peerDoctor asks one peer.
type peerDoctor struct {
	conn  *client.Client
	host  string
	port  int
	limit time.Duration
}

func (d *peerDoctor) address() string { return net.JoinHostPort(d.host, strconv.Itoa(d.port)) }

// fetch asks for one key and waits for its outcome.
func (d *peerDoctor) fetch(ctx context.Context, key string, ann *ec.Announcement) (client.FetchResult, error) {
	return ask(ctx, d.limit+5*time.Second, func(ctx context.Context) (client.FetchResult, error) {
		var p ec.Params
		p.Set(key, ann)
		results, err := d.conn.Fetch(ctx, p, d.limit)
		if err != nil {
			return client.FetchResult{}, err
		}
		r, ok := <-results
		if !ok {
			return r, fmt.Errorf("the own node gave no outcome for %s", key)
		}
		return r, nil
	})
}

// oneBlock is an announcement of one block at the peer.
func (d *peerDoctor) oneBlock() (*ec.Announcement, error) {
	p := d.conn.Pool()
	size, err := ec.ItemSize(p.Dtype)
	if err != nil {
		return nil, err
	}
	a := &ec.Announcement{Metadata: []byte("{}"), PeerHost: d.host, PeerPort: d.port, SizeBytes: p.BlockBytes}
	if p.Generation >= 2 {
		a.ItemIndices, a.Shape = []int{0}, []int{1, int(p.BlockBytes) / size}
	}
	return a, nil
}

// control asks twice for a key that nobody has: the first connects, the second shows the round trip.
func (d *peerDoctor) control(ctx context.Context) (found []finding, alive bool, err error) {
	ann, err := d.oneBlock()
	if err != nil {
		return nil, false, err
	}
	var times [2]time.Duration
	for i := range times {
		r, err := d.fetch(ctx, "ferry-doctor-"+rand.Text(), ann)
		if err != nil {
			return nil, false, err
		}
		times[i] = r.Elapsed
		if r.Outcome == ec.FetchMissing {
			continue
		}
		text := fmt.Sprintf("%s: %s: %s", d.address(), r.Outcome, r.Reason)
		fix := ""
		switch r.Outcome {
		case ec.FetchUnreachable, ec.FetchTimedOut:
			said, why := d.accepts(ctx, r.Elapsed)
			text += said
			fix = why
		case ec.FetchIncompatible:
			fix = "give doctor, and each node, the same model, dtype, block bytes, vLLM version and ec-protocol"
		}
		return []finding{{"control path", fail, text, fix}}, false, nil
	}
	return []finding{{"control path", good, fmt.Sprintf("%s answers and is compatible; connected in %s, round trip %s",
		d.address(), times[0].Round(10*time.Microsecond), times[1].Round(10*time.Microsecond)), ""}}, true, nil
}

// accepts looks at a peer that did not answer by TCP alone. The kernel takes connections for a process that is stopped, too.
func (d *peerDoctor) accepts(ctx context.Context, waited time.Duration) (said, fix string) {
	conn, err := ask(ctx, d.limit, func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", d.address())
	})
	if err != nil {
		return fmt.Sprintf("; a TCP connection fails, too: %v", err),
			"is the node up, does it listen on that address and not on loopback only, does a firewall let the port through?"
	}
	_ = conn.Close()
	return fmt.Sprintf("; TCP connections to it are accepted, but no answer came in %s", waited.Round(10*time.Millisecond)),
		"the process that listens there may be stopped (SIGSTOP, a debugger, a container that is frozen) or overloaded, or be no node"
}

// probe pulls the block of known bytes.
func (d *peerDoctor) probe(ctx context.Context, params ec.Params) (finding, error) {
	const check = "data path"
	ann, err := d.oneBlock()
	if err != nil {
		return finding{}, err
	}
	p := d.conn.Pool()
	_, want, err := node.Probe(p.Dtype, p.BlockBytes)
	if err != nil {
		return finding{check, warn, err.Error(), "give --params with the announcement of a real encoding"}, nil
	}
	r, err := d.fetch(ctx, node.ProbeKey, ann)
	switch {
	case err != nil:
		return finding{}, err
	case r.Outcome == ec.FetchMissing && len(params.Keys()) > 0:
		return finding{check, good, "the peer has no probe (it is no Tensorferry node, or its pool is full of pinned entries): see the entries of --params", ""}, nil
	case r.Outcome == ec.FetchMissing:
		return finding{check, warn, "not checked: the peer has no probe (it is no Tensorferry node, or its pool is full of pinned entries)",
			"give --params with ec_transfer_params of an encoding that it holds: from the answer of the engine that encoded it, or `ferry ec announce` at a node"}, nil
	case r.Outcome != ec.FetchReady:
		return finding{check, fail, fmt.Sprintf("%s: %s", r.Outcome, r.Reason),
			"the data path may use another port than the side channel, and another network: do firewalls let both through?"}, nil
	}
	got, err := d.bytes(ctx, node.ProbeKey)
	if err != nil {
		return finding{}, err
	}
	if !bytes.Equal(got, want) {
		return finding{check, fail, fmt.Sprintf("%d bytes came by plane %s with xxh3 %016x, want %016x: the path damages data", len(got), r.Plane, xxh3.Hash(got), xxh3.Hash(want)), ""}, nil
	}
	return finding{check, good, fmt.Sprintf("%d bytes by plane %s in %s, xxh3 %016x, equal to what was sent",
		len(got), r.Plane, r.Elapsed.Round(10*time.Microsecond), xxh3.Hash(got)), ""}, nil
}

// entry pulls an encoding that the peer announced, from where the announcement says it is.
func (d *peerDoctor) entry(ctx context.Context, key string, params ec.Params) (finding, error) {
	check := "entry " + key
	if err := params.Err(key); err != nil {
		return finding{check, fail, err.Error(), ""}, nil
	}
	ann, _ := params.Get(key)
	if !ann.Servable() {
		return finding{check, warn, "announced without an address", ""}, nil
	}
	r, err := d.fetch(ctx, key, ann)
	if err != nil {
		return finding{}, err
	}
	if r.Outcome != ec.FetchReady {
		return finding{check, fail, fmt.Sprintf("%s: %s", r.Outcome, r.Reason), ""}, nil
	}
	b, err := d.bytes(ctx, key)
	if err != nil {
		return finding{}, err
	}
	f := finding{check, good, fmt.Sprintf("%d bytes by plane %s in %s, xxh3 %016x", len(b), r.Plane, r.Elapsed.Round(10*time.Microsecond), xxh3.Hash(b)), ""}
	if ann.PeerHost != d.host || ann.PeerPort != d.port {
		f.Verdict = warn
		f.Fix = fmt.Sprintf("the announcement names %s, not the peer that was asked about: is that the address other machines can reach?", net.JoinHostPort(ann.PeerHost, strconv.Itoa(ann.PeerPort)))
	}
	return f, nil
}

// bytes copies an entry out of the pool.
func (d *peerDoctor) bytes(ctx context.Context, key string) ([]byte, error) {
	return ask(ctx, d.limit, func(ctx context.Context) ([]byte, error) {
		m, err := d.conn.Map(ctx, key)
		if err != nil {
			return nil, err
		}
		defer m.Release()
		return bytes.Join(m.Buffers(), nil), nil
	})
}
