package main

import (
	"errors"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
)

// Names of the candidates.
const (
	theirNIXL = "NixlConnector"
	theirSHM  = "SharedMemoryConnector"
	ourNIXL   = "nixl"
	ourTCP    = "tcp"
	ourMapped = "mapped"
	inPlace   = "mapped, in place"
	inline    = "inline"
	ourSHM    = "shm"
	twoCopies = "two memcpys and a byte there and back"

	limitConnector = "limit"
)

// way is one candidate.
type way struct {
	name    string
	theirs  bool
	open    request // of its connector, which several may share by its name
	inPlace bool
	most    int64 // bytes of a payload; 0: any
}

const noInline = -1

func link(name string, inline int64, planes ...string) way {
	return way{name: name, open: request{Name: name, Connector: "link", Host: "127.0.0.1", Planes: planes, Inline: inline}}
}

// ways are the candidates on one machine.
func (b *bench) ways() []way {
	var all []way
	if b.script != "" {
		all = append(all,
			way{name: theirNIXL, theirs: true, open: request{Name: theirNIXL, Connector: "nixl", Host: "127.0.0.1"}},
			way{name: theirSHM, theirs: true, open: request{Name: theirSHM, Connector: "shm"}})
	}
	if b.hasNIXL {
		all = append(all, link(ourNIXL, noInline, "nixl"))
	}
	view := link(ourMapped, noInline, "mapped")
	view.name, view.inPlace = inPlace, true
	small := link(inline, 64*kib, "mapped")
	small.most = 64 * kib
	return append(all, link(ourTCP, noInline, "tcp"), link(ourMapped, noInline, "mapped"), view, small,
		way{name: ourSHM, open: request{Name: ourSHM, Connector: "shm"}, inPlace: true},
		way{name: twoCopies, open: request{Name: twoCopies, Connector: limitConnector}})
}

func (b *bench) leakCandidates() []way {
	all := []way{link("mapped and inline", 0, "mapped"), link(ourTCP, noInline, "tcp")}
	if b.hasNIXL {
		all = append(all, link(ourNIXL, noInline, "nixl"))
	}
	return append(all, way{name: ourSHM, open: request{Name: ourSHM, Connector: "shm"}})
}

// rig is the ends of one section, with all connectors open.
type rig struct {
	our, their *pair // their may be nil
	ways       []way
}

func (r *rig) of(w *way) *pair {
	if w.theirs {
		return r.their
	}
	return r.our
}

func (r *rig) openAll() error {
	opened := map[string]bool{}
	for i := range r.ways {
		w := &r.ways[i]
		if opened[w.open.Name] {
			continue
		}
		opened[w.open.Name] = true
		if err := r.of(w).open(&w.open); err != nil {
			return err
		}
	}
	return nil
}

func (r *rig) close() error { return errors.Join(r.our.close(), r.their.close()) }

// roundTrip puts n payloads and gets them, and gives the time of each for one.
func (b *bench) roundTrip(p *pair, w way, l load, n, inFlight int, check bool) (put, get time.Duration, err error) {
	keys := b.keys(n)
	a, err := p.from.ask(request{Op: "put", Name: w.open.Name, Load: &l, Keys: keys, InFlight: inFlight})
	if err != nil {
		return 0, 0, err
	}
	g, err := p.to.ask(request{Op: "get", Name: w.open.Name, Load: &l, Keys: keys, InFlight: inFlight, Metadata: a.Metadata, InPlace: w.inPlace, Check: check})
	return a.took() / time.Duration(n), g.took() / time.Duration(n), err
}

// outcome is what one candidate took, turn by turn.
type outcome struct {
	way       way
	put, both measure.Result
	get       measure.Result
}

// turns lets the candidates take turns of n payloads each; of says which n if they differ.
func (b *bench) turns(r *rig, l load, rounds, inFlight int, n func(way) int) (map[string]outcome, error) {
	var cs []measure.Candidate
	out := map[string]*outcome{}
	for _, w := range r.ways {
		if w.most > 0 && l.total() > w.most {
			continue
		}
		if _, _, err := b.roundTrip(r.of(&w), w, l, 1, 1, true); err != nil {
			return nil, err
		}
		o := &outcome{way: w}
		out[w.name] = o
		cs = append(cs, measure.Candidate{Name: w.name, Run: func() (time.Duration, error) {
			put, get, err := b.roundTrip(r.of(&w), w, l, n(w), inFlight, false)
			o.put.Times, o.get.Times = append(o.put.Times, put), append(o.get.Times, get)
			return put + get, err
		}})
	}
	results, err := measure.Run(warmUp, rounds, cs)
	if err != nil {
		return nil, err
	}
	done := map[string]outcome{}
	for _, both := range results {
		o := out[both.Name]
		o.both, o.put.Times, o.get.Times = both, o.put.Times[warmUp:], o.get.Times[warmUp:]
		done[both.Name] = *o
	}
	return done, nil
}
