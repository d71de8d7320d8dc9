// Command pull measures a pull from an engine's view, from asking to having, between unmodified vLLM and nodes in all four
// directions, over each data plane, and NIXL's bare READ of as many bytes. vLLM needs PEERS_PYTHON (interop/peers/setup.sh).
package main

import (
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/bench/internal/peers"
	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/nixl"
)

//go:embed pull_peer.py
var vllmScript []byte

// The candidates, in the table's order.
const (
	vllmVLLM = "vLLM <- vLLM"
	goVLLM   = "Go <- vLLM"
	vllmGo   = "vLLM <- Go"
	goNIXL   = "Go <- Go, nixl"
	goMapped = "Go <- Go, mapped"
	goTCP    = "Go <- Go, tcp"
	rawNIXL  = "bare NIXL READ"
	aMemcpy  = "memcpy, all cores"
	aFloor   = "a byte there and back"
)

var candidates = []string{vllmVLLM, goVLLM, vllmGo, goNIXL, goMapped, goTCP, rawNIXL, aMemcpy, aFloor}

func main() {
	rounds := flag.Int("rounds", 21, "turns that count")
	role := flag.String("role", "", "of a child: serve or read")
	path := flag.String("region", "", "of a child: a node's region")
	entries := flag.String("entries", "", "only the rows whose name this regular expression matches")
	ways := flag.String("ways", "", "only the columns whose name this regular expression matches")
	flag.Parse()
	var err error
	switch *role {
	case "serve":
		err = rawServe(*path)
	case "read":
		err = rawRead(*path)
	case "echo":
		err = runEcho()
	default:
		err = run(*rounds, *entries, *ways)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "pull:", err)
		os.Exit(1)
	}
}

const module = "github.com/tensorferry/tensorferry"

// bench is what the stages share.
type bench struct {
	dir      string // of the binary and the sockets
	self     string
	hasVLLM  bool
	hasNIXL  bool
	rounds   int
	entries  *regexp.Regexp // rows
	ways     *regexp.Regexp // columns
	verdicts []verdict
}

func run(rounds int, entries, ways string) (err error) {
	b := &bench{rounds: rounds}
	if b.entries, err = regexp.Compile(entries); err != nil {
		return fmt.Errorf("-entries: %w", err)
	}
	if b.ways, err = regexp.Compile(ways); err != nil {
		return fmt.Errorf("-ways: %w", err)
	}
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	if b.dir, err = os.MkdirTemp("", "ferry-bench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	if out, err := exec.Command("go", "build", "-o", filepath.Join(b.dir, "ferry"), module+"/cmd/ferry").CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	if err := b.findPeers(); err != nil {
		return err
	}
	measure.Header(os.Stdout, "A pull, from asking to having", strings.Join(append([]string{"go run ./bench/pull"}, os.Args[1:]...), " "), rounds)
	fmt.Print("Medians in ms; in brackets how many times faster than vLLM <- vLLM.\n\n")
	measure.Table(os.Stdout, append([]string{"entries"}, candidates...)...)
	for _, s := range stages {
		if err := b.stage(s); err != nil {
			return err
		}
	}
	fmt.Println()
	measure.Table(os.Stdout, "target", "measured", "")
	for _, v := range b.verdicts {
		measure.Row(os.Stdout, v.target, v.measured, map[bool]string{true: "met", false: "missed"}[v.met])
	}
	return nil
}

// findPeers looks for vLLM and for NIXL, which that venv has too.
func (b *bench) findPeers() error {
	if python := os.Getenv("PEERS_PYTHON"); python != "" {
		b.hasVLLM = true
		if os.Getenv("VIRTUAL_ENV") == "" {
			if err := os.Setenv("VIRTUAL_ENV", filepath.Dir(filepath.Dir(python))); err != nil {
				return err
			}
		}
		root, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
		if err != nil {
			return fmt.Errorf("go list: %w", err)
		}
		if err := os.Setenv("PYTHONPATH", filepath.Join(strings.TrimSpace(string(root)), "interop", "peers", "vllm")); err != nil {
			return err
		}
	}
	b.hasNIXL = len(nixl.Find()) > 0
	return nil
}

// rig is the processes of a stage.
type rig struct {
	source           *ferryNode            // serves on all planes
	sinks            map[string]*ferryNode // one a plane
	producer         *peers.Script         // vLLM
	consumer         *peers.Script         // vLLM
	rawServer, rawIn *process
	echo             *echo
	copier           *copier
}

func (b *bench) newRig(region int64) (r *rig, err error) {
	r = &rig{sinks: map[string]*ferryNode{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.close())
		}
	}()
	planes := []string{"mapped", "tcp"}
	if b.hasNIXL {
		planes = append(planes, "nixl")
	}
	if r.source, err = startNode(b.dir, "source", strings.Join(planes, ","), region); err != nil {
		return r, err
	}
	for _, plane := range planes {
		if r.sinks[plane], err = startNode(b.dir, plane, plane, region); err != nil {
			return r, err
		}
	}
	if b.hasNIXL {
		if r.rawServer, err = start(b.self, "-role", "serve", "-region", r.source.client.Pool().Region); err != nil {
			return r, err
		}
		offer, err := r.rawServer.line()
		if err != nil {
			return r, fmt.Errorf("bare NIXL: %w", err)
		}
		if r.rawIn, err = start(b.self, "-role", "read", "-region", r.sinks["nixl"].client.Pool().Region); err != nil {
			return r, err
		}
		if ready, err := r.rawIn.ask(offer); err != nil || ready != "ready" {
			return r, fmt.Errorf("bare NIXL: said %q (%w)", ready, err)
		}
	}
	if r.copier, err = newCopier(r.source.client.Pool().Region, r.sinks["mapped"].client.Pool().Region); err != nil {
		return r, err
	}
	if r.echo, err = startEcho(b.self); err != nil {
		return r, err
	}
	if b.hasVLLM {
		args := []string{strconv.FormatInt(region, 10), strconv.Itoa(hidden)}
		if r.producer, err = peers.Start("pull_peer.py", vllmScript, append([]string{"producer"}, args...)...); err != nil {
			return r, err
		}
		if r.consumer, err = peers.Start("pull_peer.py", vllmScript, append([]string{"consumer"}, args...)...); err != nil {
			return r, err
		}
	}
	return r, nil
}

