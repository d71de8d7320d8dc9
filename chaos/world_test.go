package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/region"
)

// Waits of the nodes, short, so that frozen processes outlast all of them.
const (
	grantLease = 400 * time.Millisecond
	holdLease  = 600 * time.Millisecond
	longFreeze = 1500 * time.Millisecond

	// A restarted node keeps the key of a reservation for 10 s.
	veryLongFreeze = 12 * time.Second
)

// plan says what a world is and what is done to it.
type plan struct {
	nodes, engines, workers int // engines a node, workers an engine
	keys, blocks            int // of the pool of each node
	planes                  []string
	kills                   int // processes killed, at the least
	adopt                   time.Duration
	ledger                  bool // nothing is ever evicted or removed, so what was saved is there
	files                   int  // descriptors that each node has open besides
	scarce                  bool // a node's memory may not be to be had at its start
	odds                    odds
	prefix                  func(*rand.Rand) []string // a program that nodes are started by
	configure               func(i int, c *node.Config)
	disturb                 func(*rand.Rand) // harm of the scenario's own
	heal                    func()           // its end
}

// odds are the weights of what may happen next.
type odds struct{ killEngine, killNode, endNode, freezeEngine, freezeNode, disturb int }

var usualOdds = odds{killEngine: 8, killNode: 5, endNode: 1, freezeEngine: 3, freezeNode: 2}

// world is a running plan.
type world struct {
	plan
	t       *testing.T
	rng     *rand.Rand
	dir     string // sockets, board, logs
	hosts   []*host
	shm     []string // by node
	nodes   []*nodePlace
	engines []*enginePlace
	thaws   sync.WaitGroup
	counts  map[string]int
	reports report
}

type nodePlace struct {
	process
	config node.Config
	ledger string
	ready  node.Ready
	acked  []string // keys that were in the ledger when the last node died
}

type enginePlace struct {
	process
	node int
}

// newWorld prepares. hosts has one for all nodes, or one each; shm likewise the directories of their regions.
func newWorld(t *testing.T, p plan, seed uint64, hosts []*host, shm []string) *world {
	t.Helper()
	w := &world{plan: p, t: t, rng: rand.New(rand.NewPCG(seed, 0)), dir: t.TempDir(), counts: map[string]int{}}
	w.reports.Other = map[string]int{}
	for i := range p.nodes {
		w.hosts = append(w.hosts, hosts[i%len(hosts)])
		w.shm = append(w.shm, shm[i%len(shm)])
	}
	logs := w.dir
	if keep := os.Getenv("CHAOS_LOGS"); keep != "" {
		logs = filepath.Join(keep, t.Name())
		w.must(os.MkdirAll(logs, 0o700))
	}
	w.must(os.Mkdir(w.board(), 0o700))
	for i := range p.nodes {
		n := &nodePlace{
			process: process{name: fmt.Sprint("node ", i), role: "node", host: w.hosts[i], log: filepath.Join(logs, fmt.Sprintf("node-%d.log", i))},
			config:  w.config(i),
			ledger:  filepath.Join(w.dir, fmt.Sprint("ledger-", i)),
		}
		w.nodes = append(w.nodes, n)
		for j := range p.engines {
			w.engines = append(w.engines, &enginePlace{
				process: process{name: fmt.Sprintf("engine %d of node %d", j, i), role: "engine", host: w.hosts[i],
					log: filepath.Join(logs, fmt.Sprintf("engine-%d-%d.log", i, j))},
				node: i,
			})
		}
	}
	t.Cleanup(w.end)
	return w
}

func (w *world) board() string { return filepath.Join(w.dir, "board") }

