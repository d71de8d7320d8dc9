package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/region"
)

const configEnv = "FERRY_TEST_CONFIG"

// nodeProcess is a node in a process of its own: it prints its Ready and ends cleanly when stdin does.
func nodeProcess() {
	var c Config
	if err := json.Unmarshal([]byte(os.Getenv(configEnv)), &c); err != nil {
		panic(err)
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	n, err := Start(context.Background(), c, log)
	if err != nil {
		fmt.Println("error", err)
		os.Exit(1)
	}
	if err := json.NewEncoder(os.Stdout).Encode(n.Ready()); err != nil {
		panic(err)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := n.Close(ctx); err != nil {
		panic(err)
	}
}

// nodeProc is such a process, seen from the test.
type nodeProc struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	ready Ready
	log   string // path of what it wrote on stderr
}

// spawnNode starts a node of that configuration in a process.
func spawnNode(t testing.TB, c Config) *nodeProc {
	t.Helper()
	p, line := trySpawn(t, c)
	if err := json.Unmarshal([]byte(line), &p.ready); err != nil {
		t.Fatalf("node: %q\n%s", line, p.said())
	}
	return p
}

func trySpawn(t testing.TB, c Config) (*nodeProc, string) {
	t.Helper()
	conf, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"=node", configEnv+"="+string(conf))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	stderr, err := os.CreateTemp(t.TempDir(), "log")
	if err != nil {
		t.Fatal(err)
	}
	defer stderr.Close()
	p := &nodeProc{t: t, cmd: cmd, log: stderr.Name()}
	cmd.Stderr = stderr
	if p.in, err = cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	line, _ := bufio.NewReader(out).ReadString('\n')
	return p, line
}

// said is its log so far.
func (p *nodeProc) said() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		p.t.Error(err)
	}
	return string(b)
}

func (p *nodeProc) kill() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
}

// end ends it cleanly.
func (p *nodeProc) end() {
	p.t.Helper()
	_ = p.in.Close()
	if err := p.cmd.Wait(); err != nil {
		p.t.Errorf("node: %v\n%s", err, p.said())
	}
}

