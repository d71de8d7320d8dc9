package nixl

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// healthy waits until a check passes.
func healthy(t *testing.T, c *Checker) {
	t.Helper()
	for end := time.Now().Add(transfertest.Patience); ; time.Sleep(time.Millisecond) {
		err := c.Check(t.Context())
		if err == nil {
			return
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// C78: what was well at the start need not stay so.
func TestACheckFailsWhileAPlaneCannotMoveBytes(t *testing.T) {
	f := binding.NewFake()
	p := newPlane(t, Options{Loaded: f.Library()})
	c := NewChecker(p)
	must(t, c.Check(t.Context())) // there is nothing that could be read
	small, reg := register(t, p, shared(t, 100)), register(t, p, shared(t, 64<<10))
	for range 3 {
		must(t, c.Check(t.Context()))
	}
	for _, call := range []binding.FakeCall{binding.FakePost} {
		f.Fail(call, 0, binding.StatusBackend)
		wantErr(t, "a READ that fails", c.Check(t.Context()), transfer.ErrPeerLost)
		healthy(t, c)
	}

	f.Freeze(reg.agentName())
	brief, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	wantErr(t, "a READ that hangs", c.Check(brief), context.DeadlineExceeded)
	wantErr(t, "at once, while it hangs", c.Check(t.Context()), transfer.ErrPeerLost)
	f.Thaw(reg.agentName())
	healthy(t, c)

	f.Kill(small.agentName())
	if err := c.Check(t.Context()); err == nil {
		t.Error("an agent that is dead passes")
	}
}

func TestACheckPassesAgainWhenAgentsThatDiedAreBack(t *testing.T) {
	p := newPlane(t, processes(t))
	reg := register(t, p, shared(t, 64<<10))
	c := NewChecker(p)
	must(t, c.Check(t.Context()))
	for range 2 {
		serve, fetch := reg.pid(), p.fetchPID()
		must(t, unix.Kill(serve, unix.SIGKILL))
		must(t, unix.Kill(fetch, unix.SIGKILL))
		for end := time.Now().Add(transfertest.Patience); !gone(serve) || !gone(fetch); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("agents that were killed live on")
			}
		}
		healthy(t, c)
		if reg.pid() == serve || p.fetchPID() == fetch {
			t.Error("a check passes with an agent that is dead")
		}
	}
}

// READs by a fetch agent that is stopped hang, whatever the serving one does.
func TestACheckFailsWhileTheFetchAgentIsStopped(t *testing.T) {
	p := newPlane(t, processes(t))
	register(t, p, shared(t, 64<<10))
	c := NewChecker(p)
	must(t, c.Check(t.Context()))
	fetch := p.fetchPID()
	stop(t, fetch)
	brief, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	wantErr(t, "stopped", c.Check(brief), context.DeadlineExceeded)
	must(t, unix.Kill(fetch, unix.SIGCONT))
	healthy(t, c)
	if p.fetchPID() != fetch {
		t.Error("it was replaced")
	}
}

func BenchmarkCheck(b *testing.B) {
	p := newPlane(b, processes(b))
	register(b, p, shared(b, 64<<10))
	c := NewChecker(p)
	for b.Loop() {
		must(b, c.Check(b.Context()))
	}
}
