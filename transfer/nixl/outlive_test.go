package nixl

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// ownerEnv makes this test binary the owner of a region that is served, which prints what it has and waits.
const ownerEnv = "FERRY_NIXL_TEST_OWNER"

type ownerOptions struct {
	Library string
	Command []string
	Dir     string // of its region
	Keep    time.Duration
	Leave   leaving
}

// leaving is how an owner ends whose stdin does: as one that is killed, or cleanly.
type leaving struct {
	Agents bool          // leave them
	Kept   bool          // the file keeps its name
	Serve  time.Duration // how long they may go on without it
}

// owner is what such a process prints.
type owner struct {
	PID      int
	Agents   []int
	Metadata string // hex
	cmd      *exec.Cmd
	stdin    io.Closer
}

func regionOptions(dir string, keep time.Duration) region.Options {
	return region.Options{
		Dir: dir, Keep: keep, Identity: region.Identity{Instance: "node", Group: "0"}, Geometry: region.Geometry{BlockBytes: 4096, Blocks: 64, Slots: 8},
	}
}

// take gives the region and its memory.
func take(ctx context.Context, o region.Options) (*region.Region, transfer.Memory, error) {
	r, err := region.Take(ctx, o)
	if err != nil {
		return nil, transfer.Memory{}, err
	}
	f, err := r.Reopen(false)
	return r, transfer.Memory{Bytes: r.Pool(), File: f, Path: r.Path(), FileOffset: r.PoolOffset()}, err
}

func fill(b []byte) {
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
}

func runOwner() {
	var o ownerOptions
	check := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	check(json.Unmarshal([]byte(os.Getenv(ownerEnv)), &o))
	served, m, err := take(context.Background(), regionOptions(o.Dir, o.Keep))
	check(err)
	fill(m.Bytes)
	p, err := New(Options{Library: o.Library, Command: o.Command, Outlive: true})
	check(err)
	reg, err := p.Register(context.Background(), m, nil)
	check(err)
	r := reg.(*Registration)
	md := r.Metadata()
	pids := []int{r.pid()}
	_, err = r.Rotate(context.Background()) // two incarnations
	check(err)
	line, err := json.Marshal(owner{PID: os.Getpid(), Agents: append(pids, r.pid()), Metadata: hex.EncodeToString(md)})
	check(err)
	fmt.Println(string(line))
	_, _ = io.Copy(io.Discard, os.Stdin) // until it is told to end
	if !r.Leave() {
		check(errors.New("no agent can be left"))
	}
	if !o.Leave.Agents {
		r.leaves.Store(false)
	}
	check(r.Close())
	check(p.Close())
	served.ServeFor(o.Leave.Serve)
	check(served.Close(!o.Leave.Kept))
	os.Exit(0)
}

func startOwner(t *testing.T, o region.Options) *owner {
	t.Helper()
	return startOwnerThat(t, o, leaving{})
}

// end ends it cleanly.
func (o *owner) end(t *testing.T) {
	t.Helper()
	must(t, o.stdin.Close())
	must(t, o.cmd.Wait())
}

