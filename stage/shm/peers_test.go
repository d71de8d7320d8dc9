package shm

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// peerServer is vLLM-Omni's own SharedMemoryConnector, behind lines of JSON on stdin and stdout. Its segments are in /dev/shm, there is
// no other place for them.
const peerServer = `
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import omni_boot, payloads, msgspec
Nixl, Shm, Ser = omni_boot.load()
c = Shm({"stage_id": 0})
def get(q):
    meta = msgspec.msgpack.decode(bytes.fromhex(q["metadata"])) if q.get("metadata") else None
    end, tries = time.monotonic() + q.get("wait", 0), 0
    while True:
        tries += 1
        r = c.get("0", "1", q["key"], meta)
        if r is not None or time.monotonic() >= end:
            return r, tries
        time.sleep(q.get("pause", 0.05))
def do(q):
    if q["op"] == "put":
        ok, size, meta = c.put("0", "1", q["key"], payloads.build(q["case"]) if "case" in q else q["value"])
        return {"ok": ok, "size": size, "metadata": msgspec.msgpack.encode(meta).hex() if ok else None}
    if q["op"] == "get":
        r, tries = get(q)
        if r is None:
            return {"ok": False, "tries": tries}
        return {"ok": True, "tries": tries, "size": r[1], "diff": payloads.check(q["case"], r[0], "shm") if "case" in q else []}
    if q["op"] == "gets":   # values under one key, until the last
        got = []
        while len(got) < q["n"]:
            r, _ = get({**q, "wait": 20, "pause": 0})
            if r is None: break
            got.append(r[0])
        return {"ok": True, "values": got}
    if q["op"] == "puts":   # each when the one before is gone
        acked = []
        for i in range(q["n"]):
            end = time.monotonic() + 20
            while os.path.exists("/dev/shm/" + q["key"]) and time.monotonic() < end: pass
            ok, _, _ = c.put("0", "1", q["key"], i)
            if ok: acked.append(i)
        return {"ok": True, "values": acked}
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    try: a = do(json.loads(line))
    except Exception as e: a = {"error": repr(e)}
    print(json.dumps(a), flush=True)
c.close()
`

type peerServerProcess struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

type answer struct {
	OK       bool
	Error    string
	Size     int64
	Tries    int
	Metadata string
	Diff     []string
	Values   []int
}

// peersPython is a Python that has vLLM-Omni. Without PEERS_PYTHON (see interop/peers/setup.sh) the test is skipped, or fails where
// FERRY_INTEROP_REQUIRED is set.
func peersPython(t *testing.T) string {
	t.Helper()
	python := os.Getenv("PEERS_PYTHON")
	if python == "" {
		const text = "PEERS_PYTHON is not set: set it to the last line that interop/peers/setup.sh prints"
		if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	return python
}

// shared is one peer for all tests: it takes seconds to start. It ends with this process, whose end it sees on its stdin.
var shared *peerServerProcess

func startPeer(t *testing.T) *peerServerProcess {
	t.Helper()
	if shared != nil {
		shared.t = t
		return shared
	}
	python := peersPython(t)
	scripts, err := filepath.Abs("../../interop/peers/omni")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, "-W", "ignore", "-c", peerServer, scripts)
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
	shared = &peerServerProcess{t, cmd, in, bufio.NewReader(out)}
	shared.hear()
	return shared
}

// endPeer ends it, with its resource tracker.
func endPeer() {
	if shared != nil {
		shared.in.Close()
		_, _ = io.Copy(io.Discard, shared.out)
		_ = shared.cmd.Wait()
	}
}

func (p *peerServerProcess) send(q map[string]any) {
	p.t.Helper()
	b, err := json.Marshal(q)
	if err != nil {
		p.t.Fatal(err)
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		p.t.Fatal(err)
	}
}

func (p *peerServerProcess) hear() (a answer) {
	p.t.Helper()
	for {
		line, err := p.out.ReadString('\n')
		if err != nil {
			p.t.Fatalf("the peer ended: %v", err)
		}
		if !strings.HasPrefix(line, "{") {
			continue
		}
		if err := json.Unmarshal([]byte(line), &a); err != nil {
			p.t.Fatalf("%v: %s", err, line)
		}
		if a.Error != "" {
			p.t.Errorf("the peer says %s", a.Error)
		}
		return a
	}
}

func (p *peerServerProcess) do(q map[string]any) answer {
	p.t.Helper()
	p.send(q)
	return p.hear()
}

var peerCases = strings.Split("tensor,list,list1,tuple,scalar,empty,nested,noncontig,dtypes,object,dataclass,struct,big,fifty", ",")

// keysOf gives keys that no other process uses, and sees to it that nothing is left under them.
func keysOf(t *testing.T, names ...string) map[string]string {
	keys := make(map[string]string)
	for _, n := range names {
		key := fmt.Sprintf("ftest%d_%s_%s", os.Getpid(), t.Name(), n)
		keys[n] = key
		t.Cleanup(func() {
			for _, name := range []string{key, lockName(key)} {
				if os.Remove(filepath.Join(region.DefaultDir, name)) == nil {
					t.Errorf("%s was left", name)
				}
			}
		})
	}
	return keys
}

