package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

// readyLine is what a process prints when it serves: the union of a node's and an engine's.
type readyLine struct {
	Event  string `json:"event"`
	URL    string `json:"url"`
	Region string `json:"region"`
}

// group is the processes of one demo, in the order of their start. They are in a process group of their own each, so that a
// Ctrl-C at the terminal reaches the demo alone, which ends them in order; and the kernel tells them to end should the demo be
// killed.
type group struct {
	ferry string
	dir   string
	log   *slog.Logger
	fork  chan func() // run on one thread that lives as long as the group: see newGroup

	mu    sync.Mutex
	procs []*process
}

type process struct {
	name  string
	cmd   *exec.Cmd
	log   string // path of its stderr
	ready readyLine
	ended chan struct{}
	err   error // of Wait, once ended is closed
}

func newGroup(ferry, dir string, log *slog.Logger) *group {
	g := &group{ferry: ferry, dir: dir, log: log, fork: make(chan func())}
	go func() {
		// The parent of Pdeathsig is the thread that forked, not the process: it must outlive the children. The thread ends
		// with this goroutine, since it is not unlocked.
		runtime.LockOSThread()
		for f := range g.fork {
			f()
		}
	}()
	return g
}

// startAll starts processes at once and waits for their ready lines.
func (g *group) startAll(ctx context.Context, args map[string][]string) (map[string]readyLine, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	ready := make(map[string]readyLine)
	var errs []error
	for name, a := range args {
		wg.Go(func() {
			r, err := g.start(ctx, name, a)
			mu.Lock()
			defer mu.Unlock()
			ready[name] = r
			if err != nil {
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	return ready, errors.Join(errs...)
}

func (g *group) start(ctx context.Context, name string, args []string) (readyLine, error) {
	p := &process{name: name, cmd: exec.Command(g.ferry, args...), ended: make(chan struct{})}
	p.log = filepath.Join(g.dir, name+".log")
	stderr, err := os.Create(p.log)
	if err != nil {
		return readyLine{}, err
	}
	defer stderr.Close()
	p.cmd.Stderr = stderr
	stdout, w, err := os.Pipe()
	if err != nil {
		return readyLine{}, err
	}
	p.cmd.Stdout = w
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	started := make(chan error)
	g.fork <- func() { started <- p.cmd.Start() }
	err = <-started
	w.Close()
	if err != nil {
		stdout.Close()
		return readyLine{}, fmt.Errorf("%s: %w", name, err)
	}
	g.mu.Lock()
	g.procs = append(g.procs, p)
	g.mu.Unlock()
	go func() {
		p.err = p.cmd.Wait()
		close(p.ended)
	}()
	g.log.Debug("started", "process", name, "pid", p.cmd.Process.Pid, "args", args)

	type line struct {
		text []byte
		err  error
	}
	first := make(chan line, 1)
	go func() {
		// Read to the end, so that the process is never at odds with its stdout, whatever becomes of the demo.
		defer stdout.Close()
		r := bufio.NewReader(stdout)
		b, err := r.ReadBytes('\n')
		first <- line{b, err}
		io.Copy(io.Discard, r)
	}()
	select {
	case l := <-first:
		if l.err != nil {
			return readyLine{}, fmt.Errorf("%s ended before it served", name)
		}
		if err := json.Unmarshal(bytes.TrimSpace(l.text), &p.ready); err != nil || p.ready.Event != "ready" {
			return readyLine{}, fmt.Errorf("%s: its first line is not its ready line: %q", name, l.text)
		}
		return p.ready, nil
	case <-ctx.Done():
		return readyLine{}, fmt.Errorf("%s did not serve within %v: %w", name, startTimeout, ctx.Err())
	}
}

// stop ends all processes, last started first, and removes what a killed node has left. It is an error if one of them did not end
// cleanly.
func (g *group) stop() error {
	g.mu.Lock()
	procs := slices.Clone(g.procs)
	g.mu.Unlock()
	var errs []error
	for _, p := range slices.Backward(procs) {
		errs = append(errs, g.end(p))
	}
	close(g.fork)
	return errors.Join(errs...)
}

func (g *group) end(p *process) error {
	select {
	case <-p.ended:
		// It was to run until now: its end is an error, whatever its status.
		return errors.Join(fmt.Errorf("%s ended by itself: %w", p.name, statusErr(p.err)), p.sweep())
	default:
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	select {
	case <-p.ended:
		if p.err != nil {
			return errors.Join(fmt.Errorf("%s did not end cleanly: %w", p.name, p.err), p.sweep())
		}
		return nil
	case <-time.After(stopTimeout):
	}
	err := fmt.Errorf("%s did not end within %v and was killed", p.name, stopTimeout)
	if e := syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL); e != nil && !errors.Is(e, syscall.ESRCH) {
		return errors.Join(err, e)
	}
	<-p.ended
	return errors.Join(err, p.sweep())
}

func statusErr(err error) error {
	if err == nil {
		return errors.New("exit status 0")
	}
	return err
}

// sweep removes the region of a node that cannot do so any more. The path is the one that the node itself told us.
func (p *process) sweep() error {
	if p.ready.Region == "" {
		return nil
	}
	if err := os.Remove(p.ready.Region); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// writeLogs shows what the processes wrote.
func (g *group) writeLogs(w io.Writer) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range g.procs {
		b, err := os.ReadFile(p.log)
		if err != nil || len(b) == 0 {
			continue
		}
		const most = 16 << 10
		b = b[max(0, len(b)-most):]
		fmt.Fprintf(w, "--- %s (pid %d)\n%s", p.name, p.cmd.Process.Pid, b)
	}
}
