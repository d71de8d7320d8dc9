package hosts

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	width = 1024
	row   = 2 * width // bytes, one block
	large = 64 << 20 / row
)

// waits are short, so that a test of their ends is.
var waits = []string{
	"--timeouts-ack-own", "1s", "--timeouts-ack-plain", "2s", "--timeouts-connect", "2s", "--timeouts-read", "6s",
	"--timeouts-quarantine", "2s", "--timeouts-item", "12s", "--timeouts-grant-lease", "3s",
}

// put saves rows of random bytes under a key and gives them back.
func (n *node) put(key string, rows int) []byte {
	n.t.Helper()
	data := make([]byte, rows*row)
	seed := [32]byte{}
	copy(seed[:], key)
	_, _ = rand.NewChaCha8(seed).Read(data)
	file := filepath.Join(n.dir, key+".in")
	must(n.t, os.WriteFile(file, data, 0o600))
	out, status := n.ferry("ec", "put", "--socket", n.socket, "--key", key, "--shape", fmt.Sprintf("%d,%d", rows, width), file)
	if want := fmt.Sprintf(`{"key":%q,"bytes":%d,"state":"ready"}`+"\n", key, len(data)); status != 0 || out != want {
		n.t.Fatalf("put: status %d, %s", status, out)
	}
	return data
}

// announce writes the params of keys to a file and gives its path.
func (n *node) announce(keys ...string) string {
	n.t.Helper()
	out, status := n.ferry(append([]string{"ec", "announce", "--socket", n.socket}, keys...)...)
	if status != 0 {
		n.t.Fatalf("announce: status %d", status)
	}
	file := filepath.Join(n.dir, strings.Join(keys, "-")+".json")
	must(n.t, os.WriteFile(file, []byte(out), 0o600))
	return file
}

type line struct {
	Key, Status, Plane, Reason string
	Bytes                      int64
	MS                         float64
}

// fetch gives the outcome of the one key in params.
func (n *node) fetch(params string, flags ...string) line {
	n.t.Helper()
	lines, status := n.fetchAll(params, flags...)
	if len(lines) != 1 {
		n.t.Fatalf("%d lines for one key: %v", len(lines), lines)
	}
	if (status == 0) != (lines[0].Status == "ready") {
		n.t.Errorf("exit status %d with status %s", status, lines[0].Status)
	}
	return lines[0]
}

func (n *node) fetchAll(params string, flags ...string) (lines []line, status int) {
	n.t.Helper()
	out, status := n.ferry(append([]string{"ec", "fetch", "--socket", n.socket, "--params", params}, flags...)...)
	for s := range strings.Lines(out) {
		var l line
		if err := json.Unmarshal([]byte(s), &l); err != nil {
			n.t.Fatalf("fetch said %q: %v", s, err)
		}
		lines = append(lines, l)
	}
	return lines, status
}

// same compares a fetched file with what was put.
func (n *node) same(dir, key string, want []byte) {
	n.t.Helper()
	got, err := os.ReadFile(filepath.Join(dir, key+".bin"))
	must(n.t, err)
	if !bytes.Equal(got, want) {
		n.t.Errorf("%s: the %d bytes fetched are not the %d that were put", key, len(got), len(want))
	}
}