// What the peer put is got here, put again here, and got by the peer, which compares it with what it was: by metadata and by key, and by
// one that waits for it.
func TestThePeersGetWhatIsPutHereAndTheOtherWayRound(t *testing.T) {
	p := startPeer(t)
	c := open(t, Options{})
	keys := keysOf(t, peerCases...)
	for i, name := range peerCases {
		key := keys[name]
		put := p.do(map[string]any{"op": "put", "key": key, "case": name})
		r := stage.Request{Key: key, InPlace: i%2 == 0, Wait: true}
		if i%3 != 0 {
			r.Metadata = must(hex.DecodeString(put.Metadata))
		}
		g, err := c.Get(within(t, patience), r)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if g.Size != put.Size {
			t.Errorf("%s: %d bytes, the peer says %d", name, g.Size, put.Size)
		}
		for round := range 3 {
			q := map[string]any{"op": "get", "key": key, "case": name, "wait": 20}
			if round == 2 { // it asks before it is there
				p.send(q)
			}
			pub, err := c.Put(within(t, patience), key, g.Root, stage.PutOptions{Pack: wire.PackOptions{ObjectOptions: wire.ObjectOptions{PeerObjects: true}}})
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			// Structs are written with longer heads there.
			if pub.Size == put.Size && string(pub.Metadata) != string(must(hex.DecodeString(put.Metadata))) {
				t.Errorf("%s: metadata %x, the peer's %s", name, pub.Metadata, put.Metadata)
			}
			if round == 1 {
				q["metadata"] = hex.EncodeToString(pub.Metadata)
			}
			if round < 2 {
				p.send(q)
			}
			if a := p.hear(); !a.OK || len(a.Diff) > 0 || a.Size != pub.Size {
				t.Errorf("%s, round %d: the peer got %+v", name, round, a)
			}
			wantOutcome(t, pub, stage.Read)
		}
		if err := g.Release(); err != nil {
			t.Error(err)
		}
	}
}

// S1, from both sides: each put of a key that is used again and again is read once, by readers that try all the time.
func TestKeysAreUsedAgainWithThePeers(t *testing.T) {
	const n = 500
	p := startPeer(t)
	c := open(t, Options{})
	key := keysOf(t, "k")["k"]

	p.send(map[string]any{"op": "gets", "key": key, "n": n})
	for i := range n {
		pub, err := c.Put(within(t, patience), key, tensor.Int(i), stage.PutOptions{})
		if err != nil {
			t.Fatal(err)
		}
		wantOutcome(t, pub, stage.Read)
	}
	for i, v := range p.hear().Values {
		if v != i {
			t.Fatalf("the peer's get %d gave %d", i, v)
		}
	}

	p.send(map[string]any{"op": "puts", "key": key, "n": n})
	for i := range n {
		g := mustGet(t, c, stage.Request{Key: key, Wait: true})
		if g.Root != tensor.Node(tensor.Int(i)) {
			t.Fatalf("get %d gave %v", i, g.Root)
		}
	}
	if a := p.hear(); len(a.Values) != n {
		t.Errorf("the peer put %d of %d", len(a.Values), n)
	}
}

// S1 among the peers alone leaves a payload without lock file, which none of them reads.
func TestAPeersPayloadThatLostItsLockFileIsRead(t *testing.T) {
	p := startPeer(t)
	c := open(t, Options{})
	key := keysOf(t, "k")["k"]
	p.do(map[string]any{"op": "put", "key": key, "case": "big"})
	if err := os.Remove(filepath.Join(region.DefaultDir, lockName(key))); err != nil {
		t.Fatal(err)
	}
	if a := p.do(map[string]any{"op": "get", "key": key}); a.OK {
		t.Error("the peers can read it now: this case is over")
	}
	if g := mustGet(t, c, stage.Request{Key: key, Wait: true, InPlace: true}); g.Size < 4<<20 {
		t.Errorf("%d bytes", g.Size)
	}
}

// S2: a producer of ours that is killed leaves what it put, to the peers too; one of theirs takes it along.
func TestThePeersReadWhatAKilledProducerOfOursPut(t *testing.T) {
	p := startPeer(t)
	key := keysOf(t, "k")["k"]
	w := startChild(t, "offer", region.DefaultDir, key, "1h")
	w.hear()
	w.kill()
	if a := p.do(map[string]any{"op": "get", "key": key, "wait": 20}); !a.OK {
		t.Error("not read")
	}
	must(Sweep("", false)) // its record
}

// S3: with the lock of a plain process held, ours end at their deadlines.
func TestALockThatAPeerHoldsIsWaitedForNoLongerThanTheDeadline(t *testing.T) {
	python := peersPython(t)
	key := keysOf(t, "k")["k"]
	h := exec.Command(python, "-c", `
import fcntl, sys, time
f = open("/dev/shm/shm_%s_lockfile.lock" % sys.argv[1], "wb+")
fcntl.flock(f, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(3600)`, key)
	out, err := h.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Start(); err != nil {
		t.Fatal(err)
	}
	defer h.Wait()
	defer h.Process.Kill()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	c := open(t, Options{})
	if _, err := c.Put(within(t, 50*time.Millisecond), key, tensor.Int(1), stage.PutOptions{}); err == nil {
		t.Error("put under another's lock")
	}
	if _, err := c.Get(within(t, 50*time.Millisecond), stage.Request{Key: key, Wait: true}); !errors.Is(err, stage.ErrNotFound) {
		t.Error(err)
	}
	h.Process.Kill()
	pub, err := c.Put(within(t, patience), key, tensor.Int(1), stage.PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	mustGet(t, c, stage.Request{Key: key})
	wantOutcome(t, pub, stage.Read)
}
