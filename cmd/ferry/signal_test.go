package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// within polls with a deadline.
func within(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(tooLong); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("in vain: %s", what)
		}
	}
}

// running are the processes whose command line has s.
func running(s string) (pids []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && bytes.Contains(b, []byte(s)) {
			pids = append(pids, f)
		}
	}
	return pids
}

// shmDir is a directory for regions, so that what is left is this test's.
func shmDir(t *testing.T) (dir, env string) {
	dir, err := os.MkdirTemp("/dev/shm", "fs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir, "FERRY_SHM_DIR=" + dir
}

// shortDir is a directory for sockets, whose paths must be short.
func shortDir(t *testing.T) string {
	dir, err := os.MkdirTemp("", "fs")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func ferry(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	path, err := exec.LookPath("ferry") // testscript has put this binary there
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path, args...)
	cmd.Env = append(os.Environ(), env...)
	return cmd
}

// The demo is ended at several points of its life: nothing of it is left, neither by a Ctrl-C nor by SIGKILL, which the demo itself
// cannot notice.
func TestDemoThatIsEndedLeavesNothing(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGKILL} {
		for _, when := range []string{"directory", "region", "engines"} {
			t.Run(sig.String()+" "+when, func(t *testing.T) {
				tmp := shortDir(t)
				shm, env := shmDir(t)
				cmd := ferry(t, []string{"TMPDIR=" + tmp, env}, "demo", "--block-bytes", "4096", "--ec-cpu-bytes", "4MiB")
				var out bytes.Buffer
				cmd.Stdout, cmd.Stderr = &out, &out
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				regions := filepath.Join(shm, "*")
				left := func(glob string) bool { m, _ := filepath.Glob(glob); return len(m) > 0 }
				within(t, "it runs", func() bool {
					switch when {
					case "directory":
						return left(filepath.Join(tmp, "ferry-demo-*"))
					case "region":
						return left(regions)
					}
					return left(filepath.Join(tmp, "ferry-demo-*", "engine X.log"))
				})
				if err := cmd.Process.Signal(sig); err != nil {
					t.Fatal(err)
				}
				if err := cmd.Wait(); err == nil {
					t.Errorf("exit status 0 after %v:\n%s", sig, out.String())
				}
				within(t, "its processes are gone", func() bool { return len(running(tmp)) == 0 })
				if m, _ := filepath.Glob(regions); m != nil {
					t.Errorf("shared memory is left: %v", m)
				}
				if sig != syscall.SIGKILL && left(filepath.Join(tmp, "ferry-demo-*")) {
					t.Error("its directory is left")
				}
			})
		}
	}
}

// startFerry starts ferry and gives its first line, and its stderr from there on.
func startFerry(t *testing.T, args ...string) (cmd *exec.Cmd, ready string, stderr *bufio.Reader) {
	t.Helper()
	return startProgram(t, ferry(t, nil, args...))
}

func startProgram(t *testing.T, cmd *exec.Cmd) (_ *exec.Cmd, ready string, stderr *bufio.Reader) {
	t.Helper()
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	errs, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		cmd.Wait()
	})
	ready, err = bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		b, _ := io.ReadAll(errs)
		t.Fatalf("%v\n%s", err, b)
	}
	return cmd, ready, bufio.NewReader(errs)
}

// nodeArgs are those of a small node on socket.
func nodeArgs(socket string) []string {
	return []string{"node", "--socket", socket, "--side-channel", "127.0.0.1:0", "--admin", "off", "--ec-cpu-bytes", "64KiB",
		"--model", "m", "--dtype", "torch.bfloat16", "--block-bytes", "16", "--vllm-version", "1", "--log-level", "error"}
}

