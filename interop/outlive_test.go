package interop

import (
	"errors"
	"syscall"
	"testing"

	"github.com/tensorferry/tensorferry/ec"
)

func (n *nodeProcess) wantGone(pid int) {
	n.t.Helper()
	eventually(n.t, "the agent to end", func() bool { return !lives(pid) })
}

func lives(pid int) bool { return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

// V4: a READ on an agent that is known and dead ends a vLLM engine. So the agent that serves outlives a node that is killed, and what the
// node had granted stays as it is.
func TestAWarmVLLMReadsWhatANodeGrantedThatWasKilled(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		name := "while there is no node"
		if restarted {
			name = "from the agent that the next node took over"
		}
		t.Run(name, func(t *testing.T) {
			flags := []string{"--ec-cpu-bytes", "4MiB", "--timeouts-hold-lease", "1s", "--timeouts-adopt", "20s"} // so long agents go on for what was not READ
			c := launchConsumer(t)
			n := startNode(t, flags...)
			gate := newGate(t, n.address())
			warm := entries(0, 1, 64*kib)
			n.put(warm)
			c.ready()
			c.pullAll(gate.address(), warm)

			late := entries(1, 1, 512*kib)
			n.put(late)
			gate.hold()
			gate.hide() // vLLM gives up what it waits for from a connection that has ended
			c.ask(gate.address(), late)
			eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
			agent, port := n.agentOf("serve"), n.port
			n.kill()
			if restarted {
				n = n.again(flags...)
				for k := range 20 { // others go
					_, err := n.client.Put(t.Context(), key(1000+k), n.layout.spec(512*kib), pattern(key(1000+k), 512*kib))
					must(t, err)
				}
				i, err := n.client.Lookup(t.Context(), key(1000), key(1))
				must(t, err)
				if i[0].State != ec.Absent || i[1].State != ec.Ready || i[1].Pins != 1 {
					t.Errorf("want the first evicted, and the second, which the node before had granted, pinned: %+v", i)
				}
			}
			gate.release()
			c.wantPulled(late)
			c.alive()
			gate.cut()
			if !restarted {
				n = n.again(flags...)
			}
			if n.port != port {
				t.Errorf("port %d, the node before had %d", n.port, port)
			}

			next := entries(10, 3, 64*kib)
			n.put(next)
			c.pullAfterRestart(gate.address(), next)
			c.alive()
			last := n.agentOf("serve")
			n.stopClean()
			n.wantGone(agent)
			n.wantGone(last)
		})
	}
}

// The same of one that is stopped, whatever becomes of its region.
func TestAWarmVLLMReadsWhatANodeGrantedThatWasStopped(t *testing.T) {
	for _, c := range []struct {
		name        string
		first, next []string
		sig         syscall.Signal
		pinned      bool
	}{
		{"cleanly", nil, nil, syscall.SIGTERM, false},
		{"cleanly, its region kept", []string{"--keep-region"}, []string{"--keep-region"}, syscall.SIGTERM, true},
		{"by a kill, and another size", nil, []string{"--ec-cpu-bytes", "8MiB"}, syscall.SIGKILL, false},
		{"by a kill, and the next has another plane", nil, []string{"--planes", "tcp"}, syscall.SIGKILL, true},
		{"by a kill, and the next has its agents in its process", nil, []string{"--nixl-in-process"}, syscall.SIGKILL, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			vllm := launchConsumer(t)
			n := startNode(t, append([]string{"--timeouts-adopt", "30s"}, c.first...)...)
			gate := newGate(t, n.address())
			warm, late := entries(0, 1, 64*kib), entries(1, 1, 512*kib)
			n.put(warm)
			vllm.ready()
			vllm.pullAll(gate.address(), warm)
			n.put(late)
			gate.hold()
			gate.hide()
			vllm.ask(gate.address(), late)
			eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
			agent := n.agentOf("serve")
			_ = n.client.Close()
			n.stop(c.sig)
			n = n.again(append([]string{"--timeouts-adopt", "30s"}, c.next...)...)
			if i, err := n.client.Lookup(t.Context(), key(1)); err != nil || c.pinned && (i[0].State != ec.Ready || i[0].Pins != 1) {
				t.Errorf("%+v, %v: want what the node before had granted pinned", i, err)
			}
			gate.release()
			vllm.wantPulled(late)
			vllm.alive()
			gate.cut()
			_ = syscall.Kill(agent, syscall.SIGKILL) // its own clock has long to go
			n.wantGone(agent)
			n.stopClean()
		})
	}
}

// A clean end waits for READs. A second signal ends that wait, and the agent goes on as after a kill.
func TestASecondSignalEndsTheWaitForREADs(t *testing.T) {
	vllm := launchConsumer(t)
	n := startNode(t, "--timeouts-adopt", "30s")
	gate := newGate(t, n.address())
	warm, late := entries(0, 1, 64*kib), entries(1, 1, 512*kib)
	n.put(warm)
	vllm.ready()
	vllm.pullAll(gate.address(), warm)
	n.put(late)
	gate.hold()
	gate.hide()
	vllm.ask(gate.address(), late)
	eventually(t, "the ack to be held back", func() bool { return gate.held() > 0 })
	agent := n.agentOf("serve")
	_ = n.client.Close()
	n.signal(syscall.SIGTERM)
	eventually(t, "the end", func() bool { // signals that follow the first at once count as one with it
		if n.over() {
			return true
		}
		_ = n.cmd.Process.Signal(syscall.SIGTERM)
		return false
	})
	if status := n.cmd.ProcessState.ExitCode(); status != 128+int(syscall.SIGTERM) {
		t.Errorf("exit status %d, want that of a signal", status)
	}
	gate.release()
	vllm.wantPulled(late)
	vllm.alive()
	gate.cut()
	n = n.again("--timeouts-adopt", "30s")
	_ = syscall.Kill(agent, syscall.SIGKILL) // else the next node leaves it, and its own, in turn
	n.wantGone(agent)
	last := n.agentOf("serve")
	n.stopClean()
	n.wantGone(last)
}
