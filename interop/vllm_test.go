package interop

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

const (
	kib = 1 << 10
	mib = 1 << 20
)

// wantOutcomes checks fetches that must end alike, and the bytes of those that must be ready.
func (n *nodeProcess) wantOutcomes(got map[string]client.FetchResult, sizes map[string]int, want ec.Outcome) {
	n.t.Helper()
	for key, size := range sizes {
		r, there := got[key]
		if !there || r.Outcome != want {
			n.t.Errorf("%s: %v (%s), want %v", key, r.Outcome, r.Reason, want)
			continue
		}
		n.t.Logf("%d bytes: %v after %v", size, r.Outcome, r.Elapsed)
		if want != ec.FetchReady {
			continue
		}
		if r.Plane != "nixl" {
			n.t.Errorf("%s came by %q", key, r.Plane)
		}
		n.wantPattern(key, size)
	}
}

func TestANodePullsFromVLLMByteForByte(t *testing.T) {
	p := launchProducer(t, "--count", "6", "--size", "2K,64K,1M,3M,16M,64M")
	n := startNode(t, "--ec-cpu-bytes", "256MiB")
	p.ready()
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
}

func TestANodePullsTwoHundredAtOnceFromVLLM(t *testing.T) {
	p := launchProducer(t, "--count", "200", "--size", "2M,64K,256K")
	n := startNode(t, "--ec-cpu-bytes", "512MiB")
	p.ready()
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
}

func TestWhatVLLMRefusesIsOneOutcomeEach(t *testing.T) {
	cases := []struct {
		name string
		args []string
		want ec.Outcome
		p    *producer
	}{
		{name: "missing", args: []string{"--missing"}, want: ec.FetchMissing},
		{name: "another compatibility hash", args: []string{"--compat", "0123"}, want: ec.FetchIncompatible},
		{name: "another version", args: []string{"--version", "7"}, want: ec.FetchIncompatible},
	}
	for i, c := range cases {
		cases[i].p = launchProducer(t, append([]string{"--count", "2"}, c.args...)...)
	}
	n := startNode(t)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			c.p.ready()
			n.wantOutcomes(n.fetch(c.p.Params, time.Minute), c.p.Entries, c.want)
		})
	}
}

func TestANodeWaitsForWhatVLLMIsStillEncoding(t *testing.T) {
	p := launchProducer(t, "--count", "2", "--not-ready-for", "3")
	n := startNode(t)
	p.ready()
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
}

func TestVLLMPullsFromANodeByteForByte(t *testing.T) {
	c := launchConsumer(t)
	n := startNode(t, "--ec-cpu-bytes", "256MiB")
	c.ready()
	sizes := entries(0, 6, 2*kib, 64*kib, mib, 3*mib, 16*mib, 64*mib)
	n.put(sizes)
	c.pullAll(n.address(), sizes)
	t.Run("200 at once", func(t *testing.T) {
		c.evict()
		sizes := entries(100, 200, 256*kib, 64*kib)
		n.put(sizes)
		c.pullAll(n.address(), sizes)
	})
	t.Run("grants end with the notifications", func(*testing.T) { n.wantNoPins() })
	t.Run("missing", func(*testing.T) { c.wantUnavailable(n.address(), entries(900, 1, 64*kib)) })
	t.Run("not ready, then ready", func(t *testing.T) {
		k := key(901)
		r, err := n.client.Reserve(t.Context(), k, n.layout.spec(mib))
		must(t, err)
		c.ask(n.address(), map[string]int{k: mib})
		c.alive() // several steps: it has asked
		at := pattern(k, mib)
		for _, b := range r.Buffers() {
			at = at[copy(b, at):]
		}
		must(t, r.Commit(t.Context()))
		if p := c.ends(1)[k]; p.Result != "pulled" || !p.Good {
			t.Errorf("%+v", p)
		}
	})
	n.stopClean()
	c.alive()
}

func TestAnotherModelsVLLMIsRefused(t *testing.T) {
	all := map[string]*consumer{
		"compatibility hash": launchConsumer(t, "--compat", "0123"),
		"version":            launchConsumer(t, "--version", "7"),
		"model":              launchConsumer(t, "--model", "tiny-nn"),
	}
	n := startNode(t)
	sizes := entries(0, 1, 64*kib)
	n.put(sizes)
	for name, c := range all {
		t.Run(name, func(*testing.T) {
			c.ready()
			c.wantUnavailable(n.address(), sizes)
			c.alive()
		})
	}
}

