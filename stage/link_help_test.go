package stage

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/tcp"
)

// sharedSlab gives a slab that the others of the test can map. It is closed at the end, when nothing of it may be in use.
func sharedSlab(t testing.TB, bytes int64) *slab.Slab {
	t.Helper()
	name := t.TempDir()
	return slabIn(t, filepath.Dir(name), filepath.Base(name), bytes)
}

func slabIn(t testing.TB, dir, name string, bytes int64) *slab.Slab {
	t.Helper()
	m, err := mapped.New(mapped.Options{Dirs: []string{dir}})
	if err != nil {
		t.Fatal(err)
	}
	return slabOver(t, dir, name, bytes, m, overTCP(t))
}

func overTCP(t testing.TB) transfer.Plane {
	t.Helper()
	p, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func slabOver(t testing.TB, dir, name string, bytes int64, planes ...transfer.Plane) *slab.Slab {
	t.Helper()
	s, err := slab.New(t.Context(), slab.Options{Dir: dir, Name: name, Bytes: bytes, Planes: planes})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		err := s.Close(ctx)
		for _, p := range planes {
			err = errors.Join(err, p.Close())
		}
		if err != nil {
			t.Error(err)
		}
	})
	return s
}

// onlyTCP gives a link a slab whose reads see no slot table.
func onlyTCP(t testing.TB, bytes int64) func(*LinkOptions) {
	return func(o *LinkOptions) { o.Slab = slabOver(t, t.TempDir(), "tcp", bytes, overTCP(t)) }
}

// newLink gives a Link that puts and gets, with a slab of its own of that size, unless it is set; both are closed at the end, and nothing
// may be left in them.
func newLink(t testing.TB, bytes int64, set ...func(*LinkOptions)) *Link {
	t.Helper()
	o := LinkOptions{Bind: &Endpoint{}}
	if bytes > 0 {
		o.Slab = sharedSlab(t, bytes)
	}
	for _, f := range set {
		f(&o)
	}
	l, err := NewLink(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := l.Close(ctx); err != nil {
			t.Error(err)
		}
		if st := l.Stats().Store; st.Payloads+st.Claims+st.Withdrawing != 0 || st.Bytes != 0 {
			t.Errorf("left behind: %+v", st)
		}
	})
	return l
}

func withSum(o *LinkOptions)  { o.Sum = true }
func onlyGets(o *LinkOptions) { o.Bind = nil }
func noInline(o *LinkOptions) { o.Client.Inline = -1 }

// impatient has the readers of a link ask whether their claims held, all of which are older than it promises, and live.
func impatient(o *LinkOptions) { o.Store.Transfer, o.Store.Margin = time.Nanosecond, time.Hour }

func idle(t testing.TB, l *Link) {
	t.Helper()
	eventually(t, "the slab is empty", func() bool { return l.o.Slab.Used() == 0 })
}

// bytesOf is a tensor of n bytes that depend on seed.
func bytesOf(t testing.TB, n, seed int) tensor.Tensor {
	t.Helper()
	b := make([]byte, n)
	x := uint64(seed)*0x9e3779b97f4a7c15 + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
	v, err := tensor.New(tensor.Uint8, tensor.Shape{int64(n)}, b)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func mustPut(t testing.TB, l *Link, key string, root tensor.Node, o PutOptions) *Published {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p, err := l.Put(ctx, key, root, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func mustGet(t testing.TB, l *Link, r Request) *Got {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	got, err := l.Get(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// consume gets, compares and releases.
func consume(t testing.TB, l *Link, r Request, want tensor.Node) {
	t.Helper()
	got := mustGet(t, l, r)
	if !tensor.Equal(got.Root, want) {
		t.Errorf("%s by %s: got %.200v, want %.200v", r.Key, got.Plane, got.Root, want)
	}
	if err := got.Release(); err != nil {
		t.Error(err)
	}
}
