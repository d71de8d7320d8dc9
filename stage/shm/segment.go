package shm

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/tensorferry/tensorferry/stage"
	"golang.org/x/sys/unix"
)

const (
	// copyChunk is what is copied between two looks at the deadline: about 2 ms.
	copyChunk = 8 << 20
	// mapMin is from where mapping a segment is cheaper than a copy of it.
	mapMin = 64 << 10
	page   = 4096
)

// footprint is how much of the directory a segment takes.
func footprint(size int64) int64 { return (size + page - 1) / page * page }

// draft is a segment that has no name yet: it is gone if its process is.
type draft struct {
	fd int
	status
}

// write makes a draft of the parts one after the other. It is written, not mapped: on a full file system a store would be SIGBUS, a
// write is an error. The caller closes it.
func (d *folder) write(ctx context.Context, parts [][]byte, size int64) (*draft, error) {
	if err := d.checkSpace(size); err != nil {
		return nil, err
	}
	fd, err := unix.Openat(d.fd, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err == unix.EOPNOTSUPP || err == unix.EISDIR {
		return nil, fmt.Errorf("stage/shm: %s: its file system has no files without a name (O_TMPFILE); use a tmpfs: %w", d.f.Name(), err)
	}
	if err != nil {
		return nil, d.full(err, size)
	}
	t := &draft{fd: fd}
	if err = d.writeParts(ctx, fd, parts); err == nil {
		t.status, err = d.statFD(fd, "a segment")
	}
	if err != nil {
		unix.Close(fd)
		return nil, d.full(err, size)
	}
	return t, nil
}

func (d *folder) writeParts(ctx context.Context, fd int, parts [][]byte) error {
	at := int64(0)
	for _, p := range parts {
		for len(p) > 0 {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			n, err := unix.Pwrite(fd, p[:min(len(p), copyChunk)], at)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return err
			}
			p, at = p[n:], at+int64(n)
		}
	}
	return nil
}

// checkSpace asks beforehand: over RLIMIT_FSIZE the system sends SIGXFSZ, which ends the process, and a payload that does not fit
// should not fill the directory for others before it fails.
func (d *folder) checkSpace(size int64) error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &lim); err == nil && lim.Cur < uint64(size) {
		return fmt.Errorf("%w: a payload of %d bytes, the limit on file sizes is %d: raise it (ulimit -f)", stage.ErrFull, size, lim.Cur)
	}
	if size < mapMin {
		return nil // the write tells it
	}
	if free, _ := d.space(); free < size {
		return d.noSpace(size, free)
	}
	return nil
}

// space is what the directory's file system has free, and in all.
func (d *folder) space() (free, total int64) {
	var st unix.Statfs_t
	if unix.Fstatfs(d.fd, &st) != nil || st.Blocks == 0 || st.Blocks > math.MaxInt64/uint64(st.Bsize) { // without a limit it has 0
		return math.MaxInt64, math.MaxInt64
	}
	return int64(st.Bavail) * int64(st.Bsize), int64(st.Blocks) * int64(st.Bsize)
}

func (d *folder) noSpace(size, free int64) error {
	return fmt.Errorf("%w: %s has %d bytes free for a payload of %d: wait for readers, or enlarge it (docker run --shm-size=SIZE; "+
		"Kubernetes: an emptyDir with medium: Memory; mount -o remount,size=SIZE)", stage.ErrFull, d.f.Name(), free, size)
}

// full makes the system's words for "no more" a clear error, and leaves others alone.
func (d *folder) full(err error, size int64) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) || errors.Is(err, unix.ENOMEM) {
		free, _ := d.space()
		return errors.Join(d.noSpace(size, free), err)
	}
	return err
}

// link gives a draft its name, all at once. unix.EEXIST: the name is taken.
func (d *folder) link(t *draft, name string) error {
	return unix.Linkat(unix.AT_FDCWD, "/proc/self/fd/"+strconv.Itoa(t.fd), d.fd, name, unix.AT_SYMLINK_FOLLOW)
}

// segment is one that is open for reading.
type segment struct {
	fd int
	status
	sealed bool // nobody can write to it while it is open
}

// whole looks whether all of it was written: of one whose writer was killed over it, a part has no memory yet.
func (s *segment) whole() bool {
	hole, err := unix.Seek(s.fd, 0, unix.SEEK_HOLE)
	return err != nil || hole >= s.size // a file system that does not know says its end
}

// load gives the segment's bytes, which the caller may write to: a private mapping of it, or a copy if it is small, or not sealed, as
// others could then cut it off under a mapping. The memory outlives the segment's name. free gives it back, nil if there is nothing to
// give.
func (s *segment) load(ctx context.Context, inPlace bool) (data []byte, free func() error, err error) {
	if s.size < mapMin || !s.sealed {
		data, err = s.copy(ctx)
		return data, nil, err
	}
	data, err = unix.Mmap(s.fd, 0, int(s.size), unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		return nil, nil, fmt.Errorf("stage/shm: map %d bytes: %w", s.size, err)
	}
	free = func() error { return unix.Munmap(data) }
	for off := 0; off < len(data); off += copyChunk {
		if ctx.Err() != nil {
			return nil, nil, errors.Join(context.Cause(ctx), free())
		}
		// So that no store or load faults page by page later. A kernel before 5.14 does not know it, and then they do.
		if unix.Madvise(data[off:min(off+copyChunk, len(data))], unix.MADV_POPULATE_READ) == unix.EINVAL {
			break
		}
	}
	if !inPlace {
		if err := unix.Mprotect(data, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			return nil, nil, errors.Join(fmt.Errorf("stage/shm: protect %d bytes: %w", s.size, err), free())
		}
	}
	return data, free, nil
}

func (s *segment) copy(ctx context.Context) ([]byte, error) {
	data := make([]byte, s.size)
	for at := 0; at < len(data); {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		n, err := unix.Pread(s.fd, data[at:min(at+copyChunk, len(data))], int64(at))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("stage/shm: read: %w", err)
		}
		if n == 0 {
			return nil, fmt.Errorf("%w: it became shorter while it was read", ErrForeign)
		}
		at += n
	}
	return data, nil
}
