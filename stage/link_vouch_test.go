package stage

import (
	"errors"
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/tensor"
)

// With the producer's slot table in sight a reader does not ask whether its claim held; without, it does.
func TestAReaderThatSeesTheSlotTableDoesNotAsk(t *testing.T) {
	for name, c := range map[string]struct {
		tcp, inPlace    bool
		verifies, dones uint64
	}{
		"copied":   {dones: 1},
		"in place": {inPlace: true, dones: 1},
		"by tcp":   {tcp: true, verifies: 1},
	} {
		t.Run(name, func(t *testing.T) {
			from := newLink(t, 4<<20, noInline)
			set := []func(*LinkOptions){noInline, onlyGets}
			if c.tcp {
				set = append(set, onlyTCP(t, 4<<20))
			} else {
				set = append(set, func(o *LinkOptions) { o.Slab = sharedSlab(t, 4<<20) })
			}
			to := newLink(t, 0, set...)
			v := bytesOf(t, 100_000, 1)
			p := mustPut(t, from, "k", v, PutOptions{})
			consume(t, to, Request{Key: "k", Metadata: p.Metadata, InPlace: c.inPlace}, v)
			if receive(t, p.Released()); p.Outcome() != Read {
				t.Errorf("outcome %v", p.Outcome())
			}
			if st := from.Stats().Server; st.Verifies != c.verifies || st.Dones != c.dones {
				t.Errorf("%d verifies and %d dones, want %d and %d", st.Verifies, st.Dones, c.verifies, c.dones)
			}
		})
	}
}

// A claim whose time was over may be another reader's by now, whatever is in the memory: it is asked for.
func TestAReaderThatWasTooSlowAsksWhetherItsClaimHeld(t *testing.T) {
	from := newLink(t, 4<<20, noInline, func(o *LinkOptions) { o.Store.Transfer, o.Store.Margin = time.Millisecond, time.Hour })
	to := newLink(t, 4<<20, noInline, onlyGets)
	v := bytesOf(t, 100_000, 1)
	p := mustPut(t, from, "k", v, PutOptions{})
	got := mustGet(t, to, Request{Key: "k", Metadata: p.Metadata, InPlace: true})
	begin := time.Now()
	eventually(t, "the claim's time is over", func() bool { return time.Since(begin) > time.Millisecond })
	if err := got.Release(); err != nil {
		t.Error(err)
	}
	if st := from.Stats().Server; st.Verifies != 1 || st.Dones != 0 {
		t.Errorf("%d verifies and %d dones", st.Verifies, st.Dones)
	}
}

// A tensor in a mapped file that is cut off under the copy is the caller's panic, on whichever core it is copied.
func TestAFaultUnderTheCopyOfAPutIsTheCallersPanic(t *testing.T) {
	const n = 2 * streamBytes
	f, err := os.Create(filepath.Join(t.TempDir(), "cut"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	from, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(from) }()
	v, err := tensor.New(tensor.Uint8, tensor.Shape{n}, from)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(n - streamBytes/2); err != nil {
		t.Fatal(err)
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		var fault interface{ Addr() uintptr }
		if err, ok := recover().(error); !ok || !errors.As(err, &fault) {
			t.Errorf("the panic was with %v", err)
		}
	}()
	fill([][]byte{make([]byte, n)}, []tensor.Tensor{v}, false)
	t.Error("no fault")
}
