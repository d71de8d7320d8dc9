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
	p, again := launchProducer(t, "--count", "3", "--size", "64M", "--region", "256M"), launchProducer(t, "--count", "3", "--size", "1M")
	n := startNode(t, "--ec-cpu-bytes", "512MiB", "--timeouts-item", "8s", "--timeouts-ack-plain", "4s")
	p.ready()
	done := n.begin(p.Params, 20*time.Second)
	eventually(t, "a READ to be granted", func() bool { return p.stat("active_grants") > 0 })
	p.signal(syscall.SIGKILL)
	for key, r := range <-done {
		switch r.Outcome {
		case ec.FetchReady:
			n.wantPattern(key, 64*mib)
		case ec.FetchUnreachable, ec.FetchTimedOut, ec.FetchFailed:
		default:
			t.Errorf("%s: %v (%s)", key, r.Outcome, r.Reason)
		}
	}
	again.ready()
	for key := range again.Entries {
		_ = n.client.Remove(t.Context(), key)
	}
	n.wantOutcomes(n.fetch(again.Params, time.Minute), again.Entries, ec.FetchReady)
}

func TestAnAgentThatIsKilledCostsNoEntry(t *testing.T) {
	c, p := launchConsumer(t, "--region", "512M"), launchProducer(t, "--count", "4", "--size", "32M")
	n := startNode(t, "--ec-cpu-bytes", "512MiB")
	p.ready()
	done := n.begin(p.Params, time.Minute)
	must(t, syscall.Kill(n.agentOf("fetch"), syscall.SIGKILL))
	n.wantOutcomes(<-done, p.Entries, ec.FetchReady)

	// A warm vLLM that asks afterwards is told of the next agent, and to wait until there is one.
	c.ready()
	c.pullAll(n.address(), p.Entries)
	for range 3 {
		c.evict()
		// Not before its memory is gone: what is asked in the time that it takes to die may still be acked by it, and a READ on an agent
		// that it knows and that is dead ends a vLLM engine (V4).
		killed := n.agentOf("serve")
		must(t, syscall.Kill(killed, syscall.SIGKILL))
		eventually(t, "its memory to be gone", func() bool {
			pages, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", killed))
			return err != nil || bytes.HasPrefix(pages, []byte("0 "))
		})
		c.pullAll(n.address(), p.Entries)
	}
	c.alive()
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
		c.ask(n.address(), sizes)
		for key, p := range c.ends(len(sizes)) {
			// V7: vLLM fails the first request after a restart instead of asking the new producer.
			if p.Result == "pulled" && !p.Good {
				t.Errorf("%s: other bytes", key)
			}
		}
		sizes = entries(10*(i+1)+5, 3, 64*kib, mib)
		n.put(sizes)
		c.pullAll(n.address(), sizes)
	}
	c.alive()
}

func TestAVLLMKilledInAReadLeavesTheNodeServing(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp") // over shared memory a READ is over at once
	c, next := launchConsumer(t), launchConsumer(t)
	n := startNode(t, "--ec-cpu-bytes", "256MiB")
	sizes := entries(0, 3, 16*mib)
	n.put(sizes)
	c.ready()
	c.ask(n.address(), sizes)
	eventually(t, "a grant", func() bool {
		all, err := n.client.List(t.Context())
		must(t, err)
		return slices.ContainsFunc(all, func(i ec.Info) bool { return i.Pins > 0 })
	})
	c.kill()
	next.ready()
	next.pullAll(n.address(), sizes)
}

// V1: a consumer may act on an ack at any later time, also for a request that was aborted. What it reads then is what it asked for.
func TestALateAckNeverGivesOtherBytes(t *testing.T) {
	for _, aborted := range []bool{false, true} {
		t.Run(fmt.Sprintf("aborted=%v", aborted), func(t *testing.T) {
			c := launchConsumer(t)
			n := startNode(t, small...)
			gate := newGate(t, n.address())
			warm := entries(0, 1, 64*kib)
			n.put(warm)
			c.ready()
			c.pullAll(gate.address(), warm)

			late := entries(1, 1, rotating)
			n.put(late)
			gate.hold()
			c.ask(gate.address(), late)
			eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
			if aborted {
				c.abort(slices.Collect(maps.Keys(late))...)
			}
			n.waitRotations(1) // so its lease is over
			for k := range 20 {
				_, err := n.client.Put(t.Context(), key(1000+k), n.layout.spec(512*kib), pattern(key(1000+k), 512*kib))
				must(t, err)
			}
			i, err := n.client.Lookup(t.Context(), key(1000), key(1))
			must(t, err)
			if i[0].State != ec.Absent || i[1].State != ec.Ready {
				t.Errorf("want the first of them evicted, and what was granted kept: %+v", i)
			}
			gate.release()
			if aborted {
				c.ask(gate.address(), late) // vLLM looks at its acks when it has a request; it acts on that one before it asks again
			}
			c.wantPulled(late)
			c.alive()
			n.wantNoPins()
		})
	}
}
