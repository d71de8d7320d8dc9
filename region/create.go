package region

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/boottime"
)

// raceTries bounds the loops that start again because a name changed under them. Each turn needs another process that acted
// in between, so more than a few is a file system that misbehaves.
const raceTries = 100

// Create makes, reserves, pre-faults and locks a region, then publishes it under its name whole.
//
// A file that a dead owner left under that name is reaped first, so that its memory is there for the new one (unless an engine
// still has it mapped), and so is one that was emptied, or cut to less than its header, and that nobody has locked. ErrInUse names the
// path and the pid if the owner lives or another process is creating the same region right now; ErrWaits if the owner is dead but the file still waits for its restart (see Take) and o.Replace is not set;
// ErrForeign and ErrExists say that what lies there is not ours to remove. A *SpaceError says that the bytes are not
// to be had. ErrName, ErrOptions: o is wrong. On any error, an end of ctx included, nothing is left behind.
func Create(ctx context.Context, o Options) (*Region, error) { return create(ctx, o, kernelCalls) }

func create(ctx context.Context, o Options, k kernel) (*Region, error) { return open(ctx, o, k, false) }

// open is Create, or Take if it may adopt.
func open(ctx context.Context, o Options, k kernel, mayAdopt bool) (*Region, error) {
	if o.Dir == "" {
		o.Dir = DefaultDir
	}
	if o.Mode == 0 {
		o.Mode = 0o600
	}
	if o.Mode&0o600 != 0o600 || o.Mode&^0o666 != 0 {
		return nil, fmt.Errorf("%w: mode %#o, must be within 0666 and give the owner 0600", ErrOptions, uint32(o.Mode))
	}
	if o.Geometry.Slots == 0 {
		o.Geometry.Slots = DefaultSlots(o.Geometry.Blocks)
	}
	if err := o.Geometry.validate(); err != nil {
		return nil, err
	}
	name, err := o.Identity.FileName()
	if err != nil {
		return nil, err
	}
	if o.Dir, err = filepath.Abs(o.Dir); err != nil { // Path is for others too, whose working directory differs
		return nil, err
	}
	dir, err := openDir(o.Dir)
	if err != nil {
		return nil, err
	}
	defer dir.Close()

	c, err := takeClaim(ctx, dir, name, o.Geometry.fileBytes(), patience)
	if err != nil {
		return nil, err
	}
	var r *Region
	why := ""
	if mayAdopt {
		r, why, err = adopt(ctx, dir, name, o, k)
		o.Replace = o.Replace || why != "" // only what was judged
	}
	if r == nil && err == nil {
		if r, err = build(ctx, dir, name, o, k); err == nil {
			r.reason = why + r.reason
		}
	}
	if err := errors.Join(err, c.drop(dir)); err != nil {
		if r != nil {
			err = errors.Join(err, r.Close(!r.adopted))
		}
		return nil, err
	}
	return r, nil
}

// build runs under the claim of name.
func build(ctx context.Context, dir *os.File, name string, o Options, k kernel) (*Region, error) {
	path := filepath.Join(dir.Name(), name)
	size := o.Geometry.fileBytes()
	// What processes still serve that outlived files of this name goes before a start fails for it.
	reclaimed := 0
	withRoom := func(try func() error) error {
		err := try()
		var s *SpaceError
		if o.Reclaim == nil || !errors.As(err, &s) {
			return err
		}
		n := o.Reclaim(ctx, path)
		if reclaimed += n; n == 0 {
			return err
		}
		return try()
	}
	var old reaped
	err := withRoom(func() (err error) {
		old, err = reap(ctx, dir, name, o, size)
		return err
	})
	if err != nil {
		return nil, err
	}
	fail := func(err error) error {
		err = spaceFrom(err, dir, path, size)
		var s *SpaceError
		if old.owner != 0 && errors.As(err, &s) {
			s.Fix += fmt.Sprintf("; the file of pid %d, which is dead, was removed just now, but engines that still map it keep its memory", old.owner)
		}
		return err
	}
	if err := withRoom(func() error { return checkSpace(dir, path, size, 0) }); err != nil {
		return nil, fail(err)
	}
	f, temp, err := newFile(dir, name, path, k)
	if err != nil {
		return nil, fail(err)
	}
	r := &Region{path: path, dir: o.Dir, name: name, file: f, replaced: old.owner, reason: old.fate(reclaimed), header: header{
		geometry: o.Geometry, identity: o.Identity, bootID: bootID(), created: time.Now().UnixNano(), creator: os.Getpid(),
		epoch: old.epoch + 1, owner: os.Getpid(), gen: firstGen(old.gen, time.Now()), adoptUntil: adoptUntil(o.Keep),
	}}
	err = r.fill(ctx, o.Mode, size, k)
	if err == nil {
		err = publish(ctx, dir, name, f, o)
	}
	if temp != "" { // the published name is a second link to it
		err = errors.Join(err, unix.Unlinkat(int(dir.Fd()), temp, 0))
	}
	if err != nil {
		unlinkIfSame(dir, name, f) // if it failed after the name was given
		if r.mem != nil {
			unix.Munmap(r.mem)
		}
		f.Close()
		return nil, fail(fmt.Errorf("region: creating %s: %w", path, err))
	}
	return r, nil
}

