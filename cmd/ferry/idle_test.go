package main

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// V17: an engine with the peers' connector kept stepping so that its producer answered, and burned 21 to 86% of a core while it had
// nothing to do. Two nodes that have spoken with one another, with an engine connected to each, must stay far below that.
func TestIdleNodesUseNextToNoProcessor(t *testing.T) {
	dir := shortDir(t)
	_, env := shmDir(t)
	run := func(args ...string) (*exec.Cmd, *bufio.Reader) {
		t.Helper()
		cmd := ferry(t, []string{env}, args...)
		stdout, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			_ = cmd.Wait()
		})
		out := bufio.NewReader(stdout)
		if line, err := out.ReadString('\n'); err != nil {
			t.Fatalf("%v: %q, %v", args, line, err)
		}
		return cmd, out
	}
	var nodes []*exec.Cmd
	for _, name := range []string{"a", "b"} {
		sock := filepath.Join(dir, name)
		cmd, _ := run("node", "--socket", sock, "--side-channel", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--ec-cpu-bytes", "64KiB",
			"--model", "m", "--dtype", "torch.bfloat16", "--block-bytes", "16", "--vllm-version", "1", "--planes", "tcp")
		nodes = append(nodes, cmd)
		run("engine", "--socket", sock, "--listen", "127.0.0.1:0")
	}
	file := filepath.Join(dir, "in")
	if err := os.WriteFile(file, make([]byte, 16), 0o600); err != nil {
		t.Fatal(err)
	}
	do := func(args ...string) []byte {
		t.Helper()
		out, err := ferry(t, []string{env}, args...).Output()
		if err != nil {
			t.Fatalf("%v: %v", args, err)
		}
		return out
	}
	do("ec", "put", "--socket", filepath.Join(dir, "a"), "--key", "k", "--shape", "1,8", file)
	params := filepath.Join(dir, "params")
	if err := os.WriteFile(params, do("ec", "announce", "--socket", filepath.Join(dir, "a"), "k"), 0o600); err != nil {
		t.Fatal(err)
	}
	do("ec", "fetch", "--socket", filepath.Join(dir, "b"), "--params", params)

	const window, most = 4 * time.Second, 5.0 // percent of a core, under the race detector too
	before := []time.Duration{used(t, nodes[0]), used(t, nodes[1])}
	start := time.Now()
	<-time.After(window)
	elapsed := time.Since(start)
	for i, n := range nodes {
		if share := 100 * float64(used(t, n)-before[i]) / float64(elapsed); share > most {
			t.Errorf("node %c used %.1f%% of a core while idle, want at most %v%%", 'a'+i, share, most)
		} else {
			t.Logf("node %c: %.2f%% of a core", 'a'+i, share)
		}
	}
}

// used is the processor time that a process has had. /proc counts it in hundredths of a second.
func used(t *testing.T, cmd *exec.Cmd) time.Duration {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "stat"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), ") ") // the name may hold anything
	f := strings.Fields(rest)
	var ticks time.Duration
	for _, s := range f[11:13] {
		n, err := strconv.Atoi(s)
		if err != nil {
			t.Fatal(err)
		}
		ticks += time.Duration(n)
	}
	return ticks * 10 * time.Millisecond
}