func TestSecondSignalEndsAtOnce(t *testing.T) {
	dir := shortDir(t)
	sock := filepath.Join(dir, "n")
	startFerry(t, nodeArgs(sock)...)
	// A clean end waits for the request, whose body never comes. "100 Continue" says that the engine is waiting for it.
	cmd, ready, stderr := startFerry(t, "engine", "--socket", sock)
	conn, err := net.Dial("tcp", strings.TrimPrefix(strings.Split(ready, `"`)[7], "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: 10\r\nExpect: 100-continue\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "100 Continue") {
		t.Fatal(line, err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for {
		line, err := stderr.ReadString('\n')
		if err != nil {
			t.Fatal("it ended after one signal, or did not say that it ends")
		}
		if strings.Contains(line, "msg=ending") {
			break
		}
	}
	gone := make(chan error, 1)
	go func() {
		io.Copy(io.Discard, stderr)
		gone <- cmd.Wait()
	}()
	// Signals that follow the first at once count as one with it, so more than one may be needed.
	within(t, "it ends", func() bool {
		select {
		case <-gone:
			return true
		default:
			cmd.Process.Signal(syscall.SIGTERM)
			return false
		}
	})
	if got, want := cmd.ProcessState.ExitCode(), 128+int(syscall.SIGTERM); got != want {
		t.Errorf("exit status %d, want %d", got, want)
	}
}

func TestSIGHUPEndsANodeAndAnEngineCleanlyUnlessItIsIgnored(t *testing.T) {
	// Children inherit it if it is ignored here (nohup make test), and not if it is handled.
	hups := make(chan os.Signal, 1)
	signal.Notify(hups, syscall.SIGHUP)
	defer signal.Stop(hups)
	dir := shortDir(t)
	sock := filepath.Join(dir, "n")
	for _, ignored := range []bool{false, true} {
		start := func(args ...string) *exec.Cmd {
			if ignored {
				args = append([]string{"-c", `trap "" HUP; exec ferry "$@"`, "sh"}, args...)
				cmd, _, _ := startProgram(t, exec.Command("sh", args...))
				return cmd
			}
			cmd, _, _ := startFerry(t, args...)
			return cmd
		}
		node := start(nodeArgs(sock)...)
		engine := start("engine", "--socket", sock, "--log-level", "error")
		for _, cmd := range []*exec.Cmd{engine, node} {
			if err := cmd.Process.Signal(syscall.SIGHUP); err != nil {
				t.Fatal(err)
			}
			if ignored {
				if !ignores(t, cmd.Process.Pid, syscall.SIGHUP) {
					t.Errorf("%v does not ignore SIGHUP any more", cmd.Args)
				}
				if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
					t.Fatal(err)
				}
			}
			late := time.AfterFunc(tooLong, func() { _ = cmd.Process.Kill() })
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v: %v", cmd.Args, err)
			}
			late.Stop()
		}
		if _, err := os.Stat(sock); err == nil {
			t.Error("the node left its socket")
		}
	}
}

// ignores says whether a process ignores a signal.
func ignores(t *testing.T, pid int, sig syscall.Signal) bool {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(status), "SigIgn:")
	text, _, _ = strings.Cut(text, "\n")
	mask, err := strconv.ParseUint(strings.TrimSpace(text), 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return mask&(1<<(sig-1)) != 0
}

func TestWhatAnEnginesConnectionSaysIsInItsLog(t *testing.T) {
	sock := filepath.Join(shortDir(t), "n")
	node, _, _ := startFerry(t, nodeArgs(sock)...)
	_, _, stderr := startFerry(t, "engine", "--socket", sock, "--log-format", "json")
	if err := node.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for {
		line, err := stderr.ReadString('\n')
		if err != nil {
			t.Fatal("it did not say that the connection is lost:", err)
		}
		if !strings.HasPrefix(line, "{") {
			t.Fatalf("a line that is not JSON: %s", line)
		}
		if strings.Contains(line, "connection to the node is lost: connecting again") {
			return
		}
	}
}

// A reader that has gone must not be the death of a node before it has removed its region.
func TestNodeWhoseReaderHasGoneEndsCleanly(t *testing.T) {
	dir := shortDir(t)
	shm, env := shmDir(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	cmd := ferry(t, []string{env}, "node", "--socket", filepath.Join(dir, "n"), "--side-channel", "127.0.0.1:0", "--admin", "off", "--ec-cpu-bytes", "64KiB",
		"--model", "m", "--dtype", "torch.bfloat16", "--block-bytes", "16", "--vllm-version", "1")
	cmd.Stdout = w
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Run(); cmd.ProcessState.ExitCode() != exitFailed || !strings.Contains(stderr.String(), "broken pipe") {
		t.Errorf("%v\n%s", err, stderr.String())
	}
	w.Close()
	if m, _ := filepath.Glob(filepath.Join(shm, "*")); m != nil {
		t.Errorf("left: %v", m)
	}
}
