package logqueue

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// gate is a pipe that is read only while it is open.
type gate struct {
	open chan struct{}
	mu   sync.Mutex
	got  bytes.Buffer
	err  error
}

func newGate() *gate { return &gate{open: make(chan struct{})} }

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.err != nil {
		return 0, g.err
	}
	return g.got.Write(p)
}

func (g *gate) text() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.got.String()
}

func notice(dropped int) []byte { return fmt.Appendf(nil, "dropped %d\n", dropped) }

func TestWhatIsReadIsWholeAndInOrder(t *testing.T) {
	g := newGate()
	close(g.open)
	w := New(g, notice)
	var want strings.Builder
	var buf []byte // one for all lines, as slog's handlers do
	for i := range 10_000 {
		buf = fmt.Appendf(buf[:0], "line %d\n", i)
		want.Write(buf)
		if n, err := w.Write(buf); n != len(buf) || err != nil {
			t.Fatal(n, err)
		}
	}
	if !w.Flush(time.Minute) || g.text() != want.String() {
		t.Errorf("%d bytes, want %d", len(g.text()), want.Len())
	}
}

func TestNobodyWaitsForAReaderThatHasStoppedAndTheDroppedAreCountedInTheirPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newGate()
		w := New(g, notice)
		const size = Most / 16
		write := func(first, last int) {
			for i := first; i <= last; i++ {
				b := bytes.Repeat([]byte{'.'}, size)
				copy(b, fmt.Sprintf("%02d", i))
				b[size-1] = '\n'
				if n, err := w.Write(b); n != size || err != nil {
					t.Fatal(n, err)
				}
			}
		}
		write(1, 20) // 4 too many, that which is being written counted
		if w.Flush(time.Second) {
			t.Error("flushed, and nothing was read")
		}
		g.open <- struct{}{} // line 1 is read
		synctest.Wait()
		write(21, 22) // there is room for one of them
		close(g.open)
		if !w.Flush(time.Second) {
			t.Error("not flushed, and all was read")
		}
		write(23, 23)
		if !w.Flush(time.Second) {
			t.Error("not flushed")
		}
		var got []string
		for l := range strings.Lines(g.text()) {
			got = append(got, strings.TrimRight(l, ".\n"))
		}
		const want = "01,02,03,04,05,06,07,08,09,10,11,12,13,14,15,16,dropped 4,21,dropped 1,23"
		if text := strings.Join(got, ","); text != want {
			t.Errorf("%s, want %s", text, want)
		}
		if !w.Flush(0) {
			t.Error("something waits")
		}
	})
}

func TestAWriteThatFailsEndsNothing(t *testing.T) {
	g := newGate()
	g.err = errors.New("no space")
	close(g.open)
	w := New(g, notice)
	_, _ = w.Write([]byte("lost\n"))
	if !w.Flush(time.Minute) {
		t.Fatal("not flushed")
	}
	g.mu.Lock()
	g.err = nil
	g.mu.Unlock()
	_, _ = w.Write([]byte("there\n"))
	if !w.Flush(time.Minute) || g.text() != "there\n" {
		t.Errorf("%q", g.text())
	}
}
