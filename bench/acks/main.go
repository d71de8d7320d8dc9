// Command acks measures how fast a producer answers: OK acks a second over a real ROUTER and DEALER, by the size of the region, and
// the time to one ack while an engine of the same node is in a long step. Ours and vLLM's own producer, asked by the same peer in the
// same run. vLLM's part needs PEERS_PYTHON, and is run from the repository's root.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/child"
	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/bench/internal/peers"
	"github.com/tensorferry/tensorferry/ec/wire"
)

const (
	step      = 250 * time.Millisecond
	latencies = 1000
	turnAcks  = 10_000
)

func main() {
	rounds := flag.Int("rounds", 15, "turns that count")
	scripts := flag.String("peers", "interop/peers/vllm", "directory of vLLM's producer")
	role := flag.String("role", "", "of a child: serve, node or engine")
	dir := flag.String("dir", "", "of a child")
	bytes := flag.Int64("bytes", 0, "of a child: size of the region")
	socket := flag.String("socket", "", "of a child: the node's")
	flag.Parse()
	var err error
	switch *role {
	case "serve":
		err = serve(*dir, *bytes)
	case "node":
		err = serveNode(*dir)
	case "engine":
		err = engine(*socket, step)
	default:
		err = run(*rounds, filepath.Join(*scripts, "ec_producer.py"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "acks:", err)
		os.Exit(1)
	}
}

func run(rounds int, script string) (err error) {
	dir, err := os.MkdirTemp("/dev/shm", "ferry-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	w := os.Stdout
	measure.Header(w, "acks", strings.Join(append([]string{"go run ./bench/acks"}, os.Args[1:]...), " "), rounds)
	fmt.Fprintf(w, "OK acks a second on one connection, %d requests on their way at a time, for %d entries of %s. To plain peers: of a\nsession whose first READ is complete, and whose others are notified after each turn. A pull is an ack and the verify after its READ.\n\n",
		window, entries, measure.Size(spec().Bytes))
	measure.Table(w, "region", "plain, acks/s", "bytes of an ack", "own, acks/s", "own, pulls/s", "vLLM, acks/s", "bytes of an ack", "plain, times vLLM")
	for _, bytes := range []int64{8 << 20, 512 << 20} {
		if err := rates(w, dir, bytes, rounds, script); err != nil {
			return err
		}
	}
	fmt.Fprintf(w, "\nTime to one ack at low load, while an engine is in steps of %v, of %d requests. Our engine is a process of its own that keeps a\ncore busy; vLLM's producer is asked between the engine's steps, which sleep.\n\n", step, latencies)
	measure.Table(w, "producer", "p50, ms", "p99, ms", "longest, ms")
	return times(w, dir, script)
}

// vllm is vLLM's producer.
type vllm struct {
	script *peers.Script
	offer  *offer
}

// close also deletes the region, which vLLM leaves behind when it is left without a worker.
func (v *vllm) close() error {
	err := v.script.Close()
	if e := os.Remove(v.offer.Shm); e != nil && !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	return err
}

// startVLLM starts it with a region of that many bytes; nil if there is no vLLM.
func startVLLM(script string, bytes int64, stepMS int) (*vllm, error) {
	s, line, err := peers.Run(script, "--count", fmt.Sprint(entries), "--size", fmt.Sprint(spec().Bytes), "--region", fmt.Sprint(bytes),
		"--step-ms", fmt.Sprint(stepMS), "--no-fill")
	if errors.Is(err, peers.ErrNone) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	o := &offer{}
	if err := json.Unmarshal([]byte(line), o); err != nil {
		return nil, errors.Join(fmt.Errorf("vLLM's producer said %.200q: %w", line, err), s.Close())
	}
	return &vllm{s, o}, nil
}

// requests are encoded requests for everything that is on offer.
func requests(o *offer, session string, own *wire.FerryRequest) [][]byte {
	var frames [][]byte
	for k := range o.Held {
		frames = append(frames, wire.AppendRequest(nil, &wire.Request{
			Key: k, CompatHash: o.Hash, Session: session, Version: wire.Generation2, Ferry: own,
		}, wire.Generation2))
	}
	return frames
}

func ownRequest(plane string) *wire.FerryRequest {
	return &wire.FerryRequest{Node: "bench-peer", Epoch: 1, Planes: []string{plane}, Compat: compat}
}

// rates is one row.
func rates(w io.Writer, dir string, bytes int64, rounds int, script string) (err error) {
	at := &offer{}
	ours, err := child.Start(at, "-role", "serve", "-dir", dir, "-bytes", fmt.Sprint(bytes))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.Close()) }()
	var cs []measure.Candidate
	sizes := make([]int, 4)
	// add makes a candidate of n requests a turn; its time is that of one. After each turn there is a call of read.
	add := func(name string, o *offer, n int, own *wire.FerryRequest, verify bool, read func() error) (*asker, error) {
		a, err := newAsker(o.addr(), name)
		if err != nil {
			return nil, err
		}
		frames, i := requests(o, name, own), len(cs)
		cs = append(cs, measure.Candidate{Name: name, Run: func() (time.Duration, error) {
			d, size, err := a.ask(frames, n, verify)
			sizes[i] = size
			if err == nil {
				err = read()
			}
			return d / time.Duration(n), err
		}})
		return a, nil
	}
	for _, c := range []struct {
		name   string
		own    *wire.FerryRequest
		verify bool
	}{{"plain", nil, false}, {"own", ownRequest(planeName), false}, {"pull", ownRequest(planeName), true}} {
		read := func() error { return nil }
		if c.own == nil {
			read = func() error { return readAll(ours, c.name, turnAcks) }
		}
		a, err := add(c.name, at, turnAcks, c.own, c.verify, read)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, a.close()) }()
		if c.own != nil {
			continue
		}
		if _, _, err := a.ask(requests(at, c.name, nil), len(at.Held), false); err != nil {
			return err
		}
		if err := readAll(ours, c.name, len(at.Held)); err != nil {
			return err
		}
	}
	theirs, err := startVLLM(script, bytes, 0)
	if err != nil {
		return err
	}
	if theirs != nil {
		defer func() { err = errors.Join(err, theirs.close()) }()
		n := int(1000 * (8 << 20) / bytes) // an ack takes as long as the region is large
		a, err := add("vLLM", theirs.offer, max(n, 30), nil, false, func() error { return nil })
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, a.close()) }()
	}
	res, err := measure.Run(2, rounds, cs)
	if err != nil {
		return err
	}
	rate := func(r measure.Result) string { return fmt.Sprintf("%.0f", 1/r.Median().Seconds()) }
	cells := []string{measure.Size(bytes), rate(res[0]), fmt.Sprint(sizes[0]), rate(res[1]), rate(res[2]), "not run", "", ""}
	if len(res) > 3 {
		cells[5], cells[6], cells[7] = rate(res[3]), fmt.Sprint(sizes[3]), fmt.Sprintf("%.0f", res[0].Faster(res[3]))
	}
	measure.Row(w, cells...)
	return nil
}

