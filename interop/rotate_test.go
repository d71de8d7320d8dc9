package interop

import (
	"bufio"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// small is a pool of 2,048 blocks, with leases so short that an ack which is held back is soon a burned grant. rotating is more than
// the 5% of it that one source may have burned before the agent is rotated, and less than the 10% that it may have until then.
var small = []string{"--ec-cpu-bytes", "4MiB", "--timeouts-grant-lease", "1s", "--timeouts-hold-lease", "1s", "--admin", "127.0.0.1:0"}

const rotating = 150 * block

// metric is a value of the node's /metrics.
func (n *nodeProcess) metric(name string) float64 {
	n.t.Helper()
	answer, err := http.Get("http://" + n.admin + "/metrics")
	must(n.t, err)
	defer answer.Body.Close()
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		if rest, ok := strings.CutPrefix(lines.Text(), name); ok && (rest[0] == ' ' || rest[0] == '{') {
			v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
			must(n.t, err)
			return v
		}
	}
	n.t.Fatalf("no metric %s", name)
	return 0
}

func (n *nodeProcess) waitRotations(want int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("rotation %d", want), func() bool { return n.metric("tensorferry_agent_rotations_total") >= float64(want) })
}

// A vLLM engine whose READ meets a dead agent that it knows ends with it. One that holds an old ack, one that goes on pulling, and one that
// does nothing for the time: none of them may notice, neither the rotation nor that the agent they know ends while they are idle.
func TestTheServeAgentIsRotatedUnderWarmVLLMsWithoutAFailedRead(t *testing.T) {
	late, busy, idle := launchConsumer(t), launchConsumer(t), launchConsumer(t)
	n := startNode(t, small...)
	gate := newGate(t, n.address())
	warm := entries(0, 3, 64*kib, 2*kib)
	pullWarm := func(c *consumer) {
		t.Helper()
		at := n.address()
		if c == late {
			at = gate.address()
		}
		c.evict()
		n.put(warm) // they may have been evicted
		c.pullAll(at, warm)
	}
	all := []*consumer{late, busy, idle}
	for _, c := range all {
		c.ready()
		pullWarm(c)
	}
	former := n.agentOf("serve")

	held := entries(10, 1, rotating)
	n.put(held)
	gate.hold()
	late.ask(gate.address(), held)
	eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
	n.waitRotations(1)
	for i := range 3 {
		more := entries(20+10*i, 5, 64*kib, 6*kib)
		n.put(more)
		busy.pullAll(n.address(), more)
		busy.evict()
		busy.pullAll(n.address(), more)
	}
	if !lives(former) {
		t.Fatal("the former agent ended under a vLLM that has an ack which names it")
	}
	gate.release()
	for key, p := range late.ends(1) {
		if p.Result != "pulled" || !p.Good {
			t.Errorf("by an ack that named the former agent, %s: %s, bytes right: %v", key, p.Result, p.Good)
		}
	}
	n.wantGone(former) // what it granted has been READ, though two of them know no other agent
	for range 2 {
		for _, c := range all {
			pullWarm(c)
			c.alive()
		}
	}
	if b := n.metric("tensorferry_burned_grants"); b != 0 {
		t.Errorf("%v grants are still burned", b)
	}
}

// A READ may take long where it goes over a network. vLLM takes an agent away, and what it READs from there with it, as soon as an ack
// names another one.
func TestARotationDoesNotSpoilAReadThatIsUnderWay(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp") // over shared memory a READ is complete when it is posted
	c := launchConsumer(t, "--region", "512M")
	n := startNode(t, append(slices.Clone(small), "--ec-cpu-bytes", "512MiB")...)
	gate := newGate(t, n.address())
	warm := entries(0, 3, 64*kib)
	n.put(warm)
	c.ready()
	c.pullAll(gate.address(), warm)
	former := n.agentOf("serve")

	large := entries(10, 1, 48*mib) // 9% of the pool
	n.put(large)
	gate.hold()
	c.ask(gate.address(), large)
	eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
	n.waitRotations(1)
	next := entries(20, 3, 64*kib)
	n.put(next)
	c.ask(gate.address(), next)
	eventually(t, "the acks of the next ones", func() bool { return gate.held() == 4 })
	gate.release()
	for key, p := range c.ends(4) {
		if p.Result != "pulled" || !p.Good {
			t.Errorf("%s: %s, bytes right: %v", key, p.Result, p.Good)
		}
	}
	c.alive()
	n.wantGone(former)
	c.evict()
	c.pullAll(gate.address(), warm)
}
