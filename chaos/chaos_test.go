package chaos

import (
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// isSpace says that a node's memory was not to be had.
func isSpace(err error) bool {
	var s *region.SpaceError
	return errors.As(err, &s)
}

// few or many: kills of the short run and of the long one.
func kills(few, many int) int {
	if long() {
		return many
	}
	return few
}

// adoptSometimes: a node goes on with what the one before it left, or begins from nothing.
func adoptSometimes(rng *rand.Rand) time.Duration {
	if rng.IntN(3) == 0 {
		return time.Millisecond
	}
	return time.Hour
}

// shmDir is a directory for regions, which must be empty at the end.
func shmDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "ferry-chaos-")
	if err != nil {
		t.Skipf("no /dev/shm to work in: %v", err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Two nodes of one machine, which read each other's memory in place and over sockets; pools far too small for the load. A node that
// was killed starts from nothing.
func TestKillsUnderLoadSpoilNoByteAndLeakNothing(t *testing.T) {
	t.Parallel()
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 60, blocks: 160, planes: []string{transfer.Mapped, transfer.TCP},
		kills: kills(12, 200), adopt: time.Millisecond, odds: usualOdds,
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}

// The same, but each node takes over what the one before it left, and engines go on with what they have.
func TestKilledNodesGoOnWithWhatTheyHad(t *testing.T) {
	t.Parallel()
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 60, blocks: 160, planes: []string{transfer.TCP, transfer.Mapped},
		kills: kills(12, 200), adopt: time.Hour, odds: usualOdds,
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}

// Pools with room for all: what was acknowledged before a node was killed is there after it.
func TestNothingThatWasAcknowledgedIsLostByAKill(t *testing.T) {
	t.Parallel()
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 1, engines: 3, workers: 2, keys: 60, blocks: 2000, planes: []string{transfer.TCP},
		kills: kills(12, 200), adopt: time.Hour, ledger: true, odds: odds{killEngine: 3, killNode: 6, endNode: 2, freezeEngine: 2, freezeNode: 1},
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}

// A tmpfs with room for one pool and little more, which something else fills. A node whose memory is not to be had says so and ends; it
// never faults, and starts when there is room.
func TestAFullTmpfsEndsAStartAndNothingElse(t *testing.T) {
	t.Parallel()
	needNamespaces(t, unix.CLONE_NEWNS)
	seed := seedOf(t)
	const blocks = 160
	dir := t.TempDir()
	h := newHost(t, unix.CLONE_NEWNS, func() error { return mountTmpfs(dir, blocks*blockBytes*5/4) })
	filler := filepath.Join(dir, "filler")
	empty := func() {
		if err := h.try(func() error { return os.RemoveAll(filler) }); err != nil {
			t.Error(err)
		}
	}
	filled := 0
	o := usualOdds
	o.disturb = 8
	w := newWorld(t, plan{
		nodes: 1, engines: 2, workers: 3, keys: 60, blocks: blocks, planes: []string{transfer.Mapped, transfer.TCP},
		kills: kills(8, 100), adopt: adoptSometimes(rand.New(rand.NewPCG(seed, 1))), odds: o, scarce: true,
		disturb: func(rng *rand.Rand) {
			if rng.IntN(3) == 0 {
				empty()
				return
			}
			err := h.try(func() error { return os.WriteFile(filler, make([]byte, blocks*blockBytes*2), 0o600) })
			if !errors.Is(err, unix.ENOSPC) {
				t.Errorf("filling the tmpfs: %v, want it to be full", err)
			}
			filled++
		},
		heal: empty,
	}, seed, []*host{h}, []string{dir})
	w.run()
	t.Logf("filled %d times", filled)
}

// Descriptors beyond 1,024 are where programs that use select(2) write over their stacks.
func TestKillsWithTenThousandDescriptorsOpen(t *testing.T) {
	t.Parallel()
	const files = 10_000
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil || lim.Max < files+1000 {
		t.Skipf("this process may have %d descriptors", lim.Max)
	}
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 60, blocks: 160, planes: []string{transfer.TCP, transfer.Mapped},
		kills: kills(6, 60), adopt: time.Hour, odds: usualOdds, files: files,
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}

// The monotonic clock and that of the time since boot differ by days from one start of a node to the next, as in containers that were
// moved: what is kept over a restart must not be taken for what it is not.
func TestKillsAndClocksThatJump(t *testing.T) {
	t.Parallel()
	if err := exec.Command("unshare", "-T", "--monotonic", "1000", "--boottime", "1000", "true").Run(); err != nil {
		t.Skipf("no time namespaces here (unshare -T): %v", err)
	}
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 60, blocks: 160, planes: []string{transfer.Mapped, transfer.TCP},
		kills: kills(8, 100), adopt: 24 * time.Hour, odds: usualOdds,
		prefix: func(rng *rand.Rand) []string {
			jump := strconv.Itoa(rng.IntN(3 * 86400))
			return []string{"unshare", "-T", "--monotonic", jump, "--boottime", jump, "--"}
		},
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}