// dialNode connects a client that reconnects.
func dialNode(t testing.TB, socket string) *client.Client {
	t.Helper()
	c, err := client.Dial(testContext(t), socket, client.Options{Name: t.Name(), Wait: 30 * time.Second, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// engineOf starts an engine process of a node that is another process.
func engineOf(t *testing.T, p *nodeProc, role string) (*engineProc, io.Writer) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), roleEnv+"="+role, socketEnv+"="+p.ready.Socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
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
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &engineProc{cmd, bufio.NewReader(out)}, in
}

func scrape(t testing.TB, admin string) string {
	t.Helper()
	r, err := http.Get("http://" + admin + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func hexSum(b []byte) string {
	h := xxh3.New()
	_, _ = h.Write(b)
	return hex.EncodeToString(h.Sum(nil))
}

func stats(t testing.TB, c *client.Client) ec.Stats {
	t.Helper()
	s, err := c.Stats(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestAKilledNodeIsGoneOnWith(t *testing.T) {
	cfg := testConfig(t, 64)
	cfg.Checksums = true
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	put(t, c, "a", 3, 1)
	put(t, c, "b", 5, 2)
	mapped, err := c.Map(testContext(t), "a")
	if err != nil {
		t.Fatal(err)
	}
	filling, err := c.Reserve(testContext(t), "c", spec(4))
	if err != nil {
		t.Fatal(err)
	}
	given, err := c.Reserve(testContext(t), "d", spec(4))
	if err != nil {
		t.Fatal(err)
	}
	params, err := c.Announce(testContext(t), []client.AnnounceItem{{Key: "b", ItemIndices: []int{0}}})
	if err != nil {
		t.Fatal(err)
	}
	want := payload(4, 3)
	half := copy(filling.Buffers()[0], want[:100]) // in the middle of the copy
	before := c.Pool()

	p.kill()
	if err := mapped.Valid(); err != nil || !bytes.Equal(bytes.Join(mapped.Buffers(), nil), payload(3, 1)) {
		t.Errorf("mapped while there is no node: %v", err)
	}
	next := spawnNode(t, cfg)
	if next.ready.PeerPort != p.ready.PeerPort || next.ready.Region != p.ready.Region {
		t.Errorf("%+v, was %+v", next.ready, p.ready)
	}
	checkBytes(t, c, "a", 3, 1)
	checkBytes(t, c, "b", 5, 2)
	if now := c.Pool(); now.Epoch != before.Epoch+1 || now.Node != before.Node || now.PeerPort != before.PeerPort {
		t.Errorf("%+v, was %+v", now, before)
	}
	if s := stats(t, c); s.Ready != 2 || s.Filling != 2 || s.FreeBlocks != 64-16 || s.PinnedBlocks != 3 || s.HeldBlocks != 5 {
		t.Errorf("%+v", s)
	}
	if err := mapped.Valid(); err != nil {
		t.Error(err)
	}
	if err := c.Remove(testContext(t), "a"); !errors.Is(err, ec.ErrPinned) {
		t.Errorf("%v; the pin was restated", err)
	}
	copy(filling.Buffers()[0][half:], want[half:])
	if err := filling.Commit(testContext(t)); err != nil {
		t.Errorf("commit of what was reserved before: %v", err)
	}
	checkBytes(t, c, "c", 4, 3)
	if err := given.Discard(testContext(t)); err != nil {
		t.Error(err)
	}
	mapped.Release()
	eventually(t, "all is given back", func() bool {
		s := stats(t, c)
		return s.PinnedBlocks == 0 && s.Filling == 0 && s.FreeBlocks == 64-12
	})

	// C78: what was announced before leads to the new one, at the first request.
	other := startNode(t, testConfig(t, 64))
	oc := dial(t, other)
	ch, err := oc.Fetch(testContext(t), params, 0)
	if err != nil {
		t.Fatal(err)
	}
	if r := <-ch; r.Outcome != ec.FetchReady {
		t.Errorf("%+v", r)
	}
	checkBytes(t, oc, "b", 5, 2)
	next.end()
}

// C78, V7: a consumer that knows the producer asks the restarted one, and no request fails.
func TestRestartedProducersCostTheirConsumersNoRequest(t *testing.T) {
	cfg := testConfig(t, 256)
	cfg.Checksums = true
	other := startNode(t, testConfig(t, 256))
	oc := dial(t, other)
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	for i := range 10 {
		key := fmt.Sprint("k", i)
		put(t, c, key, 2, uint64(i))
		params, err := c.Announce(testContext(t), []client.AnnounceItem{{Key: key, ItemIndices: []int{0}}})
		if err != nil {
			t.Fatal(err)
		}
		p.kill()
		p = spawnNode(t, cfg)
		ch, err := oc.FetchMap(testContext(t), params, 0)
		if err != nil {
			t.Fatal(err)
		}
		r := <-ch
		if r.Outcome != ec.FetchReady {
			t.Fatalf("restart %d: %+v", i, r)
		}
		if !bytes.Equal(bytes.Join(r.Mapped.Buffers(), nil), payload(2, uint64(i))) {
			t.Fatalf("restart %d: other bytes", i)
		}
		r.Mapped.Release()
	}
	eventually(t, "no grant is left", func() bool {
		s := stats(t, c)
		return s.Ready == 10 && s.QuarantinedBlocks == 0 && s.PinnedBlocks == 0
	})
	p.end()
}

func TestAnEngineThatDiesWhileThereIsNoNodeLeavesNothing(t *testing.T) {
	cfg := testConfig(t, 4)
	p := spawnNode(t, cfg)
	e, _ := engineOf(t, p, "reserve")
	e.says(t)
	p.kill()
	e.kill(t)
	p = spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	put(t, c, "k", 4, 1) // needs all blocks
	p.end()
}

func TestWhatAnEngineWritesWhileTheNodeIsRestartedIsNotReused(t *testing.T) {
	cfg := testConfig(t, 4)
	p := spawnNode(t, cfg)
	e, _ := engineOf(t, p, "lose") // has lost its connection, and writes on
	e.says(t)
	p.kill()
	p = spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	if _, err := c.Reserve(testContext(t), "other", spec(1)); !errors.Is(err, ec.ErrFull) {
		t.Errorf("%v; want ErrFull: the engine lives", err)
	}
	p.kill() // twice
	p = spawnNode(t, cfg)
	if _, err := c.Reserve(testContext(t), "other", spec(1)); !errors.Is(err, ec.ErrFull) {
		t.Errorf("%v; want ErrFull: the engine lives", err)
	}
	e.kill(t)
	eventually(t, "its blocks are free once it is dead", func() bool { return stats(t, c).FreeBlocks == 4 })
	put(t, c, "k", 4, 1)
	p.end()
}

func TestAStoppedEnginesPinOutlivesRestarts(t *testing.T) {
	cfg := testConfig(t, 8)
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	put(t, c, "k", 4, 9)
	e, in := engineOf(t, p, "keeper")
	e.says(t)
	if err := e.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		p.kill()
		p = spawnNode(t, cfg)
		put(t, c, fmt.Sprint("other", i), 4, uint64(i)) // takes what the one before had
	}
	if s := stats(t, c); s.PinnedBlocks != 4 {
		t.Errorf("%+v", s)
	}
	if m := scrape(t, p.ready.Admin); !regexp.MustCompile(`tensorferry_engines_away_pinned\{[^}]*\} 1\n`).MatchString(m) {
		t.Errorf("nothing of it in the metrics:\n%s", m)
	}
	if err := e.cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the engine is back", func() bool {
		fmt.Fprintln(in)
		line := e.says(t)
		if !strings.HasPrefix(line, hexSum(payload(4, 9))+" <nil>") {
			t.Fatalf("the engine sees %s", line)
		}
		return strings.HasSuffix(line, "<nil> <nil>")
	})
	e.kill(t)
	eventually(t, "its death ends the pin", func() bool { return stats(t, c).PinnedBlocks == 0 })
	p.end()
}

func TestACleanEndWithKeepRegionIsARestartToo(t *testing.T) {
	cfg := testConfig(t, 16)
	cfg.KeepRegion = true
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	put(t, c, "a", 4, 1)
	m, err := c.Map(testContext(t), "a")
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Reserve(testContext(t), "b", spec(4))
	if err != nil {
		t.Fatal(err)
	}
	p.end()
	cfg.KeepRegion = false
	p = spawnNode(t, cfg)
	if p.ready.Region == "" || m.Valid() != nil {
		t.Errorf("%+v, %v", p.ready, m.Valid())
	}
	if err := c.Remove(testContext(t), "a"); !errors.Is(err, ec.ErrPinned) {
		t.Errorf("%v; the pin was restated", err)
	}
	copy(r.Buffers()[0], payload(4, 2))
	if err := r.Commit(testContext(t)); err != nil {
		t.Error(err)
	}
	checkBytes(t, c, "b", 4, 2)
	p.end()
}

func TestARestartWithAnotherPoolLeavesEnginesTheirBytes(t *testing.T) {
	cfg := testConfig(t, 16)
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	put(t, c, "a", 4, 1)
	m, err := c.Map(testContext(t), "a")
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Reserve(testContext(t), "b", spec(4))
	if err != nil {
		t.Fatal(err)
	}
	p.kill()
	cfg.Pools[0].ECCPUBytes = itoa(8 * testBlock)
	p = spawnNode(t, cfg)
	if !strings.Contains(p.said(), "not adopted") {
		t.Errorf("nothing is said of it: %s", p.said())
	}
	if _, err := c.Map(testContext(t), "a"); !errors.Is(err, ec.ErrMissing) {
		t.Errorf("%v; want ErrMissing", err)
	}
	for _, b := range r.Buffers() {
		clear(b) // into the file that is nobody's
	}
	if err := r.Commit(testContext(t)); !errors.Is(err, ec.ErrStale) {
		t.Errorf("%v; want ErrStale", err)
	}
	put(t, c, "c", 8, 3)
	checkBytes(t, c, "c", 8, 3)
	if err := m.Valid(); err != nil || !bytes.Equal(bytes.Join(m.Buffers(), nil), payload(4, 1)) {
		t.Errorf("what was mapped changed: %v", err)
	}
	m.Release()
	p.end()
}

func TestAPortThatIsTakenIsReplacedAloudAndTheEntriesAreKept(t *testing.T) {
	cfg := testConfig(t, 16)
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	put(t, c, "a", 4, 1)
	p.kill()
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(p.ready.PeerPort)))
	if err != nil {
		t.Skip("somebody else has the port: ", err)
	}
	defer l.Close()
	again := spawnNode(t, cfg)
	if again.ready.PeerPort == p.ready.PeerPort || !strings.Contains(again.said(), "announcements made before lead nowhere") {
		t.Errorf("port %d after %d: %s", again.ready.PeerPort, p.ready.PeerPort, again.said())
	}
	checkBytes(t, c, "a", 4, 1)
	again.end()
}

