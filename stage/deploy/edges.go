package deploy

import (
	"math"
	"strconv"
	"strings"
)

// connect reads one side's edges of a stage: input_connectors with from_stage_N, or output_connectors with to_stage_N.
func (d *Deployment) connect(p *parser, s StageInfo, side, prefix string, named map[string]*connector) {
	list, ok := s.at.field(side)
	if !ok || list.null() {
		return
	}
	if !list.mapping() {
		p.fail(list.bad("give %sN and a connector", prefix))
		return
	}
	for _, v := range list.each() {
		digits, ok := strings.CutPrefix(v.name, prefix)
		other, err := strconv.ParseUint(digits, 10, 31)
		if !ok || err != nil {
			p.fail(v.fail(ErrUnknownKey, "did you mean %sN, with N the number of a stage?", prefix))
			continue
		}
		e := edge{from: int(other), to: s.ID}
		if side == "output_connectors" {
			e.from, e.to = s.ID, int(other)
		}
		if _, err := d.info(int(other)); err != nil {
			p.fail(v.bad("there is no stage %d in stages", other))
			continue
		}
		if e.from == e.to {
			p.fail(v.bad("that is the stage itself"))
			continue
		}
		if e.connector = p.resolve(v, named); e.connector != nil {
			d.add(p, e, v)
		}
	}
}

// resolve gives the connector that an edge refers to, or has written out.
func (p *parser) resolve(v at, named map[string]*connector) *connector {
	if v.mapping() {
		return p.connector(v, v.key)
	}
	name, ok := p.text(v)
	if !ok {
		return nil
	}
	c := named[name]
	if c == nil {
		p.fail(v.bad("there is no such connector; connectors has: %s", strings.Join(sortedKeys(named), ", ")))
	}
	return c
}

// add adds an edge. Where both of its stages describe it, the first one counts, as for the peers.
func (d *Deployment) add(p *parser, e edge, v at) {
	for _, have := range d.edges {
		switch {
		case have.from != e.from || have.to != e.to || have.connector == e.connector:
		case have.kind != e.kind:
			p.fail(v.bad("edge %d to %d is a %s here and a %s at the other stage; give both the same connector", e.from, e.to, e.kind, have.kind))
		case !same(have.node, e.node):
			p.warning(v, "the other stage describes this edge differently, and that is what counts; refer to one connector at both")
		}
		if have.from == e.from && have.to == e.to {
			return
		}
	}
	d.edges = append(d.edges, e)
}

// plainEdges adds those that only edges: or engine_input_source names. They go through shared memory, as with vLLM-Omni.
func (d *Deployment) plainEdges(p *parser, root at) {
	shared := func(from, to at) {
		a, aok := p.integer(from, 0, math.MaxInt32)
		b, bok := p.integer(to, 0, math.MaxInt32)
		if !aok || !bok {
			return
		}
		for _, end := range []struct {
			at
			id int
		}{{from, a}, {to, b}} {
			if _, err := d.info(end.id); err != nil {
				p.fail(end.bad("there is no stage %d in stages", end.id))
				return
			}
		}
		for _, have := range d.edges {
			if have.from == a && have.to == b {
				return
			}
		}
		c := &connector{at: from, kind: string(SharedMemory), Settings: Settings{Kind: SharedMemory}}
		d.edges = append(d.edges, edge{a, b, c})
	}
	if list, ok := root.field("edges"); ok && !list.null() {
		if !list.list {
			p.fail(list.bad("give a list of from and to"))
			return
		}
		for i, n := range list.items {
			e := at{node: n, key: "edges[" + strconv.Itoa(i) + "]"}
			from, ok1 := e.field("from")
			to, ok2 := e.field("to")
			if !ok1 || !ok2 {
				p.fail(e.bad("give from and to"))
				continue
			}
			shared(from, to)
		}
	}
	for _, s := range d.Stages {
		id, _ := s.at.field("stage_id")
		if sources, ok := s.at.field("engine_input_source"); ok {
			for _, n := range sources.items {
				shared(at{node: n, key: sources.key}, id)
			}
		}
	}
}