func TestANodeOutlivesRestartsOfVLLMOnOnePort(t *testing.T) {
	p := launchProducer(t, "--count", "2")
	n := startNode(t)
	p.ready()
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
	for i := range 2 {
		p.signal(syscall.SIGKILL)
		p.waitEnd()
		for key := range p.Entries {
			must(t, n.client.Remove(t.Context(), key))
		}
		p = startProducer(t, "--count", "2", "--port", fmt.Sprint(p.Port))
		got := n.fetch(p.Params, time.Minute)
		n.wantOutcomes(got, p.Entries, ec.FetchReady)
		if t.Failed() {
			t.Fatalf("after restart %d", i+1)
		}
	}
}

func TestAVLLMKilledInAReadCostsOneTypedFailure(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp") // over shared memory a READ is over at once
	const size = 64 * mib
	first, next := launchProducer(t, "--count", "1", "--size", "64M"), launchProducer(t, "--count", "1", "--size", "64M", "--region", "160M")
	n := startNode(t, "--ec-cpu-bytes", "256MiB", "--timeouts-read", "3s", "--timeouts-item", "20s", "--admin", "127.0.0.1:0")
	whole := n.stats().FreeBlocks

	t.Run("the READ fails", func(t *testing.T) {
		first.ready()
		gate := newGate(t, first.Host+":"+fmt.Sprint(first.Port))
		gate.hold()
		done := n.begin(first.through(gate), time.Minute)
		eventually(t, "the ack to be held back", func() bool { return gate.held() == 1 })
		n.destinationOf(key(0)).stopHalfWay(gate, first.cmd.Process.Pid)
		first.kill()
		n.wantOutcomes(<-done, first.Entries, ec.FetchUnreachable)
		if failed := n.metric("tensorferry_read_errors_total"); failed != 1 {
			t.Errorf("%v READs failed, want 1", failed)
		}
		if s := n.stats(); s.FreeBlocks != whole || s.Quarantined != 0 || n.lookup(key(0))[0].State != ec.Absent {
			t.Errorf("it left something: %+v", s)
		}
	})
	t.Run("the next one is read", func(*testing.T) {
		next.ready()
		n.wantOutcomes(n.fetch(next.Params, time.Minute), next.Entries, ec.FetchReady)
	})
	t.Run("it was given up before", func(t *testing.T) {
		free := n.stats().FreeBlocks
		sizes := entries(1, 1, size)
		next.insert(sizes)
		gate := newGate(t, next.Host+":"+fmt.Sprint(next.Port))
		gate.hold()
		done := n.begin(next.through(gate), time.Minute)
		eventually(t, "the ack to be held back", func() bool { return gate.held() == 1 })
		n.destinationOf(key(1)).stopHalfWay(gate, next.cmd.Process.Pid)
		n.wantOutcomes(<-done, sizes, ec.FetchTimedOut)
		if s := n.stats(); s.QuarantinedBlocks != size/block || s.FreeBlocks != free-size/block || n.lookup(key(1))[0].State != ec.Absent {
			t.Errorf("want its memory kept and its key free: %+v", s)
		}
		next.kill()
		eventually(t, "the memory to be free again", func() bool { return n.stats().FreeBlocks == free })
		n.wantPattern(key(0), size)
	})
}

func TestAnAgentThatIsKilledCostsNoEntry(t *testing.T) {
	c, p := launchConsumer(t, "--region", "512M"), launchProducer(t, "--count", "4", "--size", "32M")
	n := startNode(t, "--ec-cpu-bytes", "512MiB")
	p.ready()
	done := n.begin(p.Params, time.Minute)
	must(t, syscall.Kill(n.agentOf("fetch"), syscall.SIGKILL))
	got := <-done
	if p.endedByUCX() {
		p = startProducer(t, "--count", "4", "--size", "32M")
		got = n.fetch(p.Params, time.Minute)
	}
	n.wantOutcomes(got, p.Entries, ec.FetchReady)

	// A warm vLLM that asks afterwards is told of the next agent, and to wait until there is one.
	c.ready()
	c.pullAll(n.address(), p.Entries)
	for range 3 {
		c.evict()
		n.killServingAgent()
		c.pullAll(n.address(), p.Entries)
	}
	c.alive()
}

// killServingAgent returns when its memory is gone: what is asked before may still be acked by it, and a READ on an agent that it knows
// and that is dead ends a vLLM engine (V4).
func (n *nodeProcess) killServingAgent() {
	n.t.Helper()
	agent := n.agentOf("serve")
	must(n.t, syscall.Kill(agent, syscall.SIGKILL))
	eventually(n.t, "its memory to be gone", func() bool {
		pages, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", agent))
		return err != nil || bytes.HasPrefix(pages, []byte("0 "))
	})
}

// wantSettled waits for the grants to be over, and wants the entry of key k to go when room is needed.
func (n *nodeProcess) wantSettled(k int) {
	n.t.Helper()
	eventually(n.t, "the grants to be over", func() bool { return n.metric("tensorferry_grants") == 0 })
	n.wantNoPins()
	n.fill()
	if i := n.lookup(key(k)); i[0].State != ec.Absent {
		n.t.Errorf("want it evicted: %+v", i)
	}
}