func TestRegionsOfNodesLongDeadAreReapedAtStart(t *testing.T) {
	cfg := testConfig(t, 4)
	cfg.Timeouts.Adopt = time.Millisecond
	waits := testConfig(t, 4)
	waits.ShmDir = cfg.ShmDir
	q := spawnNode(t, waits)
	q.kill()
	p := spawnNode(t, cfg)
	p.kill()
	eventually(t, "its time is over", func() bool {
		swept, err := region.Sweep(region.SweepOptions{Dir: cfg.ShmDir, DryRun: true})
		return err == nil && slices.ContainsFunc(swept, func(s region.Swept) bool { return s.Reaped && s.Path == p.ready.Region })
	})
	third := testConfig(t, 4)
	third.ShmDir = cfg.ShmDir
	startNode(t, third)
	if _, err := os.Stat(p.ready.Region); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the dead one's region is still there: %v", err)
	}
	if _, err := os.Stat(q.ready.Region); err != nil {
		t.Errorf("one that waits for its restart was reaped: %v", err)
	}
	spawnNode(t, waits).end()
	if stale, err := SweepSocket(testContext(t), cfg.Socket, true); !stale || err != nil {
		t.Errorf("%t, %v", stale, err)
	}
	if stale, err := SweepSocket(testContext(t), cfg.Socket, false); !stale || err != nil {
		t.Errorf("%t, %v", stale, err)
	}
	if _, err := os.Lstat(cfg.Socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	if stale, err := SweepSocket(testContext(t), third.Socket, false); stale || !errors.Is(err, ErrSocketInUse) {
		t.Errorf("a live node's: %t, %v", stale, err)
	}
}