// firstGen is where the generations of a new file start: above all of the file that it replaces, and, in case that one was
// removed, above what an earlier one can have reached since the epoch at 4 million generations a second. Below 2^53 until 2041.
func firstGen(old uint64, now time.Time) uint64 {
	return max(old, uint64(max(now.UnixMicro(), 0))<<2)
}

// fill makes the nameless file a whole region.
func (r *Region) fill(ctx context.Context, mode fs.FileMode, size int64, k kernel) error {
	fd := int(r.file.Fd())
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("flock: %w", err)
	}
	if err := unix.Fchmod(fd, uint32(mode)); err != nil { // open's mode goes through the umask, this one does not
		return fmt.Errorf("chmod: %w", err)
	}
	if err := reserve(ctx, r.file, size, k); err != nil {
		return err
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	r.mem = mem
	if err := populate(ctx, mem, k); err != nil {
		return err
	}
	r.header.encode(mem[:headerBytes])
	r.table = newSlotTable(mem, r.header.geometry, true)
	return nil
}

// newFile makes the file without its name: nameless where the file system can, so that SIGKILL leaves nothing, else under a
// temporary name, which is returned. The claim makes that name ours, and what a killed creator left under it.
func newFile(dir *os.File, name, path string, k kernel) (f *os.File, temp string, err error) {
	fd, err := k.tmpfile(int(dir.Fd()))
	if err == nil {
		return os.NewFile(uintptr(fd), path), "", nil
	}
	if err != unix.EOPNOTSUPP && err != unix.EISDIR && err != unix.EINVAL { // how file systems say that they have no O_TMPFILE
		return nil, "", &fs.PathError{Op: "region: open nameless file", Path: dir.Name(), Err: err}
	}
	temp = "." + name + ".new"
	if err := unix.Unlinkat(int(dir.Fd()), temp, 0); err != nil && err != unix.ENOENT {
		return nil, "", &fs.PathError{Op: "region: unlink", Path: filepath.Join(dir.Name(), temp), Err: err}
	}
	fd, err = unix.Openat(int(dir.Fd()), temp, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, "", &fs.PathError{Op: "region: create", Path: filepath.Join(dir.Name(), temp), Err: err}
	}
	return os.NewFile(uintptr(fd), path), temp, nil
}

