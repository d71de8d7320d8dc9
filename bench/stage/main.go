// Command stage measures put and get between two processes: ours by each way that bytes can take, and vLLM-Omni's NixlConnector and
// SharedMemoryConnector in the same run; and what memory and descriptors are left of ours. theirs need PEERS_PYTHON
// (interop/peers/setup.sh), two network namespaces need root.
package main

import (
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/bench/internal/netns"
	"github.com/tensorferry/tensorferry/nixl"
	plane "github.com/tensorferry/tensorferry/transfer/nixl"
)

//go:embed omni_end.py
var omniScript []byte

const (
	module = "github.com/tensorferry/tensorferry"

	// Roles of a child, as its first argument.
	endRole   = "end"
	agentRole = "agent"

	// patience is for gets that should not need it.
	patience = 60 * time.Second
	warmUp   = 2
)

func main() {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	var err error
	switch role {
	case endRole:
		err = runEnd()
	case agentRole:
		err = plane.RunAgent(os.NewFile(plane.AgentSocket, "socket"))
	default:
		rounds := flag.Int("rounds", 15, "turns that count")
		only := flag.String("only", "", "sections with commas: sizes, tiny, namespaces, memory; all if empty")
		flag.Parse()
		err = run(*rounds, *only)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "stage:", err)
		os.Exit(1) // without libc's exit handlers, which NIXL's agents need
	}
}

// bench is what the sections share.
type bench struct {
	rounds    int
	self      string
	script    string // "" without the peers
	peersPath string
	hasNIXL   bool
	key       int
	verdicts  []verdict
}

// verdict is a target and what came out.
type verdict struct {
	target, measured string
	met              bool
}

func (b *bench) verdict(target, measured string, met bool) {
	b.verdicts = append(b.verdicts, verdict{target, measured, met})
}

func run(rounds int, only string) (err error) {
	b := &bench{rounds: rounds}
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "ferry-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir), b.removeLeft()) }()
	if err := b.findPeers(dir); err != nil {
		return err
	}
	w := os.Stdout
	measure.Header(w, "put and get of stage payloads", strings.Join(append([]string{"go run ./bench/stage"}, os.Args[1:]...), " "), rounds)
	fmt.Fprintf(w, "A producer and a consumer, each in a process of its own; so are theirs. A round trip is the time of put in the one plus that of get in the\n"+
		"other, one after another; what the benchmark's own messages take does not count. Metadata goes from put to get. Ours includes the\n"+
		"release of what was got, and of what was got in place one byte of each page is looked at. Where a turn is several payloads they are put,\n"+
		"then got, one after another, and its time is divided by their number. NIXL's agents of ours are processes of their own.\n")
	for _, s := range []struct {
		name string
		f    func() error
	}{
		{"sizes", func() error { return b.sizes(w) }}, {"tiny", func() error { return b.tiny(w) }},
		{"namespaces", func() error { return b.namespaces(w) }}, {"memory", func() error { return b.leaks(w) }},
	} {
		if only != "" && !strings.Contains(","+only+",", ","+s.name+",") {
			continue
		}
		if err := s.f(); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	fmt.Fprint(w, "\n## Targets\n\n")
	measure.Table(w, "target", "measured", "")
	for _, v := range b.verdicts {
		measure.Row(w, v.target, v.measured, map[bool]string{true: "met", false: "missed"}[v.met])
	}
	return nil
}

// findPeers looks for vLLM-Omni, and for NIXL, which that venv has too.
func (b *bench) findPeers(dir string) error {
	python := os.Getenv("PEERS_PYTHON")
	if python != "" {
		if os.Getenv("VIRTUAL_ENV") == "" {
			if err := os.Setenv("VIRTUAL_ENV", filepath.Dir(filepath.Dir(python))); err != nil {
				return err
			}
		}
		root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
		if err != nil {
			return fmt.Errorf("go list: %w", err)
		}
		b.peersPath = filepath.Join(strings.TrimSpace(string(root)), "interop", "peers", "omni")
		b.script = filepath.Join(dir, "omni_end.py")
		if err := os.WriteFile(b.script, omniScript, 0o600); err != nil {
			return err
		}
	}
	b.hasNIXL = len(nixl.Find()) > 0
	return nil
}

// keyPrefix begins the names of all that this run leaves in shared memory, should an end be killed.
func keyPrefix() string { return fmt.Sprintf("ferrybench_%d_", os.Getpid()) }

// keys are new ones.
func (b *bench) keys(n int) []string {
	all := make([]string, n)
	for i := range all {
		b.key++
		all[i] = fmt.Sprintf("%s%d", keyPrefix(), b.key)
	}
	return all
}

func (b *bench) removeLeft() error {
	left, err := filepath.Glob("/dev/shm/*" + keyPrefix() + "*")
	for _, path := range left {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

// ours starts two ends of ours, theirs two of the peers, in our network namespace if h is nil.
func (b *bench) ours(h *netns.Pair) (*pair, error) {
	return startPair(func(side int) (*process, error) {
		ns, env := place(h, side)
		return start(ns, env, b.self, endRole)
	})
}

func (b *bench) theirs(h *netns.Pair) (*pair, error) {
	return startPair(func(side int) (*process, error) {
		ns, env := place(h, side)
		env = append(env, "PYTHONPATH="+b.peersPath, "VLLM_NO_USAGE_STATS=1", "UCX_LOG_LEVEL=fatal")
		return start(ns, env, os.Getenv("PEERS_PYTHON"), "-W", "ignore", b.script)
	})
}

// place says where an end runs. Between two namespaces UCX would share memory, which machines do not.
func place(h *netns.Pair, side int) (ns string, env []string) {
	if h == nil {
		return "", nil
	}
	device := [...]string{h.DeviceA, h.DeviceB}[side]
	return [...]string{h.A, h.B}[side], []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=" + device, "UCX_MODULES=cma"}
}
