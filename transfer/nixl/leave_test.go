package nixl

import (
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func pathOf(t *testing.T, o region.Options) string {
	t.Helper()
	name, err := o.Identity.FileName()
	must(t, err)
	return filepath.Join(o.Dir, name)
}

func (o *owner) wantEnded(t *testing.T) {
	t.Helper()
	for _, pid := range o.Agents {
		transfertest.Eventually(t, "the agents to end", func() bool { return gone(pid) })
	}
}

func TestAnOwnerThatEndsLeavesItsAgents(t *testing.T) {
	t.Run("with its region, to the next", func(t *testing.T) {
		o := regionOptions(shmDir(t), time.Hour)
		own := startOwnerThat(t, o, leaving{Agents: true, Kept: true})
		warm := add(t, newPlane(t, processes(t)), own.metadata(t))
		must(t, pull(t, warm, make([]byte, 4096)))
		own.end(t)
		must(t, pull(t, warm, make([]byte, 4096)))
		if n := EndUnnamed(t.Context(), pathOf(t, o)); n != 0 {
			t.Errorf("%d ended of a region that has its name", n)
		}
		r, m, err := take(t.Context(), o)
		must(t, err)
		defer func() { must(t, r.Close(true)) }()
		defer m.File.Close()
		reg := register(t, newPlane(t, outlivingOptions(t)), m)
		if n := len(reg.Formers()); n != 2 {
			t.Errorf("%d agents taken over, want 2", n)
		}
		must(t, pull(t, warm, make([]byte, 4096)))
		must(t, reg.Close())
		own.wantEnded(t)
	})
	t.Run("without its region, to whoever needs the memory", func(t *testing.T) {
		o := regionOptions(shmDir(t), time.Hour)
		own := startOwnerThat(t, o, leaving{Agents: true, Serve: time.Hour})
		warm := add(t, newPlane(t, processes(t)), own.metadata(t))
		must(t, pull(t, warm, make([]byte, 4096)))
		own.end(t)
		must(t, pull(t, warm, make([]byte, 4096)))
		if n := EndUnnamed(t.Context(), filepath.Join(o.Dir, "another")); n != 0 {
			t.Errorf("%d ended of another name", n)
		}
		r, err := region.Take(t.Context(), o) // the next one at that path
		must(t, err)
		must(t, pull(t, warm, make([]byte, 4096)))
		if n := EndUnnamed(t.Context(), pathOf(t, o)); n != 2 {
			t.Errorf("%d ended, want 2", n)
		}
		must(t, r.Close(true))
		own.wantEnded(t)
	})
	t.Run("without its region, until their time is over", func(t *testing.T) {
		o := regionOptions(shmDir(t), time.Hour)
		own := startOwnerThat(t, o, leaving{Agents: true, Serve: 500 * time.Millisecond})
		own.end(t)
		own.wantEnded(t)
	})
	t.Run("or ends them", func(t *testing.T) {
		o := regionOptions(shmDir(t), time.Hour)
		own := startOwnerThat(t, o, leaving{Kept: true})
		own.end(t)
		for _, pid := range own.Agents {
			if !gone(pid) {
				t.Error("an agent lives on")
			}
		}
		must(t, os.Remove(pathOf(t, o)))
	})
}

// Two directories of one file system may have regions of one name.
func TestAgentsOfARegionThatHasItsNameDoNotEndForAnotherDirectory(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	own := startOwner(t, o)
	own.kill()
	other := regionOptions(shmDir(t), time.Hour)
	if n := EndUnnamed(t.Context(), pathOf(t, other)); n != 0 {
		t.Errorf("%d ended", n)
	}
	must(t, pull(t, add(t, newPlane(t, processes(t)), own.metadata(t)), make([]byte, 4096)))
	_, err := region.Sweep(region.SweepOptions{Dir: o.Dir, Force: true})
	must(t, err)
	own.wantEnded(t)
}

// Who wanted the memory while the owner lived, and has given up since, does not end the agents when the owner does.
func TestAnAgentDoesNotEndForOneThatWaitsNoMore(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	r, m, err := take(t.Context(), o)
	must(t, err)
	defer m.File.Close()
	defer func() { must(t, r.Close(false)) }()
	must(t, r.Unlink())
	r.ServeFor(time.Hour)
	served, err := r.Reopen(false)
	must(t, err)
	defer served.Close()
	agent, err := outlive(served, r.Epoch())
	must(t, err)
	defer agent.listener.Close()
	for _, waits := range []bool{false, true} {
		c := dial(t, m.File)
		must(t, wireOf(c).send(frameEnd, 0, nil, nil))
		if !waits {
			must(t, c.Close())
		}
		if w := agent.claimed(<-agent.claims); w != nil || (agent.told != nil) != waits {
			t.Errorf("waits %v: told to end: %v", waits, agent.told != nil)
		}
		_ = c.Close()
	}
	_ = agent.told.Close()
}

// Nine incarnations need eight numbers: the oldest former agent goes, and all of the owner's can outlive it.
func TestTheOldestFormerAgentGoesWhereThereIsNoNumberForTheNext(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	var owners []*owner
	for range 3 {
		own := startOwner(t, o)
		own.kill()
		owners = append(owners, own)
	}
	r, m, err := take(t.Context(), o)
	must(t, err)
	defer func() { must(t, r.Close(true)) }()
	defer m.File.Close()
	reg := register(t, newPlane(t, outlivingOptions(t)), m)
	_, err = reg.Rotate(t.Context())
	must(t, err)
	if n := len(stillServing(reg.formers)); n != region.Servers-2 {
		t.Fatalf("%d former agents of eight with the two of now, want %d", n, region.Servers-2)
	}
	_, err = reg.Rotate(t.Context())
	must(t, err)
	live := stillServing(reg.formers)
	if len(live) != region.Servers-3 || live[0] != reg.formers[1] {
		t.Errorf("%d former agents serve, the first is the oldest but one: %v", len(live), live[0] == reg.formers[1])
	}
	if oldest := reg.formers[0].since; oldest.After(live[len(live)-1].since) {
		t.Error("a newer one was ended")
	}
	last := owners[2]
	must(t, pull(t, add(t, newPlane(t, processes(t)), last.metadata(t)), make([]byte, 4096)))
	locked := 0
	for i := range region.Servers {
		if free, err := serverGone(m.File, i); err == nil && !free {
			locked++
		}
	}
	if i := reg.cur.Load(); !i.outlives || locked != region.Servers {
		t.Errorf("the agent of now outlives its owner: %v; %d numbers taken", i.outlives, locked)
	}
	must(t, reg.Close())
	for _, own := range owners {
		own.wantEnded(t)
	}
}

// An owner that serves by another plane takes them over, and may leave them in turn.
func TestAgentsAreTakenOverWithoutAPlane(t *testing.T) {
	for _, leave := range []bool{true, false} {
		o := regionOptions(shmDir(t), time.Hour)
		own := startOwner(t, o)
		own.kill()
		warm := add(t, newPlane(t, processes(t)), own.metadata(t))
		r, m, err := take(t.Context(), o)
		must(t, err)
		heirs, err := TakeOver(t.Context(), m.File, slog.Default())
		must(t, err)
		formers := heirs.Formers()
		if len(formers) != 2 || !heirs.Leave() {
			t.Fatalf("%d agents taken over, or none can be left", len(formers))
		}
		heirs.leaves = leave
		must(t, heirs.Close())
		if !leave {
			<-formers[0].Gone
			<-formers[1].Gone
			if heirs.Leave() {
				t.Error("agents that are over are left")
			}
			must(t, m.File.Close())
			must(t, r.Close(true))
			own.wantEnded(t)
			continue
		}
		must(t, pull(t, warm, make([]byte, 4096)))
		must(t, m.File.Close())
		must(t, r.Close(true)) // their time without a name is none
		own.wantEnded(t)
	}
}

func dial(t *testing.T, f *os.File) *net.UnixConn {
	t.Helper()
	name, err := socketName(f, 0)
	must(t, err)
	c, err := net.DialUnix("unix", nil, name)
	must(t, err)
	return c
}
