package mapped

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// mapping is a peer's memory in this process, read-only. Peers whose metadata agree in all but the path share it. It is unmapped
// when the last peer and the last view have let go.
type mapping struct {
	key    location
	pool   []byte
	region *region.Mapping // nil: a plain file
	unmap  func() error
	refs   int // guarded by Plane.mu
}

// acquire gives the mapping of l with one more reference.
func (p *Plane) acquire(l location) (*mapping, error) {
	f, err := p.open(l)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	key := l
	key.path = ""
	m := p.cached(key)
	if m == nil {
		if m, err = p.attach(f, l, key); err != nil {
			return nil, err
		}
	}
	// A kept mapping shows what its owner has become since.
	if m.region != nil && m.region.Epoch() != l.epoch {
		err := fmt.Errorf("%w: mapped: %s: the region is in epoch %d now, the peer's was %d", transfer.ErrUnreachable, l.path, m.region.Epoch(), l.epoch)
		return nil, errors.Join(err, p.release(m))
	}
	return m, nil
}

func (p *Plane) cached(key location) *mapping {
	p.mu.Lock()
	defer p.mu.Unlock()
	m := p.mappings[key]
	if m != nil {
		m.refs++
	}
	return m
}

// attach maps l and keeps the mapping, or gives that of an AddPeer that was faster.
func (p *Plane) attach(f *os.File, l, key location) (*mapping, error) {
	m, err := mapFile(f, l)
	if err != nil {
		return nil, err
	}
	m.key, m.refs = key, 1
	p.mu.Lock()
	if other := p.mappings[key]; other != nil {
		other.refs++
		p.mu.Unlock()
		return other, m.unmap()
	}
	p.mappings[key] = m
	p.mu.Unlock()
	p.log.Debug("mapped: attached", "path", l.path, "bytes", l.length, "region", l.isRegion)
	return m, nil
}

func (p *Plane) release(m *mapping) error {
	p.mu.Lock()
	m.refs--
	last := m.refs == 0
	if last {
		delete(p.mappings, m.key)
	}
	p.mu.Unlock()
	if !last {
		return nil
	}
	p.log.Debug("mapped: detached", "bytes", len(m.pool))
	return m.unmap()
}

// open opens the file that l names and proves that it is the producer's: same boot, same inode, our own user's, no link. All that
// can differ on another machine or in another container is ErrUnreachable.
func (p *Plane) open(l location) (*os.File, error) {
	unreachable := func(format string, args ...any) (*os.File, error) {
		return nil, fmt.Errorf("%w: mapped: %w", transfer.ErrUnreachable, fmt.Errorf(format, args...))
	}
	if l.boot != p.boot {
		return unreachable("the peer is on another machine")
	}
	if !p.allowed(l.path) {
		return unreachable("%q is in none of the directories %q", l.path, p.dirs)
	}
	// O_NONBLOCK: opening a FIFO must not wait for its writer.
	fd, err := unix.Open(l.path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return unreachable("%w", &os.PathError{Op: "open", Path: l.path, Err: err})
	}
	f := os.NewFile(uintptr(fd), l.path)
	var st unix.Stat_t
	switch err := unix.Fstat(fd, &st); {
	case err != nil:
		f.Close()
		return unreachable("%s: %w", l.path, err)
	case st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid():
		f.Close()
		return unreachable("%s: not a regular file of this user", l.path)
	case st.Dev != l.file.dev || st.Ino != l.file.ino:
		f.Close()
		return unreachable("%s: another file than the peer's (inode %d, not %d)", l.path, st.Ino, l.file.ino)
	case st.Size < l.offset+l.length:
		f.Close()
		return unreachable("%s: %d bytes, the peer's memory ends at %d", l.path, st.Size, l.offset+l.length)
	}
	return f, nil
}

// mapFile maps l's bytes of f, which open has checked.
func mapFile(f *os.File, l location) (*mapping, error) {
	m := &mapping{}
	if l.isRegion {
		r, err := region.Attach(f, false)
		if err != nil {
			return nil, fmt.Errorf("%w: mapped: %s: %w", transfer.ErrUnreachable, l.path, err)
		}
		if r.Identity() != l.identity || r.PoolOffset() != l.offset || int64(len(r.Pool())) != l.length {
			err := fmt.Errorf("%w: mapped: %s: the region is %+v with a pool of %d bytes, the peer's was %+v with %d", transfer.ErrUnreachable,
				l.path, r.Identity(), len(r.Pool()), l.identity, l.length)
			return nil, errors.Join(err, r.Close())
		}
		m.pool, m.region, m.unmap = r.Pool(), r, r.Close
	} else {
		lead := l.offset % int64(os.Getpagesize()) // mmap wants a page's offset
		b, err := unix.Mmap(int(f.Fd()), l.offset-lead, int(l.length+lead), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return nil, fmt.Errorf("%w: mapped: mmap %s: %w", transfer.ErrUnreachable, l.path, err)
		}
		m.pool, m.unmap = b[lead:], func() error { return unix.Munmap(b) }
	}
	populate(m.pool)
	return m, nil
}

// populate enters the pages into this process's page table, so that the first READ does not take a fault for each of them. Only
// speed depends on it, and kernels before 5.14 refuse it, so an error is of no interest.
func populate(pool []byte) {
	lead := int(alignment(pool))
	if lead >= len(pool) {
		return
	}
	_ = unix.Madvise(pool[lead:], unix.MADV_POPULATE_READ)
}
