package shm

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

// Tests that need a second process start this binary again with childEnv set to the name of one of children.
const childEnv = "FERRY_SHM_TEST_CHILD"

var children = map[string]func(args []string){}

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		children[name](os.Args[1:])
		os.Exit(0)
	}
	code := m.Run()
	endPeer()
	os.Exit(code)
}

// patience is for what must happen, on a busy machine.
const patience = 30 * time.Second

// child is a running helper process that speaks lines.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	out *bufio.Reader
}

func startChild(t *testing.T, name string, args ...string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	c := &child{t, cmd, bufio.NewReader(out)}
	t.Cleanup(c.kill)
	return c
}

func (c *child) hear() string {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Fatalf("the child ended: %v", err)
	}
	return strings.TrimSpace(line)
}

func (c *child) kill() {
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		_ = c.cmd.Wait()
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// shmDir is a directory of the test's own in shared memory, empty again at the end.
func shmDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "ferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func open(t testing.TB, o Options) *Connector {
	t.Helper()
	c, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(within(t, time.Millisecond)); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return c
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), d)
	t.Cleanup(cancel)
	return ctx
}

func mustPut(t testing.TB, c *Connector, key string, root tensor.Node) *stage.Published {
	t.Helper()
	p, err := c.Put(within(t, patience), key, root, stage.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func mustGet(t testing.TB, c *Connector, r stage.Request) *stage.Got {
	t.Helper()
	g, err := c.Get(within(t, patience), r)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func wantOutcome(t testing.TB, p *stage.Published, want stage.Outcome) {
	t.Helper()
	select {
	case <-p.Released():
	case <-time.After(patience):
		t.Fatalf("%s was not released", p.Key)
	}
	if p.Outcome() != want {
		t.Errorf("%s: outcome %d, want %d", p.Key, p.Outcome(), want)
	}
}

// files are what is in a directory, but for records.
func files(t testing.TB, dir string) []string {
	t.Helper()
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, n := range names {
		if !recordNames.MatchString(n.Name()) {
			out = append(out, n.Name())
		}
	}
	return out
}

// wantFiles wants these files and no others, soon: a lock file goes a moment after its segment.
func wantFiles(t testing.TB, dir string, want ...string) {
	t.Helper()
	slices.Sort(want)
	end := time.Now().Add(2 * time.Second)
	got := files(t, dir)
	for ; !slices.Equal(got, want) && time.Now().Before(end); got = files(t, dir) {
		time.Sleep(time.Millisecond)
	}
	if !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
}

// eventually polls for what another process or goroutine does.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// value is a payload of n elements that says which it is.
func value(id string, n int) tensor.Node {
	v := make([]uint8, n)
	for i := range v {
		v[i] = uint8(i*7 + len(id) + int(id[len(id)-1]))
	}
	t := must(tensor.Of(v, int64(n)))
	return tensor.Map{tensor.Field("id", tensor.String(id)), tensor.Field("t", t)}
}

func lockPath(dir, key string) string { return filepath.Join(dir, lockName(key)) }

func say(format string, args ...any) { fmt.Printf(format+"\n", args...) }