// readAll says that a plain peer has read all that so many acks named, each entry at least as often as it was acked.
func readAll(ours *child.Child, session string, acks int) error {
	for i := range entries {
		if _, err := ours.Ask(fmt.Sprintf("%s %s %d", session, key(i), (acks+entries-1)/entries)); err != nil {
			return err
		}
	}
	return nil
}

func times(w io.Writer, dir, script string) (err error) {
	at := &offer{}
	ours, err := child.Start(at, "-role", "node", "-dir", dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.Close()) }()
	stepping, err := child.Start(&offer{}, "-role", "engine", "-socket", at.Socket)
	if err != nil {
		return err
	}
	err = timesOf(w, "ours", at, ownRequest("mapped"))
	if err = errors.Join(err, stepping.Close()); err != nil {
		return err
	}
	theirs, err := startVLLM(script, 8<<20, int(step.Milliseconds()))
	if err != nil || theirs == nil {
		return err
	}
	defer func() { err = errors.Join(err, theirs.close()) }()
	return timesOf(w, "vLLM", theirs.offer, nil)
}

func timesOf(w io.Writer, name string, o *offer, own *wire.FerryRequest) error {
	a, err := newAsker(o.addr(), "low-load")
	if err != nil {
		return err
	}
	defer a.close()
	n := latencies
	if name == "vLLM" {
		n /= 10 // each waits for a step
	}
	took, err := a.latencies(requests(o, "low-load", own), n, func() time.Duration { return rand.N(10 * time.Millisecond) })
	if err != nil {
		return err
	}
	ms := func(d time.Duration) string { return fmt.Sprintf("%.3f", d.Seconds()*1e3) }
	measure.Row(w, name, ms(took[n/2]), ms(took[n*99/100]), ms(took[n-1]))
	return nil
}
