package main

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fullPipe is a pipe that takes no byte any more, and that nobody reads.
func fullPipe(t *testing.T) (r, w *os.File) {
	t.Helper()
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	r, w = os.NewFile(uintptr(fds[0]), "r"), os.NewFile(uintptr(fds[1]), "w")
	t.Cleanup(func() {
		r.Close()
		w.Close()
	})
	if err := unix.SetNonblock(fds[1], true); err != nil {
		t.Fatal(err)
	}
	for _, some := range []int{4096, 1} {
		for err := error(nil); err != unix.EAGAIN; {
			if _, err = unix.Write(fds[1], make([]byte, some)); err != nil && err != unix.EAGAIN && err != unix.EINTR {
				t.Fatal(err)
			}
		}
	}
	if err := unix.SetNonblock(fds[1], false); err != nil { // as a process finds its stderr
		t.Fatal(err)
	}
	return r, w
}

func firstLine(r io.Reader) (string, error) { return bufio.NewReader(r).ReadString('\n') }

// A log shipper hangs, or a tee is stopped: the node logged to stderr from the goroutines that answer engines and peers, and before it
// acted on a signal.
func TestANodeWhoseStderrIsNotReadServesAndEnds(t *testing.T) {
	dir := shortDir(t)
	shm, env := shmDir(t)
	_, stderr := fullPipe(t)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	node := ferry(t, []string{env}, append(nodeArgs(a), "--log-level", "debug", "--planes", "tcp")...)
	ready, stdout, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer ready.Close()
	node.Stdout, node.Stderr = stdout, stderr
	if err := node.Start(); err != nil {
		t.Fatal(err)
	}
	stdout.Close()
	late := time.AfterFunc(tooLong, func() { _ = node.Process.Kill() })
	defer late.Stop()
	if line, err := firstLine(ready); err != nil || !strings.Contains(line, `"ready"`) {
		_ = node.Process.Kill()
		_ = node.Wait()
		t.Fatal(line, err)
	}
	startProgram(t, ferry(t, []string{env}, append(nodeArgs(b), "--planes", "tcp")...))

	do := func(args ...string) []byte {
		t.Helper()
		cmd := ferry(t, []string{env}, args...)
		out, err := cmd.Output()
		if err != nil {
			_ = node.Process.Kill()
			t.Errorf("%v: %v", args, err)
		}
		return out
	}
	file, params := filepath.Join(dir, "in"), filepath.Join(dir, "params")
	if err := os.WriteFile(file, make([]byte, 16), 0o600); err != nil {
		t.Fatal(err)
	}
	do("ec", "put", "--socket", a, "--key", "k", "--shape", "1,8", file)
	if err := os.WriteFile(params, do("ec", "announce", "--socket", a, "k"), 0o600); err != nil {
		t.Fatal(err)
	}
	do("ec", "fetch", "--socket", b, "--params", params)

	if err := node.Process.Signal(syscall.SIGTERM); err != nil {
		t.Error(err)
	}
	if err := node.Wait(); err != nil {
		t.Errorf("it did not end cleanly: %v", err)
	}
	if m, _ := filepath.Glob(filepath.Join(shm, "*.region")); len(m) != 1 {
		t.Errorf("regions %v, want that of the other node", m)
	}
	if _, err := os.Stat(a); err == nil {
		t.Error("it left its socket")
	}
}

// What a command has to say at its end is read later than it is said.
func TestWhatACommandSaysAtItsEndIsNotLost(t *testing.T) {
	r, w := fullPipe(t)
	cmd := exec.Command("sh", "-c", `ferry ec ls --socket /nonexistent/n; echo $?`)
	cmd.Stderr = w
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	text := make(chan string)
	go func() {
		var all strings.Builder
		buf := make([]byte, 1<<16)
		for {
			n, err := r.Read(buf)
			all.Write(buf[:n])
			if err != nil {
				text <- strings.TrimLeft(all.String(), "\x00")
				return
			}
		}
	}()
	status, _ := firstLine(stdout)
	if got := <-text; strings.TrimSpace(status) != "1" || !strings.HasPrefix(got, "ferry ec ls: ") || !strings.Contains(got, "/nonexistent/n") {
		t.Errorf("exit status %s, %q", status, got)
	}
	_ = cmd.Wait()
}
