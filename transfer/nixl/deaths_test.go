package nixl

import (
	"log/slog"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func TestTheDeathOfAnAgentIsTold(t *testing.T) {
	for _, c := range []struct {
		script string
		want   Death
	}{
		{"kill -ABRT $$", DeathAbort},
		{"kill -SEGV $$", DeathFault},
		{"kill -BUS $$", DeathFault},
		{"kill -KILL $$", DeathKilled},
		{"kill -TERM $$", DeathExit},
		{"exit 0", DeathExit},
		{"exit 2", DeathExit},
		{"echo 'SIGABRT: abort'; exit 2", DeathAbort},
		{"echo 'SIGSEGV: segmentation violation' >&2; exit 2", DeathFault},
		{"echo panic; echo '[signal SIGBUS: bus error code=0x2'; echo 'SIGABRT: abort'; exit 2", DeathFault},
		{"echo 'SIGABRT: abort'; kill -KILL $$", DeathKilled},
		{"echo there was no SIGABRT: abort; exit 1", DeathExit},
		{"printf 'no frame begins so' >&3; exec sleep 60", DeathGivenUp},
		{"exec 3>&-; exec sleep 60", DeathGivenUp},
	} {
		t.Run(c.script, func(t *testing.T) {
			t.Parallel()
			var died []Death
			_, err := startChild(t.Context(), childOptions{
				command: []string{"/bin/sh", "-c", c.script}, role: roleServe, log: slog.New(slog.DiscardHandler),
				died: func(d Death) { died = append(died, d) },
			}, nil)
			if err == nil {
				t.Fatal("it is an agent")
			}
			if !slices.Equal(died, []Death{c.want}) {
				t.Errorf("%v, want once %v", died, c.want)
			}
		})
	}
}

// What Go's runtime says of a signal is what an agent that UCX ends says.
func TestAgentsThatDieAreCountedByRoleAndReason(t *testing.T) {
	p := newPlane(t, processes(t))
	reg := register(t, p, shared(t, 4096))
	must(t, pull(t, add(t, p, reg.Metadata()), make([]byte, 4096)))
	if got := p.Counts(); got != (Counts{}) {
		t.Errorf("at first %+v", got)
	}
	var want Counts
	for signal, d := range map[unix.Signal]Death{unix.SIGABRT: DeathAbort, unix.SIGSEGV: DeathFault, unix.SIGKILL: DeathKilled} {
		i := reg.cur.Load()
		must(t, unix.Kill(i.agent.(*child).pid, signal))
		<-i.agent.over()
		want.Serve[d]++
		if got := p.Counts(); got != want {
			t.Errorf("after %v: %+v, want %+v", signal, got, want)
		}
		transfertest.Eventually(t, "the next agent", func() bool {
			next := reg.cur.Load()
			return next != nil && next != i
		})
	}
	a, err := p.fetch.get(t.Context())
	must(t, err)
	must(t, unix.Kill(a.(*child).pid, unix.SIGABRT))
	<-a.over()
	want.Fetch[DeathAbort]++
	if got := p.Counts(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	a, err = p.fetch.get(t.Context())
	must(t, err)
	a.end()
	end, err := reg.Rotate(t.Context())
	must(t, err)
	end()
	if got := p.Counts(); got != want {
		t.Errorf("agents that were ended count: %+v, want %+v", got, want)
	}
}

func TestAnAgentThatWasTakenOverIsCountedWhenItDies(t *testing.T) {
	o := regionOptions(shmDir(t), transfertest.Patience)
	first := startOwner(t, o)
	first.kill()
	r, m, err := take(t.Context(), o)
	must(t, err)
	defer func() { must(t, r.Close(true)) }()
	defer m.File.Close()
	p := newPlane(t, outlivingOptions(t))
	reg := register(t, p, m)
	formers := reg.Formers()
	must(t, unix.Kill(first.Agents[0], unix.SIGKILL))
	var want Counts
	want.Serve[DeathUnknown] = 1
	transfertest.Eventually(t, "its death to be counted", func() bool { return p.Counts() == want })
	for _, f := range formers { // one is over
		f.End()
	}
	if got := p.Counts(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestDeathsHaveWords(t *testing.T) {
	seen := map[string]bool{}
	for _, d := range Deaths() {
		if w := d.String(); seen[w] || strings.ContainsAny(w, " \"") || w == "invalid" {
			t.Errorf("%d: %q", d, w)
		}
		seen[d.String()] = true
	}
	if got := deaths.String(); got != "invalid" {
		t.Error(got)
	}
}
