// Package region owns the shared-memory files that hold encodings: it creates, attaches, owns (by flock), pre-faults and
// publishes them, and reads and writes the table of slots at their head.
//
// A region file is, in this order: one header page, the slot table, the pool. The pool is Blocks x BlockBytes bytes and is what
// peers READ; block i starts at pool offset i x BlockBytes. Everything before the pool is written by one process only, the owner
// (a node). Other processes attach: the mapped data plane read-only, an engine with the pool writable.
package region

import (
	"context"
	"errors"
	"io/fs"
	"os"
)

// Errors of this package. Errors returned wrap one of these or are a *SpaceError.
var (
	ErrInUse   = errors.New("region: owned by a live process")
	ErrExists  = errors.New("region: a file of that name exists")
	ErrFormat  = errors.New("region: not a region file of this version, or damaged")
	ErrForeign = errors.New("region: refused (another user's file, a symbolic link, or not a regular file)")
	ErrName    = errors.New("region: bad name")
	ErrClosed  = errors.New("region: closed")
)

// SpaceError says that the file system cannot hold what was asked. Its text names the path, both numbers and what to change.
type SpaceError struct {
	Path        string
	Asked, Free int64 // bytes
}

// Error implements error.
func (e *SpaceError) Error() string { return "region: no space" }

// Geometry is the shape of a region.
type Geometry struct {
	BlockBytes int64 // bytes of one block; equals the peers' block_size_bytes
	Blocks     int   // blocks in the pool
	Slots      int   // entries that the slot table can hold
}

// PoolBytes is Blocks x BlockBytes.
func (g Geometry) PoolBytes() int64 { return g.BlockBytes * int64(g.Blocks) }

// Identity says whose region a file is. It is stored in the header and decides the file's name, so two instances, groups or
// ranks never share a file.
type Identity struct {
	Instance string // the node's instance id, [A-Za-z0-9._-]{1,64}
	Group    string // compatibility hash of the pool (hex)
	Rank     int    // data-parallel rank, >= 0
}

// Options say what Create makes.
type Options struct {
	Dir      string      // default /dev/shm
	Mode     fs.FileMode // default 0600
	Identity Identity
	Geometry Geometry // Slots 0: DefaultSlots(Blocks)
}

// Span is a range of bytes of a pool.
type Span struct{ Offset, Length int64 }

// Extent is a run of whole blocks.
type Extent struct{ Start, Count uint32 }

// Region is the owner's side. Methods are safe for concurrent use; Close must come after the last use of Pool.
type Region struct{}

// Create makes, reserves, pre-faults and locks a region, then publishes it under its name whole.
func Create(ctx context.Context, o Options) (*Region, error) { return nil, ErrClosed }

func (r *Region) Path() string       { return "" }
func (r *Region) Geometry() Geometry { return Geometry{} }
func (r *Region) Identity() Identity { return Identity{} }

// Epoch counts the owners that this file has had, from 1.
func (r *Region) Epoch() uint64 { return 0 }

// Pool is the whole pool, writable. It stays valid until Close.
func (r *Region) Pool() []byte { return nil }

// Slots is the table at the head of the region; only the owner's goroutine that holds the cache's lock may write it.
func (r *Region) Slots() *SlotTable { return nil }

// Reopen gives a freshly opened description of the file (never the locked one), to be passed to an engine or registered with a
// data plane. The caller closes it.
func (r *Region) Reopen(write bool) (*os.File, error) { return nil, ErrClosed }

// PoolOffset is the offset in the file of the pool's first byte.
func (r *Region) PoolOffset() int64 { return 0 }

// SetPort records the side channel's port in the header.
func (r *Region) SetPort(port int) {}

// Close unmaps and, if remove is set, unlinks the file first. It is safe to call twice.
func (r *Region) Close(remove bool) error { return nil }

// Mapping is an attacher's side: header and slot table read-only, the pool read-only or writable.
type Mapping struct{}

// Attach maps an open region file after checking its header against its size. The file may be closed afterwards.
func Attach(f *os.File, write bool) (*Mapping, error) { return nil, ErrClosed }

// Open attaches read-only by path: no symbolic link is followed, and a file of another user is refused.
func Open(path string) (*Mapping, error) { return nil, ErrClosed }

func (m *Mapping) Geometry() Geometry { return Geometry{} }
func (m *Mapping) Identity() Identity { return Identity{} }
func (m *Mapping) Epoch() uint64      { return 0 }
func (m *Mapping) Pool() []byte       { return nil }
func (m *Mapping) Slots() *SlotTable  { return nil }
func (m *Mapping) Close() error       { return nil }