func TestTwoHostsMoveEncodingsByteForByte(t *testing.T) {
	ha, hb := newHosts(t, "192m")
	a, b := ha.node("a"), hb.node("b")
	want := map[string][]byte{"one": a.put("one", 1), "some": a.put("some", 37), "large": a.put("large", large)}
	params := a.announce("one", "some", "large", "absent")
	out := filepath.Join(b.dir, "out")
	lines, status := b.fetchAll(params, "--out", out)
	if status != 0 || len(lines) != 3 {
		t.Fatalf("status %d, %v", status, lines)
	}
	for _, l := range lines {
		if l.Status != "ready" || l.Plane != "tcp" || l.Bytes != int64(len(want[l.Key])) {
			t.Errorf("%+v", l)
		}
		b.same(out, l.Key, want[l.Key])
	}
	if lines, _ := b.fetchAll(params); len(lines) != 3 || slices.ContainsFunc(lines, func(l line) bool { return l.Plane != "local" }) {
		t.Errorf("fetched again: %v; want all from the pool", lines)
	}

	// A key that the peer does not have, under the address of one that it has.
	text, err := os.ReadFile(a.announce("one"))
	must(t, err)
	never := filepath.Join(b.dir, "never.json")
	must(t, os.WriteFile(never, bytes.Replace(text, []byte(`"one"`), []byte(`"never"`), 1), 0o600))
	if l := b.fetch(never); l.Status != "missing" || l.Bytes != 0 {
		t.Errorf("a key that is not there: %+v", l)
	}

	// A node of another model asks for what is there.
	other := hb.node("c", "--model", "other-mm", "--ec-cpu-bytes", "4MiB")
	if l := other.fetch(a.announce("some")); l.Status != "incompatible" || !strings.Contains(l.Reason, "other-mm") {
		t.Errorf("another model: %+v", l)
	}

	// The way the operator looks at it.
	text2, status := b.ferry("doctor", "--ec-cpu-bytes", "4MiB", "--model", "tiny-mm", "--dtype", "torch.bfloat16", "--block-bytes", "2048",
		"--vllm-version", "0.32.0", "--side-channel", b.addr+":0", "--trusted-network", "--admin", "off", "--planes", "tcp", "--peer", peerOf(t, params))
	if status != 0 || !strings.Contains(text2, "by plane tcp") {
		t.Errorf("doctor: status %d\n%s", status, text2)
	}

	for _, n := range []*node{a, b, other} {
		n.settled()
		if err := n.end(); err != nil {
			t.Errorf("%s: %v", n.socket, err)
		}
	}
	for _, h := range []*host{ha, hb} {
		if left := h.shm(); left != nil {
			t.Errorf("host %s: %v is left in /dev/shm", h.name, left)
		}
	}
}

// peerOf is the address of the first entry of params that has one.
func peerOf(t *testing.T, params string) string {
	t.Helper()
	b, err := os.ReadFile(params)
	must(t, err)
	var m map[string]struct {
		Host string `json:"peer_host"`
		Port int    `json:"peer_port"`
	}
	must(t, json.Unmarshal(b, &m))
	for _, e := range m {
		if e.Host != "" {
			return fmt.Sprintf("%s:%d", e.Host, e.Port)
		}
	}
	t.Fatalf("no address in %s", b)
	return ""
}

// A host that cannot be reached is said to be so before the budget ends, and is found again when it is back.
func TestHostThatIsOutOfReachHasATypedOutcome(t *testing.T) {
	for _, c := range []struct {
		name string
		warm bool // the nodes have spoken before
		cut  func(a, b *host)
		mend func(a, b *host)
	}{
		{"our own cable", false, func(_, b *host) { b.down() }, func(_, b *host) { b.up() }},
		{"the other's cable", false, func(a, _ *host) { a.down() }, func(a, _ *host) { a.up() }},
		{"our own cable, warm", true, func(_, b *host) { b.down() }, func(_, b *host) { b.up() }},
		{"the other's cable, warm", true, func(a, _ *host) { a.down() }, func(a, _ *host) { a.up() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			ha, hb := newHosts(t, "192m")
			a, b := ha.node("a", waits...), hb.node("b", waits...)
			want := a.put("key", 512)
			params := a.announce("key")
			if c.warm {
				a.put("before", 1)
				if l := b.fetch(a.announce("before")); l.Status != "ready" {
					t.Fatalf("before: %+v", l)
				}
			}
			c.cut(ha, hb)
			if l := b.fetch(params); l.Status != "unreachable" && l.Status != "timed_out" || l.Bytes != 0 {
				t.Errorf("%+v; want unreachable or timed_out", l)
			}
			b.settled()
			c.mend(ha, hb)
			// The network may take a moment.
			out := filepath.Join(b.dir, "out")
			within(t, "the host is found again", func() bool { return b.fetch(params, "--out", out).Status == "ready" })
			b.same(out, "key", want)
			a.settled()
		})
	}
}

// outage is longer than a heartbeat's timeout (4 s): connections of the control plane break, those of the data plane need not.
const outage = 5 * time.Second

// slow makes the link slow enough that the large entry's READ lasts seconds.
func slow(t *testing.T, h *host) {
	t.Helper()
	err := h.shape("tbf", "rate", "200mbit", "burst", "128kb", "latency", "200ms")
	need(t, err == nil, "this kernel cannot slow a link down: %v", err)
}

