package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/tensorferry/tensorferry/node"
)

func TestDoctorShowsTheEnvironmentInForce(t *testing.T) {
	for _, c := range []struct{ env, verdict, says string }{
		{"PATH=/bin", good, "no VLLM_EC_, FERRY_ or UCX_ variable"},
		{"VLLM_EC_SIDE_CHANNEL_HOST=10.0.0.1", good, "VLLM_EC_SIDE_CHANNEL_HOST=10.0.0.1"},
		{"FERRY_SIDE_CHANNEL=127.0.0.1:1", good, "FERRY_SIDE_CHANNEL=127.0.0.1:1"},
		{"FERRY_SIDECHANNEL=127.0.0.1:1", warn, "does nothing"},
		{"UCX_NET_DEVICES=mlx5_0:1", good, "UCX_NET_DEVICES=mlx5_0:1"},
		{"UCX_TLS=tcp", warn, "kept from RDMA"},
		{"UCX_TLS=rc,sm", good, "UCX_TLS=rc,sm"},
	} {
		f := checkEnv([]string{c.env})
		if len(f) != 1 || f[0].Verdict != c.verdict || !strings.Contains(f[0].Detail+f[0].Fix, c.says) {
			t.Errorf("%s: %+v", c.env, f)
		}
	}
}

// What the kernel of a peer answers is not taken for the peer.
func TestDoctorTellsAPeerThatIsStoppedFromOneThatIsNotThere(t *testing.T) {
	dir := shortDir(t)
	_, env := shmDir(t)
	args := nodeArgs(filepath.Join(dir, "n"))
	cmd, ready, _ := startProgram(t, ferry(t, []string{env}, args...))
	var r node.Ready
	if err := json.Unmarshal([]byte(ready), &r); err != nil {
		t.Fatal(err)
	}
	doctor := func(connect string) string {
		t.Helper()
		peer := net.JoinHostPort(r.PeerHost, strconv.Itoa(r.PeerPort))
		d := ferry(t, []string{env}, append([]string{"doctor", "--peer", peer, "--timeout", "1s", "--planes", "tcp", "--timeouts-connect", connect}, args[3:]...)...)
		out, err := d.Output()
		if d.ProcessState.ExitCode() != exitFailed {
			t.Fatalf("%v\n%s", err, out)
		}
		_, line, _ := strings.Cut(string(out), "control path")
		line, _, _ = strings.Cut(line, "\n")
		return line
	}
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	// --timeout ends before the connection is given up: there is no engine that could have set it.
	if got := doctor("30s"); !strings.Contains(got, ": timed out: not there within the 1s that it was given; TCP connections to it are accepted") {
		t.Errorf("of one that is stopped, by --timeout: %s", got)
	}
	got := doctor("200ms")
	t.Log(got)
	if !strings.Contains(got, "TCP connections to it are accepted, but no answer came in ") || !strings.Contains(got, "SIGSTOP") || strings.Contains(got, "firewall") {
		t.Errorf("of one that is stopped: %s", got)
	}
	if err := errors.Join(cmd.Process.Signal(syscall.SIGCONT), cmd.Process.Signal(syscall.SIGTERM), cmd.Wait()); err != nil {
		t.Fatal(err)
	}
	if got = doctor("200ms"); !strings.Contains(got, "a TCP connection fails, too") || !strings.Contains(got, "firewall") {
		t.Errorf("of one that is gone: %s", got)
	}
}

// C52: free, total and wanted are all said, in bytes too.
func TestDoctorComparesSharedMemoryWithWhatIsWanted(t *testing.T) {
	c := node.DefaultConfig()
	c.Pools = []node.PoolConfig{{ECCPUBytes: "1KiB", BlockBytes: 256, Slots: 512}}
	const file = 320<<10 + 1<<10 // header and clients, 36 KiB, and slots, 256 KiB, in steps of 64 KiB, then the pool
	if f := checkShm(c); f.Verdict != good || !strings.Contains(f.Detail, fmt.Sprintf("bytes), 321 KiB wanted (%d bytes", file)) {
		t.Errorf("%+v", f)
	}
	c.Pools = append(c.Pools, node.PoolConfig{ECCPUBytes: "1000TiB"})
	if f := checkShm(c); f.Verdict != fail || !strings.Contains(f.Fix, "--shm-size") || !strings.Contains(f.Fix, "emptyDir") {
		t.Errorf("%+v", f)
	}
	c.Pools = []node.PoolConfig{{ECCPUBytes: "1000TiB", BlockBytes: 1}}
	if f := checkShm(c); f.Verdict != fail || !strings.Contains(f.Detail, "blocks") {
		t.Errorf("%+v", f)
	}
	c.ShmDir = t.TempDir()
	c.Pools = nil
	if f := checkShm(c); f.Verdict == fail {
		t.Errorf("%+v", f)
	}
}

// An interrupted start ends with 0 only if nothing else went wrong.
func TestAnErrorBesideTheContextsIsNotTakenForIt(t *testing.T) {
	other := errors.New("region: unlink: read-only file system")
	wrapped := fmt.Errorf("%w: ec_cpu_bytes: %w", node.ErrConfig, fmt.Errorf("adopting: %w", context.Canceled))
	for _, c := range []struct {
		err  error
		want bool
	}{
		{context.Canceled, true},
		{wrapped, true},
		{fmt.Errorf("%w: planes: %v", node.ErrConfig, context.Canceled), true},
		{errors.Join(wrapped, nil), true},
		{errors.Join(wrapped, context.Canceled), true},
		{fmt.Errorf("starting: %w", errors.Join(context.Canceled, wrapped)), true},
		{other, false},
		{errors.Join(wrapped, other), false},
		{errors.Join(context.Canceled, errors.Join(other)), false},
		{fmt.Errorf("starting: %w", errors.Join(context.Canceled, fmt.Errorf("ending region: %w", other))), false},
		{context.DeadlineExceeded, false},
	} {
		if got := only(c.err, context.Canceled); got != c.want {
			t.Errorf("%q: %t", c.err, got)
		}
	}
}
