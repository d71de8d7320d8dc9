package region

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// SpaceError says that the bytes asked for are not to be had. Its text names the path, both numbers and what to change, which includes
// files of dead owners in the same directory that may be swept.
type SpaceError struct {
	Path        string
	Asked, Free int64  // bytes; Asked counts the whole file: pool, slot table and header
	Limit       string // what is short, e.g. "tmpfs /dev/shm"
	Fix         string // what to change
}

// Error implements error.
func (e *SpaceError) Error() string {
	return fmt.Sprintf("region: no space for %s: asked %s, free %s of %s; %s",
		e.Path, bytesText(e.Asked), bytesText(e.Free), e.Limit, e.Fix)
}

// bytesText gives people a rounded number and scripts the exact one.
func bytesText(n int64) string {
	if n < 1<<20 {
		return fmt.Sprintf("%d bytes", n)
	}
	return fmt.Sprintf("%.1f MiB (%d bytes)", float64(n)/(1<<20), n)
}

const (
	fixTmpfs = "ask for less, or enlarge it: docker run --shm-size=SIZE (compose: shm_size); Kubernetes: mount there an " +
		"emptyDir with medium: Memory and a larger sizeLimit; on a host: mount -o remount,size=SIZE DIR"
	fixInodes = "it has no inodes left: remove files, or mount it with a larger nr_inodes"
	fixDisk   = "ask for less, free some, or use another directory"
	fixRlimit = "raise the limit on file sizes (ulimit -f, LimitFSIZE= in a systemd unit)"
	fixMemory = "ask for less, or raise the limit: docker run --memory=SIZE; Kubernetes: resources.limits.memory (an emptyDir " +
		"with medium: Memory counts against it)"
	fixHost = "ask for less, or end something: shared memory is memory"
)

// CheckSpace says whether new regions of these geometries fit into dir together, as Create asks before it makes one: *SpaceError if they
// do not. asked is the size of all files, in bytes. It knows nothing of files that a restart would go on with, or that Create would reap.
// ErrOptions: a geometry is impossible. Other errors are about the directory.
func CheckSpace(dir string, gs ...Geometry) (asked int64, err error) {
	var largest int64
	for _, g := range gs {
		if g.Slots == 0 {
			g.Slots = DefaultSlots(g.Blocks)
		}
		if err := g.validate(); err != nil {
			return 0, err
		}
		if asked > math.MaxInt64-g.fileBytes() {
			return 0, fmt.Errorf("%w: all pools together do not fit an address space", ErrOptions)
		}
		asked += g.fileBytes()
		largest = max(largest, g.fileBytes())
	}
	d, err := openDir(dir)
	if err != nil {
		return asked, err
	}
	defer d.Close()
	if err := checkFileSize(dir, largest); err != nil {
		return asked, err
	}
	return asked, checkRoom(d, dir, asked, 0)
}

// checkSpace asks beforehand, because the system's own answers are worse: over RLIMIT_FSIZE it sends SIGXFSZ, and over a memory
// limit it may kill. What changes between the look and the reservation is caught there (spaceFrom). back counts as free: it is what
// will have been given back by then.
func checkSpace(dir *os.File, path string, size, back int64) error {
	if err := checkFileSize(path, size); err != nil {
		return err
	}
	return checkRoom(dir, path, size, back)
}

// checkFileSize is about one file.
func checkFileSize(path string, size int64) error {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &lim); err == nil && lim.Cur < uint64(size) {
		return &SpaceError{Path: path, Asked: size, Free: int64(lim.Cur), Limit: "RLIMIT_FSIZE", Fix: fixRlimit}
	}
	return nil
}

