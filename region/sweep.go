package region

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// SweepOptions say where Sweep looks and what it may do.
type SweepOptions struct {
	Dir    string // default DefaultDir
	DryRun bool   // change nothing, and take no lock
	Force  bool   // also reap regions that still wait for their owner's restart
}

// Swept is a file that looks like one of ours, and what became of it.
type Swept struct {
	Path   string
	Bytes  int64  // of memory that it takes
	Reaped bool   // or would be, in a dry run
	Reason string // why, or why not
}

// Names of the files of this package: a region, and what stands beside it while it is made.
var (
	regionName   = regexp.MustCompile(`^ferry_.+_[0-9a-f]{1,12}_r[0-9]{1,5}\.region$`)
	leftoverName = regexp.MustCompile(`^\.(ferry_.+\.region)\.(claim|new)$`)
)

const noRegion = "not a region file"

// Sweep reaps what dead owners and killed creators left in a directory: regions that wait for no restart any more or were emptied,
// claims and temporary files. It leaves alone what has a live owner or creator, what is another user's, no regular file, no region by its
// content, or a region under another's name; the answer says so for each file whose name is one of ours, in order of the names.
// A region that waits is not even locked, so that its owner's restart is not disturbed. An error is about the directory only.
func Sweep(o SweepOptions) ([]Swept, error) {
	dir, err := openDir(cmp.Or(o.Dir, DefaultDir))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("region: sweep: %w", err)
	}
	slices.Sort(names)
	var out []Swept
	for _, name := range names {
		var s Swept
		switch m := leftoverName.FindStringSubmatch(name); {
		case regionName.MatchString(name):
			s = sweepRegion(dir, name, o)
		case m != nil && regionName.MatchString(m[1]):
			s = sweepLeftover(dir, name, m[1], o)
		default:
			continue
		}
		s.Path = filepath.Join(dir.Name(), name)
		if s.Reason != "" { // else it went while we looked
			out = append(out, s)
		}
	}
	return out, nil
}

func sweepRegion(dir *os.File, name string, o SweepOptions) (s Swept) {
	flags := unix.O_RDWR // for a lock, which file systems over a network want to write for
	if o.DryRun {
		flags = unix.O_RDONLY
	}
	f, err := openOwn(dir, name, flags)
	if err != nil {
		return unswept(err)
	}
	defer f.Close()
	if s.Bytes, err = held(f); err != nil {
		return unswept(err)
	}
	page, size, err := readStart(f)
	if err != nil {
		return unswept(err)
	}
	switch {
	case isRemnant(page, size):
	case !isRegion(page):
		s.Reason = noRegion
		return s
	case order.Uint32(page[offVersion:]) != headerVersion:
		v := order.Uint32(page[offVersion:])
		s.Reason = fmt.Sprintf("of version %d of the format, this is %d: the ferry of that version can tell whether it is needed", v, headerVersion)
		return s
	}
	if pid := flockOwner(f); pid != 0 {
		s.Reason = fmt.Sprintf("owned by a live process, pid %d", pid)
		return s
	}
	reap, why := mayReap(f, name, o)
	if reap && !o.DryRun {
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			s.Reason = fmt.Sprintf("locked by a process that is not seen from here, or was not a moment ago; its owner is, or was, pid %d", namedOwner(f))
			return s
		}
		reap, why = mayReap(f, name, o) // again, now that nobody changes it
	}
	s.Reason = why
	if !reap {
		return s
	}
	return s.unlink(dir, name, f, o)
}

// mayReap says whether a region that has no owner is to be reaped, and why, or why not.
func mayReap(f *os.File, name string, o SweepOptions) (bool, string) {
	page, size, err := readStart(f)
	switch {
	case err != nil:
		return false, err.Error()
	case isRemnant(page, size):
		return true, fmt.Sprintf("nobody's: it was cut to %d bytes", size)
	case !isRegion(page):
		return false, noRegion
	}
	h, err := decodeHeader(page, size)
	if err != nil {
		return true, "its owner is dead"
	}
	if want, _ := h.identity.FileName(); want != name {
		return false, fmt.Sprintf("the region %s under another name", want)
	}
	switch err := h.waits(f.Name()); {
	case err == nil:
		return true, fmt.Sprintf("its owner, pid %d, is dead; %s", h.owner, h.whyNotWaiting())
	case o.Force:
		return true, fmt.Sprintf("its owner, pid %d, is dead", h.owner)
	default:
		return false, err.Error()
	}
}

// sweepLeftover is for what a creator of a region leaves if it is killed.
func sweepLeftover(dir *os.File, name, region string, o SweepOptions) (s Swept) {
	f, err := openOwn(dir, name, unix.O_RDWR)
	if err != nil {
		return unswept(err)
	}
	defer f.Close()
	if s.Bytes, err = held(f); err != nil {
		return unswept(err)
	}
	s.Reason = "left by a creator that was killed"
	if o.DryRun {
		if pid := flockOwner(f); pid != 0 {
			s.Reason = fmt.Sprintf("a region is being created by pid %d", pid)
			return s
		}
		s.Reaped = true
		return s
	}
	// The claim is what makes a temporary file, and the claim itself, ours to remove.
	c, err := takeClaim(context.Background(), dir, region, 0, 0)
	if err != nil {
		s.Reason = err.Error()
		return s
	}
	if name == c.name {
		if err := c.drop(dir); err != nil {
			return unswept(err)
		}
		s.Reaped = true
		return s
	}
	s = s.unlink(dir, name, f, o)
	if err := c.drop(dir); err != nil {
		return unswept(err)
	}
	return s
}

func (s Swept) unlink(dir *os.File, name string, f *os.File, o SweepOptions) Swept {
	if o.DryRun {
		s.Reaped = true
		return s
	}
	done, err := unlinkIfSame(dir, name, f)
	if err != nil {
		return unswept(err)
	}
	if !done {
		return Swept{}
	}
	s.Reaped = true
	return s
}

func unswept(err error) Swept {
	if errors.Is(err, os.ErrNotExist) {
		return Swept{}
	}
	return Swept{Reason: err.Error()}
}

// held is how much memory, or disk, a file takes.
func held(f *os.File) (int64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, err
	}
	return st.Blocks * 512, nil
}

// OwnerOf is the pid of the live process that owns the region at path, 0 if there is none. It takes no lock, so it never stands
// in a starting owner's way; the price is that owners in a PID namespace that is not seen from here look like none.
func OwnerOf(path string) (int, error) {
	dir, err := openDir(filepath.Dir(path))
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	f, err := openOwn(dir, filepath.Base(path), unix.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return flockOwner(f), nil
}

// flockOwner looks the holder of a file's flock up, 0 if there is none that /proc tells of. A line there is
// "1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF", the device in hexadecimal.
func flockOwner(f *os.File) int {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0
	}
	locks, err := os.Open("/proc/locks")
	if err != nil {
		return 0
	}
	defer locks.Close()
	want := fmt.Sprintf("%02x:%02x:%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev)), st.Ino)
	for lines := bufio.NewScanner(locks); lines.Scan(); {
		w := strings.Fields(lines.Text())
		if len(w) >= 6 && w[1] == "FLOCK" && w[5] == want {
			pid, _ := strconv.Atoi(w[4])
			return pid
		}
	}
	return 0
}