func TestAWarmVLLMOutlivesRestartsOfTheNodeOnOnePort(t *testing.T) {
	c := launchConsumer(t)
	n := startNode(t)
	sizes := entries(0, 3, 64*kib, mib)
	n.put(sizes)
	c.ready()
	c.pullAll(n.address(), sizes)
	for i, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		_ = n.client.Close()
		n.stop(s)
		n = n.again("--side-channel", n.address())
		sizes = entries(10*(i+1), 3, 64*kib, mib)
		n.put(sizes)
		c.pullAfterRestart(n.address(), sizes)
		sizes = entries(10*(i+1)+5, 3, 64*kib, mib)
		n.put(sizes)
		c.pullAll(n.address(), sizes)
	}
	c.alive()
}

func TestAVLLMKilledInAReadLeavesTheNodeServing(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp") // over shared memory a READ is over at once
	const size = 64 * mib
	c, next := launchConsumer(t), launchConsumer(t)
	n := startNode(t, "--ec-cpu-bytes", "512MiB", "--admin", "127.0.0.1:0")
	warm, sizes := entries(0, 1, 64*kib), entries(1, 1, size)
	n.put(warm)
	n.put(sizes)
	c.ready()
	gate := newGate(t, n.address())
	c.pullAll(gate.address(), warm)
	gate.hold()
	c.ask(gate.address(), sizes)
	eventually(t, "the ack to be held back", func() bool { return gate.held() == 1 })
	agent := n.agentOf("serve")
	c.destinationOf(key(1)).stopHalfWay(gate, agent)
	if !c.pulls()[key(1)].Posted {
		t.Error("vLLM READs nothing")
	}
	c.kill()
	must(t, syscall.Kill(agent, syscall.SIGCONT))

	next.ready()
	next.pullAll(n.address(), sizes)
	next.pullAll(n.address(), warm)
	// Nobody has heard of the READ's end, so its grant is kept as long as the agent lives that served it. If UCX ends that, nothing can be READ
	// by the grant.
	eventually(t, "one grant to be left, or none and no agent", func() bool {
		left := n.metric("tensorferry_grants")
		return left == 1 || left == 0 && !lives(agent)
	})
	if lives(agent) {
		n.fill()
		if i := n.lookup(key(0), key(1)); lives(agent) && (i[0].State != ec.Absent || i[1].State != ec.Ready || i[1].Pins != 1) {
			t.Errorf("want what was read evicted, and what was granted kept: %+v", i)
		}
		if lives(agent) {
			n.killServingAgent() // rotation takes minutes
		}
	} else {
		n.endedAgentByUCX(agent)
	}
	n.wantSettled(1)
	next.alive()
}

// V1: a consumer may act on an ack at any later time, also for a request that was aborted. What it reads then is what it asked for.
func TestALateAckNeverGivesOtherBytes(t *testing.T) {
	c := launchConsumer(t)
	for _, tc := range []struct {
		name    string
		aborted bool
		lease   time.Duration
		leases  int // that end while the ack is held back
	}{
		{"an ack that comes late", false, time.Second, 1},
		{"of a request that was aborted", true, time.Second, 1},
		{"of one that was aborted many leases ago", true, 10 * time.Millisecond, 300},
	} {
		t.Run(tc.name, func(t *testing.T) {
			n := startNode(t, append(slices.Clone(small), "--timeouts-grant-lease", tc.lease.String(), "--timeouts-hold-lease", tc.lease.String())...)
			gate := newGate(t, n.address())
			warm := entries(0, 1, 64*kib)
			n.put(warm)
			if c.Region == "" {
				c.ready()
			}
			c.evict()
			c.pullAll(gate.address(), warm)

			late := entries(1, 1, rotating)
			n.put(late)
			gate.hold()
			c.ask(gate.address(), late)
			eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
			granted := time.Now()
			if tc.aborted {
				c.abort(slices.Collect(maps.Keys(late))...)
			}
			n.waitRotations(1) // so its lease is over
			for filled := 0; filled == 0 || time.Since(granted) < time.Duration(tc.leases)*tc.lease; filled++ {
				n.fill()
				if i := n.lookup(key(0), key(1)); i[0].State != ec.Absent || i[1].State != ec.Ready || i[1].Pins != 1 {
					t.Fatalf("want the warm one evicted, and what was granted kept: %+v", i)
				}
			}
			gate.release()
			if tc.aborted {
				c.ask(gate.address(), late) // vLLM looks at its acks when it has a request; it acts on that one before it asks again
			}
			c.wantPulled(late)
			c.alive()
			n.wantNoPins()
		})
	}
}