// publish gives the file its name, which must not be taken. Under the claim only a process that does not follow the protocol
// can have taken it since the reaping; what it put there is judged once more.
func publish(ctx context.Context, dir *os.File, name string, f *os.File, o Options) error {
	source := "/proc/self/fd/" + strconv.Itoa(int(f.Fd()))
	for range raceTries {
		err := unix.Linkat(unix.AT_FDCWD, source, int(dir.Fd()), name, unix.AT_SYMLINK_FOLLOW)
		if err != unix.EEXIST {
			return os.NewSyscallError("linkat", err)
		}
		if _, err := reap(ctx, dir, name, o, 0); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: again and again", ErrExists)
}

// reap removes what lies under name if it is a region of this user and identity whose owner is dead, and returns its header;
// a zero header if nothing lies there, or if the file was emptied. Whatever else lies there is left alone and named in the error, and so
// is a region that waits for its owner's restart unless o.Replace is set. Nothing is removed for a file of size bytes that would still not fit: then
// a start with other options can go on with what lies there. Processes that serve it for a restart go on if peers may still READ what was
// granted to them, and if there is room for both files; else they end with its name, and are waited for.
func reap(ctx context.Context, dir *os.File, name string, o Options, size int64) (reaped, error) {
	path := filepath.Join(dir.Name(), name)
	for range raceTries {
		f, err := openOwn(dir, name, unix.O_RDWR)
		if errors.Is(err, fs.ErrNotExist) {
			return reaped{}, nil
		}
		if err != nil {
			return reaped{}, err
		}
		h, done, err := reapOpen(ctx, dir, name, path, f, o, size)
		if done && !h.left {
			awaitServers(ctx, f)
		}
		f.Close() // gives the lock up
		if done || err != nil {
			return h, err
		}
	}
	return reaped{}, fmt.Errorf("%w: %s comes and goes", ErrInUse, path)
}

// reaped is a file that was removed.
type reaped struct {
	header
	left   bool // processes go on serving it
	cutOff bool // they were ended, whatever peers had been granted
}

// fate says in words what became of the processes that served it, and of so many that served files before it; "" if there were none.
func (r *reaped) fate(reclaimed int) string {
	const cost = "and a vLLM engine that was told of them and has not READ yet may end"
	switch {
	case r.left && reclaimed == 0:
		return fmt.Sprintf("; peers may still READ what they were granted of it for %v: its memory is free then",
			time.Duration(r.adoptUntil-boottime.Now()).Round(time.Second))
	case r.cutOff || reclaimed > 0:
		return "; there is no room for its memory beside the new one: the processes that served peers from it were ended, " + cost
	}
	return ""
}

func reapOpen(ctx context.Context, dir *os.File, name, path string, f *os.File, o Options, size int64) (h reaped, done bool, err error) {
	page, bytes, err := readStart(f)
	if err != nil {
		return h, false, &fs.PathError{Op: "region: read", Path: path, Err: err}
	}
	notOurs := fmt.Errorf("%w: %s is not a region file; remove it if it is not needed", ErrExists, path)
	if !isRegion(page) && !isRemnant(page, bytes) {
		return h, false, notOurs
	}
	if err := lockRegion(ctx, f); err != nil {
		return h, false, err
	}
	// Under the lock no owner lives any more who could change it. What somebody who knows nothing of locks wrote into an empty file
	// meanwhile is not ours.
	if page, bytes, err = readStart(f); err != nil {
		return h, false, &fs.PathError{Op: "region: read", Path: path, Err: err}
	}
	if !isRegion(page) && !isRemnant(page, bytes) {
		return h, false, notOurs
	}
	// A region of another version of the format may be reaped as well, or an upgrade could never start; only its header means
	// nothing to us. That of a remnant is not there.
	var headerErr error
	h.header, headerErr = decodeHeader(page, bytes)
	if headerErr == nil && h.identity != o.Identity {
		return h, false, fmt.Errorf("%w: %s is a region of instance %q, group %q, rank %d; remove it if it is not needed",
			ErrExists, path, h.identity.Instance, h.identity.Group, h.identity.Rank)
	}
	if headerErr == nil && !o.Replace {
		if err := h.waits(path); err != nil {
			return h, false, err
		}
	}
	back, err := heldBytes(f)
	if err != nil {
		return h, false, err
	}
	if err := checkSpace(dir, path, size, back); err != nil {
		var s *SpaceError
		if errors.As(err, &s) {
			s.Fix += fmt.Sprintf("; the file of a dead owner that lies there, %s that count as free, is kept: a start with its size may go on with it", bytesText(back))
		}
		return h, false, err
	}
	if headerErr == nil && h.waitsFor() > 0 && served(f) && granted(f, &h.header) {
		h.left = checkSpace(dir, path, size, 0) == nil && leaveServers(f, h.adoptUntil) == nil
		h.cutOff = !h.left
	}
	if !h.left && headerErr == nil && h.serveUntil != 0 {
		// Its owner, or a start that ended here before, had left them; nothing is to be READ of it now, or there is no room.
		if err := leaveServers(f, 0); err != nil {
			return h, false, &fs.PathError{Op: "region: write", Path: path, Err: err}
		}
	}
	done, err = unlinkIfSame(dir, name, f)
	return h, done, err
}

const (
	// patience is for locks that a sweep holds for moments. An owner keeps the lock of its file, and a creator its claim, for longer.
	patience     = time.Second
	patiencePoll = time.Millisecond
	// ownerLooks is how often in a row the owner that a file names is seen with its lock before that is believed: a sweep may have
	// the pid that a dead owner had.
	ownerLooks = 3
)

// lockRegion takes the lock of a region's file. ErrInUse names who has it and keeps it.
func lockRegion(ctx context.Context, f *os.File) error {
	late := time.NewTimer(patience)
	defer late.Stop()
	tick := time.NewTicker(patiencePoll)
	defer tick.Stop()
	for looks := 0; ; {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
		case nil:
			return nil
		case unix.EWOULDBLOCK, unix.EINTR:
		default:
			return &fs.PathError{Op: "region: flock", Path: f.Name(), Err: err}
		}
		holder, owner := flockOwner(f), namedOwner(f)
		inUse := fmt.Errorf("%w: %s, by a process that is not seen from here and may be pid %d of its own namespace; end it, or give this one another instance id",
			ErrInUse, f.Name(), owner)
		if holder != 0 {
			inUse = fmt.Errorf("%w: %s, pid %d; end that process, or give this one another instance id", ErrInUse, f.Name(), holder)
		}
		if looks++; holder == 0 || holder != owner {
			looks = 0
		}
		if looks == ownerLooks {
			return inUse
		}
		select {
		case <-tick.C:
		case <-late.C:
			return inUse
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// namedOwner is the pid that a region's file names as its owner's, dead or not; 0 if it names none.
func namedOwner(f *os.File) int {
	var word [8]byte
	if _, err := f.ReadAt(word[:], offOwner); err != nil {
		return 0
	}
	return int(order.Uint64(word[:]))
}

// claim is an empty locked file that lives while a region of one name is being created: it makes reaping and creating one step
// towards other creators, so that two of them neither remove each other's work nor ask for the memory twice. A killed creator
// leaves it unlocked for the next one to take.
type claim struct {
	file *os.File
	name string
}

// takeClaim gives ErrInUse if another process has it for longer than wait. size is that of the region, for the error if there is no
// inode left.
func takeClaim(ctx context.Context, dir *os.File, region string, size int64, wait time.Duration) (*claim, error) {
	name := "." + region + ".claim"
	path := filepath.Join(dir.Name(), name)
	end := time.Now().Add(wait)
	for tries := 0; tries < raceTries; tries++ {
		fd, err := unix.Openat(int(dir.Fd()), name, unix.O_CREAT|unix.O_RDWR|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
		switch err {
		case nil:
		case unix.ELOOP:
			return nil, fmt.Errorf("%w: %s is a symbolic link", ErrForeign, path)
		default:
			return nil, spaceFrom(&fs.PathError{Op: "region: create", Path: path, Err: err}, dir, path, size)
		}
		f := os.NewFile(uintptr(fd), path)
		got, err := lockClaim(dir, name, region, f)
		if got {
			return &claim{f, name}, nil
		}
		f.Close()
		switch {
		case errors.Is(err, ErrInUse) && time.Now().Before(end):
			tries = 0
			select {
			case <-time.After(patiencePoll):
			case <-ctx.Done():
				return nil, context.Cause(ctx)
			}
		case err != nil:
			return nil, err
		}
	}
	return nil, fmt.Errorf("%w: %s comes and goes", ErrInUse, path)
}

func lockClaim(dir *os.File, name, region string, f *os.File) (bool, error) {
	if err := checkOwn(int(f.Fd()), f.Name()); err != nil {
		return false, err
	}
	switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err {
	case nil:
	case unix.EWOULDBLOCK:
		return false, fmt.Errorf("%w: %s is being created by %s", ErrInUse, filepath.Join(dir.Name(), region), claimant(f))
	default:
		return false, &fs.PathError{Op: "region: flock", Path: f.Name(), Err: err}
	}
	// A record lock besides, because the kernel tells whose it is. It costs no page, which a pid in the file would.
	_ = unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
	return sameFile(dir, name, int(f.Fd())) // it may have been dropped between the open and the lock
}

// claimant names the process that has the claim, for an error's text.
func claimant(f *os.File) string {
	l := unix.Flock_t{Type: unix.F_WRLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_GETLK, &l); err != nil || l.Type == unix.F_UNLCK || l.Pid <= 0 {
		return "this process or one that the kernel does not show" // own record locks do not conflict
	}
	return "pid " + strconv.Itoa(int(l.Pid))
}

func (c *claim) drop(dir *os.File) error {
	_, err := unlinkIfSame(dir, c.name, c.file)
	return errors.Join(err, c.file.Close())
}

// bootID names the run of the kernel that a file in memory cannot outlive; empty where /proc does not tell.
func bootID() string {
	id, err := boottime.ID()
	if err != nil {
		return ""
	}
	return id[:min(len(id), bootIDBytes)]
}