func startOwnerThat(t *testing.T, o region.Options, leave leaving) *owner {
	t.Helper()
	p := processes(t)
	text, err := json.Marshal(ownerOptions{p.Library, p.Command, o.Dir, o.Keep, leave})
	must(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	in, err := cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	own := &owner{cmd: cmd, stdin: in}
	err = json.NewDecoder(out).Decode(own)
	t.Cleanup(func() {
		own.kill()
		for _, pid := range own.Agents {
			transfertest.Eventually(t, "the agents to end", func() bool { return gone(pid) })
		}
	})
	must(t, err)
	return own
}

func (o *owner) kill() {
	_ = o.cmd.Process.Kill()
	_ = o.cmd.Wait()
}

func (o *owner) metadata(t *testing.T) []byte {
	b, err := hex.DecodeString(o.Metadata)
	must(t, err)
	return b
}

func shmDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "ferry-test-")
	if err != nil {
		t.Skip("no tmpfs:", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func outlivingOptions(t *testing.T) Options {
	o := processes(t)
	o.Outlive = true
	return o
}

func TestAServeAgentOutlivesItsNodeAndIsTakenOverByTheNext(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	first := startOwner(t, o)
	reader := newPlane(t, processes(t))
	warm := add(t, reader, first.metadata(t))
	want := make([]byte, 64*4096)
	fill(want)
	read := func(when string) {
		t.Helper()
		got := make([]byte, len(want))
		must(t, pull(t, warm, got))
		if !bytes.Equal(got, want) {
			t.Fatalf("wrong bytes %s", when)
		}
	}
	read("at first")
	first.kill()
	read("without a node")

	r, m, err := take(t.Context(), o)
	must(t, err)
	defer func() { must(t, r.Close(true)) }()
	defer m.File.Close()
	if !r.Adopted() {
		t.Fatal("not adopted")
	}
	p := newPlane(t, outlivingOptions(t))
	reg := register(t, p, m)
	read("with the next node")
	formers := reg.Formers()
	if len(formers) != 2 {
		t.Fatalf("%d agents were taken over, want 2", len(formers))
	}
	if bytes.Equal(reg.Metadata(), first.metadata(t)) {
		t.Error("the former agent is named anew")
	}
	for _, f := range formers {
		select {
		case <-f.Gone:
			t.Fatal("over before its end")
		default:
		}
		f.End()
		<-f.Gone
	}
	for _, pid := range first.Agents {
		transfertest.Eventually(t, "the agents to end", func() bool { return gone(pid) })
	}
	wantErr(t, "a READ by the former agent", pull(t, warm, make([]byte, 4096)), transfer.ErrPeerLost)
	must(t, pull(t, add(t, reader, reg.Metadata()), make([]byte, 4096)))
}

func TestAServeAgentEndsWhenItsRegionWaitsNoMore(t *testing.T) {
	for _, c := range []struct {
		name string
		keep time.Duration
		do   func(t *testing.T, o region.Options)
	}{
		{"its time is over", 500 * time.Millisecond, func(*testing.T, region.Options) {}},
		{"its file is swept", time.Hour, func(t *testing.T, o region.Options) {
			_, err := region.Sweep(region.SweepOptions{Dir: o.Dir, Force: true})
			must(t, err)
		}},
		{"its file is replaced", time.Hour, func(t *testing.T, o region.Options) {
			o.Geometry.Blocks++
			r, err := region.Take(t.Context(), o)
			must(t, err)
			must(t, r.Close(true))
		}},
		{"the next owner has no agents", time.Hour, func(t *testing.T, o region.Options) {
			r, m, err := take(t.Context(), o)
			must(t, err)
			defer m.File.Close()
			heirs, err := TakeOver(t.Context(), m.File, slog.Default())
			must(t, err)
			must(t, heirs.Close())
			for i := range region.Servers {
				if free, err := serverGone(m.File, i); !free || err != nil {
					t.Errorf("server %d still serves (%v)", i, err)
				}
			}
			must(t, r.Close(true))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := regionOptions(shmDir(t), c.keep)
			own := startOwner(t, o)
			own.kill()
			c.do(t, o)
			for _, pid := range own.Agents {
				transfertest.Eventually(t, "the agents to end", func() bool { return gone(pid) })
			}
		})
	}
}

func TestAnAgentThatDoesNotAnswerTheNextNodeIsEnded(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	own := startOwner(t, o)
	must(t, unix.Kill(own.Agents[0], unix.SIGSTOP))
	own.kill()
	r, m, err := take(t.Context(), o)
	must(t, err)
	defer func() { must(t, r.Close(true)) }()
	defer m.File.Close()
	reg := register(t, newPlane(t, outlivingOptions(t)), m)
	if !gone(own.Agents[0]) {
		transfertest.Eventually(t, "the stopped agent to end", func() bool { return gone(own.Agents[0]) })
	}
	if n := len(reg.Formers()); n != 1 {
		t.Errorf("%d agents taken over, want the one that answers", n)
	}
}

// A node that dies again leaves the agents of the one before it too.
func TestAgentsOutliveTwoNodes(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	first := startOwner(t, o)
	first.kill()
	second := startOwner(t, o)
	second.kill()
	r, m, err := take(t.Context(), o)
	must(t, err)
	defer func() { must(t, r.Close(true)) }()
	defer m.File.Close()
	reg := register(t, newPlane(t, outlivingOptions(t)), m)
	if len(reg.formers) != 4 {
		t.Errorf("%d agents taken over, want 2 of each", len(reg.formers))
	}
	reader := newPlane(t, processes(t))
	must(t, pull(t, add(t, reader, first.metadata(t)), make([]byte, 4096)))
	must(t, pull(t, add(t, reader, second.metadata(t)), make([]byte, 4096)))
	must(t, reg.Close())
	for _, pid := range append(first.Agents, second.Agents...) {
		transfertest.Eventually(t, "the agents to end", func() bool { return gone(pid) })
	}
}

// A start that fails gives the region up again, and warm peers must not notice.
func TestAgentsThatWereTakenOverCanBeLeftToTheNextNode(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	first := startOwner(t, o)
	first.kill()
	warm := add(t, newPlane(t, processes(t)), first.metadata(t))
	for try := range 2 {
		r, m, err := take(t.Context(), o)
		must(t, err)
		p := newPlane(t, outlivingOptions(t))
		p.LeaveFormers(true)
		reg := register(t, p, m)
		if len(reg.formers) != 2 {
			t.Errorf("try %d: %d agents taken over, want 2", try, len(reg.formers))
		}
		over := reg.formers[0].isOver
		own := reg.pid()
		must(t, reg.Close())
		must(t, reg.Close())
		must(t, pull(t, warm, make([]byte, 4096)))
		select {
		case <-over:
			t.Error("said to be over")
		default:
		}
		if !gone(own) {
			t.Error("the agent of the start that failed lives on")
		}
		must(t, HandBack(t.Context(), m.File))
		must(t, pull(t, warm, make([]byte, 4096)))
		must(t, m.File.Close())
		must(t, r.Close(false))
	}
	r, m, err := take(t.Context(), o)
	must(t, err)
	defer func() { must(t, r.Close(true)) }()
	defer m.File.Close()
	must(t, register(t, newPlane(t, outlivingOptions(t)), m).Close())
	for _, pid := range first.Agents {
		transfertest.Eventually(t, "the agents to end", func() bool { return gone(pid) })
	}
}

// An agent bounds how long its region may have another owner than its own: an owner that gave the region up must not count.
func TestAnAgentThatIsHandedBackBelongsToTheOwnerOfThen(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	r, m, err := take(t.Context(), o)
	must(t, err)
	served, err := r.Reopen(false)
	must(t, err)
	defer served.Close()
	agent, err := outlive(served, r.Epoch())
	must(t, err)
	defer agent.listener.Close()
	must(t, m.File.Close())
	must(t, r.Close(false))
	r, m, err = take(t.Context(), o)
	must(t, err)
	defer func() { must(t, r.Close(true)) }()
	defer m.File.Close()
	if !r.Adopted() || r.Epoch() == agent.epoch {
		t.Fatalf("adopted %v, epoch %d, was %d", r.Adopted(), r.Epoch(), agent.epoch)
	}
	handed := make(chan error, 1)
	go func() { handed <- HandBack(t.Context(), m.File) }()
	w := agent.claimed(<-agent.claims)
	must(t, <-handed)
	if w == nil || agent.epoch != r.Epoch() {
		t.Fatalf("epoch %d, want %d", agent.epoch, r.Epoch())
	}
	defer w.conn.Close()
	if f, err := w.next(); !errors.Is(err, io.EOF) {
		t.Errorf("%+v, %v: not left alone again", f, err)
	}
}

func TestAnAgentIsTakenOverWithItsOwnRegionOnly(t *testing.T) {
	o := regionOptions(shmDir(t), time.Hour)
	own := startOwner(t, o)
	own.kill()
	file, err := o.Identity.FileName()
	must(t, err)
	f, err := os.Open(filepath.Join(o.Dir, file))
	must(t, err)
	defer f.Close()
	name, err := socketName(f, 0)
	must(t, err)
	other, err := os.Open(os.DevNull)
	must(t, err)
	defer other.Close()
	for _, file := range []*os.File{other, nil} {
		c, err := net.DialUnix("unix", nil, name)
		must(t, err)
		if err := (&former{wire: wireOf(c), file: file}).claim(t.Context()); err == nil {
			t.Errorf("taken over with the file %v", file)
		}
		_ = c.Close()
	}
	must(t, pull(t, add(t, newPlane(t, processes(t)), own.metadata(t)), make([]byte, 4096)))
	all, err := takeOver(t.Context(), f, slog.Default(), func() { t.Error("one died") })
	must(t, err)
	if len(all) != 2 {
		t.Errorf("%d agents taken over afterwards, want 2", len(all))
	}
	for _, a := range all {
		a.end()
	}
}
