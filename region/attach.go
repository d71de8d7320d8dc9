package region

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Mapping is an attacher's side: header and slot table read-only, the pool read-only or writable.
// Methods are safe for concurrent use; Close must come after the last use of Pool and Slots.
//
// A mapping outlives its owner: bytes and table stay readable after the owner's death and after the file was unlinked. Nobody who follows
// this package's rules cuts a file. If somebody does, header and tables read as damaged; an access to a byte of the pool that is gone is a
// memory fault, which ends the process unless runtime/debug.SetPanicOnFault says otherwise.
type Mapping struct {
	header header

	mu    sync.Mutex
	head  []byte // header page and slot table, PROT_READ
	pool  []byte
	table *SlotTable
}

// Attach maps an open region file after checking its header against its size. The file may be closed afterwards.
// write asks for a writable pool, which needs a description open for writing. A file that is none, or truncated: ErrFormat; not
// a regular file: ErrForeign.
//
// Attach does not look at who owns the file: whoever handed the descriptor over vouches for it.
func Attach(f *os.File, write bool) (*Mapping, error) {
	h, err := readHeader(f)
	if err != nil {
		return nil, fmt.Errorf("attaching %s: %w", f.Name(), err)
	}
	prot := unix.PROT_READ
	if write {
		prot |= unix.PROT_WRITE
	}
	poolOffset := h.geometry.poolOffset()
	head, err := unix.Mmap(int(f.Fd()), 0, int(poolOffset), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("region: mapping the slot table of %s: %w", f.Name(), err)
	}
	pool, err := unix.Mmap(int(f.Fd()), poolOffset, int(h.geometry.PoolBytes()), prot, unix.MAP_SHARED)
	if err != nil {
		err = fmt.Errorf("region: mapping %d bytes of %s (writable: %t): %w", h.geometry.PoolBytes(), f.Name(), write, err)
		return nil, errors.Join(err, unix.Munmap(head))
	}
	return &Mapping{header: h, head: head, pool: pool, table: newSlotTable(head, h.geometry, false)}, nil
}

// Open attaches read-only by path: no symbolic link is followed, and a file of another user is refused (ErrForeign).
func Open(path string) (*Mapping, error) {
	dir, err := openDir(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	f, err := openOwn(dir, filepath.Base(path), unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return Attach(f, false)
}

// Geometry of the region.
func (m *Mapping) Geometry() Geometry { return m.header.geometry }

// Identity of the region.
func (m *Mapping) Identity() Identity { return m.header.identity }

// Epoch is the file's epoch at the time of the call; 0 after Close, or if the file was emptied.
func (m *Mapping) Epoch() uint64 { return m.word(offEpoch) }

// OwnerPID is the pid that the owner wrote, as its own pid namespace counts; 0 after Close. It does not say that the owner lives.
func (m *Mapping) OwnerPID() int { return int(m.word(offOwner)) }

// Port is the port of the owner's side channel, 0 if it has none yet.
func (m *Mapping) Port() int { return int(m.word(offPort)) }

// Created is when the file was made, by the wall clock of then.
func (m *Mapping) Created() time.Time { return time.Unix(0, m.header.created) }

// BootID is the kernel's boot id of when the file was made, as /proc tells it; "" if it did not. In memory no file is older than
// the running kernel; on a disk it can be, and its owner is then dead whatever its pid.
func (m *Mapping) BootID() string { return m.header.bootID }

// WaitsFor is how much longer the file waits for its owner's restart should that be dead; 0 if it does not, and then why tells.
func (m *Mapping) WaitsFor() (left time.Duration, why string) {
	h := m.header
	h.adoptUntil = int64(m.word(offAdoptUntil))
	return h.waitsFor(), h.whyNotWaiting()
}

func (m *Mapping) word(off int) (v uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.head == nil {
		return 0
	}
	guarded(func() { v = atomic.LoadUint64(headerWord(m.head, off)) })
	return v
}

// Pool is the whole pool, writable only if Attach was asked so: a store into a read-only one is a memory fault.
// It stays valid until Close; nil after it.
func (m *Mapping) Pool() []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.pool
}

// PoolOffset is the offset in the file of the pool's first byte, a multiple of 64 KiB.
func (m *Mapping) PoolOffset() int64 { return m.header.geometry.poolOffset() }

// Slots is the table, for reading only. It dies at Close; nil after it.
func (m *Mapping) Slots() *SlotTable {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.table
}

// Clients is the table of clients, for reading only. It dies at Close; nil after it.
func (m *Mapping) Clients() *ClientTable {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.head == nil {
		return nil
	}
	return newClientTable(m.head, false)
}

// Close unmaps. It is safe to call twice. Pool, Slots and all that was cut from them must not be used any more.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.head == nil {
		return nil
	}
	err := errors.Join(unix.Munmap(m.pool), unix.Munmap(m.head))
	m.pool, m.head, m.table = nil, nil, nil
	if err != nil {
		return fmt.Errorf("region: unmapping: %w", err)
	}
	return nil
}

