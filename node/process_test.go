package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// roleEnv makes the test binary an engine in a process of its own; socketEnv says whose.
const (
	roleEnv   = "FERRY_TEST_ROLE"
	socketEnv = "FERRY_TEST_SOCKET"
)

func TestMain(m *testing.M) {
	if os.Getenv(roleEnv) == "node" {
		nodeProcess()
		return
	}
	if role := os.Getenv(roleEnv); role != "" {
		if err := engineProcess(role, os.Getenv(socketEnv)); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		return
	}
	// Without a venv or a name for it no NIXL is found: which planes a node has does not depend on where the tests run.
	for _, name := range []string{"VIRTUAL_ENV", nixl.LibraryEnv} {
		if err := os.Unsetenv(name); err != nil {
			panic(err)
		}
	}
	os.Exit(m.Run())
}

// engineProcess plays an engine: it says what it has done on stdout, and waits for its stdin where it is to be killed.
func engineProcess(role, socket string) error {
	ctx := context.Background()
	c, err := client.Dial(ctx, socket, client.Options{Name: role})
	if role == "denied" {
		fmt.Println(errors.Is(err, client.ErrDenied), err)
		return nil
	}
	if err != nil {
		return err
	}
	switch role {
	case "reserve": // and begin to write
		r, err := c.Reserve(ctx, "k", spec(4))
		if err != nil {
			return err
		}
		for _, b := range r.Buffers() {
			copy(b, bytes.Repeat([]byte{0xee}, len(b)/2))
		}
		fmt.Println("reserved")
	case "lose": // lose the connection, stay alive, and go on writing: closed with the reservation, as a buggy engine would
		nc, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		if err := reserveByHand(nc.(*net.UnixConn), "k", 4); err != nil {
			return err
		}
		_ = nc.Close()
		fmt.Println("lost")
	case "leave": // lose three connections with a reservation and a pin each, stay alive, and go on using them
		for i := range 3 {
			nc, err := net.Dial("unix", socket)
			if err != nil {
				return err
			}
			if err := askByHand(nc.(*net.UnixConn), reserveOp(fmt.Sprint("r", i), 1), api.Op{Kind: api.OpMap, Key: "k"}, api.Op{Kind: api.OpMap, Key: "k"}); err != nil {
				return err
			}
			_ = nc.Close()
		}
		fmt.Println("left")
	case "worker": // map, and say what is there
		if err := c.WaitReady(ctx, "k"); err != nil {
			return err
		}
		m, err := c.Map(ctx, "k")
		if err != nil {
			return err
		}
		h := xxh3.New()
		for _, b := range m.Buffers() {
			_, _ = h.Write(b)
		}
		fmt.Println(hex.EncodeToString(h.Sum(nil)))
	case "keeper": // map, say so, and say what is there for each line
		m, err := c.Map(ctx, "k")
		if err != nil {
			return err
		}
		fmt.Println("mapped")
		for in := bufio.NewScanner(os.Stdin); in.Scan(); {
			h := xxh3.New()
			for _, b := range m.Buffers() {
				_, _ = h.Write(b)
			}
			fmt.Println(hex.EncodeToString(h.Sum(nil)), m.Valid(), c.Err())
		}
	case "parent": // leave a child behind that has the socket
		nc, err := net.Dial("unix", socket)
		if err != nil {
			return err
		}
		if err := reserveByHand(nc.(*net.UnixConn), "k", 4); err != nil {
			return err
		}
		f, err := nc.(*net.UnixConn).File()
		if err != nil {
			return err
		}
		child := exec.Command("sleep", "60")
		child.ExtraFiles = []*os.File{f}
		if err := child.Start(); err != nil {
			return err
		}
		fmt.Println(child.Process.Pid)
	}
	_, _ = os.Stdin.Read(make([]byte, 1))
	return nil
}

// engineProc is such a process, seen from the test.
type engineProc struct {
	cmd *exec.Cmd
	out *bufio.Reader
}

func startEngine(t *testing.T, n *Node, role string, attr *syscall.SysProcAttr) *engineProc {
	t.Helper()
	exe := os.Args[0]
	if attr != nil { // another user may not reach where the test binary is
		exe = copyBinary(t)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), roleEnv+"="+role, socketEnv+"="+n.Ready().Socket)
	cmd.SysProcAttr = attr
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &engineProc{cmd, bufio.NewReader(out)}
}

