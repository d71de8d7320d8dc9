package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/child"
	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

const (
	blockBytes  = 2048
	entryBlocks = 8
	entries     = 64 // 1 MiB of blocks, an eighth of the small region: one source may be granted a quarter
	planeName   = "bench"
)

var compat = wire.Compat{VLLMVersion: "0.32.0", Model: "tiny-mm", Dtype: "torch.bfloat16", BlockBytes: blockBytes}

func key(i int) string { return fmt.Sprintf("%064x", uint64(i)*0x9e3779b97f4a7c15) }

func spec() ec.Spec {
	return ec.Spec{Dtype: compat.Dtype, Shape: []int64{entryBlocks, blockBytes / 2}, Bytes: entryBlocks * blockBytes}
}

// offer is the first line of a child: where to ask, and for what.
type offer struct {
	Host   string         `json:"host"`
	Port   int            `json:"port"`
	Hash   string         `json:"compat_hash"`
	Held   map[string]int `json:"entries"`
	Socket string         `json:"socket,omitempty"`
	Shm    string         `json:"shm,omitempty"` // vLLM's region
}

func (o *offer) addr() string { return fmt.Sprintf("%s:%d", o.Host, o.Port) }

// plane carries no bytes: READs are not measured here. It speaks to plain peers and to our own.
type plane struct{ notify func(transfer.Notification) }

func (p *plane) Name() string                        { return planeName }
func (p *plane) Capabilities() transfer.Capabilities { return transfer.Capabilities{Notify: true} }
func (p *plane) Close() error                        { return nil }
func (p *plane) AddPeer(context.Context, []byte) (transfer.Peer, error) {
	return nil, transfer.ErrUnreachable
}
func (p *plane) Register(_ context.Context, _ transfer.Memory, notify func(transfer.Notification)) (transfer.Registration, error) {
	p.notify = notify
	return registration{}, nil
}

type registration struct{}

func (registration) Metadata() []byte                            { return []byte("metadata") }
func (registration) Grant(string, []region.Span) ([]byte, error) { return nil, nil }
func (registration) Revoke(string)                               {}
func (registration) Close() error                                { return nil }

// Agent implements ec.PlainServer. The metadata is as long as that of a NIXL agent.
func (registration) Agent() ([]byte, uint64, <-chan struct{}) {
	return make([]byte, 600), 1 << 40, nil
}

// serve is a producer with a full set of entries in a region of that many bytes, with the shares of a node. A line "SESSION KEY N" on
// stdin says that a plain peer has read the key N times; the end of stdin ends it.
func serve(dir string, bytes int64) (err error) {
	ctx := context.Background()
	blocks := int(bytes / blockBytes)
	r, err := region.Create(ctx, region.Options{
		Dir:      dir,
		Identity: region.Identity{Instance: fmt.Sprint("bench-", os.Getpid()), Group: "0"},
		Geometry: region.Geometry{BlockBytes: blockBytes, Blocks: blocks, Slots: 4 * entries},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close(true)) }()
	cache, err := ec.NewCache(ec.CacheOptions{Region: r})
	if err != nil {
		return err
	}
	held := map[string]int{}
	for i := range entries {
		res, err := cache.Reserve(key(i), spec(), 0)
		if err == nil {
			_, err = res.Commit(nil)
		}
		if err != nil {
			return err
		}
		held[key(i)] = int(spec().Bytes)
	}
	p := &plane{}
	producer, err := ec.NewProducer(ctx, ec.ProducerOptions{
		Pools:      []ec.ServedPool{{Cache: cache, Compat: compat, Memory: transfer.Memory{Bytes: r.Pool()}, Planes: []transfer.Plane{p}}},
		Generation: wire.Generation2, Node: "bench", Epoch: 1,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, producer.Close()) }()
	loop, err := control.NewLoop(control.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, loop.Close()) }()
	router, err := loop.Listen(ctx, "127.0.0.1", 0, producer)
	if err != nil {
		return err
	}
	producer.Serve(router)
	if err := child.Ready(offer{Host: "127.0.0.1", Port: router.Port(), Hash: compat.Hash(), Held: held}); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var session, key string
		var reads int
		if _, err := fmt.Sscan(lines.Text(), &session, &key, &reads); err != nil {
			return err
		}
		for range reads {
			p.notify(transfer.Notification{Message: wire.Notification(session, key)})
		}
		fmt.Println("ok")
	}
	return lines.Err()
}

// serveNode is a whole node, with the entries that an engine has put there.
func serveNode(dir string) (err error) {
	ctx := context.Background()
	c := node.DefaultConfig()
	c.Instance = fmt.Sprint("bench-", os.Getpid())
	c.Socket = filepath.Join(dir, "node.sock")
	c.SideChannel, c.Admin, c.ShmDir = "127.0.0.1:0", node.AdminOff, dir
	c.Planes = []string{"mapped"}
	c.Pools = []node.PoolConfig{{
		ECCPUBytes: "64MiB", Model: compat.Model, Dtype: compat.Dtype, BlockBytes: compat.BlockBytes, VLLMVersion: compat.VLLMVersion,
	}}
	n, err := node.Start(ctx, c, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(ctx, answerTimeout)
		defer cancel()
		err = errors.Join(err, n.Close(end))
	}()
	e, err := client.Dial(ctx, c.Socket, client.Options{Name: "bench"})
	if err != nil {
		return err
	}
	held := map[string]int{}
	for i := range entries {
		if _, err := e.Put(ctx, key(i), spec(), make([]byte, spec().Bytes)); err != nil {
			return errors.Join(err, e.Close())
		}
		held[key(i)] = int(spec().Bytes)
	}
	if err := e.Close(); err != nil {
		return err
	}
	if err := child.Ready(offer{Host: n.Ready().PeerHost, Port: n.Ready().PeerPort, Hash: compat.Hash(), Held: held, Socket: c.Socket}); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// engine is an engine of a node that is in one step after another, all of which keep its thread busy: it maps an entry, computes,
// saves another and lets go of the first.
func engine(socket string, step time.Duration) error {
	ctx := context.Background()
	e, err := client.Dial(ctx, socket, client.Options{Name: "stepping"})
	if err != nil {
		return err
	}
	defer e.Close()
	if err := child.Ready(offer{}); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, os.Stdin)
		ended <- err
	}()
	for i := 0; ; i++ {
		select {
		case err := <-ended:
			return err
		default:
		}
		m, err := e.Map(ctx, key(i%entries))
		if err != nil {
			return err
		}
		for start := time.Now(); time.Since(start) < step; {
		}
		if _, err := e.Put(ctx, key(entries+i%8), spec(), make([]byte, spec().Bytes)); err != nil {
			return err
		}
		m.Release()
	}
}
