// Package interop tests this module's nodes against the real peers: unmodified vLLM over NIXL, driven by the scripts in peers/.
// The tests need PEERS_PYTHON (see peers/setup.sh). Without it they are skipped, or fail where FERRY_INTEROP_REQUIRED is set.
package interop

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

// patience bounds every wait. Importing vLLM takes 10 to 30 s on a small machine.
const patience = 180 * time.Second

// cleanEnd is the time that a peer gets to end by itself after a test.
const cleanEnd = 15 * time.Second

// layout is what nodes and peers agree on.
type layout struct {
	dtype  string
	item   int // bytes of an element
	hidden int // of the language model: a block is so many elements
	width  int // of a row
}

// usual is what both have if nothing else is said. A block is one row.
var usual = layout{dtype: "bfloat16", item: 2, hidden: 1024, width: 1024}

const block = 2 * 1024 // of usual

func (l layout) spec(size int) ec.Spec {
	return ec.Spec{Dtype: "torch." + l.dtype, Shape: []int64{int64(size / (l.width * l.item)), int64(l.width)}, Bytes: int64(size)}
}

// flags of a node.
func (l layout) flags() []string {
	return []string{"--dtype", "torch." + l.dtype, "--block-bytes", strconv.Itoa(l.hidden * l.item)}
}

// args of a peer.
func (l layout) args() []string {
	return []string{"--dtype", l.dtype, "--hidden", strconv.Itoa(l.hidden), "--width", strconv.Itoa(l.width)}
}

var binaryDir string

func TestMain(m *testing.M) {
	code := m.Run()
	if binaryDir != "" {
		leftover.End(binaryDir)
		_ = os.RemoveAll(binaryDir)
	}
	os.Exit(code)
}

// ferry builds the program once, unless FERRY_BINARY names one.
var ferry = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("FERRY_BINARY"); path != "" {
		return path, nil
	}
	dir, err := os.MkdirTemp("", "ferry-interop-")
	if err != nil {
		return "", err
	}
	binaryDir = dir
	path := filepath.Join(dir, "ferry")
	out, err := exec.Command("go", "build", "-o", path, "../cmd/ferry").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// python of the venv with the peers.
func python(t testing.TB) string {
	t.Helper()
	path := os.Getenv("PEERS_PYTHON")
	if path != "" {
		if _, err := os.Stat(path); err == nil {
			return path
		}
	}
	skip(t, fmt.Sprintf("PEERS_PYTHON is %q: no python with the real peers; set it to the last line that interop/peers/setup.sh prints", path))
	return ""
}

// skip skips the test, or fails it where FERRY_INTEROP_REQUIRED is set.
func skip(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// process is a program under test with its stderr kept for the report of a failure.
type process struct {
	t     testing.TB
	name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan []byte // of stdout; closed at its end
	log   string
	ended chan struct{}
}

func start(t testing.TB, name string, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, name: name, cmd: cmd, lines: make(chan []byte, 4096), ended: make(chan struct{})}
	logFile, err := os.CreateTemp(t.TempDir(), "stderr-")
	must(t, err)
	p.log = logFile.Name()
	cmd.Stderr = logFile
	stdout, w, err := os.Pipe()
	must(t, err)
	cmd.Stdout = w
	p.stdin, err = cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	_ = w.Close()
	_ = logFile.Close()
	go func() {
		defer close(p.lines)
		defer stdout.Close()
		r := bufio.NewReader(stdout)
		for {
			line, err := r.ReadBytes('\n')
			if err != nil {
				return
			}
			p.lines <- line
		}
	}()
	go func() {
		_ = cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.stdin.Close() // the scripts end by themselves then
		select {
		case <-p.ended:
		case <-time.After(cleanEnd):
		}
		p.kill()
		if t.Failed() {
			text, _ := os.ReadFile(p.log)
			t.Logf("%s, stderr, its end:\n%s", name, text[max(0, len(text)-4000):])
		}
	})
	return p
}

func (p *process) kill() {
	select {
	case <-p.ended:
	default:
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// over says whether it has ended.
func (p *process) over() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

func (p *process) signal(s syscall.Signal) { must(p.t, p.cmd.Process.Signal(s)) }

// stop ends it by a signal and gives its exit status.
func (p *process) stop(s syscall.Signal) int {
	p.t.Helper()
	p.signal(s)
	p.waitEnd()
	return p.cmd.ProcessState.ExitCode()
}

func (p *process) waitEnd() {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.t.Fatalf("%s did not end", p.name)
	}
}

// answer is the next line, decoded into v.
func (p *process) answer(v any) {
	p.t.Helper()
	select {
	case line, ok := <-p.lines:
		if !ok {
			<-p.ended
			p.t.Fatalf("%s ended with status %d", p.name, p.cmd.ProcessState.ExitCode())
		}
		if err := json.Unmarshal(line, v); err != nil {
			p.t.Fatalf("%s said %q: %v", p.name, line, err)
		}
	case <-time.After(patience):
		p.t.Fatalf("%s says nothing", p.name)
	}
}

func (p *process) say(line string) {
	p.t.Helper()
	_, err := io.WriteString(p.stdin, line+"\n")
	must(p.t, err)
}

// nodeProcess is a ferry node.
type nodeProcess struct {
	*process
	client *client.Client
	socket string
	port   int
	admin  string
	layout layout
}

// startNode starts a node with the nixl plane only. flags come after the defaults, and win.
func startNode(t testing.TB, flags ...string) *nodeProcess {
	t.Helper()
	return startNodeAt(t, filepath.Join(t.TempDir(), "s"), flags...)
}

// again starts the next node of one that has ended: of the same instance, so that it goes on with its region and port.
func (n *nodeProcess) again(flags ...string) *nodeProcess {
	n.t.Helper()
	_ = n.client.Close()
	return startNodeAt(n.t, n.socket, flags...)
}

func startNodeAt(t testing.TB, socket string, flags ...string) *nodeProcess {
	t.Helper()
	py := python(t)
	path, err := ferry()
	must(t, err)
	n := &nodeProcess{socket: socket, layout: usual}
	args := append([]string{
		"node", "--socket", n.socket, "--ec-cpu-bytes", "64MiB", "--model", "tiny-mm",
		"--vllm-version", "0.32.0", "--side-channel", "127.0.0.1:0", "--admin", "off", "--planes", "nixl",
	}, slices.Concat(usual.flags(), flags)...)
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), "VIRTUAL_ENV="+filepath.Dir(filepath.Dir(py)))
	n.process = start(t, "node", cmd)
	t.Cleanup(func() { // before start's own: it would wait for a node that does not look at its stdin
		_ = n.cmd.Process.Signal(syscall.SIGTERM)
	})
	var ready struct {
		Port  int    `json:"peer_port"`
		Admin string `json:"admin"`
	}
	n.answer(&ready)
	n.port, n.admin = ready.Port, ready.Admin
	n.client, err = client.Dial(t.Context(), n.socket, client.Options{Name: "interop"})
	must(t, err)
	t.Cleanup(func() { _ = n.client.Close() })
	return n
}

