package stage

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/tcp"
)

// newSlab gives a slab with the planes mapped and tcp, closed at the end.
func newSlab(t testing.TB, bytes int64) *slab.Slab {
	t.Helper()
	m, err := mapped.New(mapped.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c, err := tcp.New(t.Context(), tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := slab.New(t.Context(), slab.Options{Dir: t.TempDir(), Name: filepath.Base(t.TempDir()), Bytes: bytes, Planes: []transfer.Plane{m, c}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := s.Close(ctx); err != nil {
			t.Error(err)
		}
		m.Close()
		c.Close()
	})
	return s
}

func TestQuick(t *testing.T) {
	s := newSlab(t, 1<<20)
	l, err := NewLink(t.Context(), LinkOptions{Slab: s, Bind: &Endpoint{}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(context.Background())
	v, _ := tensor.Of([]float32{1, 2, 3}, 3)
	p, err := l.Put(t.Context(), "a", v, PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	got, err := l.Get(ctx, Request{Key: "a", Metadata: p.Metadata})
	t.Log(got, err, l.client.Stats())
}