// beginRead starts the fetch of a large entry and returns when a quarter of it has come.
func beginRead(t *testing.T, a, b *node, params, out string) chan line {
	t.Helper()
	slow(t, a.host)
	before := a.sent()
	end := make(chan line, 1)
	go func() {
		l := line{Status: "the test failed"}
		defer func() { end <- l }()
		l = b.fetch(params, "--out", out)
	}()
	within(t, "the READ is under way", func() bool { return a.sent()-before > large*row/4 })
	return end
}

func result(t *testing.T, end chan line) line {
	t.Helper()
	select {
	case l := <-end:
		return l
	case <-time.After(patience):
		t.Fatal("the fetch does not end")
		return line{}
	}
}

// The cable is out for a moment: the READ goes on, or is made again. Whatever it is, no byte is wrong.
func TestReadOverALinkThatFailsForAMomentComesThrough(t *testing.T) {
	ha, hb := newHosts(t, "192m")
	a, b := ha.node("a"), hb.node("b")
	want := a.put("key", large)
	out := filepath.Join(b.dir, "out")
	end := beginRead(t, a, b, a.announce("key"), out)
	for range 3 {
		hb.down()
		hb.up()
	}
	ha.down()
	<-time.After(outage)
	ha.up()
	if l := result(t, end); l.Status != "ready" || l.Bytes != int64(len(want)) {
		t.Fatalf("%+v", l)
	}
	b.same(out, "key", want)
	b.settled()
	a.settled()
}

// The cable stays out: the fetch ends with an outcome, and neither node keeps anything for it. When it is back all is as before.
func TestReadOverALinkThatStaysDownEndsAndLeavesNothing(t *testing.T) {
	ha, hb := newHosts(t, "192m")
	a, b := ha.node("a", waits...), hb.node("b", waits...)
	want := a.put("key", large)
	params := a.announce("key")
	out := filepath.Join(b.dir, "out")
	end := beginRead(t, a, b, params, out)
	hb.down()
	if l := result(t, end); l.Status != "unreachable" && l.Status != "timed_out" || l.Bytes != 0 {
		t.Errorf("%+v; want unreachable or timed_out", l)
	}
	b.settled()
	a.settled() // its lease ends the grant, with nobody there to say anything
	if free := b.stats().FreeBlocks; free != b.stats().Blocks {
		t.Errorf("%d of %d blocks are free at the consumer", free, b.stats().Blocks)
	}
	hb.up()
	must(t, ha.shape("pfifo"))
	within(t, "the entry is fetched", func() bool { return b.fetch(params, "--out", out).Status == "ready" })
	b.same(out, "key", want)
	b.settled()
	a.settled()
}

// Many keys at once over a link that is late and loses packets.
func TestDelayAndLossCostTimeOnly(t *testing.T) {
	ha, hb := newHosts(t, "192m")
	for _, h := range []*host{ha, hb} {
		if err := h.shape("netem", "delay", "20ms", "5ms", "loss", "1%", "reorder", "1%"); err != nil {
			t.Logf("no netem in this kernel (%v): packets are lost at a queue that is too short", err)
			err = h.shape("tbf", "rate", "400mbit", "burst", "20kb", "limit", "40kb")
			need(t, err == nil, "neither netem nor tbf: %v", err)
		}
	}
	a, b := ha.node("a"), hb.node("b")
	want := map[string][]byte{"large": a.put("large", large)}
	keys := []string{"large"}
	for i := range 16 {
		key := fmt.Sprint("small", i)
		want[key] = a.put(key, 1+i)
		keys = append(keys, key)
	}
	out := filepath.Join(b.dir, "out")
	lines, status := b.fetchAll(a.announce(keys...), "--out", out)
	if status != 0 || len(lines) != len(keys) {
		t.Fatalf("status %d, %v", status, lines)
	}
	for _, l := range lines {
		b.same(out, l.Key, want[l.Key])
	}
	if out := ha.ok("tc", "-s", "qdisc", "show", "dev", ha.device); strings.Contains(out, "dropped 0,") {
		t.Errorf("no packet was lost, so this test shows nothing:\n%s", out)
	}
	b.settled()
	a.settled()
}
