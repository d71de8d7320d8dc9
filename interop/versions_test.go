package interop

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/nixl"
)

// other is the folder with the NIXL version that the venv of the peers does not have (see peers/setup.sh).
func other(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(filepath.Dir(filepath.Dir(python(t))), "nixl-1.5.1")
	if _, err := os.Stat(filepath.Join(dir, ".complete")); err != nil {
		skip(t, "no NIXL 1.5.1 beside the peers: run interop/peers/setup.sh")
	}
	return dir
}

// newer is what a process has in its environment to use NIXL 1.5.1: nodes by the library, vLLM by the package.
func newer(t testing.TB) (node, vllm []string) {
	t.Helper()
	libs, err := filepath.Glob(filepath.Join(other(t), ".nixl_cu1*.mesonpy.libs/libnixl_capi.so"))
	must(t, err)
	if len(libs) != 1 {
		t.Fatalf("libraries %v, want one", libs)
	}
	return []string{nixl.LibraryEnv + "=" + libs[0]}, []string{"PYTHONPATH=" + other(t)}
}

// with starts processes with more in their environment.
func with[T any](t testing.TB, environ []string, start func() T) T {
	t.Helper()
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		before, set := os.LookupEnv(name)
		must(t, os.Setenv(name, value))
		defer func() {
			if set {
				_ = os.Setenv(name, before)
			} else {
				_ = os.Unsetenv(name)
			}
		}()
	}
	return start()
}

func (n *nodeProcess) agents() []int { return []int{n.agentOf("serve"), n.agentOf("fetch")} }

// NIXL 1.3.2 on either end.
func TestNodesOfTwoNIXLVersions(t *testing.T) {
	lib, _ := newer(t)
	older := startNode(t)
	next := with(t, lib, func() *nodeProcess { return startNode(t) })
	third := with(t, lib, func() *nodeProcess { return startNode(t) })
	sizes := entries(0, 3, 64*kib, mib)
	for _, n := range []*nodeProcess{older, next} {
		n.put(sizes)
	}
	pull := func(from, to *nodeProcess) map[string]string {
		t.Helper()
		got := map[string]string{}
		for key, r := range to.fetch(from.announce(slices.Collect(maps.Keys(sizes))...), time.Minute) {
			got[key] = r.Reason
			if r.Outcome == ec.FetchReady {
				got[key] = ""
				to.wantPattern(key, sizes[key])
				must(t, to.client.Remove(t.Context(), key))
			}
		}
		return got
	}
	for key, why := range pull(next, third) {
		if why != "" {
			t.Errorf("1.5.1 from 1.5.1: %s: %s", key, why)
		}
	}
	agents := slices.Concat(older.agents(), next.agents(), third.agents())
	for key, why := range pull(older, third) {
		if !strings.Contains(why, "NIXL 1.5.1 here would crash the peer's 1.3.2") {
			t.Errorf("1.5.1 from 1.3.2: %s: %s", key, why)
		}
	}
	fourth := startNode(t) // has nothing of the next one's yet
	agents = append(agents, fourth.agents()...)
	for key, why := range pull(next, fourth) {
		t.Logf("1.3.2 from 1.5.1: %s: %q", key, why) // they may not reach each other
	}
	if now := slices.Concat(older.agents(), next.agents(), third.agents(), fourth.agents()); !slices.Equal(now, agents) {
		t.Errorf("agents %v, which were %v: one of them died", now, agents)
	}
}

func TestANodeAndVLLMWithNIXL15(t *testing.T) {
	lib, packages := newer(t)
	c := with(t, packages, func() *consumer { return launchConsumer(t) })
	p := with(t, packages, func() *producer { return launchProducer(t, "--count", "3", "--size", "64K,1M,16M") })
	n := with(t, lib, func() *nodeProcess { return startNode(t) })
	p.ready()
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
	c.ready()
	c.pullAll(n.address(), p.Entries)
	c.evict()
	c.pullAll(n.address(), p.Entries)
	c.alive()
}

// An agent of 1.3.2 ends when one of 1.5.1 reads from it on one machine. What we read from we can refuse; who reads from us does not say
// what it is.
func TestNIXLVersionsThatCrashEachOther(t *testing.T) {
	lib, packages := newer(t)
	newVLLM := with(t, packages, func() *consumer { return launchConsumer(t) })
	oldVLLM, producer := launchConsumer(t), launchProducer(t, "--count", "2")
	newNode := with(t, lib, func() *nodeProcess { return startNode(t) })
	oldNode := startNode(t)
	sizes := entries(0, 2, 64*kib)

	t.Run("a node does not crash a vLLM that it would read from", func(t *testing.T) {
		producer.ready()
		for key, r := range newNode.fetch(producer.Params, time.Minute) {
			if r.Outcome != ec.FetchUnreachable || !strings.Contains(r.Reason, "would crash the peer's 1.3 or 1.4") {
				t.Errorf("%s: %v (%s)", key, r.Outcome, r.Reason)
			}
		}
		oldNode.wantOutcomes(oldNode.fetch(producer.Params, time.Minute), producer.Entries, ec.FetchReady)
	})
	t.Run("a node outlives a vLLM that crashes its agent", func(t *testing.T) {
		for key := range producer.Entries {
			_ = oldNode.client.Remove(t.Context(), key)
		}
		oldNode.put(sizes)
		newVLLM.ready()
		before := oldNode.agentOf("serve")
		newVLLM.ask(oldNode.address(), sizes)
		eventually(t, "the agent to die, or the pulls to end", func() bool {
			return !lives(before) || len(newVLLM.lines) == len(sizes) || newVLLM.over()
		})
		oldVLLM.ready()
		eventually(t, "an agent that serves", func() bool { return lives(oldNode.agentOf("serve")) })
		oldVLLM.pullAll(oldNode.address(), sizes)
		oldVLLM.alive()
	})
	t.Run("an older vLLM fails on a newer node, and lives", func(t *testing.T) {
		newNode.put(sizes)
		oldVLLM.evict()
		before := newNode.agents()
		oldVLLM.ask(newNode.address(), sizes)
		for key, p := range oldVLLM.ends(len(sizes)) {
			if p.Result == "pulled" && !p.Good {
				t.Errorf("%s: other bytes", key)
			}
			t.Logf("%s: %s", key, p.Result)
		}
		oldVLLM.alive()
		if now := newNode.agents(); !slices.Equal(now, before) {
			t.Errorf("agents %v, which were %v", now, before)
		}
	})
}

// The binding's own tests and some of the plane's, over 1.5.1: a process can open one library only.
func TestTheBindingAndThePlaneOverNIXL15(t *testing.T) {
	lib, _ := newer(t)
	for _, c := range []struct{ pkg, tests string }{
		{"../nixl", "."},
		{"../transfer/nixl", "ConformsInProcesses|HandedOut|OutlivesItsNode|ReadsFromItself|AFetchAgentThatDies|EndsTheAgent|EndsReadsOfAStopped|AgentsThatDie"},
	} {
		t.Run(c.pkg, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command("go", "test", "-count", "1", "-v", "-run", c.tests, c.pkg)
			cmd.Env = append(slices.Concat(os.Environ(), lib), "FERRY_INTEROP_REQUIRED=1")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			t.Logf("%d tests passed", strings.Count(string(out), "--- PASS"))
		})
	}
}
