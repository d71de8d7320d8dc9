// Package mapped is the data plane within one machine: the reader maps the producer's file read-only, once, and copies out of
// the mapping with one copy, or uses the bytes where they are. The producer's process is never woken, and may even be gone.
//
// The plane has neither tokens nor notifications: nothing stands between a reader and the mapping. What keeps a reader from using
// bytes that were replaced is a check after the READ, the slot table's generation or a question to the producer (see package ec).
package mapped

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"

	"github.com/tensorferry/tensorferry/internal/boottime"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// Options configure a Plane. The zero value is usable.
type Options struct {
	// Dirs are the directories whose files a peer may name; any other path in metadata is ErrUnreachable. Default: /dev/shm.
	Dirs []string
	// Workers is the number of goroutines that copy one READ of 8 MiB and more. Default: GOMAXPROCS, at most 4.
	Workers int
	// Log takes attaches and detaches at level Debug. Default: slog.Default().
	Log *slog.Logger
}

// Plane is the mapped plane of one process.
type Plane struct {
	boot    string
	dirs    []string
	workers int
	log     *slog.Logger
	burst   burst

	mu       sync.Mutex
	closed   bool
	regs     map[*registration]struct{}
	peers    map[*peer]struct{}
	mappings map[location]*mapping
}

// New makes a plane. It fails only if the machine does not tell its boot id.
func New(o Options) (*Plane, error) {
	boot, err := boottime.ID()
	if err != nil {
		return nil, fmt.Errorf("mapped: this machine's boot id: %w", err)
	}
	p := &Plane{
		boot: boot, workers: o.Workers, log: o.Log,
		regs: map[*registration]struct{}{}, peers: map[*peer]struct{}{}, mappings: map[location]*mapping{},
	}
	if len(o.Dirs) == 0 {
		o.Dirs = []string{"/dev/shm"}
	}
	for _, d := range o.Dirs {
		abs, err := filepath.Abs(d)
		if err != nil {
			return nil, fmt.Errorf("mapped: directory %q: %w", d, err)
		}
		p.dirs = append(p.dirs, abs)
	}
	if p.workers <= 0 {
		p.workers = min(runtime.GOMAXPROCS(0), 4)
	}
	if p.log == nil {
		p.log = slog.Default()
	}
	return p, nil
}

// Name implements transfer.Plane.
func (p *Plane) Name() string { return transfer.Mapped }

// Capabilities implements transfer.Plane.
func (p *Plane) Capabilities() transfer.Capabilities {
	return transfer.Capabilities{Cancel: true, InPlace: true}
}

// Register implements transfer.Plane. The memory must have a file that is still found at its path. notify is never called.
func (p *Plane) Register(ctx context.Context, m transfer.Memory, _ func(transfer.Notification)) (transfer.Registration, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := m.Check(); err != nil {
		return nil, err
	}
	l, err := p.locate(m)
	if err != nil {
		return nil, err
	}
	r := &registration{plane: p, memory: m, metadata: l.encode(), grants: map[string]struct{}{}}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, fmt.Errorf("mapped: register: %w", transfer.ErrClosed)
	}
	for o := range p.regs {
		if o.memory.Overlaps(m) {
			return nil, fmt.Errorf("%w: mapped: %s overlaps memory that is registered", transfer.ErrBadRequest, m.Path)
		}
	}
	p.regs[r] = struct{}{}
	return r, nil
}

// locate describes m for the metadata.
func (p *Plane) locate(m transfer.Memory) (location, error) {
	if m.File == nil || m.Path == "" {
		return location{}, fmt.Errorf("%w: mapped: memory without a file and its path cannot be attached by others", transfer.ErrBadRequest)
	}
	path, err := filepath.Abs(m.Path)
	if err != nil {
		return location{}, fmt.Errorf("%w: mapped: %w", transfer.ErrBadRequest, err)
	}
	st, err := m.File.Stat()
	if err != nil {
		return location{}, fmt.Errorf("mapped: %w", err)
	}
	there, err := os.Lstat(path)
	if err != nil {
		return location{}, fmt.Errorf("%w: mapped: %w", transfer.ErrBadRequest, err)
	}
	if !os.SameFile(st, there) || len(path) > maxPath {
		return location{}, fmt.Errorf("%w: mapped: %s is not the memory's file", transfer.ErrBadRequest, path)
	}
	l := location{boot: p.boot, file: fileOf(st), path: path, offset: m.FileOffset, length: int64(len(m.Bytes))}
	attached, err := region.Attach(m.File, false)
	if err != nil {
		return l, nil // a plain file
	}
	defer attached.Close()
	if attached.PoolOffset() == l.offset && attached.Geometry().PoolBytes() == l.length {
		l.isRegion, l.identity, l.epoch = true, attached.Identity(), attached.Epoch()
	}
	return l, nil
}

// Close implements transfer.Plane. Peers that are still open are closed first; views keep their memory until released.
func (p *Plane) Close() error {
	p.mu.Lock()
	p.closed = true
	var open []*peer
	for c := range p.peers {
		open = append(open, c)
	}
	p.mu.Unlock()
	var errs []error
	for _, c := range open {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// allowed says whether a peer's metadata may name that path.
func (p *Plane) allowed(path string) bool {
	return filepath.Clean(path) == path && slices.Contains(p.dirs, filepath.Dir(path))
}

// registration is memory on offer. The plane has nothing to enforce, so it only keeps the books that the contract asks for.
type registration struct {
	plane    *Plane
	memory   transfer.Memory
	metadata []byte

	mu     sync.Mutex
	closed bool
	grants map[string]struct{}
}

func (r *registration) Metadata() []byte { return r.metadata }

func (r *registration) Grant(id string, spans []region.Span) ([]byte, error) {
	if err := transfer.CheckGrant(id, spans, int64(len(r.memory.Bytes))); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("mapped: grant %q: %w", id, transfer.ErrClosed)
	}
	if _, ok := r.grants[id]; ok {
		return nil, fmt.Errorf("%w: mapped: grant %q is live", transfer.ErrBadRequest, id)
	}
	r.grants[id] = struct{}{}
	return nil, nil
}

func (r *registration) Revoke(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.grants, id)
}

func (r *registration) Close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.plane.mu.Lock()
	delete(r.plane.regs, r)
	r.plane.mu.Unlock()
	return nil
}
