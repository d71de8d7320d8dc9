package interop

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
)

// A region of 1 GiB has 524,288 blocks here, and an ack to vLLM describes each: 7 MB. What is at its end has large block numbers, and
// lies more than 512 MiB from its start.
func TestRegionsOfOneGiBBothWays(t *testing.T) {
	c := launchConsumer(t, "--region", "1G")
	p := launchProducer(t, "--region", "1G", "--count", "1", "--size", "64M")
	n := startNode(t, "--ec-cpu-bytes", "1GiB")
	sizes := entries(100, 4, 2*kib, 64*kib, 3*mib, 6*kib)
	small := 0
	for _, size := range sizes {
		small += size / block
	}

	t.Run("a node reads the end of vLLM's", func(t *testing.T) {
		p.ready()
		free := p.stat("free_blocks")
		p.do(fmt.Sprintf("exec bool(sch._cache.alloc('filler', %d))", free-small))
		all := maps.Clone(p.Entries)
		p.insert(sizes)
		maps.Copy(all, sizes)
		if free := p.stat("free_blocks"); free != 0 {
			t.Fatalf("%d blocks of vLLM's are free, so something does not lie at its end", free)
		}
		n.wantOutcomes(n.fetch(p.Params, time.Minute), all, ec.FetchReady)
	})
	t.Run("vLLM reads the end of a node's", func(t *testing.T) {
		for key := range sizes {
			must(t, n.client.Remove(t.Context(), key))
		}
		const spare = 64 * block
		r, err := n.client.Reserve(t.Context(), "filler", n.layout.spec(1<<30-64*mib-small*block-spare))
		must(t, err)
		must(t, r.Commit(t.Context()))
		filler, err := n.client.Map(t.Context(), "filler") // so that it stays
		must(t, err)
		defer filler.Release()
		n.put(sizes)
		maps.Copy(sizes, p.Entries) // which came from vLLM
		last := uint32(0)
		all, err := n.client.List(t.Context())
		must(t, err)
		for _, i := range all {
			for _, e := range i.Extents {
				last = max(last, e.Start+e.Count)
			}
		}
		if last < (1<<30-spare)/block {
			t.Errorf("block %d is the last that is used", last)
		}
		c.ready()
		c.pullAll(n.address(), sizes)
		c.alive()
	})
}

// layouts are what models differ in.
var layouts = []struct {
	name string
	layout
	rows []int
}{
	{"7 KiB blocks of a 7B model", layout{"bfloat16", 2, 3584, 3584}, []int{1, 5, 256, 1196}},
	{"blocks of 4,000 bytes, the last part filled", layout{"float32", 4, 1000, 777}, []int{1, 2, 3, 17, 331}},
	{"rows of many blocks, the last part filled", layout{"float16", 2, 100, 333}, []int{1, 2, 61}},
}

func (l layout) row() int { return l.width * l.item }

// entries are keys from first on with so many rows each.
func (l layout) entries(first int, rows []int) map[string]int {
	out := map[string]int{}
	for i, r := range rows {
		out[key(first+i)] = r * l.row()
	}
	return out
}

// What a node has pulled from one vLLM, another one pulls from the node, by the node's own announcements.
func TestLayoutsBothWays(t *testing.T) {
	for _, l := range layouts {
		t.Run(l.name, func(t *testing.T) {
			var sizes []string
			for _, r := range l.rows {
				sizes = append(sizes, fmt.Sprint(r*l.row()))
			}
			c := launchConsumer(t, l.args()...)
			p := launchProducer(t, append(l.args(), "--count", fmt.Sprint(len(sizes)), "--size", strings.Join(sizes, ","))...)
			n := startNode(t, l.flags()...)
			n.layout = l.layout
			p.ready()
			if len(p.Entries) != len(sizes) {
				t.Fatalf("vLLM has %v", p.Entries)
			}
			n.wantOutcomes(n.fetch(p.Params, time.Minute), p.Entries, ec.FetchReady)
			own := l.entries(100, l.rows)
			n.put(own)
			maps.Copy(own, p.Entries)
			c.ready()
			c.pullAnnounced(n, own)
			c.evict()
			c.pullAll(n.address(), own)
			c.alive()
		})
	}
}
