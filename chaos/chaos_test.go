package chaos

import (
	"errors"
	"os"
	"testing"
	"time"

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
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 60, blocks: 160, planes: []string{transfer.Mapped, transfer.TCP},
		kills: kills(12, 200), adopt: time.Millisecond, odds: usualOdds,
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}

// The same, but each node takes over what the one before it left, and engines go on with what they have.
func TestKilledNodesGoOnWithWhatTheyHad(t *testing.T) {
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 2, engines: 2, workers: 3, keys: 60, blocks: 160, planes: []string{transfer.TCP, transfer.Mapped},
		kills: kills(12, 200), adopt: time.Hour, odds: usualOdds,
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}

// Pools with room for all: what was acknowledged before a node was killed is there after it.
func TestNothingThatWasAcknowledgedIsLostByAKill(t *testing.T) {
	seed := seedOf(t)
	w := newWorld(t, plan{
		nodes: 1, engines: 3, workers: 2, keys: 60, blocks: 2000, planes: []string{transfer.TCP},
		kills: kills(12, 200), adopt: time.Hour, ledger: true, odds: odds{killEngine: 3, killNode: 6, freezeEngine: 2, freezeNode: 1},
	}, seed, []*host{newHost(t, 0, nil)}, []string{shmDir(t)})
	w.run()
}