// readHeader reads with pread, never through a mapping: a short file is an error then and not a memory fault.
func readHeader(f *os.File) (header, error) {
	st, err := f.Stat()
	if err != nil {
		return header{}, err
	}
	if !st.Mode().IsRegular() {
		return header{}, fmt.Errorf("%w: mode %s", ErrForeign, st.Mode())
	}
	page, err := readPage(f)
	if err != nil {
		return header{}, err
	}
	return decodeHeader(page, st.Size())
}

// readStart reads the header page, or what there is of it, and the file's size.
func readStart(f *os.File) (page []byte, size int64, err error) {
	if page, err = readPage(f); err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	return page, st.Size(), nil
}

// readPage reads the header page, or what there is of it.
func readPage(f *os.File) ([]byte, error) {
	page := make([]byte, headerBytes)
	n, err := f.ReadAt(page, 0)
	if err != nil && err != io.EOF {
		return nil, err
	}
	return page[:n], nil
}

// openDir opens a directory for the *at calls, so that all steps of an operation are about one directory.
func openDir(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "region: open directory", Path: dir, Err: err}
	}
	return os.NewFile(uintptr(fd), dir), nil
}

// openOwn opens name in dir if it is a regular file of this process's user, else ErrForeign (or fs.ErrNotExist). The first open
// is O_PATH, which has no side effect on whatever may lie there: no fifo blocks, no device is woken, no link is followed.
func openOwn(dir *os.File, name string, flags int) (*os.File, error) {
	path := filepath.Join(dir.Name(), name)
	fd, err := unix.Openat(int(dir.Fd()), name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "region: open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := checkOwn(fd, path); err != nil {
		return nil, err
	}
	return reopen(fd, flags, path)
}

func checkOwn(fd int, path string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "region: stat", Path: path, Err: err}
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFLNK:
		return fmt.Errorf("%w: %s is a symbolic link", ErrForeign, path)
	default:
		return fmt.Errorf("%w: %s is not a regular file", ErrForeign, path)
	}
	if uid := uint32(os.Geteuid()); st.Uid != uid {
		return fmt.Errorf("%w: %s belongs to uid %d, this process is uid %d", ErrForeign, path, st.Uid, uid)
	}
	return nil
}

// sameFile says whether name in dir is the file behind fd now.
func sameFile(dir *os.File, name string, fd int) (bool, error) {
	var a, b unix.Stat_t
	if err := unix.Fstat(fd, &a); err != nil {
		return false, err
	}
	switch err := unix.Fstatat(int(dir.Fd()), name, &b, unix.AT_SYMLINK_NOFOLLOW); err {
	case nil:
		return a.Dev == b.Dev && a.Ino == b.Ino, nil
	case unix.ENOENT:
		return false, nil
	default:
		return false, err
	}
}

// unlinkIfSame unlinks name if it is f, whose lock the caller holds: since only holders of a file's lock unlink it, the name
// cannot come to mean another file between the look and the unlink. It reports whether the name was f.
func unlinkIfSame(dir *os.File, name string, f *os.File) (bool, error) {
	same, err := sameFile(dir, name, int(f.Fd()))
	if err == nil && same {
		if err = unix.Unlinkat(int(dir.Fd()), name, 0); err == unix.ENOENT { // someone's rm came first
			return false, nil
		}
	}
	if err != nil {
		return false, &fs.PathError{Op: "region: unlink", Path: filepath.Join(dir.Name(), name), Err: err}
	}
	return same, nil
}
