package omni

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
)

// program builds ferry once.
var program = sync.OnceValues(func() (string, error) {
	path := filepath.Join(peers.dir, "ferry") // removed with it
	out, err := exec.Command("go", "build", "-race", "-o", path, "../../cmd/ferry").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("go build: %w\n%s", err, out)
	}
	return path, nil
})

// host is a network namespace, and a mount namespace with a /dev/shm of its own, both kept by a process that sleeps in them.
type host struct {
	t    *testing.T
	addr string
	pid  int
}

// newHosts gives two hosts on one link.
func newHosts(t *testing.T) (a, b *host) {
	t.Helper()
	need(t, os.Geteuid() == 0, "network namespaces need root")
	for _, c := range []string{"ip", "nsenter"} {
		_, err := exec.LookPath(c)
		need(t, err == nil, "%s is not installed (packages iproute2, util-linux)", c)
	}
	a, b = newHost(t, "10.213.9.1"), newHost(t, "10.213.9.2")
	a.run("ip", "link", "add", "oa", "type", "veth", "peer", "name", "ob", "netns", strconv.Itoa(b.pid))
	for device, h := range map[string]*host{"oa": a, "ob": b} {
		h.run("ip", "addr", "add", h.addr+"/24", "dev", device)
		h.run("ip", "link", "set", "lo", "up")
		h.run("ip", "link", "set", device, "up")
	}
	return a, b
}

func newHost(t *testing.T, addr string) *host {
	t.Helper()
	keeper := exec.Command("sh", "-c", "mount --make-rprivate / && mount -t tmpfs -o size=256m ferry /dev/shm && "+
		"mount -t sysfs sysfs /sys && echo up && exec sleep infinity") // UCX looks for network devices in /sys
	keeper.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := keeper.StdoutPipe()
	must(t, err)
	err = keeper.Start()
	need(t, err == nil, "a network namespace: %v", err)
	t.Cleanup(func() { kill(keeper) })
	line, err := bufio.NewReader(out).ReadString('\n')
	need(t, err == nil && line == "up\n", "a private /dev/shm and /sys: %q, %v", line, err)
	return &host{t, addr, keeper.Process.Pid}
}

// command runs on the host.
func (h *host) command(args ...string) *exec.Cmd {
	cmd := exec.CommandContext(patient(h.t), "nsenter", append([]string{"-t", strconv.Itoa(h.pid), "-n", "-m", "--"}, args...)...)
	cmd.Env = append(os.Environ(), "VIRTUAL_ENV="+filepath.Dir(filepath.Dir(python(h.t))))
	return cmd
}

// run wants a command to end well, and gives what it said.
func (h *host) run(args ...string) []byte {
	h.t.Helper()
	cmd := h.command(args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		h.t.Fatalf("%v on %s: %v\n%s%s", args, h.addr, err, out, stderr.Bytes())
	}
	return out
}

func writeTensors(t *testing.T, path string, named []tensor.Named) {
	t.Helper()
	var b bytes.Buffer
	must(t, tensor.WriteSafetensors(&b, named, nil))
	must(t, os.WriteFile(path, b.Bytes(), 0o600))
}

// As a script would do it: the command line on one host, a real connector on the other, NIXL over tcp between them.
func TestFilesTravelBetweenHostsToAndFromARealConnector(t *testing.T) {
	p := newPeer(t)
	a, b := newHosts(t)
	path, err := program()
	must(t, err)
	p.at = p.do(ask{"op": "open", "host": b.pid, "config": ask{"host": b.addr, "zmq_port": 0}}).endpoint()
	dir := t.TempDir()
	named := []tensor.Named{{Name: "large", Tensor: raw(tensor.Float32, 1, 4<<20)}, {Name: "small", Tensor: raw(tensor.BFloat16, 2, 3, 4)}}
	in, out := filepath.Join(dir, "in.safetensors"), filepath.Join(dir, "out.safetensors")
	writeTensors(t, in, named)
	value := dict{field("large", named[0].Tensor), field("small", named[1].Tensor)}

	put := a.command(path, "put", in, "--key", "k", "--listen", a.addr+":0", "--planes", "nixl")
	put.Stderr = t.Output()
	stdout, err := put.StdoutPipe()
	must(t, err)
	must(t, put.Start())
	lines := bufio.NewReader(stdout)
	var say struct {
		Event, Metadata string
		Size            int64
	}
	next := func(event string) {
		t.Helper()
		line, err := lines.ReadBytes('\n')
		must(t, err)
		if must(t, json.Unmarshal(line, &say)); say.Event != event {
			t.Fatalf("ferry put said %s, not %q", line, event)
		}
	}
	next("put")
	p.wants(ask{"op": "get", "key": "k", "metadata": say.Metadata, "wait": patience.Seconds()}, say.Size, describe(value))
	next("claimed")
	next("released")
	must(t, put.Wait())

	if r := p.do(ask{"op": "puts", "key": "big", "first": 5, "count": 1, "bytes": 32 << 20}); !r.OK {
		t.Fatal("their put failed")
	}
	from := net.JoinHostPort(p.at.Host, strconv.Itoa(p.at.Port))
	npy := filepath.Join(dir, "out.npy")
	a.run(path, "get", "--key", "big5", "--from", from, "--planes", "nixl", "--out", npy)
	data, err := os.ReadFile(npy)
	must(t, err)
	s, err := tensor.ParseNPY(data)
	must(t, err)
	x, err := s.Contiguous()
	must(t, err)
	if !bytes.Equal(x.Data(), bytes.Repeat([]byte{5}, 32<<20)) {
		t.Errorf("%v of %d bytes, not what was put", x.DType(), x.Bytes())
	}
	small := describe(dict{field("small", named[1].Tensor), field("other", raw(tensor.Int64, 4, 5))})
	p.put("map", small)
	a.run(path, "get", "--key", "map", "--from", from, "--planes", "nixl", "--out", out)
	data, err = os.ReadFile(out)
	must(t, err)
	got, _, err := tensor.ParseSafetensors(data)
	must(t, err)
	back := dict{}
	for _, n := range got {
		back = append(back, field(n.Name, n.Tensor))
	}
	same(t, "small", describe(back.Get("small")), describe(named[1].Tensor))
	same(t, "other", describe(back.Get("other")), describe(raw(tensor.Int64, 4, 5)))
	p.drained()
}
