package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/child"
	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/node"
)

var compat = wire.Compat{VLLMVersion: "0.32.0", Model: "tiny-mm", Dtype: "torch.bfloat16", BlockBytes: 2048}

const timeout = 30 * time.Second

// offer is the child's first line.
type offer struct {
	Socket string `json:"socket"`
	Addr   string `json:"addr"`

	pid int
}

// spec is that of an entry of 4 blocks: the pool holds 8,192 of them.
func spec() ec.Spec {
	return ec.Spec{Dtype: compat.Dtype, Shape: []int64{4, compat.BlockBytes / 2}, Bytes: 4 * compat.BlockBytes}
}

func key(i int) string { return fmt.Sprintf("%064x", uint64(i)*0x9e3779b97f4a7c15) }

// serve is a node. A line on stdin asks for the bytes of its heap in use, after a collection.
func serve(dir string) (err error) {
	ctx := context.Background()
	c := node.DefaultConfig()
	c.Instance = fmt.Sprint("bench-", os.Getpid())
	c.Socket = filepath.Join(dir, "node.sock")
	c.SideChannel, c.Admin, c.ShmDir = "127.0.0.1:0", "127.0.0.1:0", dir
	c.Planes = []string{"mapped", "tcp"}
	c.Pools = []node.PoolConfig{{
		ECCPUBytes: "64MiB", Model: compat.Model, Dtype: compat.Dtype, BlockBytes: compat.BlockBytes, VLLMVersion: compat.VLLMVersion,
	}}
	n, err := node.Start(ctx, c, slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})))
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		err = errors.Join(err, n.Close(end))
	}()
	r := n.Ready()
	if err := child.Ready(offer{Socket: c.Socket, Addr: fmt.Sprintf("%s:%d", r.PeerHost, r.PeerPort)}); err != nil {
		return err
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		fmt.Println(m.HeapAlloc)
	}
	return lines.Err()
}
