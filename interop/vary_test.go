package interop

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
)

// Versions 1 and 2 of the protocol leave their number out, so that nothing on the wire tells them apart. A node is told which its peers
// speak, and pulls succeed either way, as between two vLLMs.
func TestBothGenerationsOfTheProtocol(t *testing.T) {
	one := []string{"--speaks", "1"}
	c, p := launchConsumer(t, one...), launchProducer(t, append(one, "--count", "2")...)
	n := startNode(t, "--ec-protocol", "1")
	trapped := startNode(t) // takes them for peers of version 2
	sizes := entries(10, 2, 64*kib)
	p.ready()
	c.ready()
	for _, n := range []*nodeProcess{n, trapped} {
		n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
		n.put(sizes)
		c.evict()
		c.pullAll(n.address(), sizes)
	}
	c.alive()

	// Only a number that is written out is refused.
	t.Run("another version", func(t *testing.T) {
		two := startConsumer(t, append(one, "--version", "2")...)
		two.pullAll(trapped.address(), sizes)
		two.evict()
		two.wantUnavailable(n.address(), sizes)
		two.alive()
	})
}

func TestSeveralVLLMsPullAtOnce(t *testing.T) {
	const each, rounds = 40, "3"
	var all []*process
	n := startNode(t, "--ec-cpu-bytes", "128MiB")
	n.put(entries(0, each, 64*kib, mib, 6*kib))
	for range 3 {
		all = append(all, script(t, "ec_consumer.py", n.address(), "--count", fmt.Sprint(each), "--size", "64K,1M,6K", "--repeat", rounds, "--quiet"))
	}
	for _, p := range all {
		var summary struct {
			OK     bool
			Pulled int
			Failed map[string]string
		}
		p.answer(&summary)
		if !summary.OK || summary.Pulled != 3*each {
			t.Errorf("%+v, want %d pulled", summary, 3*each)
		}
	}
	n.wantNoPins()
}

func TestKeysOfVLLMsUsers(t *testing.T) {
	c := launchConsumer(t)
	p := launchProducer(t, "--count", "0", "--region", "8M")
	n := startNode(t)
	sizes := map[string]int{
		"a":                                2 * kib,
		"with:colons:in:it":                64 * kib,
		"Überschrift/猫 \U0001f408":         6 * kib,
		strings.Repeat("k", 256):           64 * kib,
		"lora-" + strings.Repeat("é", 125): 2 * kib,
	}
	p.ready()
	p.insert(sizes)
	n.wantOutcomes(n.fetch(p.Params, time.Minute), sizes, ec.FetchReady)
	c.ready()
	c.pullAnnounced(n, sizes)
	c.alive()
	n.wantNoPins()

	t.Run("one that is too long is refused, and others are not", func(t *testing.T) {
		c.ask(n.address(), map[string]int{strings.Repeat("k", 257): 2 * kib})
		next := entries(0, 1, 64*kib)
		n.put(next)
		c.ask(n.address(), next)
		for key, r := range c.ends(1) {
			if next[key] == 0 || r.Result != "pulled" || !r.Good {
				t.Errorf("%+v", r)
			}
		}
		c.abort(strings.Repeat("k", 257))
		c.alive()
	})
}

func TestANodeThatCannotServeVLLMSaysSo(t *testing.T) {
	c := launchConsumer(t)
	n := startNode(t, "--planes", "tcp", "--admin", "127.0.0.1:0")
	sizes := entries(0, 2, 64*kib)
	n.put(sizes)
	c.ready()
	c.wantUnavailable(n.address(), sizes)
	c.alive()
	if refused := n.metric("tensorferry_plain_peers_refused_total"); refused != 2 {
		t.Errorf("%v requests of plain peers refused, want 2", refused)
	}
}

func TestAVLLMThatFailsInsideIsOneOutcome(t *testing.T) {
	p := launchProducer(t, "--count", "2")
	n := startNode(t)
	p.ready()
	p.do("exec setattr(sch._producer_session, '_grant_or_nack', lambda r: S.XferAck(mm_hash=r.mm_hash, status=S.XferStatus.NACK_INTERNAL))")
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchFailed)
}

// V11: vLLM asks again at each step.
func TestANodeDoesNotPesterAVLLMThatIsStillEncoding(t *testing.T) {
	p := launchProducer(t, "--count", "1", "--not-ready-for", "3")
	n := startNode(t)
	p.ready()
	p.do("exec C.__dict__.update(asked=[0], grant=sch._producer_session._grant_or_nack)")
	p.do("exec setattr(sch._producer_session, '_grant_or_nack', lambda r: (C.asked.__setitem__(0, C.asked[0] + 1), C.grant(r))[1])")
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
	if asked := p.value("C.asked[0]"); asked == "0" || len(asked) > 2 {
		t.Errorf("asked %s times in some seconds", asked)
	} else {
		t.Logf("asked %s times", asked)
	}
}

// wantNoPins waits until nobody uses anything of the node.
func (n *nodeProcess) wantNoPins() {
	n.t.Helper()
	eventually(n.t, "all pins to be gone", func() bool {
		all, err := n.client.List(n.t.Context())
		must(n.t, err)
		return !slices.ContainsFunc(all, func(i ec.Info) bool { return i.Pins > 0 })
	})
}