func copyBinary(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("/tmp", "ferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "engine")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}

// says waits for a line.
func (p *engineProc) says(t *testing.T) string {
	t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil || strings.HasPrefix(line, "error") {
		t.Fatalf("engine process: %q, %v", line, err)
	}
	return strings.TrimSpace(line)
}

func (p *engineProc) kill(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = p.cmd.Wait()
}

func TestAKilledEnginesReservationGoesToTheNext(t *testing.T) {
	n := startNode(t, testConfig(t, 4)) // no room for a second extent
	c := dial(t, n)
	p := startEngine(t, n, "reserve", nil)
	p.says(t)
	if _, err := c.Reserve(testContext(t), "k", spec(4)); !errors.Is(err, ec.ErrPending) {
		t.Fatalf("while another fills: %v; want ErrPending", err)
	}
	waited := make(chan error, 1)
	go func() { waited <- c.WaitReady(testContext(t), "k") }()
	p.kill(t)
	if err := <-waited; !errors.Is(err, ec.ErrMissing) {
		t.Fatalf("who waited for it: %v; want ErrMissing", err)
	}
	var err error
	eventually(t, "the blocks of a dead process are free", func() bool {
		_, err = c.Put(testContext(t), "k", spec(4), payload(4, 7))
		return !errors.Is(err, ec.ErrFull)
	})
	if err != nil {
		t.Fatal(err)
	}
	checkBytes(t, c, "k", 4, 7)
}

func TestWhatALiveProcessMayStillWriteIsNotReused(t *testing.T) {
	n := startNode(t, testConfig(t, 4))
	c := dial(t, n)
	p := startEngine(t, n, "lose", nil)
	p.says(t)
	stats := func() ec.Stats {
		s, err := c.Stats(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	eventually(t, "the lost connection's blocks are in quarantine", func() bool { return stats().QuarantinedBlocks == 4 })
	if _, err := c.Reserve(testContext(t), "k", spec(4)); !errors.Is(err, ec.ErrFull) {
		t.Fatalf("its process lives: %v; want ErrFull", err)
	}
	p.kill(t)
	eventually(t, "they are free once it is dead", func() bool { return stats().FreeBlocks == 4 })
	put(t, c, "k", 4, 1)
}

func TestWhatALiveProcessMayStillReadIsNotReused(t *testing.T) {
	n := startNode(t, testConfig(t, 8))
	c := dial(t, n)
	put(t, c, "k", 4, 1)
	p := startEngine(t, n, "leave", nil)
	p.says(t)
	clients := n.pools[0].clients
	away := func() [3]int {
		engines, left, pinned := clients.away()
		return [3]int{engines, left, pinned}
	}
	eventually(t, "three clients are away, with a reservation each and the entry pinned", func() bool { return away() == [3]int{3, 3, 3} })
	if err := c.Remove(testContext(t), "k"); !errors.Is(err, ec.ErrPinned) {
		t.Errorf("its process lives: %v; want ErrPinned", err)
	}
	if _, err := c.Reserve(testContext(t), "new", spec(2)); !errors.Is(err, ec.ErrFull) {
		t.Errorf("4 blocks are read, 3 may be written: %v; want ErrFull", err)
	}
	checkBytes(t, c, "k", 4, 1)
	p.kill(t)
	eventually(t, "nothing is kept once it is dead", func() bool { return away() == [3]int{} })
	put(t, c, "new", 8, 2)
}

func TestAChildThatInheritedTheSocketDoesNotKeepADeadEngine(t *testing.T) {
	n := startNode(t, testConfig(t, 4))
	c := dial(t, n)
	p := startEngine(t, n, "parent", nil)
	var child int
	if _, err := fmt.Sscan(p.says(t), &child); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = syscall.Kill(child, syscall.SIGKILL) }()
	p.kill(t)
	eventually(t, "the reservation is given up", func() bool {
		_, err := c.Put(testContext(t), "k", spec(4), payload(4, 1))
		return err == nil
	})
}

// C18: of the workers of one engine only rank 0 pinned.
func TestFourWorkersMapWhatOneWrote(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	c := dial(t, n)
	r, err := c.Reserve(testContext(t), "k", spec(9))
	if err != nil {
		t.Fatal(err)
	}
	var workers []*engineProc
	for range 4 {
		workers = append(workers, startEngine(t, n, "worker", nil))
	}
	want := payload(9, 3)
	rest := want
	for _, b := range r.Buffers() {
		rest = rest[copy(b, rest):]
	}
	if err := r.Commit(testContext(t)); err != nil {
		t.Fatal(err)
	}
	h := xxh3.New()
	_, _ = h.Write(want)
	for _, w := range workers {
		if got := w.says(t); got != hex.EncodeToString(h.Sum(nil)) {
			t.Errorf("a worker sees %s", got)
		}
	}
	pins := func() int {
		i, err := c.Lookup(testContext(t), "k")
		if err != nil {
			t.Fatal(err)
		}
		return i[0].Pins
	}
	if got := pins(); got != 4 {
		t.Errorf("%d pins, want one a worker", got)
	}
	if err := c.Remove(testContext(t), "k"); !errors.Is(err, ec.ErrPinned) {
		t.Errorf("Remove of what workers use: %v; want ErrPinned", err)
	}
	for _, w := range workers {
		w.kill(t)
	}
	eventually(t, "the workers' death releases their pins", func() bool { return pins() == 0 })
	if err := c.Remove(testContext(t), "k"); err != nil {
		t.Error(err)
	}
}

func TestAnotherUsersProcessIsDenied(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to be somebody else")
	}
	cfg := testConfig(t, 4)
	dir, err := os.MkdirTemp("/tmp", "ferry-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg.Socket = filepath.Join(dir, "s")
	n := startNode(t, cfg)
	// Even where the file lets everybody in.
	if err := errors.Join(os.Chmod(dir, 0o755), os.Chmod(cfg.Socket, 0o666)); err != nil {
		t.Fatal(err)
	}
	p := startEngine(t, n, "denied", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	if got := p.says(t); !strings.HasPrefix(got, "true") {
		t.Errorf("%s; want ErrDenied", got)
	}
}
