package region

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// kernel holds the calls that old kernels and some file systems do not have, so that tests can take them away.
type kernel struct {
	tmpfile   func(dirfd int) (int, error)
	fallocate func(fd int, off, n int64) error
	populate  func(mem []byte) error
}

var kernelCalls = kernel{
	tmpfile: func(dirfd int) (int, error) {
		return unix.Openat(dirfd, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	},
	fallocate: func(fd int, off, n int64) error { return unix.Fallocate(fd, 0, off, n) },
	populate:  func(mem []byte) error { return unix.Madvise(mem, unix.MADV_POPULATE_WRITE) },
}

const (
	// reserveChunk is small enough to end well within the 10 ms of a profiler's signals: tmpfs gives a whole fallocate back when
	// a signal comes. Reserving costs 160 ms a GiB.
	reserveChunk = 16 << 20
	// populateChunk is how much is pre-faulted between two looks at the context.
	populateChunk = 32 << 20
	// populateWorkers: zeroing pages is bound by memory from a few cores on.
	populateWorkers = 4
)

// reserve gives the file its size and every byte of it a place on the file system, so that no store into a mapping can fault
// later. ENOSPC and its like come from here.
func reserve(ctx context.Context, f *os.File, size int64, k kernel) error {
	for off := int64(0); off < size; off += reserveChunk {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n := min(reserveChunk, size-off)
		err := k.fallocate(int(f.Fd()), off, n)
		for err == unix.EINTR && ctx.Err() == nil {
			err = k.fallocate(int(f.Fd()), off, n)
		}
		switch err {
		case nil:
		case unix.EOPNOTSUPP, unix.ENOSYS:
			return reserveByWriting(ctx, f, off, size)
		default:
			return fmt.Errorf("fallocate: %w", err)
		}
	}
	return nil
}

// reserveByWriting is for file systems without fallocate: a written byte has its place as well.
func reserveByWriting(ctx context.Context, f *os.File, off, size int64) error {
	zeros := make([]byte, 1<<20)
	for off < size {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := f.WriteAt(zeros[:min(int64(len(zeros)), size-off)], off)
		if err != nil {
			return err
		}
		off += int64(n)
	}
	return nil
}

// populate faults all pages in, writable, so that nobody pays for it (0.5 s a GiB) in the middle of a transfer. The space is
// reserved already, so touching is safe. mem may be in use: no byte of it changes.
func populate(ctx context.Context, mem []byte, k kernel) error {
	g, stop := errgroup.WithContext(ctx)
	g.SetLimit(min(populateWorkers, runtime.GOMAXPROCS(0)))
	for off := 0; off < len(mem) && stop.Err() == nil; off += populateChunk {
		chunk := mem[off:min(off+populateChunk, len(mem))]
		g.Go(func() error {
			if stop.Err() != nil {
				return context.Cause(stop)
			}
			return populateOne(chunk, k)
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return context.Cause(ctx)
}

func populateOne(chunk []byte, k kernel) error {
	err := k.populate(chunk)
	for range raceTries {
		if err != unix.EINTR && err != unix.EAGAIN {
			break
		}
		err = k.populate(chunk)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS): // kernels before 5.14 do not know MADV_POPULATE_WRITE
		touch(chunk)
		return nil
	default:
		return fmt.Errorf("pre-fault: %w", err)
	}
}

// touch writes to each page what is there, in one step for everybody: of an adopted file others are writing the pool.
func touch(mem []byte) {
	for i := 0; i < len(mem); i += os.Getpagesize() {
		atomic.AddUint64(headerWord(mem, i), 0)
	}
}