// checkRoom is about so many bytes of files, however many.
func checkRoom(dir *os.File, path string, size, back int64) error {
	v, err := volumeOf(dir)
	if err != nil {
		return err
	}
	if v.free < size-back {
		return &SpaceError{Path: path, Asked: size, Free: v.free + back, Limit: v.what, Fix: v.fix + deadFiles(dir, path)}
	}
	if !v.memory {
		return nil
	}
	if m, ok := systemMemory.free(); ok && m.free < size-back {
		return &SpaceError{Path: path, Asked: size, Free: m.free + back, Limit: m.what, Fix: m.fix + deadFiles(dir, path)}
	}
	return nil
}

// maxDeadFiles is how many files an error names.
const maxDeadFiles = 4

// deadFiles names the files in dir, but for that at path, that ferry sweep --force would remove: "" if there are none. Like the sweep's
// dry run it takes no lock.
func deadFiles(dir *os.File, path string) string {
	swept, err := Sweep(SweepOptions{Dir: dir.Name(), DryRun: true, Force: true})
	if err != nil {
		return "" // there is an error to report already, which needs no second
	}
	swept = slices.DeleteFunc(swept, func(s Swept) bool { return !s.Reaped || s.Bytes == 0 || s.Path == path })
	if len(swept) == 0 {
		return ""
	}
	slices.SortStableFunc(swept, func(a, b Swept) int { return cmp.Compare(b.Bytes, a.Bytes) })
	var total int64
	for _, s := range swept {
		total += s.Bytes
	}
	var names []string
	for _, s := range swept[:min(len(swept), maxDeadFiles)] {
		names = append(names, fmt.Sprintf("%s, %s", s.Path, bytesText(s.Bytes)))
	}
	if more := len(swept) - len(names); more > 0 {
		names = append(names, fmt.Sprintf("%d more", more))
	}
	return fmt.Sprintf("; nodes that are dead hold %s there, for their restart with the options of before (%s): ferry sweep --force --dir %s removes that, with the entries",
		bytesText(total), strings.Join(names, "; "), dir.Name())
}

// heldBytes is what the file's end gives back, if nobody else has it open.
func heldBytes(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, fmt.Errorf("region: stat %s: %w", f.Name(), err)
	}
	return st.Blocks * 512, nil // the unit of st_blocks, stat(2)
}

// volume is what statfs says of a directory's file system.
type volume struct {
	free   int64 // bytes; MaxInt64 if it has no limit
	inodes bool  // there are inodes left
	memory bool  // its files are memory
	what   string
	fix    string
}

func volumeOf(dir *os.File) (volume, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &st); err != nil {
		return volume{}, fmt.Errorf("region: statfs %s: %w", dir.Name(), err)
	}
	v := volume{free: math.MaxInt64, inodes: st.Files == 0 || st.Ffree > 0, what: "the file system of " + dir.Name(), fix: fixDisk}
	if st.Type == unix.TMPFS_MAGIC || st.Type == unix.RAMFS_MAGIC {
		v.memory, v.what, v.fix = true, "tmpfs "+dir.Name(), fixTmpfs
	}
	if st.Blocks > 0 && st.Bavail < math.MaxInt64/uint64(st.Bsize) { // a tmpfs without a limit says 0 blocks
		v.free = int64(st.Bavail) * int64(st.Bsize)
	}
	return v, nil
}

// spaceFrom turns the system's words for "no more" into a *SpaceError, and leaves other errors alone.
func spaceFrom(err error, dir *os.File, path string, size int64) error {
	short := errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG)
	noMemory := errors.Is(err, unix.ENOMEM)
	if !short && !noMemory {
		return err
	}
	v, verr := volumeOf(dir)
	if verr != nil {
		return errors.Join(err, verr)
	}
	if m, ok := systemMemory.free(); noMemory && ok {
		return &SpaceError{Path: path, Asked: size, Free: m.free, Limit: m.what, Fix: m.fix + deadFiles(dir, path)}
	}
	if !v.inodes {
		v.fix = fixInodes
	}
	return &SpaceError{Path: path, Asked: size, Free: v.free, Limit: v.what, Fix: v.fix + deadFiles(dir, path)}
}
