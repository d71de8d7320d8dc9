package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// process answers lines with lines, and ends with its input or by a signal.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func start(path string, args ...string) (*process, error) {
	p := &process{cmd: exec.Command(path, args...)}
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReaderSize(out, 1<<20)
	return p, p.cmd.Start()
}

func (p *process) line() (string, error) {
	s, err := p.out.ReadString('\n')
	return strings.TrimSpace(s), err
}

func (p *process) ask(line string) (string, error) {
	if _, err := fmt.Fprintln(p.in, line); err != nil {
		return "", err
	}
	return p.line()
}

const endTimeout = 20 * time.Second

// end closes the input, sends the signal, and kills what does not end by that.
func (p *process) end(s syscall.Signal) error {
	_ = p.in.Close()
	_ = p.cmd.Process.Signal(s)
	late := time.AfterFunc(endTimeout, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	return p.cmd.Wait()
}

// ferryNode is a ferry node and this process's connection to it, as an engine has one.
type ferryNode struct {
	*process
	planes string
	client *client.Client
}

// startNode starts a node whose pool is REGION bytes of blocks of one row.
func startNode(dir, name, planes string, region int64) (*ferryNode, error) {
	socket := filepath.Join(dir, name)
	p, err := start(filepath.Join(dir, "ferry"), "node", "--log-level", "error", "--socket", socket, "--ec-cpu-bytes", strconv.FormatInt(region, 10),
		"--model", "tiny-mm", "--dtype", "torch.bfloat16", "--block-bytes", strconv.Itoa(rowBytes), "--vllm-version", "0.32.0",
		"--side-channel", "127.0.0.1:0", "--admin", "off", "--planes", planes)
	if err != nil {
		return nil, fmt.Errorf("node %s: %w", name, err)
	}
	n := &ferryNode{process: p, planes: planes}
	if _, err := p.line(); err != nil { // says that it serves
		return nil, errors.Join(fmt.Errorf("node %s: %w", name, err), n.close())
	}
	if n.client, err = client.Dial(context.Background(), socket, client.Options{Name: "bench", Once: true}); err != nil {
		return nil, errors.Join(fmt.Errorf("node %s: %w", name, err), n.close())
	}
	return n, nil
}

func (n *ferryNode) close() error {
	if n.client != nil {
		_ = n.client.Close()
	}
	return n.end(syscall.SIGTERM)
}

// add saves entries and announces them.
func (n *ferryNode) add(w workload) (ec.Params, error) {
	ctx := context.Background()
	var items []client.AnnounceItem
	for _, key := range w.keys() {
		if _, err := n.client.Put(ctx, key, w.spec(), pattern(key, w.bytes)); err != nil {
			return ec.Params{}, err
		}
		items = append(items, client.AnnounceItem{Key: key})
	}
	return n.client.Announce(ctx, items)
}

// pull fetches all entries at once and gives the time until their results are here. Then it removes them again.
func (n *ferryNode) pull(w workload, p ec.Params, check bool) (time.Duration, error) {
	begin := time.Now()
	err := n.fetch(p)
	took := time.Since(begin)
	if err != nil {
		return 0, err
	}
	if check {
		for _, key := range w.keys() {
			if err := n.check(key, w.bytes); err != nil {
				return 0, err
			}
		}
	}
	return took, n.remove(w)
}

func (n *ferryNode) fetch(p ec.Params) (err error) {
	results, err := n.client.Fetch(context.Background(), p, 0)
	if err != nil {
		return err
	}
	for r := range results {
		if r.Outcome != ec.FetchReady || r.Plane != n.planes {
			err = fmt.Errorf("%s: %v by plane %q: %s", r.Key, r.Outcome, r.Plane, r.Reason)
		}
	}
	return err
}

func (n *ferryNode) remove(w workload) error {
	var ops []client.Op
	for _, key := range w.keys() {
		ops = append(ops, client.RemoveOp(key))
	}
	removed, err := n.client.Batch(context.Background(), ops...)
	for _, r := range removed {
		err = errors.Join(err, r.Err)
	}
	return err
}

// offset is where the entry lies in the pool, in one piece.
func (n *ferryNode) offset(key string) (int64, error) {
	i, err := n.client.Lookup(context.Background(), key)
	if err != nil {
		return 0, err
	}
	if len(i[0].Extents) != 1 {
		return 0, fmt.Errorf("%s lies in %d pieces", key, len(i[0].Extents))
	}
	return int64(i[0].Extents[0].Start) * rowBytes, nil
}

func (n *ferryNode) check(key string, size int64) error {
	m, err := n.client.Map(context.Background(), key)
	if err != nil {
		return err
	}
	defer m.Release()
	want := pattern(key, size)
	for _, b := range m.Buffers() {
		if !bytes.Equal(b, want[:len(b)]) {
			return fmt.Errorf("%s: wrong bytes", key)
		}
		want = want[len(b):]
	}
	return nil
}

// paramsOf decodes what a vLLM producer announces.
func paramsOf(text string) (ec.Params, error) {
	var p ec.Params
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return p, fmt.Errorf("vLLM's announcement %.100q: %w", text, err)
	}
	return p, nil
}
