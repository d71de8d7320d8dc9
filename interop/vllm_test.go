package interop

import (
	"fmt"
	"maps"
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
	n := startNode(t, "--ec-cpu-bytes", "256MiB")
	p := startProducer(t, "--count", "6", "--size", "2K,64K,1M,3M,16M,64M")
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
}

func TestANodePullsTwoHundredAtOnceFromVLLM(t *testing.T) {
	n := startNode(t, "--ec-cpu-bytes", "512MiB")
	p := startProducer(t, "--count", "200", "--size", "2M,64K,256K")
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
}

func TestWhatVLLMRefusesIsOneOutcomeEach(t *testing.T) {
	n := startNode(t)
	for _, c := range []struct {
		name string
		args []string
		want ec.Outcome
	}{
		{"missing", []string{"--missing"}, ec.FetchMissing},
		{"another compatibility hash", []string{"--compat", "0123"}, ec.FetchIncompatible},
		{"another version", []string{"--version", "7"}, ec.FetchIncompatible},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := startProducer(t, append([]string{"--count", "2"}, c.args...)...)
			n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, c.want)
			for key := range p.Entries {
				_ = n.client.Remove(t.Context(), key)
			}
		})
	}
}

func TestANodeWaitsForWhatVLLMIsStillEncoding(t *testing.T) {
	n := startNode(t)
	p := startProducer(t, "--count", "2", "--not-ready-for", "3")
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
}

func TestVLLMPullsFromANodeByteForByte(t *testing.T) {
	n := startNode(t, "--ec-cpu-bytes", "256MiB")
	c := startConsumer(t)
	sizes := entries(0, 6, 2*kib, 64*kib, mib, 3*mib, 16*mib, 64*mib)
	n.put(sizes)
	c.pullAll(n.address(), sizes)
	t.Run("200 at once", func(t *testing.T) {
		c.evict()
		sizes := entries(100, 200, 256*kib, 64*kib)
		n.put(sizes)
		c.pullAll(n.address(), sizes)
	})
	t.Run("grants end with the notifications", func(t *testing.T) {
		eventually(t, "all pins to be gone", func() bool {
			all, err := n.client.List(t.Context())
			must(t, err)
			return !slices.ContainsFunc(all, func(i ec.Info) bool { return i.Pins > 0 })
		})
	})
	t.Run("missing", func(t *testing.T) {
		c.ask(n.address(), entries(900, 1, 64*kib))
		for _, p := range c.ends(1) {
			if p.Result == "pulled" {
				t.Errorf("a key that nobody holds: %+v", p)
			}
		}
	})
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
	n := startNode(t)
	sizes := entries(0, 1, 64*kib)
	n.put(sizes)
	for _, args := range [][]string{{"--compat", "0123"}, {"--version", "7"}} {
		t.Run(args[0], func(t *testing.T) {
			c := startConsumer(t, args...)
			c.ask(n.address(), sizes)
			for _, p := range c.ends(1) {
				if p.Result == "pulled" {
					t.Errorf("%+v", p)
				}
			}
			c.alive()
		})
	}
}

func TestANodeOutlivesRestartsOfVLLMOnOnePort(t *testing.T) {
	n := startNode(t)
	p := startProducer(t, "--count", "2")
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
	n := startNode(t, "--ec-cpu-bytes", "512MiB", "--timeouts-item", "8s", "--timeouts-ack-plain", "4s")
	p := startProducer(t, "--count", "3", "--size", "64M", "--region", "256M")
	done := make(chan map[string]client.FetchResult, 1)
	go func() { done <- n.fetch(p.Params, 20*time.Second) }()
	eventually(t, "a READ to be granted", func() bool {
		p.say("stats")
		var stats struct {
			Grants int `json:"active_grants"`
		}
		p.answer(&stats)
		return stats.Grants > 0
	})
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
	again := startProducer(t, "--count", "3", "--size", "1M")
	for key := range again.Entries {
		_ = n.client.Remove(t.Context(), key)
	}
	n.wantOutcomes(n.fetch(again.Params, time.Minute), again.Entries, ec.FetchReady)
}

