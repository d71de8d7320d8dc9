// Package hosts tests two nodes on two hosts: two network namespaces that a veth pair joins. Each has a /dev/shm of its own, so the
// nodes share nothing but the network. All that is done is done by the command line, as a script would do it.
//
// The tests need root and the commands ip, tc and nsenter. Without them they are skipped, or fail where FERRY_INTEROP_REQUIRED is set.
package hosts

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/interop/internal/leftover"
	"github.com/tensorferry/tensorferry/node/client"
)

// patience bounds every wait.
const patience = 120 * time.Second

var binaryDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if binaryDir != "" {
		leftover.End(binaryDir)
		_ = os.RemoveAll(binaryDir)
	}
	os.Exit(code)
}

// program builds ferry once. A race in it ends it with a status that no test takes for a clean end.
var program = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "ferry-hosts-")
	if err != nil {
		return "", err
	}
	binaryDir = dir
	path := filepath.Join(dir, "ferry")
	out, err := exec.Command("go", "build", "-race", "-o", path, "../../cmd/ferry").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// within polls with a deadline.
func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("in vain: %s", what)
		}
	}
}

// host is a network namespace and a mount namespace, kept by a process that sleeps in them. Nothing else refers to them: they end
// with that process, and that ends with the test, however the test ends.
type host struct {
	t      *testing.T
	name   string
	addr   string
	device string
	keeper *exec.Cmd
	dir    string // for sockets and files; both hosts see it
}

// newHosts gives two hosts on one link. size is that of /dev/shm of each, as mount takes it.
func newHosts(t *testing.T, size string) (a, b *host) {
	t.Helper()
	need(t, os.Geteuid() == 0, "network namespaces need root")
	for _, c := range []string{"ip", "tc", "nsenter"} {
		_, err := exec.LookPath(c)
		need(t, err == nil, "%s is not installed (packages iproute2, util-linux)", c)
	}
	_, err := program()
	must(t, err)
	dir, err := os.MkdirTemp("", "fh") // short, since a unix socket's path is
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	a = &host{t: t, name: "a", addr: "10.213.8.1", device: "fa", dir: dir}
	b = &host{t: t, name: "b", addr: "10.213.8.2", device: "fb", dir: dir}
	for _, h := range []*host{a, b} {
		h.keep(size)
	}
	h := a
	h.ok("ip", "link", "add", a.device, "type", "veth", "peer", "name", b.device, "netns", strconv.Itoa(b.keeper.Process.Pid))
	for _, h := range []*host{a, b} {
		h.ok("ip", "addr", "add", h.addr+"/24", "dev", h.device)
		h.ok("ip", "link", "set", "lo", "up")
		h.up()
	}
	return a, b
}

