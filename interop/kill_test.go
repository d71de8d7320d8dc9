package interop

import (
	"encoding/json"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// through gives the producer's announcements with the gate's address.
func (p *producer) through(g *gate) ec.Params {
	p.t.Helper()
	text, err := json.Marshal(p.Params)
	must(p.t, err)
	_, port, _ := strings.Cut(g.address(), ":")
	var out ec.Params
	must(p.t, json.Unmarshal([]byte(strings.ReplaceAll(string(text), fmt.Sprintf(`"peer_port":%d`, p.Port), `"peer_port":`+port)), &out))
	return out
}

// begin fetches while the test goes on.
func (n *nodeProcess) begin(p ec.Params, timeout time.Duration) <-chan map[string]client.FetchResult {
	done := make(chan map[string]client.FetchResult, 1)
	go func() {
		results, err := n.client.Fetch(n.t.Context(), p, timeout)
		out := map[string]client.FetchResult{}
		if err == nil {
			for r := range results {
				out[r.Key] = r
			}
		}
		done <- out
	}()
	return done
}

func TestAVLLMKilledBetweenItsAckAndTheReadCostsOneTypedFailure(t *testing.T) {
	first, next := launchProducer(t, "--count", "2"), launchProducer(t, "--count", "2")
	n := startNode(t, "--timeouts-item", "8s")
	first.ready()
	gate := newGate(t, first.Host+":"+fmt.Sprint(first.Port))
	gate.hold()
	done := n.begin(first.through(gate), 20*time.Second)
	eventually(t, "both acks to be held back", func() bool { return gate.held() == 2 })
	gate.hide()
	first.kill()
	gate.release()
	n.wantOutcomes(<-done, first.Entries, ec.FetchUnreachable)
	next.ready()
	n.wantOutcomes(n.fetch(next.Params, time.Minute), next.Entries, ec.FetchReady)
}

// V1 as vLLM's producer does it: what it granted is another's 30 s later (here 1 s), and its consumer is not told.
func TestANodeDoesNotDeliverWhatAVLLMHasReused(t *testing.T) {
	p := launchProducer(t, "--count", "1", "--size", "512K", "--region", "1M", "--pin-lease", "1")
	n := startNode(t, "--timeouts-plain-lease", "900ms", "--timeouts-item", "20s")
	p.ready()
	gate := newGate(t, p.Host+":"+fmt.Sprint(p.Port))
	gate.hold()
	done := n.begin(p.through(gate), 30*time.Second)
	eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
	eventually(t, "its lease to end", func() bool { return p.stat("active_grants") == 0 })
	p.insert(entries(100, 2, 512*kib)) // all of the region
	gate.release()
	n.wantOutcomes(<-done, p.Entries, ec.FetchMissing)
}

func TestANodeKilledInAReadFromVLLMLeavesThatServing(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp") // over shared memory a READ is over at once
	p := launchProducer(t, "--count", "3", "--size", "64M")
	n := startNode(t, "--ec-cpu-bytes", "512MiB")
	p.ready()
	done := n.begin(p.Params, time.Minute)
	eventually(t, "a READ to be granted", func() bool { return p.stat("active_grants") > 0 })
	n.kill()
	<-done
	n = n.again("--ec-cpu-bytes", "512MiB")
	n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
	n.stopClean()
}

func TestANodeKilledInAReadOfVLLMCostsItNothing(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp")
	c := launchConsumer(t, "--region", "512M")
	n := startNode(t, "--ec-cpu-bytes", "512MiB")
	sizes := entries(0, 3, 32*mib) // less than what one source may have granted
	n.put(sizes)
	c.ready()
	gate := newGate(t, n.address())
	warm := entries(100, 1, 64*kib)
	n.put(warm)
	c.pullAll(gate.address(), warm)
	gate.hold()
	c.ask(gate.address(), sizes)
	eventually(t, "the acks to be held back", func() bool { return gate.held() == len(sizes) })
	gate.hide() // vLLM gives up what it waits for from a connection that has ended
	gate.release()
	n.kill()
	c.wantPulled(sizes)
	c.alive()
	gate.cut()
	n = n.again("--ec-cpu-bytes", "512MiB")
	n.stopClean()
}

func TestAVLLMKilledBetweenAckAndReadLeavesTheNodeServing(t *testing.T) {
	c, next := launchConsumer(t), launchConsumer(t)
	n := startNode(t, small...)
	sizes := entries(0, 2, 64*kib)
	n.put(sizes)
	gate := newGate(t, n.address())
	c.ready()
	gate.hold()
	c.ask(gate.address(), sizes)
	eventually(t, "the acks to be held back", func() bool { return gate.held() == 2 })
	c.signal(syscall.SIGKILL)
	c.waitEnd()
	gate.release()
	next.ready()
	next.pullAll(n.address(), sizes)
	// Nobody knows that it is dead and not only away, so what it was granted stays (V1).
	eventually(t, "its grants to be burned", func() bool { return n.metric("tensorferry_burned_grants") == 2 })
	next.alive()
}