func (n *nodeProcess) address() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(n.port)) }

// put saves entries, and gives keys and sizes as ec_live.py takes them.
func (n *nodeProcess) put(sizes map[string]int) {
	n.t.Helper()
	for key, size := range sizes {
		if _, err := n.client.Put(n.t.Context(), key, n.layout.spec(size), pattern(key, size)); err != nil {
			n.t.Fatalf("put %s: %v", key, err)
		}
	}
}

// announce takes a hold on each key, so that eviction leaves it for a while.
func (n *nodeProcess) announce(keys ...string) ec.Params {
	n.t.Helper()
	var items []client.AnnounceItem
	for _, k := range keys {
		items = append(items, client.AnnounceItem{Key: k})
	}
	p, err := n.client.Announce(n.t.Context(), items)
	must(n.t, err)
	return p
}

// fetch pulls and gives the outcome of each key.
func (n *nodeProcess) fetch(p ec.Params, timeout time.Duration) map[string]client.FetchResult {
	n.t.Helper()
	results, err := n.client.Fetch(n.t.Context(), p, timeout)
	must(n.t, err)
	out := map[string]client.FetchResult{}
	for r := range results {
		out[r.Key] = r
	}
	return out
}

// wantPattern checks an entry that is in the node's pool.
func (n *nodeProcess) wantPattern(key string, size int) {
	n.t.Helper()
	m, err := n.client.Map(n.t.Context(), key)
	if err != nil {
		n.t.Errorf("map %s: %v", key, err)
		return
	}
	defer m.Release()
	if got := slices.Concat(m.Buffers()...); string(got) != string(pattern(key, size)) {
		n.t.Errorf("%s: %d bytes, which are not its %d", key, len(got), size)
	}
}

// stopClean ends the node as an operator would.
func (n *nodeProcess) stopClean() {
	n.t.Helper()
	_ = n.client.Close()
	if status := n.stop(syscall.SIGTERM); status != 0 {
		n.t.Errorf("the node's exit status is %d", status)
	}
}

// key is the name of entry k, as ec_common.py has it.
func key(k int) string { return hash(fmt.Sprintf("ec-entry-%d", k)) }

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}

// entries are n keys from first on, with sizes in turn.
func entries(first, n int, sizes ...int) map[string]int {
	out := map[string]int{}
	for k := range n {
		out[key(first+k)] = sizes[k%len(sizes)]
	}
	return out
}

// pattern is the bytes of an entry, as ec_common.py has them.
func pattern(key string, n int) []byte {
	seed := seedOf(key)
	b := make([]byte, 0, n+8)
	for j := uint64(1); len(b) < n; j++ {
		b = binary.LittleEndian.AppendUint64(b, mix(seed, j))
	}
	return b[:n]
}

// word is the i-th of the pattern's words of 8 bytes.
func word(key string, i int) []byte {
	return binary.LittleEndian.AppendUint64(nil, mix(seedOf(key), uint64(i)+1))
}

func seedOf(key string) uint64 {
	sum := sha256.Sum256([]byte(key))
	return binary.LittleEndian.Uint64(sum[:])
}

func mix(seed, j uint64) uint64 {
	z := j*0x9E3779B97F4A7C15 + seed
	z ^= z >> 30
	z *= 0xBF58476D1CE4E5B9
	z ^= z >> 27
	z *= 0x94D049BB133111EB
	z ^= z >> 31
	return z
}

// children are the processes that a process has started.
func children(t testing.TB, pid int) map[int]string {
	t.Helper()
	out := map[int]string{}
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	must(t, err)
	for _, f := range tasks {
		text, _ := os.ReadFile(f) // a thread may be gone
		for _, field := range strings.Fields(string(text)) {
			child, err := strconv.Atoi(field)
			must(t, err)
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", child))
			out[child] = strings.ReplaceAll(string(line), "\x00", " ")
		}
	}
	return out
}

// agentOf is the pid of the node's agent of that role. Agents that tests themselves have killed may not be reaped yet.
func (n *nodeProcess) agentOf(role string) int {
	n.t.Helper()
	found := 0
	eventually(n.t, "an agent of role "+role, func() bool {
		for pid, line := range children(n.t, n.cmd.Process.Pid) {
			if strings.Contains(line, "--role "+role) {
				found = pid
				return true
			}
		}
		return false
	})
	return found
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}
