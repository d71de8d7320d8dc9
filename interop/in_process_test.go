package interop

import (
	"slices"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
)

// A node that runs NIXL in its own process pulls from one that does not, and serves it and a real vLLM.
func TestANodeWithNIXLInItsOwnProcessPullsAndServes(t *testing.T) {
	c := launchConsumer(t)
	inside, outside := startNode(t, "--nixl-in-process"), startNode(t)
	here, there := entries(0, 3, 300*kib), entries(10, 3, 300*kib)
	inside.put(here)
	outside.put(there)
	inside.wantOutcomes(inside.fetch(outside.announce(sorted(there)...), time.Minute), there, ec.FetchReady)
	outside.wantOutcomes(outside.fetch(inside.announce(sorted(here)...), time.Minute), here, ec.FetchReady)
	c.ready()
	c.pullAll(inside.address(), here)
	if p := children(t, inside.cmd.Process.Pid); len(p) != 0 {
		t.Errorf("it has processes of its own: %v", p)
	}
	inside.stopClean()
	outside.stopClean()
}

func sorted(sizes map[string]int) (keys []string) {
	for k := range sizes {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
