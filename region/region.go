// Package region owns the shared-memory files that hold encodings: it creates, adopts, attaches, owns (by flock), pre-faults,
// publishes and reaps them, and reads and writes the table of slots at their head.
//
// A region file is, in this order: one header page, the clients, the slot table, the pool. The pool is Blocks x BlockBytes bytes and is what
// peers READ; block i starts at pool offset i x BlockBytes. Everything before the pool is written by one process only, the owner
// (a node). Other processes attach: the mapped data plane read-only, an engine with the pool writable.
//
// Who owns a file is decided by flock alone, never by a pid: the owner holds an exclusive lock on the file from before the file
// has a name until Close or its death. flock belongs to an open file description, so attachers are given freshly opened ones
// (Reopen) and children do not inherit it. Only who holds the lock of a file unlinks it, and a published file is never truncated:
// mappings stay good whatever happens to the name or to the owner.
//
// Slices of a mapping (Pool, Slots and what was cut from them) die at Close: a later access is a memory fault that ends the
// process, not an error. Close only after the last user has stopped. The package needs Linux and a mounted /proc.
package region

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/bits"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Errors of this package. Errors returned wrap one of these or the system's error, or are a *SpaceError.
var (
	ErrInUse   = errors.New("region: owned by a live process")
	ErrWaits   = errors.New("region: waits for the restart of its owner")
	ErrExists  = errors.New("region: a file of that name exists")
	ErrFormat  = errors.New("region: not a region file of this version, or damaged")
	ErrForeign = errors.New("region: refused (another user's file, a symbolic link, or not a regular file)")
	ErrName    = errors.New("region: bad name")
	ErrOptions = errors.New("region: bad geometry or mode")
	ErrSlot    = errors.New("region: bad slot")
	ErrClosed  = errors.New("region: closed")
)

// DefaultDir is where regions are made unless Options say otherwise.
const DefaultDir = "/dev/shm"

// Limits of a geometry. They keep every sum of a file's layout far from overflow.
const (
	MaxBlocks     = math.MaxUint32 // an Extent counts in uint32
	MaxBlockBytes = 1 << 40
	MaxSlots      = 1 << 24
)

// Geometry is the shape of a region.
type Geometry struct {
	BlockBytes int64 // bytes of one block; equals the peers' block_size_bytes
	Blocks     int   // blocks in the pool
	Slots      int   // entries that the slot table can hold
}

// PoolBytes is Blocks x BlockBytes.
func (g Geometry) PoolBytes() int64 { return g.BlockBytes * int64(g.Blocks) }

// poolOffset is the offset of the pool in the file.
func (g Geometry) poolOffset() int64 {
	end := int64(tableOffset) + int64(g.Slots)*SlotBytes
	return (end + poolAlign - 1) &^ (poolAlign - 1)
}

// fileBytes is the size of the whole file.
func (g Geometry) fileBytes() int64 { return g.poolOffset() + g.PoolBytes() }

func (g Geometry) validate() error {
	switch {
	case g.BlockBytes < 1 || g.BlockBytes > MaxBlockBytes:
		return fmt.Errorf("%w: block of %d bytes, must be 1 to %d", ErrOptions, g.BlockBytes, int64(MaxBlockBytes))
	case g.Blocks < 1 || int64(g.Blocks) > MaxBlocks:
		return fmt.Errorf("%w: %d blocks, must be 1 to %d", ErrOptions, g.Blocks, int64(MaxBlocks))
	case g.Slots < 1 || g.Slots > MaxSlots:
		return fmt.Errorf("%w: %d slots, must be 1 to %d", ErrOptions, g.Slots, MaxSlots)
	}
	hi, lo := bits.Mul64(uint64(g.BlockBytes), uint64(g.Blocks))
	if hi != 0 || lo > math.MaxInt-uint64(g.poolOffset()) {
		return fmt.Errorf("%w: %d blocks of %d bytes do not fit an address space", ErrOptions, g.Blocks, g.BlockBytes)
	}
	return nil
}

