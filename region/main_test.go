package region

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// Tests that need a second process start this binary again with childEnv set to the name of one of children. A child speaks
// lines on stdin and stdout.
const childEnv = "FERRY_REGION_TEST_CHILD"

var children = map[string]func(args []string){
	"hold":    childHold,
	"create":  childCreate,
	"parent":  childParent,
	"race":    childRace,
	"entries": childEntries,
	"attach":  childAttach,
	"rlimit":  childRlimit,
	"keep":    childKeep,
	"write":   childWrite,
	"sweep":   childSweep,
}

func TestMain(m *testing.M) {
	if name := os.Getenv(childEnv); name != "" {
		children[name](os.Args[1:])
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// child is a running helper process.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	in  *os.File
	out *bufio.Reader
}

func startChild(t *testing.T, name string, files []*os.File, args ...string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = files
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	inR, inW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdin, cmd.Stdout = inR, outW
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	inR.Close()
	outW.Close()
	c := &child{t, cmd, inW, bufio.NewReader(outR)}
	t.Cleanup(func() {
		c.kill()
		inW.Close()
		outR.Close()
	})
	return c
}

// kill sends SIGKILL and waits. It is safe to call twice.
func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

func (c *child) say(line string) {
	c.t.Helper()
	if _, err := fmt.Fprintln(c.in, line); err != nil {
		c.t.Fatal(err)
	}
}

func (c *child) hear() string {
	c.t.Helper()
	line, err := c.out.ReadString('\n')
	if err != nil {
		c.t.Fatalf("child said %q, then: %v", line, err)
	}
	return strings.TrimSuffix(line, "\n")
}

// must is for children, which have no t, and for what only a broken machine refuses.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

const groupA = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func smallOptions(dir string) Options {
	return Options{
		Dir:      dir,
		Identity: Identity{Instance: "node-1", Group: groupA},
		Geometry: Geometry{BlockBytes: 4096, Blocks: 16, Slots: 8},
	}
}

func mustCreate(t *testing.T, o Options) *Region {
	t.Helper()
	r, err := Create(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(true); err != nil {
			t.Error(err)
		}
	})
	return r
}

// wantFiles checks what a directory holds.
func wantFiles(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range entries {
		got = append(got, e.Name())
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Fatalf("%s holds %q, want %q", dir, got, want)
	}
}
