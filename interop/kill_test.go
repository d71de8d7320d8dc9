package interop

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/transfer/nixl/nixltest"
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

// endedByUCX says whether UCX has ended a process whose reader was killed or stopped. No other end of it passes.
func (p *process) endedByUCX() bool {
	p.t.Helper()
	if !p.over() {
		return false
	}
	text, err := os.ReadFile(p.log)
	must(p.t, err)
	return nixltest.EndedByUCX(p.t, p.name, text)
}

// endedAgentByUCX is endedByUCX of an agent of the node.
func (n *nodeProcess) endedAgentByUCX(pid int) bool {
	n.t.Helper()
	if lives(pid) {
		return false
	}
	var said []byte
	eventually(n.t, "the end of an agent to be logged", func() (died bool) {
		text, err := os.ReadFile(n.log)
		must(n.t, err)
		said, died = nixltest.AgentSaid(text, pid)
		return died
	})
	return nixltest.EndedByUCX(n.t, "the agent that serves", said)
}

// endsByUCX waits until the producer has let go of its grants, and says whether UCX ended it before.
func (p *producer) endsByUCX() bool {
	p.t.Helper()
	eventually(p.t, "vLLM to let go of its grants", func() bool {
		if p.over() {
			return true
		}
		if _, err := io.WriteString(p.stdin, "stats\n"); err != nil {
			return false // it is ending
		}
		select {
		case line, ok := <-p.lines:
			return ok && bytes.Contains(line, []byte(`"active_grants": 0`))
		case <-p.ended:
			return true
		}
	})
	return p.endedByUCX()
}

// What vLLM granted a node that is dead, it keeps for its own lease (30 s, here 3 s).
func TestANodeKilledBeforeAndInAReadFromVLLMLeavesThatServing(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp") // over shared memory a READ is over at once
	const size = 64 * mib
	args := []string{"--count", "1", "--size", "64M", "--region", "160M", "--pin-lease", "3"}
	p := launchProducer(t, args...)
	n := startNode(t, "--ec-cpu-bytes", "256MiB")
	p.ready()
	gate := newGate(t, p.Host+":"+fmt.Sprint(p.Port))
	again := func(want map[string]int) {
		t.Helper()
		n = n.again("--ec-cpu-bytes", "256MiB")
		n.wantOutcomes(n.fetch(p.Params, time.Minute), want, ec.FetchReady)
		eventually(t, "vLLM to let go of its grants", func() bool { return p.stat("active_grants") == 0 })
		if pins, blocks := p.stat("pins"), p.stat("free_blocks")+p.stat("evictable_blocks"); pins != 0 || blocks != p.stat("blocks") {
			t.Errorf("vLLM has %d pins, and %d blocks that it can use", pins, blocks)
		}
	}

	t.Run("between ack and READ", func(t *testing.T) {
		gate.hold()
		done := n.begin(p.through(gate), time.Minute)
		eventually(t, "the ack to be held back", func() bool { return gate.held() == 1 })
		n.kill()
		<-done
		gate.release()
		if p.endedByUCX() {
			p = startProducer(t, append(args, "--port", fmt.Sprint(p.Port))...) // the gate leads there
		}
		again(p.Entries)
	})
	t.Run("in a READ", func(*testing.T) {
		sizes := entries(1, 1, size)
		p.insert(sizes)
		gate.hold()
		done := n.begin(p.through(gate), time.Minute)
		eventually(t, "the ack to be held back", func() bool { return gate.held() == 1 })
		n.destinationOf(key(1)).stopHalfWay(gate, p.cmd.Process.Pid)
		n.kill()
		<-done
		p.signal(syscall.SIGCONT)
		if p.endsByUCX() {
			p = startProducer(t, append(args, "--port", fmt.Sprint(p.Port))...)
			p.insert(sizes)
		}
		again(sizes)
	})
	t.Run("others take the place of what they were granted", func(*testing.T) {
		more := entries(2, 2, size)
		p.insert(more)
		n.wantOutcomes(n.fetch(p.Params, time.Minute), more, ec.FetchReady)
		if entries := p.stat("entries"); entries != len(more) {
			t.Errorf("vLLM has %d entries, want the last %d", entries, len(more))
		}
	})
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
	n.fill()
	for _, i := range n.lookup(key(0), key(1)) {
		if i.State != ec.Ready || i.Pins != 1 {
			t.Errorf("want it kept: %+v", i)
		}
	}
	n.killServingAgent() // what ends them; by rotation it takes minutes
	n.wantSettled(0)
	if died := n.metric(`tensorferry_agents_died_total{reason="killed",role="serve"}`); died != 1 {
		t.Errorf("%v agents that serve were killed, want 1", died)
	}
	next.alive()
}

// A vLLM that is started anew under the name of its NIXL agent, and at its port, is another session. What the one before was granted is not
// its, and stays: nobody knows that that one is dead and not only away (V1).
func TestAVLLMThatIsStartedAnewUnderItsNameIsAnotherOne(t *testing.T) {
	port := fmt.Sprint(freePort(t))
	same := []string{"--engine-id", "the-same", "--port", port}
	c, next := launchConsumer(t, same...), launchConsumer(t, append(same, "--later")...)
	n := startNode(t, small...)
	gate := newGate(t, n.address())
	warm, late := entries(0, 1, 64*kib), entries(1, 1, 64*kib)
	n.put(warm)
	n.put(late)
	c.ready()
	c.pullAll(gate.address(), warm)
	gate.hold()
	c.ask(gate.address(), late)
	eventually(t, "the ack to be held back", func() bool { return gate.held() == 1 })
	agent := n.agentOf("serve")
	c.kill()
	gate.release()

	next.say("")
	next.ready()
	next.pullAll(n.address(), late)
	eventually(t, "the grant of the one before to be burned, and no other", func() bool {
		return !lives(agent) || n.metric("tensorferry_burned_grants") == 1 && n.metric("tensorferry_grants") == 1
	})
	if n.endedAgentByUCX(agent) {
		t.Skip("with the agent went what it had granted, so there is nothing to look at")
	}
	n.fill()
	if i := n.lookup(key(0), key(1)); i[0].State != ec.Absent || i[1].State != ec.Ready || i[1].Pins != 1 {
		t.Errorf("want what was read evicted, and what was granted kept: %+v", i)
	}
	next.evict()
	next.pullAll(n.address(), late)
	n.put(warm)
	next.pullAll(n.address(), warm)
	n.killServingAgent() // ends the grant; the clock does so after minutes
	n.wantSettled(1)
	n.put(entries(2, 1, mib))
	next.pullAll(n.address(), entries(2, 1, mib))
	next.alive()
}

func freePort(t testing.TB) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}
