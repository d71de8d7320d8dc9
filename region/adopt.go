package region

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/boottime"
)

// Take gives the region of an identity: the one that a dead owner left, if a restart can go on with it, else a new one as Create
// makes it. Errors are Create's; ErrWaits is not among them.
//
// A region is adopted if it is this user's file of this identity, geometry and format version, was made since the machine booted,
// still waits for its owner (Options.Keep), and its slot table is sound. It keeps its entries, clients, generations and port, and
// its epoch is one higher. What is in its slots is true as of the owner's death: no ready entry is half written, and nobody but
// clients may still write to a filling one: no thread of a process is left when its lock is free, and Take waits for processes that
// wrote on the owner's behalf. Such a process holds a read lock on the file's first byte for as long as it lives (F_OFD_SETLK, of
// the description that it maps). ErrInUse if one does not end.
//
// Anything else that a dead owner of this identity left is reaped, and Replaced says why. Processes that have it mapped keep it.
func Take(ctx context.Context, o Options) (*Region, error) {
	return open(ctx, o, kernelCalls, true)
}

// adopt takes over the file under name, which the claim protects. A nil region without an error is for build to deal with: why
// says what is wrong with the file, or is empty if there is none or it is not ours to judge.
func adopt(ctx context.Context, dir *os.File, name string, o Options, k kernel) (r *Region, why string, err error) {
	for range raceTries {
		if r, why, err = adoptOnce(ctx, dir, name, o, k); !errors.Is(err, errMoved) {
			return r, why, err
		}
	}
	return nil, "", fmt.Errorf("%w: %s comes and goes", ErrInUse, filepath.Join(dir.Name(), name))
}

func adoptOnce(ctx context.Context, dir *os.File, name string, o Options, k kernel) (r *Region, why string, err error) {
	f, err := openOwn(dir, name, unix.O_RDWR)
	if err != nil {
		return nil, "", nil
	}
	if err := lockRegion(ctx, f); err != nil {
		return nil, "", errors.Join(err, f.Close())
	}
	r = &Region{path: filepath.Join(dir.Name(), name), dir: o.Dir, name: name, file: f, adopted: true}
	if why, err = r.adopt(ctx, dir, o, k); err == nil && why == "" {
		return r, "", nil
	}
	if r.mem != nil {
		err = errors.Join(err, unix.Munmap(r.mem))
	}
	err = errors.Join(err, f.Close())
	if errors.Is(err, errNotJudged) {
		return nil, "", nil
	}
	if err != nil {
		err = fmt.Errorf("region: adopting %s: %w", r.path, err)
	}
	return nil, why, err
}

var (
	// errNotJudged: the file is another's, or no region. Reaping says so, and what to do.
	errNotJudged = errors.New("not judged")
	// errMoved: the name was taken off the file before it was locked.
	errMoved = errors.New("not under its name any more")
)

func (r *Region) adopt(ctx context.Context, dir *os.File, o Options, k kernel) (why string, err error) {
	fd := int(r.file.Fd())
	switch same, err := sameFile(dir, r.name, fd); {
	case err != nil:
		return "", err
	case !same:
		return "", errMoved
	}
	// The header is read under the lock: before that, its words may be a living owner's.
	page, bytes, err := readStart(r.file)
	if err != nil {
		return "", err
	}
	if !isRegion(page) && !isRemnant(page, bytes) {
		return "", errNotJudged
	}
	h, err := decodeHeader(page, bytes)
	switch {
	case err != nil:
		return err.Error(), nil
	case h.identity != o.Identity:
		return "", errNotJudged
	case h.geometry != o.Geometry:
		return fmt.Sprintf("it has %d blocks of %d bytes and %d slots, wanted are %d of %d and %d", h.geometry.Blocks, h.geometry.BlockBytes,
			h.geometry.Slots, o.Geometry.Blocks, o.Geometry.BlockBytes, o.Geometry.Slots), nil
	}
	if why := h.whyNotWaiting(); why != "" {
		return why, nil
	}
	r.header = h
	size := h.geometry.fileBytes()
	if r.mem, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return "", fmt.Errorf("mmap: %w", err)
	}
	r.table = newSlotTable(r.mem, h.geometry, true)
	if a := r.table.Audit(); len(a.Problems) > 0 {
		return fmt.Sprintf("its slot table is damaged in %d places: %v", len(a.Problems), a.Problems[0]), nil
	}
	if err := awaitWriters(ctx, r.file); err != nil {
		return "", err
	}
	if err := populate(ctx, r.mem, k); err != nil {
		return "", err
	}
	if err := unix.Fchmod(fd, uint32(o.Mode)); err != nil {
		return "", fmt.Errorf("chmod: %w", err)
	}
	// From here on it is ours. The epoch goes first: whatever else changes, it changed in an epoch of its own.
	r.header.epoch++
	r.header.owner = os.Getpid()
	atomic.StoreUint64(headerWord(r.mem, offEpoch), r.header.epoch)
	atomic.StoreUint64(headerWord(r.mem, offOwner), uint64(r.header.owner))
	atomic.StoreUint64(headerWord(r.mem, offAdoptUntil), uint64(adoptUntil(o.Keep)))
	atomic.StoreUint64(headerWord(r.mem, offServeUntil), 0)
	return "", nil
}

const (
	writersTimeout = 10 * time.Second // they die with their owner, of a signal that comes at once
	writersPoll    = 2 * time.Millisecond
)

// awaitWriters returns when nobody writes on the dead owner's behalf any more.
func awaitWriters(ctx context.Context, f *os.File) error {
	ctx, cancel := context.WithTimeoutCause(ctx, writersTimeout,
		fmt.Errorf("%w: a process that the dead owner started to write the file still lives: end it", ErrInUse))
	defer cancel()
	tick := time.NewTicker(writersPoll)
	defer tick.Stop()
	for {
		l := unix.Flock_t{Type: unix.F_WRLCK, Len: 1}
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l); err != nil {
			return fmt.Errorf("looking for writers: %w", err)
		}
		if l.Type == unix.F_UNLCK {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// whyNotWaiting is empty while the file waits for the restart of its owner.
func (h *header) whyNotWaiting() string {
	switch now := boottime.Now(); {
	case h.bootID == "" || h.bootID != bootID():
		return "it is from before the machine was booted"
	case h.adoptUntil == 0:
		return "its owner wanted no restart to go on with it"
	case h.adoptUntil <= now:
		return fmt.Sprintf("it waited for a restart of its owner until %v ago", time.Duration(now-h.adoptUntil).Round(time.Second))
	}
	return ""
}

// waitsFor is how much longer the file waits for its owner's restart, 0 if it does not.
func (h *header) waitsFor() time.Duration {
	if h.whyNotWaiting() != "" {
		return 0
	}
	return time.Duration(h.adoptUntil - boottime.Now())
}

// adoptUntil is the header's word for "so long from now".
func adoptUntil(d time.Duration) int64 {
	if d <= 0 {
		return 0
	}
	now := boottime.Now()
	return now + min(int64(d), math.MaxInt64-now)
}

// waits is an ErrWaits while the file, which lies at path, is not to be reaped.
func (h *header) waits(path string) error {
	left := h.waitsFor()
	if left <= 0 {
		return nil
	}
	return fmt.Errorf("%w: %s, of pid %d, for %v more", ErrWaits, path, h.owner, left.Round(time.Second))
}