// C9, C10: nodes, ranks and groups of one machine never share a region, and one instance is one node.
func TestInstancesAndRanksNeverCollide(t *testing.T) {
	dir := shmDir(t)
	regions := map[string]bool{}
	var first Config
	for i := range 6 {
		c := testConfig(t, 4)
		c.ShmDir, c.Rank = dir, i%3
		if i >= 3 {
			c.Pools[0].Model = "another"
		}
		if i == 0 {
			first = c
		}
		regions[startNode(t, c).Ready().Region] = true
	}
	same := first
	for rank := range 3 { // of one instance
		c := testConfig(t, 4)
		c.ShmDir, c.Rank, c.Instance = dir, rank, "engine-0"
		regions[startNode(t, c).Ready().Region] = true
		same = c
	}
	if len(regions) != 9 {
		t.Errorf("%d regions of 9 nodes: %v", len(regions), regions)
	}
	same.Socket += "2" // another node that calls itself the same
	if _, err := Start(testContext(t), same, quiet()); !errors.Is(err, region.ErrInUse) || !strings.Contains(err.Error(), "pid "+strconv.Itoa(os.Getpid())) {
		t.Errorf("%v; want ErrInUse that names the owner", err)
	}
}

// A node under load is killed at random points, hundreds of times if asked (FERRY_TEST_KILLS). FERRY_TEST_SEED replays a failure.
func TestNoByteIsWrongAndNoReadyEntryIsLostWhateverIsKilled(t *testing.T) {
	kills := 12
	if testing.Short() {
		kills = 4
	}
	if v, err := strconv.Atoi(os.Getenv("FERRY_TEST_KILLS")); err == nil {
		kills = v
	}
	seed := rand.Uint64()
	if v, err := strconv.ParseUint(os.Getenv("FERRY_TEST_SEED"), 10, 64); err == nil {
		seed = v
	}
	t.Logf("FERRY_TEST_SEED=%d", seed)
	for name, blocks := range map[string]int{"with room for all": 1 << 14, "under eviction": 48} {
		t.Run(name, func(t *testing.T) {
			killLoop(t, blocks, kills, rand.New(rand.NewPCG(seed, 0)), name == "with room for all")
		})
	}
}