// Identity says whose region a file is. It is stored in the header and decides the file's name, so two instances, groups or
// ranks never share a file.
type Identity struct {
	Instance string // the node's instance id, [A-Za-z0-9._-]{1,64}
	Group    string // compatibility hash of the pool, 1 to 128 lower-case hex digits
	Rank     int    // data-parallel rank, 0 to 65535
}

const (
	maxInstance = 64
	maxGroup    = 128
	maxRank     = math.MaxUint16
	nameGroup   = 12 // digits of the group in a file's name
)

// FileName is the name of this identity's file: ferry_{instance}_{first 12 digits of group}_r{rank}.region. ErrName.
func (id Identity) FileName() (string, error) {
	if len(id.Instance) < 1 || len(id.Instance) > maxInstance || !all(id.Instance, isNameByte) {
		return "", fmt.Errorf("%w: instance %.80q, must be 1 to %d of A-Z a-z 0-9 . _ -", ErrName, id.Instance, maxInstance)
	}
	if len(id.Group) < 1 || len(id.Group) > maxGroup || !all(id.Group, isHexByte) {
		return "", fmt.Errorf("%w: group %.140q, must be 1 to %d lower-case hex digits", ErrName, id.Group, maxGroup)
	}
	if id.Rank < 0 || id.Rank > maxRank {
		return "", fmt.Errorf("%w: rank %d, must be 0 to %d", ErrName, id.Rank, maxRank)
	}
	return "ferry_" + id.Instance + "_" + id.Group[:min(len(id.Group), nameGroup)] + "_r" + strconv.Itoa(id.Rank) + ".region", nil
}

func all(s string, ok func(byte) bool) bool {
	for i := range len(s) {
		if !ok(s[i]) {
			return false
		}
	}
	return true
}

func isHexByte(b byte) bool { return '0' <= b && b <= '9' || 'a' <= b && b <= 'f' }

func isNameByte(b byte) bool {
	return '0' <= b && b <= '9' || 'a' <= b && b <= 'z' || 'A' <= b && b <= 'Z' || b == '.' || b == '_' || b == '-'
}

// Options say what Create makes.
type Options struct {
	Dir string // default DefaultDir; any file system with mmap will do
	// Mode is the file's exact mode whatever the umask, default 0600. It must give the owner rw and nobody x. Who may open the
	// file can also lock it, and so keep a dead owner's file from being replaced.
	Mode     fs.FileMode
	Identity Identity
	Geometry Geometry // Slots 0: DefaultSlots(Blocks)
	// Keep is how long the file waits for its owner's restart once that is dead, counted from the owner's last KeepFor, which for
	// a start is made here. 0: not at all.
	Keep time.Duration
	// Replace lets Create reap a file that waits for its owner's restart.
	Replace bool
	// Reclaim is called when there is no room. It ends the processes that go on serving files which had that path and lost it (see
	// ServeFor), and says how many it ended. Nil: there are none.
	Reclaim func(ctx context.Context, path string) int
}

// Span is a range of bytes of a pool.
type Span struct{ Offset, Length int64 }

// Extent is a run of whole blocks.
type Extent struct{ Start, Count uint32 }

// Region is the owner's side. Methods are safe for concurrent use; Close must come after the last use of Pool and Slots.
type Region struct {
	path     string
	dir      string
	name     string
	header   header
	replaced int
	reason   string // why the replaced one was not adopted
	adopted  bool

	mu     sync.Mutex // guards what follows, and orders Reopen, Unlink and Close
	file   *os.File   // the locked description; never leaves this package
	mem    []byte     // the whole file
	table  *SlotTable
	closed bool
}

// Path is the file's path. It names the file only until Unlink or Close.
func (r *Region) Path() string { return r.path }

// Geometry of the region, with the number of slots filled in.
func (r *Region) Geometry() Geometry { return r.header.geometry }

// Identity of the region.
func (r *Region) Identity() Identity { return r.header.identity }

// Epoch counts the owners that this file's name has had, from 1: a region that was adopted from a dead owner, or replaced its
// file, has that one's epoch + 1. It starts again at 1 when the file was removed in between.
func (r *Region) Epoch() uint64 { return r.header.epoch }

