package nixl

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl/nixltest"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// pid of the agent that serves; 0 while there is none.
func (r *Registration) pid() int {
	i := r.cur.Load()
	if i == nil {
		return 0
	}
	return i.agent.(*child).pid
}

func (p *Plane) fetchPID() int {
	p.fetch.mu.Lock()
	defer p.fetch.mu.Unlock()
	return p.fetch.cur.agent.(*child).pid
}

func gone(pid int) bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

// stop stops a process. The signal alone does not wait for its threads, each of which goes on for a moment.
func stop(t *testing.T, pid int) {
	t.Helper()
	must(t, unix.Kill(pid, unix.SIGSTOP))
	transfertest.Eventually(t, "all threads to be stopped", func() bool {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		must(t, err)
		return !slices.ContainsFunc(tasks, func(task string) bool {
			text, err := os.ReadFile(task)
			return err == nil && !bytes.Contains(text, []byte(") T "))
		})
	})
}

// planeLog is what a plane logs.
type planeLog struct {
	mu   sync.Mutex
	text []byte
	last int // pid of the last agent that UCX ended
}

func (l *planeLog) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text = append(l.text, b...)
	return len(b), nil
}

func (l *planeLog) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return string(l.text)
}

// logged are options for agents in processes of their own, and their plane's log.
func logged(t *testing.T) (Options, *planeLog) {
	t.Helper()
	o, l := processes(t), &planeLog{}
	o.Log = slog.New(slog.NewTextHandler(l, nil))
	return o, l
}

// aborted says whether UCX has ended an agent whose reader was killed or stopped. No other end of it passes.
func (l *planeLog) aborted(t *testing.T, pid int) bool {
	t.Helper()
	if pid == l.last || !gone(pid) {
		return pid == l.last
	}
	l.last = pid
	var said []byte
	transfertest.Eventually(t, "the end of an agent to be logged", func() (died bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		said, died = nixltest.AgentSaid(l.text, pid)
		return died
	})
	return nixltest.EndedByUCX(t, "the agent that serves", said)
}

func TestAFetchAgentThatDiesCostsOnlyTheReadsInFlight(t *testing.T) {
	for _, tls := range []string{"", "tcp"} {
		t.Run("UCX_TLS="+tls, func(t *testing.T) {
			if tls != "" {
				t.Setenv("UCX_TLS", tls)
			}
			testFetchAgentDies(t)
		})
	}
}

func testFetchAgentDies(t *testing.T) {
	o, log := logged(t)
	p := newPlane(t, o)
	const n = 64 << 20
	m, d := shared(t, n), shared(t, n)
	reg := register(t, p, m)
	register(t, p, d)
	c := add(t, p, reg.Metadata())
	clear(d.Bytes)
	must(t, pull(t, c, d.Bytes[:4096]))
	serve := reg.pid()
	for range 3 {
		pid := p.fetchPID()
		var reads []transfer.Read
		for range 4 {
			rd, err := c.Read(t.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: n}}, Local: [][]byte{d.Bytes}})
			must(t, err)
			reads = append(reads, rd)
		}
		must(t, unix.Kill(pid, unix.SIGKILL))
		failed := 0
		for _, rd := range reads {
			if err := wait(t, rd); err != nil {
				failed++
				wantErr(t, "a READ in flight", err, transfer.ErrPeerLost)
			}
		}
		if failed == 0 {
			t.Error("no READ was in flight: the test shows nothing")
		}
		clear(d.Bytes)
		// The next one starts on demand, maybe after a pause.
		transfertest.Eventually(t, "a READ by the next agent", func() bool {
			err := error(nil)
			if log.aborted(t, serve) { // the next one has other metadata
				now := reg.pid()
				if now == 0 || now == serve {
					return false
				}
				var next transfer.Peer
				if next, err = p.AddPeer(t.Context(), reg.Metadata()); err == nil {
					t.Cleanup(func() { must(t, next.Close()) })
					c, serve = next, now
				}
			}
			if err == nil {
				err = pull(t, c, d.Bytes)
			}
			if err != nil {
				wantErr(t, "a READ before the next agent is there", err, transfer.ErrPeerLost)
			}
			return err == nil
		})
		if !bytes.Equal(d.Bytes, m.Bytes) {
			t.Fatal("wrong bytes")
		}
		if !gone(pid) {
			t.Error("the former agent is still there")
		}
	}
	if reg.pid() != serve && !log.aborted(t, serve) {
		t.Error("the agent that served was replaced")
	}
}

