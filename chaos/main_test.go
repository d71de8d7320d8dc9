package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/node"
)

// The environment of a process of a world.
const (
	roleEnv   = "CHAOS_ROLE"   // node, engine
	configEnv = "CHAOS_CONFIG" // JSON: a nodeRole or an engineRole
)

// Exit statuses of roles.
const (
	exitFailed  = 1
	exitWrong   = 3 // an engine met something that must not be
	exitNoSpace = 4 // a node's memory was not to be had
)

func TestMain(m *testing.M) {
	switch role := os.Getenv(roleEnv); role {
	case "":
		os.Exit(m.Run())
	case "node":
		os.Exit(run(runNode))
	case "engine":
		os.Exit(run(runEngine))
	default:
		fmt.Fprintln(os.Stderr, "unknown role", role)
		os.Exit(exitFailed)
	}
}

func run[R any](role func(ctx context.Context, r R) int) int {
	var r R
	if err := json.Unmarshal([]byte(os.Getenv(configEnv)), &r); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return exitFailed
	}
	// Never stopped, it ends with the process: a second SIGTERM must not kill what is ending.
	ctx, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	return role(ctx, r)
}

// nodeRole is what a node process is told.
type nodeRole struct {
	Config node.Config
	Files  int // descriptors to have open beside its own
}

// runNode is ferry node without its command line.
func runNode(ctx context.Context, r nodeRole) int {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	for range r.Files {
		if _, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0); err != nil {
			log.Error("not so many files", "error", err)
			return exitFailed
		}
	}
	starting, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	n, err := node.Start(starting, r.Config, log)
	if isSpace(err) {
		log.Warn("no space", "error", err)
		return exitNoSpace
	}
	if err != nil {
		log.Error("not started", "error", err)
		return exitFailed
	}
	if err := json.NewEncoder(os.Stdout).Encode(n.Ready()); err != nil {
		log.Error("nobody listens", "error", err)
	}
	select {
	case <-ctx.Done():
	case <-n.Done():
		log.Error("ended by itself", "error", n.Err())
	}
	ending, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := n.Close(ending); err != nil {
		log.Error("not ended cleanly", "error", err)
		return exitFailed
	}
	if n.Err() != nil {
		return exitFailed
	}
	return 0
}

// patience bounds every wait for something that should take moments: machines that run these tests have other work.
const patience = 60 * time.Second

// long is true for the long run.
func long() bool { return os.Getenv("CHAOS") == "long" }

// seedOf gives the seed of a test's schedule, and says it where it fails.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano()) % 1_000_000_000
	if text := os.Getenv("CHAOS_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("CHAOS_SEED: %v", err)
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("again: CHAOS_SEED=%d go test ./chaos -run '^%s$'", seed, t.Name())
		}
	})
	return seed
}

// tail is the end of a file, for people.
func tail(path string, n int64) string {
	f, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	if st, err := f.Stat(); err == nil && st.Size() > n {
		_, _ = f.Seek(-n, io.SeekEnd)
	}
	b, _ := io.ReadAll(f)
	return string(b)
}
