package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/bench/internal/netns"
)

var (
	tiny   = load{Bytes: 16}
	small  = load{Bytes: 64 * kib}
	large  = load{Bytes: 16 * mib}
	leaves = load{Bytes: 64 * kib, Leaves: 50}
)

// sizes are the loads of the first section, with how many are put and got in a turn.
var sizes = []struct {
	load load
	n    int
}{{small, 8}, {load{Bytes: mib}, 4}, {large, 1}, {load{Bytes: 256 * mib}, 1}, {leaves, 4}}

// target is how many times faster ours has to be.
type target struct {
	load        load
	ours, their string
	times       float64
}

var targets = []target{
	{small, ourMapped, theirNIXL, 30}, {leaves, ourMapped, theirNIXL, 30}, {leaves, inPlace, theirNIXL, 30}, {large, ourMapped, theirNIXL, 5},
	{large, ourSHM, theirSHM, 10}, {large, ourMapped, theirSHM, 10}, {large, inPlace, theirSHM, 10},
}

// rigOf starts the ends of a section.
func (b *bench) rigOf(h *netns.Pair, ways []way) (r *rig, err error) {
	r = &rig{ways: ways}
	if r.our, err = b.ours(h); err == nil && ways[0].theirs {
		r.their, err = b.theirs(h)
	}
	if err == nil {
		err = r.openAll()
	}
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

func (b *bench) sizes(w io.Writer) (err error) {
	r, err := b.rigOf(nil, b.ways())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	fmt.Fprintf(w, "\n## One machine\n\nMedians of a round trip in ms; in brackets how many times faster than the NixlConnector. 256 MiB: a third of the turns.\n"+
		"Two memcpys: what mapped cannot do without, one in each process, from 4 MiB a tensor on on two cores, and between them a byte to the producer\nand back by a unix socket.\n\n")
	return b.table(w, r, []string{theirNIXL, theirSHM, ourNIXL, ourTCP, ourMapped, twoCopies, inPlace, inline, ourSHM}, func(l load) int {
		if l.total() >= 256*mib {
			return max(b.rounds/3, 3)
		}
		return b.rounds
	}, targets, "")
}

// table measures all sizes and prints a row for each, then keeps what became of the targets.
func (b *bench) table(w io.Writer, r *rig, columns []string, rounds func(load) int, targets []target, where string) error {
	measure.Table(w, append([]string{"payload"}, columns...)...)
	for _, s := range sizes {
		out, err := b.turns(r, s.load, rounds(s.load), 1, func(way) int { return s.n })
		if err != nil {
			return fmt.Errorf("%v: %w", s.load, err)
		}
		base, has := out[theirNIXL]
		cells := []string{s.load.String()}
		for _, name := range columns {
			o, ok := out[name]
			switch {
			case !ok:
				cells = append(cells, "")
			case has && name != theirNIXL:
				cells = append(cells, fmt.Sprintf("%s (%.1fx)", measure.Milliseconds(o.both.Median()), o.both.Faster(base.both)))
			default:
				cells = append(cells, measure.Milliseconds(o.both.Median()))
			}
		}
		measure.Row(w, cells...)
		for _, t := range targets {
			ours, ok := out[t.ours]
			their, both := out[t.their]
			if t.load == s.load && ok && both {
				got := ours.both.Faster(their.both)
				b.verdict(fmt.Sprintf("%v%s, %s: %.0fx %s", t.load, where, t.ours, t.times, t.their), fmt.Sprintf("%.1fx", got), got >= t.times)
			}
		}
	}
	return nil
}

// manyTiny are put and got in a turn, fewTiny by the NixlConnector, which would take all the time.
const (
	manyTiny = 480
	fewTiny  = 48
)

func (b *bench) tiny(w io.Writer) (err error) {
	var ways []way
	for _, w := range b.ways() {
		if w.theirs || w.name == inline || w.name == ourSHM {
			w.inPlace = false
			ways = append(ways, w)
		}
	}
	r, err := b.rigOf(nil, ways)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	fmt.Fprintf(w, "\n## Tiny payloads\n\nOf 16 bytes, %d in a turn (NixlConnector: %d): all are put, then all got. Alone is one after another; else %d goroutines or threads at each end.\n"+
		"The NixlConnector is not asked for several at once from one producer: its gets remove the producer's agent under each other, and fail.\n\n", manyTiny, fewTiny, inFlight)
	measure.Table(w, "connector", "in flight", "puts/s", "gets/s", "put and get/s")
	for _, at := range []int{1, inFlight} {
		if at > 1 {
			r.ways = slices.DeleteFunc(r.ways, func(w way) bool { return w.name == theirNIXL })
		}
		out, err := b.turns(r, tiny, b.rounds, at, func(w way) int {
			if w.name == theirNIXL {
				return fewTiny
			}
			return manyTiny
		})
		if err != nil {
			return err
		}
		for _, way := range r.ways {
			o := out[way.name]
			measure.Row(w, way.name, fmt.Sprint(at), rate(o.put.Median()), rate(o.get.Median()), rate(o.both.Median()))
		}
		with, times := "alone", 2.0
		if at > 1 {
			with, times = fmt.Sprintf("%d in flight", at), 5
		}
		if nixl, ok := out[theirNIXL]; ok && at == 1 {
			got := out[inline].get.Faster(nixl.get)
			b.verdict("tiny gets, inline: 100x "+theirNIXL, fmt.Sprintf("%.0fx", got), got >= 100)
		}
		if shm, ok := out[theirSHM]; ok {
			for _, name := range []string{inline, ourSHM} {
				got := out[name].both.Faster(shm.both)
				b.verdict(fmt.Sprintf("tiny put and get, %s, %s: %.0fx %s", with, name, times, theirSHM),
					fmt.Sprintf("%.1fx; gets %.1fx", got, out[name].get.Faster(shm.get)), got >= times)
			}
		}
	}
	return nil
}

func (b *bench) namespaces(w io.Writer) (err error) {
	if _, err := exec.LookPath("ip"); err != nil || os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "stage: two network namespaces are left out: they need root and ip(8)")
		return nil
	}
	h, err := netns.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.Close()) }()
	var ways []way
	for _, w := range b.ways() {
		if w.name == theirNIXL || w.name == ourNIXL || w.name == ourTCP {
			w.open.Host, w.open.ToHost = h.AddrA, h.AddrB
			ways = append(ways, w)
		}
	}
	r, err := b.rigOf(h, ways)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	fmt.Fprintf(w, "\n## Two network namespaces\n\nJoined by a veth pair; all that NIXL does goes over TCP. As above; from 16 MiB a third of the turns.\n\n")
	return b.table(w, r, []string{theirNIXL, ourNIXL, ourTCP}, func(l load) int {
		if l.total() >= 16*mib {
			return max(b.rounds/3, 5)
		}
		return b.rounds
	}, []target{{large, ourTCP, theirNIXL, 3}}, " between namespaces")
}

func rate(d time.Duration) string { return fmt.Sprintf("%.0f", 1/d.Seconds()) }
