package measure

import (
	"errors"
	"testing"
	"time"
)

func fixed(name string, times ...time.Duration) Candidate {
	i := -1
	return Candidate{Name: name, Run: func() (time.Duration, error) { i++; return times[i], nil }}
}

func TestCandidatesAreComparedTurnByTurn(t *testing.T) {
	res, err := Run(1, 3, []Candidate{fixed("a", 99, 10, 20, 30), fixed("b", 99, 5, 40, 10)})
	if err != nil {
		t.Fatal(err)
	}
	if m := res[0].Median(); m != 20 {
		t.Errorf("median %d", m)
	}
	if f := res[1].Faster(res[0]); f != 2 { // 2, 1/2 and 3 times
		t.Errorf("ratio %v", f)
	}
	if lo, hi := res[0].Quartiles(); lo != 10 || hi != 30 {
		t.Errorf("quartiles %d and %d", lo, hi)
	}
}

func TestACandidateThatFailsEndsTheRun(t *testing.T) {
	bad := errors.New("bad")
	_, err := Run(0, 3, []Candidate{Timed("good", func() error { return nil }), Timed("bad", func() error { return bad })})
	if !errors.Is(err, bad) {
		t.Errorf("error %v", err)
	}
}

func TestSizesReadAsPeopleWriteThem(t *testing.T) {
	for n, want := range map[int64]string{5: "5 B", 64 << 10: "64 KiB", 3 << 20: "3 MiB", 1<<20 + 1: "1048577 B"} {
		if got := Size(n); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}
}
