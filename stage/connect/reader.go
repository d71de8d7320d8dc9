package connect

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Reader gets payloads one after the other, each into a slab of its size: for programs that do not know what is to come.
type Reader struct {
	client *stage.Client
	loop   *control.Loop
	space  *fitting
}

// OpenReader opens a Reader. Of o, what is about putting and the slab's size does not count; Bind's host says where the planes listen.
// The caller closes it. On an error nothing is left.
func OpenReader(ctx context.Context, o Options) (_ *Reader, err error) {
	o.complete()
	r := &Reader{space: &fitting{o: o}}
	defer func() {
		if err != nil {
			err = errors.Join(err, r.Close(ctx))
		}
	}()
	if r.space.planes, err = Planes(ctx, o); err != nil {
		return nil, err
	}
	if r.loop, err = control.NewLoop(control.Options{Log: o.Log}); err != nil {
		return nil, err
	}
	c := o.Client
	c.Loop, c.Slab, c.Log = r.loop, r.space, o.Log
	if c.Node == "" {
		c.Node = Name()
	}
	r.client, err = stage.NewClient(c)
	return r, err
}

// Get is stage.Client's. One at a time; what was got before must be released.
func (r *Reader) Get(ctx context.Context, q stage.Request) (*stage.Got, error) {
	return r.client.Get(ctx, q)
}

// Close ends it. What was got must not be used any more.
func (r *Reader) Close(ctx context.Context) error {
	var errs []error
	if r.client != nil {
		errs = append(errs, r.client.Close(ctx))
	}
	if r.loop != nil {
		errs = append(errs, r.loop.Close())
	}
	return errors.Join(append(errs, r.space.close(ctx))...)
}

// fitting makes a slab for each buffer.
type fitting struct {
	o      Options
	planes []transfer.Plane

	mu   sync.Mutex
	slab *slab.Slab
}

// Planes implements stage.Space.
func (f *fitting) Planes() []string {
	names := make([]string, len(f.planes))
	for i, p := range f.planes {
		names[i] = p.Name()
	}
	return names
}

// Alloc implements stage.Space. The slab of the buffer before is closed.
func (f *fitting) Alloc(ctx context.Context, sizes []int64) (*slab.Buffer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	need := Room(sizes)
	if f.slab == nil || f.slab.Bytes() < need {
		if err := f.drop(ctx); err != nil {
			return nil, err
		}
		sweep(&f.o)
		s, err := slab.New(ctx, slab.Options{Dir: f.o.Dir, Name: Name(), Bytes: need, Planes: f.planes, Log: f.o.Log})
		if err != nil {
			return nil, err
		}
		f.slab = s
	}
	return f.slab.Alloc(ctx, sizes)
}

// Read implements stage.Space.
func (f *fitting) Read(ctx context.Context, m *wire.Metadata, into *slab.Buffer) (string, error) {
	f.mu.Lock()
	s := f.slab
	f.mu.Unlock()
	return s.Read(ctx, m, into)
}

// View implements stage.Space: nothing is used in place.
func (f *fitting) View(context.Context, *wire.Metadata) ([][]byte, string, func() bool, error) {
	return nil, "", nil, slab.ErrNoPlane
}

// Room is the size of a slab that holds tensors of these sizes, in bytes, and nothing else.
func Room(sizes []int64) int64 {
	n := int64(1) // a slab of nothing there is not
	for _, s := range sizes {
		n += (s + slab.Align - 1) / slab.Align * slab.Align
	}
	return n
}

func (f *fitting) drop(ctx context.Context) error {
	if f.slab == nil {
		return nil
	}
	s := f.slab
	f.slab = nil
	if err := s.Close(ctx); err != nil {
		return fmt.Errorf("slab: %w", err)
	}
	return nil
}

func (f *fitting) close(ctx context.Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Join(f.drop(ctx), closePlanes(f.planes))
}
