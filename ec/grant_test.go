package ec

import (
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
)

// grantModel says what a producer should hold.
type grantModel struct {
	*stand
	live  map[[2]string]*modelGrant // by session and key
	ended []*wire.Ack
}

type modelGrant struct {
	ack     *wire.Ack
	expires time.Time
}

// TestGrantsBehaveAsTheirModel asks, renews, verifies, gives up and lets time pass, and compares pins with a plain model.
func TestGrantsBehaveAsTheirModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			m := &grantModel{stand: newStand(t, 32, nil), live: map[[2]string]*modelGrant{}}
			keys := []string{"a", "b", "c"}
			for _, k := range keys {
				save(t, m.cache, k, 2)
			}
			session := rapid.SampledFrom([]string{"s-1", "s-2", "s-3"})
			key := rapid.SampledFrom(append(keys, "absent"))
			conn := rapid.SampledFrom([]string{"c-1", "c-2"})
			for range rapid.IntRange(1, 60).Draw(rt, "steps") {
				switch rapid.IntRange(0, 3).Draw(rt, "what") {
				case 0:
					m.askFor(rt, session.Draw(rt, "session"), key.Draw(rt, "key"), conn.Draw(rt, "connection"))
				case 1:
					m.settle(rt, session.Draw(rt, "session"), key.Draw(rt, "key"), rapid.Bool().Draw(rt, "failed"))
				case 2:
					m.settleEnded(rt)
				case 3:
					time.Sleep(time.Duration(rapid.IntRange(1, 20).Draw(rt, "seconds")) * time.Second)
				}
				synctest.Wait()
				m.compare(rt, keys)
			}
		})
	})
}

func (m *grantModel) askFor(t *rapid.T, session, key, conn string) {
	r := m.request(key)
	r.Session = session
	a := m.from(r, control.Source{ID: conn, Addr: "10.0.0.1"})
	if key == "absent" {
		if a.Status != wire.NackMissing {
			t.Fatalf("absent: %v", a.Status)
		}
		return
	}
	if a.Status != wire.OK {
		t.Fatalf("%s: %v", key, a.Status)
	}
	id := [2]string{session, key}
	if g := m.live[id]; g != nil && g.ack.Ferry.Grant != a.Ferry.Grant {
		t.Fatalf("%v was granted twice at a time", id)
	}
	m.live[id] = &modelGrant{a, time.Now().Add(30 * time.Second)}
}

func (m *grantModel) settle(t *rapid.T, session, key string, failed bool) {
	id := [2]string{session, key}
	g := m.live[id]
	if g == nil {
		return
	}
	answers := m.verify(g.ack, func(v *wire.Verify) { v.Failed = failed })
	if !failed && !answers[0].(*wire.Verified).OK {
		t.Fatalf("%v was not verified", id)
	}
	delete(m.live, id)
	m.ended = append(m.ended, g.ack)
}

// settleEnded verifies a grant that is over.
func (m *grantModel) settleEnded(t *rapid.T) {
	if len(m.ended) == 0 {
		return
	}
	a := rapid.SampledFrom(m.ended).Draw(t, "ended")
	if m.verify(a, nil)[0].(*wire.Verified).OK {
		t.Fatal("a grant that is over was verified")
	}
}

func (m *grantModel) compare(t *rapid.T, keys []string) {
	pins := map[string]int{}
	for id, g := range m.live {
		if !time.Now().Before(g.expires) {
			delete(m.live, id)
			m.ended = append(m.ended, g.ack)
			continue
		}
		pins[id[1]]++
	}
	for _, k := range keys {
		if i, _ := m.cache.Lookup(k); i.Pins != pins[k] {
			t.Fatalf("%s has %d pins, want %d", k, i.Pins, pins[k])
		}
	}
	distinct := 0
	for _, n := range pins {
		if n > 0 {
			distinct++
		}
	}
	s := m.producer.Stats()
	m.producer.mu.Lock()
	defer m.producer.mu.Unlock()
	table := &m.producer.grants
	if s.Grants != len(m.live) || len(table.byKey) != len(m.live) || table.leases.Len() != len(m.live) || s.GrantedBlocks != 2*distinct {
		t.Fatalf("%d grants, want %d: %+v", s.Grants, len(m.live), s)
	}
	sessions := 0
	for _, c := range table.sessions {
		for _, n := range c {
			sessions += n
		}
	}
	if sessions != len(m.live) {
		t.Fatalf("%d grants by session, want %d", sessions, len(m.live))
	}
	if len(m.live) == 0 && len(m.producer.order[0].ownHeld.bySource)+len(table.sessions) != 0 {
		t.Fatal("a source or session is kept without grants")
	}
}
