package stage

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
	"pgregory.net/rapid"
)

// modelPayload is what the model knows of one generation of a key.
type modelPayload struct {
	memory     *fakeMemory
	generation wire.ID
	leaseEnd   time.Time
	claims     map[Claim]time.Time // until when; Generation is left out
	readers    int
	reads      map[wire.ID]bool
	condemned  bool
	retired    bool
	outcome    Outcome

	published *Published
	claimed   bool
}

func (p *modelPayload) consumed() bool { return len(p.reads) >= p.readers }

// retire ends the payload, for a reason that counts unless all its readers have it.
func (p *modelPayload) retire(why Outcome) {
	if p.retired {
		return
	}
	p.retired, p.outcome = true, why
	if p.consumed() {
		p.outcome = Read
	}
}

// left ends the payload if its last claim was to be its last.
func (p *modelPayload) left() {
	switch {
	case len(p.claims) > 0:
	case p.condemned:
		p.retire(Aborted)
	case p.consumed():
		p.retire(Read)
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// model is the store written down naively, with a memory that can always be withdrawn.
type model struct {
	s    *Store
	o    Options
	keys map[string]*modelPayload
	all  []*modelPayload
	seen []wire.ID // generations, old ones too

	verified map[claimName]time.Time // until when
	last     Claim                   // that was verified
}

// settle retires what is over, and looks whether exactly the memory of retired payloads is released.
func (m *model) settle(t *rapid.T) {
	synctest.Wait()
	now := time.Now()
	for key, p := range m.keys {
		for c, until := range p.claims {
			if !now.Before(until) {
				delete(p.claims, c)
				m.retry(p, until)
				p.left()
			}
		}
		if len(p.claims) == 0 && !now.Before(p.leaseEnd) {
			p.retire(Expired)
		}
		if p.retired {
			delete(m.keys, key)
		}
	}
	for _, p := range m.all {
		if p.memory.isReleased() != p.retired {
			t.Fatalf("generation %v: released %v, want %v", p.generation, p.memory.isReleased(), p.retired)
		}
		if isClosed(p.published.Released()) != p.retired || p.published.Outcome() != p.outcome || isClosed(p.published.Claimed()) != p.claimed {
			t.Fatalf("generation %v: released %v for %d, claimed %v; want %+v", p.generation, isClosed(p.published.Released()), p.published.Outcome(),
				isClosed(p.published.Claimed()), p)
		}
	}
	st := m.s.Stats()
	claims := 0
	for _, p := range m.keys {
		claims += len(p.claims)
	}
	if st.Payloads != len(m.keys) || st.Claims != claims || st.Withdrawing != 0 || st.Bytes != int64(len(m.keys)) {
		t.Fatalf("%+v, want %d payloads with %d claims", st, len(m.keys), claims)
	}
}

// retry is the lease of a payload after a reader failed at a time.
func (m *model) retry(p *modelPayload, at time.Time) {
	if end := at.Add(m.o.RetryGrace); p.consumed() || p.leaseEnd.Before(end) {
		p.leaseEnd = end
	}
}

func (m *model) end(c Claim, consumed bool) (held bool) {
	p := m.keys[c.Key]
	k := c
	k.Generation = wire.ID{}
	if p == nil || p.generation != c.Generation {
		return false
	}
	if _, held := p.claims[k]; !held {
		return false
	}
	delete(p.claims, k)
	if consumed && len(p.reads) < p.readers {
		p.reads[c.ID] = true
	}
	if !consumed || !p.consumed() {
		m.retry(p, time.Now())
	}
	if consumed || p.condemned { // after a failure it is kept for another try, even if all have it
		p.left()
	}
	return true
}

func (m *model) draw(t *rapid.T) Claim {
	c := Claim{Key: m.key(t), ID: wire.TextID(rapid.SampledFrom([]string{"1", "2", "3"}).Draw(t, "id")), Owner: rapid.SampledFrom([]string{"", "", "o1", "o2"}).Draw(t, "owner")}
	if p := m.keys[c.Key]; p != nil && rapid.IntRange(0, 3).Draw(t, "now") > 0 {
		c.Generation = p.generation
	} else if len(m.seen) > 0 && rapid.Bool().Draw(t, "old") {
		c.Generation = rapid.SampledFrom(m.seen).Draw(t, "generation")
	}
	return c
}

func (m *model) key(t *rapid.T) string { return rapid.SampledFrom([]string{"a", "b"}).Draw(t, "key") }

func (m *model) put(t *rapid.T) {
	key := m.key(t)
	lease := time.Duration(rapid.IntRange(1, 100).Draw(t, "lease")) * time.Second
	mem := newMemory(t)
	readers := rapid.IntRange(0, 3).Draw(t, "readers")
	published, claimed, released := NewPublished(Published{Key: key})
	g, err := m.s.Put(Put{Key: key, Metadata: wire.Metadata{Size: 1}, Memory: mem, Lease: lease, Readers: readers, Events: Events{claimed, released}})
	old := m.keys[key]
	if old != nil && len(old.claims) > 0 {
		if !errors.Is(err, ErrClaimed) {
			t.Fatal(err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if old != nil {
		old.retire(Replaced)
	}
	p := &modelPayload{memory: mem, generation: g, leaseEnd: time.Now().Add(lease), claims: make(map[Claim]time.Time),
		readers: max(1, readers), reads: make(map[wire.ID]bool), published: published}
	m.keys[key] = p
	m.all, m.seen = append(m.all, p), append(m.seen, g)
}

func (m *model) claim(t *rapid.T) {
	c := m.draw(t)
	md, err := m.s.Claim(context.Background(), c)
	p := m.keys[c.Key]
	k := c
	k.Generation = wire.ID{}
	granted := p != nil && (c.Generation.IsZero() || c.Generation == p.generation)
	if granted {
		_, held := p.claims[k]
		others := false
		for o := range p.claims {
			others = others || o.ID == c.ID && o.Owner != c.Owner
		}
		granted = !others && (held || !p.condemned)
	}
	if granted != (err == nil) {
		t.Fatalf("claim %+v: %v, want granted %v", c, err, granted)
	}
	if err == nil {
		if md.Generation != p.generation || md.Claim != c.ID {
			t.Fatalf("%+v", md)
		}
		if _, held := p.claims[k]; !held {
			delete(m.verified, claimName{p.generation, c.ID})
		}
		p.claims[k] = time.Now().Add(m.o.Transfer + m.o.Margin)
		p.claimed = true
	} else if !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrFailed) {
		t.Fatal(err)
	}
}

func (m *model) done(t *rapid.T) {
	c := m.draw(t)
	if got, want := m.s.Done(c), m.end(c, true); got != want {
		t.Fatalf("done %+v: %v, want %v", c, got, want)
	}
}

func (m *model) verify(t *rapid.T) {
	c := m.draw(t)
	name := claimName{c.Generation, c.ID}
	want := m.end(c, true)
	if want {
		m.verified[name] = time.Now().Add(m.o.RetryGrace)
	} else {
		want = time.Now().Before(m.verified[name])
	}
	if got := m.s.Verify(c); got != want {
		t.Fatalf("verify %+v: %v, want %v", c, got, want)
	}
	m.last = c
}

// verifyAgain is what a reader does that did not hear the answer: by another connection.
func (m *model) verifyAgain(t *rapid.T) {
	c := m.last
	c.Owner = rapid.SampledFrom([]string{"o1", "o2"}).Draw(t, "owner")
	p := m.keys[c.Key]
	if k := (Claim{Key: c.Key, ID: c.ID, Owner: c.Owner}); p != nil && p.generation == c.Generation {
		if _, held := p.claims[k]; held {
			return // it is verified for the first time
		}
	}
	if got, want := m.s.Verify(c), time.Now().Before(m.verified[claimName{c.Generation, c.ID}]); got != want {
		t.Fatalf("verify %+v again: %v, want %v", c, got, want)
	}
}

func (m *model) fail(t *rapid.T) {
	c := m.draw(t)
	if got, want := m.s.Fail(c), m.end(c, false); got != want {
		t.Fatalf("fail %+v: %v, want %v", c, got, want)
	}
}

func (m *model) drop(t *rapid.T) {
	owner := rapid.SampledFrom([]string{"o1", "o2"}).Draw(t, "owner")
	m.s.Drop(owner)
	for _, p := range m.keys {
		for c := range p.claims {
			if c.Owner == owner {
				delete(p.claims, c)
				m.retry(p, time.Now())
				p.left()
			}
		}
	}
}

func (m *model) cleanup(t *rapid.T) {
	key := m.key(t)
	err := m.s.Cleanup(key)
	p := m.keys[key]
	if claimed := p != nil && len(p.claims) > 0; claimed != errors.Is(err, ErrClaimed) || !claimed && err != nil {
		t.Fatal(err)
	}
	if p != nil && err == nil {
		p.retire(CleanedUp)
	}
}

func (m *model) abort(t *rapid.T) {
	key := m.key(t)
	m.s.Abort(key, "reason")
	if p := m.keys[key]; p != nil {
		p.condemned = true
		if len(p.claims) == 0 {
			p.retire(Aborted)
		}
	}
}

func (m *model) sleep(t *rapid.T) {
	time.Sleep(time.Duration(rapid.IntRange(1, 60).Draw(t, "seconds")) * time.Second)
}

func TestTheStoreBehavesAsItsModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(struct{ rapid.TB }{t}, func(t *rapid.T) { // not a *testing.T: a bubble has no Deadline
			o := Options{Transfer: 30 * time.Second, Margin: 10 * time.Second, RetryGrace: 15 * time.Second, FailureKept: 20 * time.Second}
			s, err := NewStore(o)
			if err != nil {
				t.Fatal(err)
			}
			m := &model{s: s, o: o, keys: make(map[string]*modelPayload), verified: make(map[claimName]time.Time)}
			defer func() {
				ctx, cancel := context.WithCancel(context.Background())
				cancel()
				if err := s.Close(ctx, time.Second); err != nil {
					t.Error(err)
				}
				for _, p := range m.all {
					if !p.memory.isReleased() {
						t.Error(fmt.Sprintf("generation %v is left after Close", p.generation))
					}
					if !isClosed(p.published.Released()) || p.published.Outcome() == 0 {
						t.Error(fmt.Sprintf("generation %v: nobody was told of its end", p.generation))
					}
				}
			}()
			t.Repeat(map[string]func(*rapid.T){
				"put": m.put, "claim": m.claim, "claim again": m.claim, "done": m.done, "verify": m.verify, "verify again": m.verifyAgain, "fail": m.fail, "drop": m.drop,
				"cleanup": m.cleanup, "abort": m.abort, "sleep": m.sleep, "": m.settle,
			})
		})
	})
}
