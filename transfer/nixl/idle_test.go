package nixl

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
)

// An agent that has nothing to do asks the library ten times a second at most, and one that nobody can notify once.
func TestAnIdleAgentSeldomAsksTheLibrary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := binding.NewFake()
		asked := map[binding.FakeCall]int{}
		quiet := func(what string, d time.Duration, notifications, status int) {
			t.Helper()
			calls := []binding.FakeCall{binding.FakeNotifications, binding.FakeStatus}
			for _, c := range calls {
				asked[c] = f.Calls(c)
			}
			time.Sleep(d)
			synctest.Wait()
			for i, most := range []int{notifications, status} {
				if most > 0 {
					most += 2 // at the ends of the time
				}
				if n := f.Calls(calls[i]) - asked[calls[i]]; n > most {
					t.Errorf("%s: %d calls for %s in %v, at most %d were expected", what, n, calls[i], d, most)
				}
			}
		}
		engineOf := func(name string, notify func([]byte)) *engine {
			e, err := newEngine(f.Library(), engineOptions{Name: name, Backends: []Backend{{Name: "UCX"}}, IdlePeers: 8}, notify)
			must(t, err)
			return e
		}
		const while, seconds = 10 * time.Minute, 600

		reader := engineOf("reader", nil)
		defer reader.end()
		quiet("a fetch agent from its start", while, seconds, 0)
		memory := make([]byte, 8)
		_, err := reader.register(1, PlaceOf(memory))
		must(t, err)
		far := producer(t, f, "far")
		from := make([]byte, 8)
		_, err = far.Register(binding.DRAM, []binding.Range{binding.RangeOf(from)})
		must(t, err)
		peer, err := reader.addPeer(t.Context(), metadataOf(t, far))
		must(t, err)
		over := make(chan error, 1)
		reader.read(readOp{peer: peer, pieces: []piece{{1, 0, PlaceOf(from).Addr, 8, 0}}}, func(err error) { over <- err })
		must(t, <-over)
		quiet("after a READ", while, seconds, 0)

		server := engineOf("server", func([]byte) {})
		defer server.end()
		time.Sleep(time.Minute)
		const listening = int(while / listenSlowest)
		quiet("a serve agent beside it", while, listening+seconds, 0)
		server.attend()
		quiet("when a notification is expected", while, listening+seconds+int(listenHotFor/listenHot)+10, 0)
	})
}

// What agents that do nothing cost, by the kernel's account. Run it with -benchtime 10x, which is 10 seconds.
func BenchmarkIdle(b *testing.B) {
	p := newPlane(b, processes(b))
	reg := register(b, p, shared(b, 64<<10))
	must(b, pull(b, add(b, p, reg.Metadata()), make([]byte, 64<<10)))
	time.Sleep(2*listenHotFor + time.Second) // what it expects after its start
	pids := map[string]int{"serve": reg.pid(), "fetch": p.fetchPID()}
	before := map[string]usage{}
	for role, pid := range pids {
		before[role] = usageOf(b, pid)
	}
	b.ResetTimer()
	time.Sleep(time.Duration(b.N) * time.Second)
	b.StopTimer()
	for role, pid := range pids {
		u := usageOf(b, pid)
		b.ReportMetric(float64(u.wakeUps-before[role].wakeUps)/float64(b.N), role+"-wakeups/s")
		b.ReportMetric(float64(u.cpu-before[role].cpu)/float64(time.Second)/float64(b.N)*100, role+"-%cpu")
	}
}

// usage of a process by all its threads.
type usage struct {
	wakeUps int
	cpu     time.Duration
}

var voluntary = regexp.MustCompile(`\nvoluntary_ctxt_switches:\t(\d+)\n`)

func usageOf(t testing.TB, pid int) (u usage) {
	t.Helper()
	tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	must(t, err)
	for _, task := range tasks {
		status, err := os.ReadFile(filepath.Join(task, "status"))
		must(t, err)
		m := voluntary.FindSubmatch(status)
		if m == nil {
			t.Skip("this kernel does not count voluntary context switches")
		}
		n, err := strconv.Atoi(string(m[1]))
		must(t, err)
		stat, err := os.ReadFile(filepath.Join(task, "schedstat"))
		if err != nil {
			t.Skip("this kernel has no schedstat")
		}
		run, err := strconv.Atoi(string(bytes.Fields(stat)[0]))
		must(t, err)
		u.wakeUps, u.cpu = u.wakeUps+n, u.cpu+time.Duration(run)
	}
	return u
}