func (w *world) config(i int) node.Config {
	c := node.DefaultConfig()
	c.Instance = fmt.Sprintf("chaos-%d-%d", os.Getpid(), i)
	c.Socket = filepath.Join(w.dir, fmt.Sprintf("n%d.sock", i))
	c.SideChannel, c.Admin = "127.0.0.1:0", "127.0.0.1:0"
	c.ShmDir = w.shm[i]
	c.Planes = w.planes
	c.Checksums = w.rng.IntN(2) == 0 // without them no checksum hides what goes wrong
	c.KeepRegion = w.adopt > time.Minute && (w.ledger || w.rng.IntN(2) == 0)
	if w.rng.IntN(2) == 0 {
		c.Eviction = ec.PolicySIEVE
	}
	c.Pools = []node.PoolConfig{{
		ECCPUBytes: strconv.Itoa(w.blocks * blockBytes), Model: model, Dtype: dtype, BlockBytes: blockBytes, VLLMVersion: version,
	}}
	c.Timeouts = node.TimeoutConfig{
		AckOwn: 300 * time.Millisecond, AckPlain: 600 * time.Millisecond, Connect: 300 * time.Millisecond, Read: time.Second,
		Quarantine: 500 * time.Millisecond, Item: 3 * time.Second, GrantLease: grantLease, HoldLease: holdLease, Idle: 500 * time.Millisecond,
		Adopt: w.adopt,
	}
	if w.configure != nil {
		w.configure(i, &c)
	}
	return c
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// fail says what went wrong and goes on: the end is still to be checked.
func (w *world) fail(format string, a ...any) {
	w.t.Helper()
	w.t.Errorf(format, a...)
}

// run starts all, does harm, lets it rest, and checks.
func (w *world) run() {
	start := time.Now()
	for i := range w.nodes {
		w.startNode(i)
	}
	for _, e := range w.engines {
		w.startEngine(e)
	}
	pace := 60 * time.Millisecond
	if long() {
		pace = 200 * time.Millisecond
	}
	for w.killed() < w.kills && !w.t.Failed() {
		time.Sleep(w.upTo(pace)) // the time between two events is the schedule's
		w.event()
		w.survey()
	}
	harmed := time.Since(start).Round(time.Millisecond)
	w.calm()
	w.check()
	w.t.Logf("%v of harm: %v; %d saved, %d mapped, %d pulled, %d found locally by the engines that lived; %v",
		harmed, w.counts, w.reports.Saved, w.reports.Mapped, w.reports.Pulled, w.reports.Local, w.reports.Other)
}

func (w *world) killed() int {
	return w.counts["engines killed"] + w.counts["nodes killed"] + w.counts["nodes killed at their start"]
}

func (w *world) upTo(d time.Duration) time.Duration { return time.Duration(w.rng.Int64N(int64(d)) + 1) }

// event is the next harm.
func (w *world) event() {
	o := w.odds
	n := w.rng.IntN(o.killEngine + o.killNode + o.endNode + o.freezeEngine + o.freezeNode + o.disturb)
	i, e := w.rng.IntN(len(w.nodes)), w.engines[w.rng.IntN(len(w.engines))]
	for _, c := range []struct {
		weight int
		do     func()
	}{
		{o.killEngine, func() { w.killEngine(e) }},
		{o.killNode, func() { w.killNode(i) }},
		{o.endNode, func() { w.endNode(i) }},
		{o.freezeEngine, func() { w.freeze(&e.process, "engines frozen") }},
		{o.freezeNode, func() { w.freeze(&w.nodes[i].process, "nodes frozen") }},
		{o.disturb, func() { w.counts["disturbed"]++; w.disturb(w.rng) }},
	} {
		if n < c.weight {
			c.do()
			return
		}
		n -= c.weight
	}
}

// survey fails if a process has ended that nobody told to.
func (w *world) survey() {
	for _, n := range w.nodes {
		if n.died() {
			w.fail("%s ended by itself, status %d\n%s", n.name, n.status(), tail(n.log, 6000))
		}
	}
	for _, e := range w.engines {
		if e.died() {
			w.fail("%s ended by itself, status %d\n%s", e.name, e.status(), tail(e.log, 6000))
		}
	}
}

func (w *world) startEngine(e *enginePlace) {
	w.must(e.start(engineRole{
		Socket: w.nodes[e.node].config.Socket, Node: e.node, Seed: w.rng.Uint64(), Keys: w.keys, Workers: w.workers, Removes: !w.ledger,
		Board: w.board(), Ledger: w.nodes[e.node].ledger,
	}))
}

func (w *world) killEngine(e *enginePlace) {
	w.counts["engines killed"]++
	e.kill()
	w.startEngine(e)
}

// killNode kills a node, looks at what it left, and starts the next, which may be killed before it is ready.
func (w *world) killNode(i int) {
	n := w.nodes[i]
	w.counts["nodes killed"]++
	n.kill()
	w.autopsy(n)
	if w.rng.IntN(2) == 0 {
		time.Sleep(w.upTo(200 * time.Millisecond)) // it stays away
	}
	for w.rng.IntN(4) == 0 {
		w.counts["nodes killed at their start"]++
		w.must(n.start(nodeRole{n.config, w.files}, w.program()...))
		time.Sleep(w.upTo(200 * time.Millisecond))
		n.kill()
		w.autopsy(n)
	}
	w.startNode(i)
}

func (w *world) endNode(i int) {
	n := w.nodes[i]
	w.counts["nodes ended"]++
	if status, err := n.end(); err != nil || status != 0 {
		w.fail("%s, told to end: status %d, %v\n%s", n.name, status, err, tail(n.log, 6000))
	}
	w.mustBeGone(n)
	if n.config.KeepRegion {
		w.autopsy(n)
	} else {
		w.must(os.WriteFile(n.ledger, nil, 0o600))
		n.acked = nil
	}
	w.startNode(i)
}

// mustBeGone checks that a node that ended cleanly left nothing, or just its region.
func (w *world) mustBeGone(n *nodePlace) {
	paths := []string{n.config.Socket}
	if !n.config.KeepRegion {
		paths = append(paths, n.ready.Region)
	}
	for _, path := range paths {
		if err := n.host.try(func() error { _, err := os.Lstat(path); return err }); !errors.Is(err, os.ErrNotExist) {
			w.fail("%s ended cleanly and left %s (%v)", n.name, path, err)
		}
	}
}

func (w *world) program() []string {
	if w.prefix == nil {
		return nil
	}
	return w.prefix(w.rng)
}

// startNode starts a node and waits until it serves.
func (w *world) startNode(i int) {
	w.t.Helper()
	n := w.nodes[i]
	for end := time.Now().Add(patience); ; {
		w.must(n.start(nodeRole{n.config, w.files}, w.program()...))
		line, err := n.line()
		if err == nil {
			w.must(json.Unmarshal(line, &n.ready))
			break
		}
		if err == io.EOF {
			<-n.ended
			if w.scarce && n.status() == exitNoSpace && time.Now().Before(end) {
				w.counts["starts without space"]++
				w.heal() // the old region's memory comes back once its engines have seen that it is over
				time.Sleep(20 * time.Millisecond)
				continue
			}
		}
		kept := ""
		_ = n.host.try(func() error { // names are those of its mount namespace
			kept = mapped(n.config.ShmDir)
			return nil
		})
		w.t.Fatalf("%s does not start: %v, status %d\nwhat keeps its memory:\n%s\n%s", n.name, err, n.status(), kept, tail(n.log, 6000))
	}
	w.lookForLost(i)
}

// mapped lists the mappings and descriptors of files in dir, or that were there, by process: they keep the memory of a file without a name.
func mapped(dir string) string {
	var b strings.Builder
	maps, _ := filepath.Glob("/proc/[0-9]*/maps")
	for _, path := range maps {
		proc := filepath.Dir(path)
		name, _ := os.ReadFile(filepath.Join(proc, "comm"))
		say := func(line string) {
			if strings.Contains(line, dir) {
				fmt.Fprintf(&b, "%s (%s): %s\n", filepath.Base(proc), strings.TrimSpace(string(name)), strings.TrimSpace(line))
			}
		}
		text, _ := os.ReadFile(path)
		for line := range strings.Lines(string(text)) {
			say(line)
		}
		fds, _ := filepath.Glob(filepath.Join(proc, "fd/*"))
		for _, fd := range fds {
			to, _ := os.Readlink(fd)
			say(fd + " " + to)
		}
	}
	return b.String()
}

// autopsy looks at the region of a node that was killed: whatever the instruction was, the table tells the truth, and what it calls
// ready is right in every byte.
func (w *world) autopsy(n *nodePlace) {
	if text, err := os.ReadFile(n.ledger); err == nil {
		n.acked = strings.Fields(string(text))
	}
	err := n.host.try(func() error {
		m, err := region.Open(n.ready.Region)
		if errors.Is(err, os.ErrNotExist) {
			return nil // killed before it had made a new one
		}
		if err != nil {
			return err
		}
		defer m.Close()
		w.counts["autopsies"]++
		if a := m.Slots().Audit(); len(a.Problems) > 0 {
			return errors.Join(a.Problems...)
		}
		for i := range m.Slots().Len() {
			s, err := m.Slots().Load(i)
			if err != nil {
				return err
			}
			if s.State != region.SlotReady {
				continue
			}
			w.counts["entries in autopsies"]++
			if err := check(buffersOf(m.Pool(), s.Extents, s.Bytes), s.Key); err != nil {
				return fmt.Errorf("slot %d, generation %d, extents %v: %w", i, s.Gen, s.Extents, err)
			}
		}
		return nil
	})
	if err != nil {
		w.fail("the region that %s left: %v", n.name, err)
	}
}

func buffersOf(pool []byte, extents []region.Extent, left int64) (out [][]byte) {
	for _, e := range extents {
		start := int64(e.Start) * blockBytes
		n := min(int64(e.Count)*blockBytes, left)
		out = append(out, pool[start:start+n])
		left -= n
	}
	return out
}

// lookForLost checks that what was acknowledged before the node was killed is there after its restart.
func (w *world) lookForLost(i int) {
	n := w.nodes[i]
	if !w.ledger || len(n.acked) == 0 {
		return
	}
	c, err := w.dial(i)
	if err != nil {
		w.fail("%s: %v", n.name, err)
		return
	}
	defer w.leave(i, c)
	slices.Sort(n.acked)
	keys := slices.Compact(n.acked)
	infos, err := c.Lookup(w.within(), keys...)
	if err != nil {
		w.fail("%s: %v", n.name, err)
		return
	}
	w.counts["entries adopted"] += len(keys)
	for _, info := range infos {
		if info.State != ec.Ready {
			w.fail("%s was saved, and acknowledged; after a restart of %s it is %s", info.Key, n.name, info.State)
		}
	}
}

// freeze stops a process for a while, often longer than the leases of what it has.
func (w *world) freeze(p *process, what string) {
	w.counts[what]++
	d := w.upTo(longFreeze)
	if long() && p.role == "engine" && w.rng.IntN(15) == 0 {
		d = veryLongFreeze
		w.counts["engines frozen for very long"]++
	}
	p.signal(syscall.SIGSTOP)
	w.thaws.Go(func() {
		time.Sleep(d)
		p.signal(syscall.SIGCONT)
	})
}

// calm ends all harm and the engines.
func (w *world) calm() {
	w.thaws.Wait()
	if w.heal != nil {
		w.heal()
	}
	w.survey()
	if w.t.Failed() {
		return
	}
	time.Sleep(200 * time.Millisecond) // of undisturbed work
	for _, e := range w.engines {
		if _, err := e.line(); err != nil {
			w.fail("%s: %v", e.name, err)
		}
		e.signal(syscall.SIGTERM)
	}
	for _, e := range w.engines {
		status, err := e.end()
		if err != nil || status != 0 {
			w.fail("%s, told to end: status %d, %v\n%s", e.name, status, err, tail(e.log, 6000))
			continue
		}
		var r report
		line, err := e.line()
		if err == nil {
			err = json.Unmarshal(line, &r)
		}
		if err != nil {
			w.fail("%s: its report: %v", e.name, err)
		}
		w.add(r)
	}
	// Those that were killed wrote down what they met.
	for _, e := range w.engines {
		f, err := os.Open(e.log)
		w.must(err)
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if strings.Contains(lines.Text(), "msg=WRONG") {
				w.fail("%s: %s", e.name, lines.Text())
			}
		}
		_ = f.Close()
	}
}

func (w *world) add(r report) {
	w.reports.Saved += r.Saved
	w.reports.Mapped += r.Mapped
	w.reports.Pulled += r.Pulled
	w.reports.Local += r.Local
	for what, n := range r.Other {
		w.reports.Other[what] += n
	}
}

func (w *world) within() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) dial(i int) (*client.Client, error) {
	return client.Dial(w.within(), w.nodes[i].config.Socket, client.Options{Name: "the test"})
}

// end kills what is left, after a failure.
func (w *world) end() {
	w.thaws.Wait()
	for _, e := range w.engines {
		if e.cmd != nil {
			e.kill()
		}
	}
	for _, n := range w.nodes {
		if n.cmd != nil {
			n.kill()
		}
	}
}