func TestAnAgentThatIsKilledCostsNoEntry(t *testing.T) {
	n := startNode(t, "--ec-cpu-bytes", "512MiB")
	p := startProducer(t, "--count", "4", "--size", "32M")
	done := make(chan map[string]client.FetchResult, 1)
	go func() { done <- n.fetch(p.Params, time.Minute) }()
	must(t, syscall.Kill(n.agentOf("fetch"), syscall.SIGKILL))
	n.wantOutcomes(<-done, p.Entries, ec.FetchReady)

	// A warm vLLM that asks afterwards is told of the next agent, and to wait until there is one.
	c := startConsumer(t, "--region", "512M")
	c.pullAll(n.address(), p.Entries)
	for range 3 {
		c.evict()
		// Not before the node has seen it: an ack of the few ms until then names an agent that is dead, and a READ on an agent that
		// it knows and that is dead ends a vLLM engine (V4).
		killed := n.agentOf("serve")
		must(t, syscall.Kill(killed, syscall.SIGKILL))
		eventually(t, "the next agent", func() bool { return n.agentOf("serve") != killed })
		c.pullAll(n.address(), p.Entries)
	}
	c.alive()
}

func TestAWarmVLLMOutlivesRestartsOfTheNodeOnOnePort(t *testing.T) {
	n := startNode(t)
	c := startConsumer(t)
	sizes := entries(0, 3, 64*kib, mib)
	n.put(sizes)
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
	n := startNode(t, "--ec-cpu-bytes", "256MiB")
	sizes := entries(0, 3, 64*mib)
	n.put(sizes)
	c := startConsumer(t)
	c.ask(n.address(), sizes)
	eventually(t, "a grant", func() bool {
		all, err := n.client.List(t.Context())
		must(t, err)
		return slices.ContainsFunc(all, func(i ec.Info) bool { return i.Pins > 0 })
	})
	c.kill()
	next := startConsumer(t)
	next.pullAll(n.address(), sizes)
}

// V1: a consumer may act on an ack at any later time. Whatever it reads then must be what it asked for.
func TestALateAckNeverGivesOtherBytes(t *testing.T) {
	n := startNode(t, "--ec-cpu-bytes", "4MiB", "--timeouts-grant-lease", "1s", "--timeouts-hold-lease", "1s")
	c := startConsumer(t)
	gate := newGate(t, n.address())
	warm := entries(0, 1, 64*kib)
	n.put(warm)
	c.pullAll(gate.address(), warm)

	late := entries(1, 1, 512*kib)
	n.put(late)
	gate.hold()
	c.ask(gate.address(), late)
	eventually(t, "the grant to be burned and everything else evicted", func() bool {
		for k := range 20 {
			_, err := n.client.Put(t.Context(), key(1000+k), n.layout.spec(512*kib), pattern(key(1000+k), 512*kib))
			must(t, err)
		}
		return gate.held() > 0 && time.Since(gate.since()) > 3*time.Second
	})
	gate.release()
	for key, p := range c.ends(1) {
		if p.Result == "pulled" && !p.Good {
			t.Errorf("%s: pulled, with other bytes", key)
		}
		if p.Result != "pulled" {
			t.Logf("%s: %s", key, p.Result)
		}
	}
	c.alive()
}

func TestAnAbortedRequestWhoseAckComesLateReadsNothingWrong(t *testing.T) {
	n := startNode(t, "--ec-cpu-bytes", "4MiB", "--timeouts-grant-lease", "1s", "--timeouts-hold-lease", "1s")
	c := startConsumer(t)
	gate := newGate(t, n.address())
	warm := entries(0, 1, 64*kib)
	n.put(warm)
	c.pullAll(gate.address(), warm)
	late := entries(1, 1, 512*kib)
	n.put(late)
	gate.hold()
	c.ask(gate.address(), late)
	eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
	c.tell(map[string]any{"abort": slices.Collect(maps.Keys(late))})
	var aborted struct{ Aborted int }
	c.answer(&aborted)
	for k := range 20 {
		_, err := n.client.Put(t.Context(), key(1000+k), n.layout.spec(512*kib), pattern(key(1000+k), 512*kib))
		must(t, err)
	}
	gate.release()
	// A later user of the same key gets what that READ left, if anything.
	c.ask(gate.address(), late)
	for key, p := range c.ends(1) {
		if p.Result == "pulled" && !p.Good {
			t.Errorf("%s: pulled, with other bytes", key)
		}
	}
	c.alive()
}
