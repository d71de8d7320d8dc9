package ec

import "testing"

// C41.
func TestEveryEventIsDefinedInEveryState(t *testing.T) {
	for s := state(0); s < states; s++ {
		for e := event(0); e < events; e++ {
			if table[s][e].kind == undefined {
				t.Errorf("state %d (%v), event %d: undefined", s, s, e)
			}
		}
		for _, e := range []event{evBudget, evAbandoned} {
			if m := table[s][e]; m.kind != goes || m.to != done {
				t.Errorf("state %d (%v) does not end at event %d: %+v", s, s, e, m)
			}
		}
	}
}

func TestTheDestinationHasOneFateAtEveryEnd(t *testing.T) {
	for s := state(0); s < states; s++ {
		for e := event(0); e < events; e++ {
			m := table[s][e]
			if m.kind != goes {
				continue
			}
			// In reading, the destination may be written until one of these.
			over := e == evRead || e == evReadFailed || e == evGaveUp || e == evBeyond
			var want fate
			switch {
			case m.to != done, s == queued:
				want = keep
			case s == reading && !over:
				want = quarantine
			case e == evVerified:
				want = commit
			default:
				want = free
			}
			if m.dest != want {
				t.Errorf("state %d (%v), event %d: destination's fate is %d, want %d", s, s, e, m.dest, want)
			}
			// A grant is in hand from opening on, and over once its READ was verified.
			if letGo := s >= opening && (m.to == done || m.to == pausing) && e != evVerified; m.letGo != letGo {
				t.Errorf("state %d (%v), event %d: lets go of the grant: %v, want %v", s, s, e, m.letGo, letGo)
			}
		}
	}
}