// Replaced is the pid of the dead owner whose file was reaped to make this one, or 0, and why that file was not adopted. For the
// log.
func (r *Region) Replaced() (pid int, reason string) { return r.replaced, r.reason }

// Adopted says whether this is the file of a dead owner that Take took over, with its entries.
func (r *Region) Adopted() bool { return r.adopted }

// Port is the port of the side channel that the file had when it was created (0) or adopted.
func (r *Region) Port() int { return r.header.port }

// Pool is the whole pool, writable. It stays valid until Close; nil after it.
func (r *Region) Pool() []byte {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	return r.mem[r.PoolOffset():]
}

// Slots is the table at the head of the region; only the owner's goroutine that holds the cache's lock may write it.
// Like Pool it dies at Close; nil after it.
func (r *Region) Slots() *SlotTable {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.table
}

// Clients is the table of clients; like Slots it is the owner's to write, and dies at Close; nil after it.
func (r *Region) Clients() *ClientTable {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	return newClientTable(r.mem, true)
}

// Reopen gives a freshly opened description of the file (never the locked one), to be passed to an engine or registered with a
// data plane. The caller closes it. It works after Unlink too. ErrClosed.
func (r *Region) Reopen(write bool) (*os.File, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, ErrClosed
	}
	flags := unix.O_RDONLY
	if write {
		flags = unix.O_RDWR
	}
	return reopen(int(r.file.Fd()), flags, r.path)
}

// reopen makes a new open file description of the file behind fd. flock does not carry over.
func reopen(fd, flags int, path string) (*os.File, error) {
	n, err := unix.Open("/proc/self/fd/"+strconv.Itoa(fd), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "region: open through /proc/self/fd", Path: path, Err: err}
	}
	return os.NewFile(uintptr(n), path), nil
}

// PoolOffset is the offset in the file of the pool's first byte, a multiple of 64 KiB.
func (r *Region) PoolOffset() int64 { return r.header.geometry.poolOffset() }

// SetPort records the side channel's port in the header. A no-op after Close.
func (r *Region) SetPort(port int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		atomic.StoreUint64(headerWord(r.mem, offPort), uint64(port))
	}
}

// KeepFor lets the file wait so long, from now on, for its owner's restart, should that die: a live owner calls it again well
// before the time is over. 0: not at all. A no-op after Close.
func (r *Region) KeepFor(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		atomic.StoreUint64(headerWord(r.mem, offAdoptUntil), uint64(adoptUntil(d)))
	}
}

// ServeFor lets processes that serve the file go on so long, from now on, when it has no name any more: they end at once else. It is for
// an owner that is about to take the name away. A no-op after Close.
func (r *Region) ServeFor(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		atomic.StoreUint64(headerWord(r.mem, offServeUntil), uint64(adoptUntil(d)))
	}
}

// Unlink takes the file's name away, if the name still is this file, and keeps everything else working: with all engines
// attached (or served through Reopen) not even SIGKILL then leaves a file behind. The price: the name no longer protects the
// identity from a second owner, and a restart finds nothing. It is safe to call twice.
func (r *Region) Unlink() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return ErrClosed
	}
	return r.unlink()
}

func (r *Region) unlink() error {
	dir, err := openDir(r.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	_, err = unlinkIfSame(dir, r.name, r.file)
	return err
}

// Close unmaps and, if remove is set, unlinks the file first (only if the name still is this file). It is safe to call twice.
// Pool, Slots and all that was cut from them must not be used any more.
func (r *Region) Close(remove bool) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil
	}
	var errs []error
	if remove {
		errs = append(errs, r.unlink())
	}
	r.closed, r.table = true, nil
	errs = append(errs, unix.Munmap(r.mem))
	r.mem = nil
	// Unlocking is said aloud: a child that was forked and has not called exec yet still has the description.
	errs = append(errs, unix.Flock(int(r.file.Fd()), unix.LOCK_UN), r.file.Close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("region: closing %s: %w", r.path, err)
	}
	return nil
}