func killLoop(t *testing.T, blocks, kills int, rnd *rand.Rand, all bool) {
	cfg := testConfig(t, blocks)
	cfg.Checksums = true
	p := spawnNode(t, cfg)
	other := startNode(t, testConfig(t, 64))

	var mu sync.Mutex
	acked := map[string]int{} // rows by key, of what the node said is ready
	ctx, stop := context.WithCancel(context.Background())
	var work sync.WaitGroup
	for w := range 3 {
		c, oc := dialNode(t, cfg.Socket), dial(t, other)
		r := rand.New(rand.NewPCG(rnd.Uint64(), uint64(w)))
		work.Go(func() { load(t, ctx, c, oc, r, w, &mu, acked, all) })
	}
	c := dialNode(t, cfg.Socket)
	for range kills {
		time.Sleep(time.Duration(rnd.IntN(30_000)) * time.Microsecond) // the random point; nothing is waited for
		p.kill()
		mu.Lock()
		known := make(map[string]int, len(acked))
		for k, n := range acked {
			known[k] = n
		}
		mu.Unlock()
		p = spawnNode(t, cfg)
		if log := p.said(); strings.Contains(log, "checksum") || strings.Contains(log, "damaged") {
			t.Fatalf("the next node found damage: %s", log)
		}
		for key, rows := range known {
			m, err := c.Map(testContext(t), key)
			if errors.Is(err, ec.ErrMissing) && !all {
				continue
			}
			if err != nil {
				t.Fatalf("%s, of %d that were ready before the kill: %v", key, len(known), err)
			}
			if !bytes.Equal(bytes.Join(m.Buffers(), nil), payload(rows, keySeed(key))) {
				t.Fatalf("%s has wrong bytes", key)
			}
			m.Release()
		}
		if t.Failed() {
			break
		}
	}
	stop()
	work.Wait()
	eventually(t, "nothing is left pinned, filling or in quarantine", func() bool {
		s := stats(t, c)
		return s.PinnedBlocks == 0 && s.Filling == 0 && s.QuarantinedBlocks == 0
	})
	p.end()
}

// maxAcked keys have room for all in 16,384 blocks and 4,096 slots, so that none is evicted.
const maxAcked = 2000

func keySeed(key string) uint64 { return xxh3.HashString(key) }

// load puts, maps, verifies, announces and pulls until ctx ends. Every key has its own bytes.
func load(t *testing.T, ctx context.Context, c, other *client.Client, r *rand.Rand, w int, mu *sync.Mutex, acked map[string]int, all bool) {
	wait := func() context.Context { return testContext(t) }
	may := func(err error) bool {
		for _, e := range []error{ec.ErrFull, ec.ErrMissing, ec.ErrNotReady, ec.ErrPending, ec.ErrStale, client.ErrDisconnected} {
			if errors.Is(err, e) {
				return true
			}
		}
		return false
	}
	var kept []*client.Mapped
	for i := 0; ctx.Err() == nil && !t.Failed(); i++ {
		key, rows := fmt.Sprintf("w%d-%d", w, i), 1+r.IntN(6)
		mu.Lock()
		full := all && len(acked) >= maxAcked
		mu.Unlock()
		if full { // from here on only the nodes' lives and deaths are tested
			if _, err := c.Lookup(wait(), key); err != nil && !may(err) {
				t.Errorf("lookup: %v", err)
			}
			continue
		}
		res, err := c.Reserve(wait(), key, spec(rows))
		if err != nil {
			if !may(err) {
				t.Errorf("reserve: %v", err)
			}
			continue
		}
		rest := payload(rows, keySeed(key))
		for _, b := range res.Buffers() {
			rest = rest[copy(b, rest):]
		}
		if r.IntN(8) == 0 {
			if err := res.Discard(wait()); err != nil && !may(err) {
				t.Errorf("discard: %v", err)
			}
			continue
		}
		if err := res.Commit(wait()); err != nil {
			if !may(err) {
				t.Errorf("commit: %v", err)
			}
			continue
		}
		mu.Lock()
		acked[key] = rows
		mu.Unlock()
		m, err := c.Map(wait(), key)
		if err != nil {
			if !may(err) {
				t.Errorf("map: %v", err)
			}
			continue
		}
		kept = append(kept, m) // over restarts
		if len(kept) > 3 {
			m, kept = kept[0], kept[1:]
			got := bytes.Join(m.Buffers(), nil)
			want := payload(len(got)/testBlock, keySeed(m.Info().Key))
			if err := m.Valid(); err != nil {
				t.Errorf("a pin was lost: %v", err)
			} else if !bytes.Equal(got, want) {
				t.Errorf("%s, which was mapped, has wrong bytes", m.Info().Key)
			}
			m.Release()
		}
		if r.IntN(4) == 0 {
			params, err := c.Announce(wait(), []client.AnnounceItem{{Key: key, ItemIndices: []int{0}}})
			if err != nil {
				if !may(err) {
					t.Errorf("announce: %v", err)
				}
				continue
			}
			ch, err := other.FetchMap(wait(), params, 5*time.Second)
			if err != nil {
				t.Errorf("fetch: %v", err)
				continue
			}
			for res := range ch {
				if res.Mapped == nil {
					continue
				}
				if !bytes.Equal(bytes.Join(res.Mapped.Buffers(), nil), payload(rows, keySeed(key))) {
					t.Errorf("%s was pulled with wrong bytes", key)
				}
				res.Mapped.Release()
			}
		}
	}
	for _, m := range kept {
		m.Release()
	}
}
