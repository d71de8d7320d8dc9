package region

import (
	"cmp"
	"fmt"
	"slices"
)

// Audit is what a look at a whole slot table finds.
type Audit struct {
	Free, Filling, Ready int
	Torn                 int   // filling, without a record: the owner writes it just now, or died of it. No byte of it was handed out
	Bytes                int64 // of ready entries
	Blocks               int   // of filling and ready entries
	Problems             []error
}

// maxProblems bounds what a table of garbage has to say.
const maxProblems = 100

// Audit loads every slot and checks that no two have a block in common, which a truthful table never says. Problems wrap
// ErrFormat. Beside a live owner entries that come and go during the call may look like a problem: audit again.
func (t *SlotTable) Audit() Audit {
	type piece struct {
		Extent
		slot int
	}
	var a Audit
	problem := func(err error) {
		if len(a.Problems) < maxProblems {
			a.Problems = append(a.Problems, err)
		}
	}
	var pieces []piece
	for i := range t.Len() {
		s, err := t.Load(i)
		if err != nil {
			problem(err)
			continue
		}
		switch {
		case s.State == SlotFree:
			a.Free++
			continue
		case s.Key == "":
			a.Torn++
			continue
		case s.State == SlotFilling:
			a.Filling++
		default:
			a.Ready++
			a.Bytes += s.Bytes
		}
		for _, e := range s.Extents {
			a.Blocks += int(e.Count)
			pieces = append(pieces, piece{e, i})
		}
	}
	slices.SortFunc(pieces, func(a, b piece) int { return cmp.Compare(a.Start, b.Start) })
	for i := 1; i < len(pieces); i++ {
		if p, q := pieces[i-1], pieces[i]; uint64(p.Start)+uint64(p.Count) > uint64(q.Start) {
			problem(fmt.Errorf("%w: slots %d and %d share block %d", ErrFormat, p.slot, q.slot, q.Start))
		}
	}
	return a
}
