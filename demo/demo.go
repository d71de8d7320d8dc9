// Package demo is what `ferry demo` does: it starts two nodes and three reference engines as separate processes, takes real images
// through them as an orchestrator would, checks every byte, and takes everything down again.
package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// Options of Run.
type Options struct {
	Ferry      string // path of the binary
	Images     string // directory with JPEG and PNG files; "": the photographs that the binary carries
	Planes     string // of the nodes, with commas; "": all that are there
	PoolBytes  string // size of each pool, as `ferry node` takes it
	BlockBytes int    // bytes of a row
	ShmDir     string // "": the nodes' default
	Log        *slog.Logger
	Stderr     io.Writer // gets what a process that failed wrote
}

const (
	startTimeout   = 30 * time.Second // of one process, to its ready line
	requestTimeout = 2 * time.Minute  // of one HTTP request; the longest step is an encode of the largest image
	stopTimeout    = 10 * time.Second // of one process, from SIGTERM to its end
)

const (
	model   = "ferry-demo"
	version = "0.32.0" // stands for the engines' vLLM version, which both nodes must agree on
)

// Run does the whole demo. An error means that it could not be carried out; failed checks are in the report. Whatever happens,
// no process and no shared memory is left when it returns. Temporary files of a demo that was killed are removed by the next.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	pictures, err := load(o.Images)
	if err != nil {
		return nil, err
	}
	temp, err := newTempDir(o.Log)
	if err != nil {
		return nil, err
	}
	dir := temp.path
	g := newGroup(o.Ferry, dir, o.Log)
	defer func() {
		err = errors.Join(err, ctx.Err(), g.stop())
		if err != nil && ctx.Err() == nil {
			g.writeLogs(o.Stderr)
		}
		err = errors.Join(err, temp.remove())
	}()
	c, err := start(ctx, g, o, dir)
	if err != nil {
		return nil, err
	}
	report = &Report{}
	seen := make(map[string]bool)
	for _, p := range pictures {
		line, err := c.image(ctx, p, seen)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.name, err)
		}
		report.Images = append(report.Images, line)
	}
	report.summarize()
	return report, nil
}

// cluster is the running demo: engine E encodes on node A, D decodes on node B, X is a third engine, on node A.
type cluster struct {
	encode, decode, third *engineClient
}

// start brings up the two nodes at once, then the three engines at once.
func start(ctx context.Context, g *group, o Options, dir string) (*cluster, error) {
	node := func(name string) []string {
		args := []string{
			"node", "--ec-cpu-bytes", o.PoolBytes, "--model", model, "--dtype", "torch.bfloat16",
			"--block-bytes", strconv.Itoa(o.BlockBytes), "--vllm-version", version,
			"--side-channel", "127.0.0.1:0", "--admin", "127.0.0.1:0",
			"--socket", filepath.Join(dir, name+".sock"), "--instance", fmt.Sprintf("demo-%d-%s", os.Getpid(), name),
		}
		if o.Planes != "" {
			args = append(args, "--planes", o.Planes)
		}
		if o.ShmDir != "" {
			args = append(args, "--shm-dir", o.ShmDir)
		}
		return args
	}
	engine := func(name, role, node string) []string {
		return []string{"engine", "--listen", "127.0.0.1:0", "--ec-role", role, "--name", name, "--socket", filepath.Join(dir, node+".sock")}
	}
	if _, err := g.startAll(ctx, map[string][]string{"node A": node("a"), "node B": node("b")}); err != nil {
		return nil, err
	}
	ready, err := g.startAll(ctx, map[string][]string{
		"engine E": engine("E", "ec_producer", "a"),
		"engine D": engine("D", "ec_consumer", "b"),
		"engine X": engine("X", "ec_consumer", "a"),
	})
	if err != nil {
		return nil, err
	}
	return &cluster{newEngineClient(ready["engine E"].URL), newEngineClient(ready["engine D"].URL), newEngineClient(ready["engine X"].URL)}, nil
}
