package stage

import (
	"errors"
	"os"
	"path/filepath"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/tensor"
)

// With the producer's slot table in sight, or a token, a reader does not ask whether its claim held; after the time that it was given it does.
func TestAReaderThatKnowsItselfDoesNotAsk(t *testing.T) {
	for name, c := range map[string]struct {
		tcp, inPlace, late bool
		verifies, dones    uint64
	}{
		"copied":         {dones: 1},
		"in place":       {inPlace: true, dones: 1},
		"by tcp":         {tcp: true, dones: 1},
		"copied late":    {late: true, verifies: 1},
		"in place, late": {late: true, inPlace: true, verifies: 1},
		"by tcp, late":   {late: true, tcp: true, verifies: 1},
	} {
		t.Run(name, func(t *testing.T) {
			from := newLink(t, 4<<20, noInline, func(o *LinkOptions) {
				if c.late {
					impatient(o)
				}
			})
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