func TestAServeAgentThatDiesIsStartedAgainUnderAnotherName(t *testing.T) {
	o, log := logged(t)
	p := newPlane(t, o)
	m := shared(t, 1<<20)
	notes := make(chan transfer.Notification, 1)
	r, err := p.Register(t.Context(), m, func(n transfer.Notification) { notes <- n })
	must(t, err)
	defer r.Close()
	reg := r.(*Registration)
	c := add(t, p, reg.Metadata())
	dst := make([]byte, 1<<20)
	notified := func(c transfer.Peer) {
		t.Helper()
		rd, err := c.Read(t.Context(), transfer.ReadRequest{
			Remote: []region.Span{{Length: 1 << 20}}, Local: [][]byte{dst}, Notification: []byte("session:key"),
		})
		must(t, err)
		must(t, wait(t, rd))
		select {
		case <-notes:
		case <-time.After(transfertest.Patience):
			t.Error("no notification")
		}
	}
	notified(c)
	before, _, over := reg.Agent()
	must(t, unix.Kill(reg.pid(), unix.SIGKILL))
	select {
	case <-over:
	case <-time.After(transfertest.Patience):
		t.Fatal("nobody is told that the agent is gone")
	}
	wantErr(t, "a READ from the dead agent", pull(t, c, dst), transfer.ErrPeerLost)
	transfertest.Eventually(t, "the next agent", func() bool {
		after, _, _ := reg.Agent()
		return after != nil && !bytes.Equal(after, before)
	})
	transfertest.Eventually(t, "the log to say so", func() bool {
		return strings.Count(log.String(), `level=INFO msg="nixl: the serve agent is up again`) == 1
	})
	clear(dst)
	notified(add(t, p, reg.Metadata()))
	if !bytes.Equal(dst, m.Bytes) {
		t.Error("wrong bytes")
	}
}

// V4: a READ on an agent that is known and dead ends a vLLM engine, so no ack may name one. The end of a process is seen by its socket and
// its pid long after the kernel has taken its memory away.
func TestAnAgentIsNotHandedOutFromWhenItsMemoryIsGone(t *testing.T) {
	p := newPlane(t, processes(t))
	reg := register(t, p, shared(t, 512<<20))
	before, base, over := reg.Agent()
	pid := reg.pid()
	must(t, unix.Kill(pid, unix.SIGKILL))
	// What a peer on this machine would do.
	var b [1]byte
	readable := func() bool {
		_, err := unix.ProcessVMReadv(pid, []unix.Iovec{{Base: &b[0], Len: 1}}, []unix.RemoteIovec{{Base: uintptr(base), Len: 1}}, 0)
		return err == nil
	}
	for end := time.Now().Add(transfertest.Patience); readable(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatal("it does not die")
		}
	}
	if after, _, _ := reg.Agent(); bytes.Equal(after, before) {
		t.Error("an agent whose memory is gone is handed out")
	}
	<-over
}

// The sure end of a quarantine, with an agent that is really stopped.
func TestClosingAPeerEndsReadsOfAStoppedProcess(t *testing.T) {
	t.Setenv("UCX_TLS", "tcp") // over shared memory the reader needs nobody's help
	o, log := logged(t)
	o.Drain = 100 * time.Millisecond
	p := newPlane(t, o)
	const n = 8 << 20
	m, d := shared(t, n), shared(t, n)
	reg := register(t, p, m)
	register(t, p, d)
	c := add(t, p, reg.Metadata())
	must(t, pull(t, c, d.Bytes))
	clear(d.Bytes)
	serve := reg.pid()
	stop(t, serve)
	rd, err := c.Read(t.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: n}}, Local: [][]byte{d.Bytes}})
	must(t, err)
	select {
	case <-rd.Done():
		t.Fatalf("a READ from a stopped process ended: %v", rd.Err())
	case <-time.After(200 * time.Millisecond):
	}
	must(t, c.Close())
	wantErr(t, "the READ", wait(t, rd), transfer.ErrPeerLost)
	mark := bytes.Repeat([]byte{0xa5}, n)
	copy(d.Bytes, mark)
	must(t, unix.Kill(serve, unix.SIGCONT))
	dst := make([]byte, n)
	transfertest.Eventually(t, "a READ", func() bool {
		log.aborted(t, serve) // then the next agent serves
		c, err := p.AddPeer(t.Context(), reg.Metadata())
		if err != nil {
			wantErr(t, "adding it", err, transfer.ErrPeerLost)
			return false
		}
		defer c.Close()
		return pull(t, c, dst) == nil
	})
	if !bytes.Equal(d.Bytes, mark) {
		t.Error("the destination was written after Done")
	}
	if !bytes.Equal(dst, m.Bytes) {
		t.Error("wrong bytes afterwards")
	}
}

func TestMemoryIsServedFromAReadOnlyMapping(t *testing.T) {
	p := newPlane(t, processes(t))
	reg := register(t, p, shared(t, 1<<20))
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", reg.pid()))
	must(t, err)
	defer f.Close()
	found := false
	for s := bufio.NewScanner(f); s.Scan(); {
		if fields := strings.Fields(s.Text()); strings.Contains(s.Text(), "memfd:pool") {
			found = true
			if fields[1] != "r--s" {
				t.Errorf("mapped %s", fields[1])
			}
		}
	}
	if !found {
		t.Error("not mapped")
	}
}

