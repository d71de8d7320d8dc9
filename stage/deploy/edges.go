package deploy

import (
	"fmt"
	"maps"
	"math"
	"slices"
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
		p.fail(v.bad("there is no such connector; connectors has: %s", strings.Join(slices.Sorted(maps.Keys(named)), ", ")))
	}
	return c
}

// add adds an edge. Where both of its stages describe it, the first one counts, as for the peers.
func (d *Deployment) add(p *parser, e edge, v at) {
	have, ok := d.between(e.from, e.to)
	switch {
	case !ok:
		d.edges = append(d.edges, e)
	case have.connector == e.connector:
	case have.kind != e.kind:
		p.fail(v.bad("edge %d to %d is a %s here and a %s at the other stage; give both the same connector", e.from, e.to, e.kind, have.kind))
	case !same(have.node, e.node):
		p.warning(v, "the other stage describes this edge differently, and that is what counts; refer to one connector at both")
	}
}

func (d *Deployment) between(from, to int) (edge, bool) {
	i := slices.IndexFunc(d.edges, func(e edge) bool { return e.from == from && e.to == to })
	if i < 0 {
		return edge{}, false
	}
	return d.edges[i], true
}

// plainEdges adds those that only edges: or a stage's engine_input_source names.
func (d *Deployment) plainEdges(p *parser, root at) {
	list, ok := root.field("edges")
	if ok && !list.null() && !list.list {
		p.fail(list.bad("give a list of from and to"))
	}
	if ok {
		for i, n := range list.items {
			e := at{node: n, key: fmt.Sprintf("edges[%d]", i)}
			from, ok1 := e.field("from")
			to, ok2 := e.field("to")
			if !ok1 || !ok2 {
				p.fail(e.bad("give from and to"))
				continue
			}
			d.plainEdge(p, from, to)
		}
	}
	for _, s := range d.Stages {
		to, _ := s.at.field("stage_id")
		if sources, ok := s.at.field("engine_input_source"); ok {
			for i, n := range sources.items {
				d.plainEdge(p, at{node: n, key: fmt.Sprintf("%s[%d]", sources.key, i)}, to)
			}
		}
	}
}

// plainEdge adds an edge through shared memory, as vLLM-Omni does, unless there is one.
func (d *Deployment) plainEdge(p *parser, from, to at) {
	var ids [2]int
	for i, end := range []at{from, to} {
		id, ok := p.integer(end, 0, math.MaxInt32)
		if !ok {
			return
		}
		if _, err := d.info(id); err != nil {
			p.fail(end.bad("there is no stage %d in stages", id))
			return
		}
		ids[i] = id
	}
	if _, ok := d.between(ids[0], ids[1]); !ok {
		c := &connector{at: from, kind: string(SharedMemory), Settings: Settings{Kind: SharedMemory}}
		d.edges = append(d.edges, edge{ids[0], ids[1], c})
	}
}
