// Package omni tests the stage connector against the real one: unmodified vLLM-Omni NixlConnectors over NIXL, driven by
// ../peers/omni/omni_live.py.
//
// The tests need PEERS_PYTHON (see ../peers/setup.sh). Without it they are skipped, or fail where FERRY_INTEROP_REQUIRED is set.
package omni

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/nixl/nixltest"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// patience bounds every wait.
const patience = 90 * time.Second

// What this test binary is instead of a test, by its environment.
const (
	agentEnv    = "FERRY_OMNI_TEST_AGENT"    // an agent process
	producerEnv = "FERRY_OMNI_TEST_PRODUCER" // a process that puts and is killed: the JSON of what it is told
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(agentEnv) != "":
		if err := nixl.RunAgent(os.NewFile(nixl.AgentSocket, "socket")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case os.Getenv(producerEnv) != "":
		produce(os.Getenv(producerEnv))
		os.Exit(0)
	}
	code := m.Run()
	peers.end()
	os.Exit(code)
}

// python of the venv with the peers.
func python(t *testing.T) string {
	t.Helper()
	path := os.Getenv("PEERS_PYTHON")
	if path != "" {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	need(t, false, "PEERS_PYTHON is %q: no python with the real peers; set it to the last line that interop/peers/setup.sh prints", path)
	return ""
}

// need skips the test, or fails it where nothing may be skipped.
func need(t *testing.T, ok bool, format string, args ...any) {
	t.Helper()
	if ok {
		return
	}
	if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// library is that of the venv.
func library(python string) string {
	venv := filepath.Dir(filepath.Dir(python))
	m, _ := filepath.Glob(filepath.Join(venv, "lib/python3*/site-packages/.nixl_cu1*.mesonpy.libs/libnixl_capi.so"))
	if len(m) == 0 {
		return "" // where it is found
	}
	return m[len(m)-1]
}

// factory is the process whose forks the peers are.
type factory struct {
	once   sync.Once
	err    error
	cmd    *exec.Cmd
	stdin  io.Closer
	dir    string
	socket string
	log    string
}

var peers factory

func (f *factory) start(python string) {
	f.err = func() (err error) {
		if f.dir, err = os.MkdirTemp("", "fo"); err != nil { // short, since a unix socket's path is
			return err
		}
		f.socket, f.log = filepath.Join(f.dir, "s"), filepath.Join(f.dir, "stderr")
		log, err := os.Create(f.log)
		if err != nil {
			return err
		}
		defer log.Close()
		script, err := filepath.Abs("../peers/omni/omni_live.py")
		if err != nil {
			return err
		}
		f.cmd = exec.Command(python, script, f.socket)
		f.cmd.Stderr = log
		stdout, w, err := os.Pipe()
		if err != nil {
			return err
		}
		defer stdout.Close()
		f.cmd.Stdout = w
		if f.stdin, err = f.cmd.StdinPipe(); err != nil {
			return err
		}
		err = f.cmd.Start()
		_ = w.Close()
		if err != nil {
			return err
		}
		if err := stdout.SetReadDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		if line, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
			return fmt.Errorf("omni_live.py said %q: %w\n%s", line, err, f.said(0))
		}
		return nil
	}()
}

// size is how many bytes all peers have written to stderr.
func (f *factory) size() int {
	text, _ := os.ReadFile(f.log)
	return len(text)
}

// said is what all peers wrote to stderr, from that byte on, at most its last 64 KiB.
func (f *factory) said(from int) []byte {
	text, _ := os.ReadFile(f.log)
	text = text[min(from, len(text)):]
	return text[max(0, len(text)-64<<10):]
}

func (f *factory) end() {
	if f.cmd != nil && f.cmd.Process != nil {
		_ = f.stdin.Close()
		kill := time.AfterFunc(patience, func() { _ = f.cmd.Process.Kill() })
		_ = f.cmd.Wait()
		kill.Stop()
	}
	if f.dir != "" {
		_ = os.RemoveAll(f.dir)
	}
}

// ours is a Go end: a Link with the nixl plane only, whose agents are processes of their own.
type ours struct {
	*stage.Link
	t     *testing.T
	slab  *slab.Slab
	plane *nixl.Plane
}

// settings of a Go end; zero values are those of production, with a slab of 32 MiB.
type settings struct {
	bytes    int64
	getsOnly bool
	port     int
	store    stage.Options

	descriptors int // that an agent may have; 0: as many as this process
}

// agent is the command that starts an agent.
func (o *settings) agent() []string {
	run := []string{"/usr/bin/env", agentEnv + "=1", os.Args[0]}
	if o.descriptors == 0 {
		return run
	}
	return append([]string{"/bin/sh", "-c", fmt.Sprintf(`ulimit -n %d && exec "$@"`, o.descriptors), "sh"}, run...)
}

// newOurs gives one that is closed at the end, when nothing of it may be in use.
func newOurs(t *testing.T, o settings) *ours {
	t.Helper()
	log, err := os.CreateTemp(t.TempDir(), "log-")
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("our log, its end:\n%s", text[max(0, len(text)-4000):])
		}
		_ = log.Close()
	})
	dir := transfertest.Dir(t)
	e, err := openOurs(patient(t), python(t), dir, slog.New(slog.NewTextHandler(log, nil)), o)
	must(t, err)
	e.t = t
	t.Cleanup(func() {
		eventually(t, "the slab is free", func() bool { return e.slab.Used() == 0 })
		must(t, e.close(patient(t)))
		text, err := os.ReadFile(log.Name())
		must(t, err)
		wantAgentsAlive(t, e.plane.Counts(), text)
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	return e
}

// wantAgentsAlive wants no agent to have died, but by UCX whose reader was killed or stopped.
func wantAgentsAlive(t *testing.T, c nixl.Counts, log []byte) {
	t.Helper()
	for _, d := range nixl.Deaths() {
		switch n := c.Serve[d] + c.Fetch[d]; {
		case n == 0:
		case d == nixl.DeathAbort:
			nixltest.EndedByUCX(t, "an agent", log)
		default:
			t.Errorf("%d agents died: %v", n, d)
		}
	}
}

func openOurs(ctx context.Context, python, dir string, log *slog.Logger, o settings) (*ours, error) {
	if o.bytes == 0 {
		o.bytes = 32 << 20
	}
	e := &ours{}
	var err error
	e.plane, err = nixl.New(nixl.Options{
		Library: library(python), Command: o.agent(), Loopback: true, Log: log,
	})
	if err != nil {
		return nil, err
	}
	if e.slab, err = slab.New(ctx, slab.Options{Dir: dir, Name: "omni", Bytes: o.bytes, Planes: []transfer.Plane{e.plane}, Log: log}); err != nil {
		return nil, errors.Join(err, e.plane.Close())
	}
	lo := stage.LinkOptions{Slab: e.slab, Store: o.store, Log: log}
	if !o.getsOnly {
		lo.Bind = &stage.Endpoint{Host: "127.0.0.1", Port: o.port}
	}
	if e.Link, err = stage.NewLink(ctx, lo); err != nil {
		return nil, errors.Join(err, e.slab.Close(ctx), e.plane.Close())
	}
	return e, nil
}

func (e *ours) close(ctx context.Context) error {
	return errors.Join(e.Link.Close(ctx), e.slab.Close(ctx), e.plane.Close())
}

func (e *ours) put(key string, v tensor.Node, o stage.PutOptions) *stage.Published {
	e.t.Helper()
	p, err := e.Put(patient(e.t), key, v, o)
	must(e.t, err)
	return p
}

// get wants a payload, as describe has it.
func (e *ours) get(r stage.Request, want any) {
	e.t.Helper()
	got, err := e.Get(patient(e.t), r)
	if err != nil {
		e.t.Errorf("get %s: %v", r.Key, err)
		return
	}
	if got.Size > 0 && got.Plane != transfer.NIXL {
		e.t.Errorf("%s came by %s", r.Key, got.Plane)
	}
	same(e.t, r.Key, describe(got.Root), want)
	must(e.t, got.Release())
	e.told()
}

// told waits until producers know of the end of all claims: a peer that ends before keeps Close waiting.
func (e *ours) told() {
	e.t.Helper()
	eventually(e.t, "all claims are ended", func() bool { return e.Stats().Client.Pending == 0 })
}

// ended waits for the payload's end, which must be by that outcome.
func (e *ours) ended(p *stage.Published, want stage.Outcome) {
	e.t.Helper()
	select {
	case <-p.Released():
		if got := p.Outcome(); got != want {
			e.t.Errorf("%s ended by outcome %d, want %d", p.Key, got, want)
		}
	case <-time.After(patience):
		e.t.Errorf("%s is not released", p.Key)
	}
}

func (e *ours) claimed(p *stage.Published) {
	e.t.Helper()
	select {
	case <-p.Claimed():
	case <-time.After(patience):
		e.t.Fatalf("%s is not claimed", p.Key)
	}
}

// patient is a context that no test should reach the end of.
func patient(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for: %s", patience, what)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
