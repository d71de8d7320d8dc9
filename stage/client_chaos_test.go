package stage

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"pgregory.net/rapid"
)

// What a producer may do with a request instead of what it should.
const (
	serves      = iota
	dropsIt     // no answer
	losesAnswer // does it, no answer
	isLate      // does it when the next request comes
	says        // not found, lost
	talks       // an answer that makes no sense
	breaks      // metadata that cannot be used
	deeds
)

func TestWhateverAProducerDoesNothingWrongIsDeliveredAndNothingIsLeft(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			values := []tensor.Node{full(0), full(100), full(100_000)}
			for i, v := range values {
				p.put(itoa(i), v)
			}
			s := newPlainSlab(t, 1<<20)
			c := newClient(t, ClientOptions{Slab: s, Answer: 20 * time.Millisecond, Query: time.Millisecond})
			rapid.Check(t, func(t *rapid.T) { chaos(t, p, c, values) })
		})
	}
}

// chaos runs a few gets at once against a producer that does what was drawn.
func chaos(t *rapid.T, p *producer, c *Client, values []tensor.Node) {
	givenUp := c.Stats().GivenUp
	deed := rapid.SliceOfN(rapid.IntRange(0, deeds-1), 0, 12).Draw(t, "deeds")
	var mu sync.Mutex
	var late []asked
	p.onAsk(func(q asked) bool {
		mu.Lock()
		defer mu.Unlock()
		for _, l := range late {
			l.serve()
		}
		late = nil
		if len(deed) == 0 {
			return false
		}
		d := deed[0]
		deed = deed[1:]
		return misdeed(q, d, func() { late = append(late, q) })
	})

	var all sync.WaitGroup
	for i := range rapid.IntRange(1, 4).Draw(t, "gets") {
		key := rapid.IntRange(0, len(values)-1).Draw(t, "key")
		r := Request{Key: itoa(key), From: p.endpoint(), Wait: rapid.Bool().Draw(t, "wait"), InPlace: rapid.Bool().Draw(t, "in place")}
		within := time.Duration(rapid.SampledFrom([]int{0, 200, 1000, 5000, 50_000, 1_000_000}).Draw(t, "within")) * time.Microsecond
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), within)
			defer cancel()
			g, err := c.Get(ctx, r)
			if err != nil {
				return
			}
			right := tensor.Equal(g.Root, values[key])
			if err := g.Release(); err == nil && !right {
				t.Errorf("get %d of key %d gave other bytes", i, key)
			} else if err != nil && !errors.Is(err, ErrLost) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	mu.Lock()
	deed = nil
	for _, l := range late {
		l.serve()
	}
	late = nil
	mu.Unlock()
	for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		c.sweepIdle() // gives up what was never answered
		st := c.Stats()
		left := p.held()
		if p.plain { // its claims that could not be ended in time, on a slow machine, are counted
			left -= int(st.GivenUp - givenUp)
		}
		if left <= 0 && st.Pending == 0 && c.o.Slab.(*slab.Slab).Used() == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("left: %d claims, %d bytes, %+v", p.held(), c.o.Slab.(*slab.Slab).Used(), st)
		}
	}
	p.mu.Lock()
	p.seen = nil
	clear(p.claims)
	p.mu.Unlock()
}

// misdeed does one, and says whether q is dealt with.
func misdeed(q asked, d int, later func()) bool {
	switch d {
	case dropsIt:
		// A producer of ours that does not answer at all ends nothing either: only its connection's end does.
		return q.p.plain || q.Op == wire.Get
	case losesAnswer:
		if q.Op != wire.Get || !q.p.plain {
			return false
		}
		q.p.mu.Lock()
		defer q.p.mu.Unlock()
		q.p.claims[q.Claim] = q
		return true
	case isLate:
		later()
		return true
	case says:
		if q.Op == wire.Done {
			return false
		}
		q.p.mu.Lock()
		defer q.p.mu.Unlock()
		if held, there := q.p.claims[q.Claim]; there && (q.p.plain || held.from.ID == q.from.ID) {
			delete(q.p.claims, q.Claim)
		}
		status := wire.Lost
		if q.Op == wire.Get {
			status = wire.NotFound
		}
		q.answer(wire.Reply{Status: status})
		return true
	case talks:
		if q.Op != wire.Get {
			return false
		}
		q.answer(wire.Reply{Status: wire.Acked})
		return true
	case breaks:
		if q.Op != wire.Get {
			return false
		}
		q.p.mu.Lock()
		defer q.p.mu.Unlock()
		q.p.claims[q.Claim] = q
		if !q.send(broken(q, "a wrong size")) && !q.p.plain {
			delete(q.p.claims, q.Claim)
		}
		return true
	}
	return false
}
