package interop

import (
	"bytes"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
)

// destination is memory that a READ is to fill, and that has nothing of the entry yet. The READ has to go by tcp (UCX_TLS): over shared
// memory it is over at once.
type destination struct {
	t     testing.TB
	looks []look
}

// look is at one of its words of 8 bytes.
type look struct{ have, want []byte }

// newDestination has looks all over an entry. blocks are of the memory, in the entry's order.
func newDestination(t testing.TB, key string, memory []byte, blocks []int) *destination {
	t.Helper()
	const looks = 64
	if len(blocks) < looks {
		t.Fatalf("%s is to be READ into %d blocks, want %d at least", key, len(blocks), looks)
	}
	d := &destination{t: t}
	for i := range looks {
		k := i * (len(blocks) - 1) / (looks - 1)
		d.looks = append(d.looks, look{memory[blocks[k]*block:][:8], word(key, k*block/8)})
	}
	return d
}

// partly says whether some of the entry's bytes are there and some are not.
func (d *destination) partly() bool {
	there := 0
	for _, l := range d.looks {
		if bytes.Equal(l.have, l.want) {
			there++
		}
	}
	return there > 0 && there < len(d.looks)
}

// stopHalfWay lets go of the acks that the READ waits for, and stops the process that the bytes come from when some have come.
func (d *destination) stopHalfWay(g *gate, pid int) {
	d.t.Helper()
	g.release()
	for end := time.Now().Add(patience); !d.partly(); time.Sleep(20 * time.Microsecond) {
		if time.Now().After(end) {
			d.t.Fatal("no READ was seen half way")
		}
	}
	must(d.t, syscall.Kill(pid, syscall.SIGSTOP))
	if !d.partly() {
		d.t.Fatal("the READ was over before its source could be stopped")
	}
}

// destinationOf is where the node's fetch of key, which has begun, is to write.
func (n *nodeProcess) destinationOf(key string) *destination {
	n.t.Helper()
	m, err := region.Open(n.client.Pool().Region)
	must(n.t, err)
	n.t.Cleanup(func() { _ = m.Close() })
	var blocks []int
	for _, e := range n.lookup(key)[0].Extents {
		for b := range e.Count {
			blocks = append(blocks, int(e.Start+b))
		}
	}
	return newDestination(n.t, key, m.Pool(), blocks)
}

// destinationOf is where vLLM's READ of key, for which it has asked, is to write.
func (c *consumer) destinationOf(key string) *destination {
	c.t.Helper()
	f, err := os.Open(c.Region)
	must(c.t, err)
	defer f.Close()
	s, err := f.Stat()
	must(c.t, err)
	memory, err := syscall.Mmap(int(f.Fd()), 0, int(s.Size()), syscall.PROT_READ, syscall.MAP_SHARED)
	must(c.t, err)
	c.t.Cleanup(func() { _ = syscall.Munmap(memory) })
	return newDestination(c.t, key, memory, c.pulls()[key].Blocks)
}

func (n *nodeProcess) lookup(keys ...string) []ec.Info {
	n.t.Helper()
	i, err := n.client.Lookup(n.t.Context(), keys...)
	must(n.t, err)
	return i
}

func (n *nodeProcess) stats() ec.Stats {
	n.t.Helper()
	s, err := n.client.Stats(n.t.Context())
	must(n.t, err)
	return s
}

// fill has one entry take all of the pool that is not pinned, and writes over it, so that everything else goes.
func (n *nodeProcess) fill() {
	n.t.Helper()
	s := n.stats()
	r, err := n.client.Reserve(n.t.Context(), "filler", n.layout.spec((s.Blocks-s.PinnedBlocks)*block))
	must(n.t, err)
	for _, b := range r.Buffers() {
		clear(b)
	}
	must(n.t, r.Commit(n.t.Context()))
	must(n.t, n.client.Remove(n.t.Context(), "filler"))
}