func TestAProgramThatIsNoAgentIsAnError(t *testing.T) {
	for _, command := range [][]string{{"/bin/false"}, {"/nowhere/at/all"}, {"/bin/sh", "-c", "exec 3>&-; sleep 60"}} {
		o := processes(t)
		o.Command = command
		o.StartTimeout = 2 * time.Second
		p := newPlane(t, o)
		if _, err := p.Register(t.Context(), shared(t, 4096), nil); err == nil {
			t.Errorf("%v: registered", command)
		}
		reg := &registrationMetadata{base: 4096, length: 4096}
		if _, err := p.AddPeer(t.Context(), reg.append(nil)); err == nil {
			t.Errorf("%v: added", command)
		}
	}
}

// What New saw can be gone when an agent starts.
func TestALibraryThatAnAgentProcessMissesIsSaidAsThat(t *testing.T) {
	o := processes(t)
	p := newPlane(t, o)
	p.o.Library = "/no/such/libnixl_capi.so"
	_, err := p.Register(t.Context(), shared(t, 4096), nil)
	wantErr(t, "Register", err, ErrMissing)
	_, err = p.fetch.get(t.Context())
	wantErr(t, "fetch", err, ErrMissing)
	if err != nil && !strings.Contains(err.Error(), "pip install nixl") {
		t.Errorf("no word of what to install: %v", err)
	}
}

func TestABackendThatIsNotThereIsSaidAtOnce(t *testing.T) {
	o := processes(t)
	o.Backends = []Backend{{Name: "NOSUCH"}}
	_, err := newPlane(t, o).Register(t.Context(), shared(t, 4096), nil)
	if err == nil || !strings.Contains(err.Error(), "NOSUCH") {
		t.Errorf("error %v", err)
	}
}

// UCX refuses a mode that it does not know, so that what it took and what it refused shows that parameters reach it.
func TestABackendsParametersReachIt(t *testing.T) {
	for mode, good := range map[string]bool{"none": true, "peer": true, "nosuch": false} {
		o := processes(t)
		o.Backends = []Backend{{Name: "UCX", Params: map[string]string{"ucx_error_handling_mode": mode}}}
		_, err := newPlane(t, o).Register(t.Context(), shared(t, 4096), nil)
		if (err == nil) != good {
			t.Errorf("error handling mode %s: %v", mode, err)
		}
	}
}

func TestRegisterWaitsForTheFetchAgentOfANodeThatWasKilled(t *testing.T) {
	o := processes(t)
	first := newPlane(t, o)
	m := shared(t, 1<<20)
	reg := register(t, first, m)
	add(t, first, reg.Metadata())
	o.Exclusive = true
	next := newPlane(t, o)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := next.Register(ctx, m, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("register beside a fetch agent that may write: %v", err)
	}
	must(t, unix.Kill(first.fetchPID(), unix.SIGKILL))
	register(t, next, m)
}

// nodeEnv makes this test binary a program with a plane, which prints the pids of its agents and waits.
const nodeEnv = "FERRY_NIXL_TEST_NODE"

func runNode() {
	var o Options
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	check(json.Unmarshal([]byte(os.Getenv(nodeEnv)), &o))
	p, err := New(o)
	check(err)
	fd, err := unix.MemfdCreate("node-pool", 0)
	check(err)
	f := os.NewFile(uintptr(fd), "node-pool")
	check(f.Truncate(4096))
	b, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	check(err)
	ctx := context.Background()
	reg, err := p.Register(ctx, transfer.Memory{Bytes: b, File: f, Path: "node-pool"}, nil)
	check(err)
	_, err = p.AddPeer(ctx, reg.Metadata())
	check(err)
	fmt.Println(reg.(*Registration).pid(), p.fetchPID())
	select {}
}

func TestAgentsEndWithTheProcessThatHasThePlane(t *testing.T) {
	o := processes(t)
	for _, s := range []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM} {
		text, err := json.Marshal(Options{Library: o.Library, Command: o.Command})
		must(t, err)
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), nodeEnv+"="+string(text))
		cmd.Stderr = os.Stderr
		out, err := cmd.StdoutPipe()
		must(t, err)
		must(t, cmd.Start())
		var serve, fetch int
		if _, err := fmt.Fscan(out, &serve, &fetch); err != nil {
			_ = cmd.Process.Kill()
			t.Fatal(err)
		}
		must(t, cmd.Process.Signal(s))
		_ = cmd.Wait()
		transfertest.Eventually(t, "the agents to be gone", func() bool { return gone(serve) && gone(fetch) })
	}
}