func (r *rig) close() error {
	var errs []error
	for _, s := range []*peers.Script{r.consumer, r.producer} {
		if s != nil {
			errs = append(errs, s.Close())
		}
	}
	for _, p := range []*process{r.rawIn, r.rawServer} {
		if p != nil {
			errs = append(errs, p.end(syscall.Signal(0)))
		}
	}
	if r.copier != nil {
		errs = append(errs, r.copier.close())
	}
	if r.echo != nil {
		errs = append(errs, r.echo.close())
	}
	for _, n := range r.sinks {
		if n != nil {
			errs = append(errs, n.close())
		}
	}
	if r.source != nil {
		errs = append(errs, r.source.close())
	}
	return errors.Join(errs...)
}

func (b *bench) stage(s stage) (err error) {
	s.loads = slices.DeleteFunc(slices.Clone(s.loads), func(w workload) bool { return !b.entries.MatchString(w.String()) })
	if len(s.loads) == 0 {
		return nil
	}
	r, err := b.newRig(s.region)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	for _, w := range s.loads {
		cs, err := b.candidates(r, w)
		if err != nil {
			return err
		}
		results, err := measure.Run(3, b.rounds, cs)
		if err != nil {
			return fmt.Errorf("%v: %w", w, err)
		}
		b.report(w, results)
	}
	return nil
}

// candidates puts a workload in place at both producers and lists the ways to pull it.
func (b *bench) candidates(r *rig, w workload) (cs []measure.Candidate, err error) {
	ours, err := r.source.add(w)
	if err != nil {
		return nil, err
	}
	// way adds a candidate that is told to compare the bytes in its first turn.
	way := func(name string, pull func(check bool) (time.Duration, error)) {
		check := true
		cs = append(cs, measure.Candidate{Name: name, Run: func() (time.Duration, error) {
			defer func() { check = false }()
			return pull(check)
		}})
	}
	for name, plane := range map[string]string{goNIXL: "nixl", goMapped: "mapped", goTCP: "tcp"} {
		if n := r.sinks[plane]; n != nil {
			way(name, func(check bool) (time.Duration, error) { return n.pull(w, ours, check) })
		}
	}
	if b.hasVLLM {
		text, err := r.producer.Ask("add %d %s", w.bytes, strings.Join(w.keys(), " "))
		if err != nil {
			return nil, fmt.Errorf("vLLM's producer: %w", err)
		}
		theirs, err := paramsOf(text)
		if err != nil {
			return nil, err
		}
		way(goVLLM, func(check bool) (time.Duration, error) { return r.sinks["nixl"].pull(w, theirs, check) })
		way(vllmVLLM, func(check bool) (time.Duration, error) { return r.vllmPull(w, theirs, check) })
		way(vllmGo, func(check bool) (time.Duration, error) { return r.vllmPull(w, ours, check) })
	}
	if b.hasNIXL {
		moves, err := r.moves(r.sinks["nixl"], w, ours)
		if err != nil {
			return nil, err
		}
		way(rawNIXL, func(check bool) (time.Duration, error) {
			s, err := r.rawIn.ask(rawLine(check, moves))
			if err != nil {
				return 0, err
			}
			sec, err := strconv.ParseFloat(s, 64)
			return time.Duration(sec * 1e9), err
		})
	}
	moves, err := r.moves(r.sinks["mapped"], w, ours)
	if err != nil {
		return nil, err
	}
	cs = append(cs, measure.Timed(aMemcpy, func() error { r.copier.copy(moves); return nil }), measure.Candidate{Name: aFloor, Run: r.echo.roundTrip})
	cs = slices.DeleteFunc(cs, func(c measure.Candidate) bool { return !b.ways.MatchString(c.Name) })
	slices.SortFunc(cs, func(x, y measure.Candidate) int {
		return slices.Index(candidates, x.Name) - slices.Index(candidates, y.Name)
	})
	return cs, nil
}

// moves says where the source has the entries, and where a sink puts them.
func (r *rig) moves(sink *ferryNode, w workload, p ec.Params) ([]move, error) {
	if err := sink.fetch(p); err != nil {
		return nil, err
	}
	var all []move
	for _, key := range w.keys() {
		from, err := r.source.offset(key)
		if err != nil {
			return nil, err
		}
		to, err := sink.offset(key)
		if err != nil {
			return nil, err
		}
		all = append(all, move{key, from, to, w.bytes})
	}
	return all, sink.remove(w)
}

func (r *rig) vllmPull(w workload, p ec.Params, check bool) (time.Duration, error) {
	a, ok := p.Get(w.keys()[0])
	if !ok {
		return 0, errors.New("the producer announced nothing")
	}
	c := 0
	if check {
		c = 1
	}
	return r.consumer.Took("pull %s %d %d %d %s", a.PeerHost, a.PeerPort, w.bytes, c, strings.Join(w.keys(), " "))
}