func (h *host) keep(size string) {
	t := h.t
	h.keeper = exec.Command("sh", "-c", "mount --make-rprivate / && mount -t tmpfs -o size="+size+" ferry /dev/shm && echo up && exec sleep infinity")
	h.keeper.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS,
		Pdeathsig:  syscall.SIGKILL,
	}
	out, err := h.keeper.StdoutPipe()
	must(t, err)
	err = h.keeper.Start()
	need(t, err == nil, "a network namespace: %v", err)
	t.Cleanup(func() {
		_ = h.keeper.Process.Kill()
		_ = h.keeper.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	need(t, err == nil && line == "up\n", "a private /dev/shm: %q, %v", line, err)
}

// command runs on the host.
func (h *host) command(ctx context.Context, args ...string) *exec.Cmd {
	args = append([]string{"-t", strconv.Itoa(h.keeper.Process.Pid), "-n", "-m", "-w" + h.dir, "--"}, args...)
	cmd := exec.CommandContext(ctx, "nsenter", args...)
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// run gives what a command on the host says, and its exit status.
func (h *host) run(args ...string) (stdout string, status int) {
	h.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := h.command(ctx, args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	err := cmd.Run()
	if cmd.ProcessState == nil || ctx.Err() != nil {
		h.t.Fatalf("%s on %s: %v\n%s", strings.Join(args, " "), h.name, err, errs.String())
	}
	if err != nil {
		h.t.Logf("%s on %s: %v\n%s%s", strings.Join(args, " "), h.name, err, out.String(), errs.String())
	}
	return out.String(), cmd.ProcessState.ExitCode()
}

func (h *host) ok(args ...string) string {
	h.t.Helper()
	out, status := h.run(args...)
	if status != 0 {
		h.t.Fatalf("%s on %s: exit status %d", strings.Join(args, " "), h.name, status)
	}
	return out
}

// up and down are the host's cable. Either end cuts it.
func (h *host) up()   { h.t.Helper(); h.ok("ip", "link", "set", h.device, "up") }
func (h *host) down() { h.t.Helper(); h.ok("ip", "link", "set", h.device, "down") }

// shape sets what tc does to packets that leave the host.
func (h *host) shape(qdisc ...string) error {
	out, status := h.run(append([]string{"tc", "qdisc", "replace", "dev", h.device, "root"}, qdisc...)...)
	if status != 0 {
		return fmt.Errorf("tc %s: exit status %d %s", strings.Join(qdisc, " "), status, out)
	}
	return nil
}

// sent is how many bytes have left the host.
func (h *host) sent() int64 {
	h.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/dev", h.keeper.Process.Pid))
	must(h.t, err)
	for line := range strings.Lines(string(b)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		if f := strings.Fields(rest); name == h.device && len(f) > 8 {
			n, err := strconv.ParseInt(f[8], 10, 64)
			must(h.t, err)
			return n
		}
	}
	h.t.Fatalf("no device %s in\n%s", h.device, b)
	return 0
}

// shm lists the host's /dev/shm.
func (h *host) shm() []string {
	h.t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/dev/shm", h.keeper.Process.Pid))
	must(h.t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// node is a ferry node on a host.
type node struct {
	*host
	cmd    *exec.Cmd
	socket string
	client *client.Client // an engine of the host's, to look at counters
	once   sync.Once
	err    error
}

// node starts one, with flags after those that all have.
func (h *host) node(name string, flags ...string) *node {
	t := h.t
	t.Helper()
	path, err := program()
	must(t, err)
	n := &node{host: h, socket: filepath.Join(h.dir, name)}
	n.cmd = h.command(context.Background(), append([]string{
		path, "node", "--ec-cpu-bytes", "160MiB", "--model", "tiny-mm", "--dtype", "torch.bfloat16", "--block-bytes", "2048",
		"--vllm-version", "0.32.0", "--side-channel", h.addr + ":0", "--admin", "127.0.0.1:0", "--socket", n.socket,
		"--planes", "tcp", "--trusted-network",
	}, flags...)...)
	stderr, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	must(t, err)
	defer stderr.Close()
	n.cmd.Stderr = stderr
	stdout, err := n.cmd.StdoutPipe()
	must(t, err)
	must(t, n.cmd.Start())
	t.Cleanup(func() {
		n.end()
		if t.Failed() {
			b, _ := os.ReadFile(stderr.Name())
			t.Logf("node %s, stderr, its end:\n%s", name, b[max(0, len(b)-4000):])
		}
	})
	lines := make(chan string, 1)
	go func() {
		s, _ := bufio.NewReader(stdout).ReadString('\n')
		lines <- s
		_, _ = io.Copy(io.Discard, stdout)
	}()
	var ready struct{ Event, Socket, Region string }
	select {
	case s := <-lines:
		if err := json.Unmarshal([]byte(s), &ready); err != nil || ready.Event != "ready" {
			t.Fatalf("node %s: first line %q is no ready line", name, s)
		}
	case <-time.After(patience):
		t.Fatalf("node %s does not become ready", name)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	n.client, err = client.Dial(ctx, n.socket, client.Options{Name: "counters"})
	must(t, err)
	t.Cleanup(func() { n.client.Close() })
	return n
}

// end is a clean end of the node.
func (n *node) end() error {
	n.once.Do(func() {
		_ = n.cmd.Process.Signal(syscall.SIGTERM)
		kill := time.AfterFunc(patience, func() { _ = n.cmd.Process.Kill() })
		defer kill.Stop()
		n.err = n.cmd.Wait()
	})
	return n.err
}

// ferry runs a command of the CLI against the node.
func (n *node) ferry(args ...string) (stdout string, status int) {
	n.t.Helper()
	path, err := program()
	must(n.t, err)
	return n.run(append([]string{path}, args...)...)
}

// stats are those of the node's pool.
func (n *node) stats() ec.Stats {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := n.client.Stats(ctx)
	must(n.t, err)
	return s
}

// settled waits until nothing of any transfer is left in the pool.
func (n *node) settled() {
	n.t.Helper()
	within(n.t, n.name+": nothing filling, pinned or in quarantine", func() bool {
		s := n.stats()
		return s.FillingBlocks == 0 && s.PinnedBlocks == 0 && s.QuarantinedBlocks == 0
	})
}
