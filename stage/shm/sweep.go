package shm

import (
	"cmp"
	"fmt"
	"os"
	"regexp"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/internal/boottime"
	"github.com/tensorferry/tensorferry/region"
	"golang.org/x/sys/unix"
)

var recordNames = regexp.MustCompile(`^ferry_stage_[0-9a-f]{16}\.puts$`)

// lockAge is how old a lock file without a segment has to be: between the two a writer needs microseconds.
const lockAge = time.Minute

// Sweep reaps what killed connectors left in a directory (default region.DefaultDir): payloads of theirs that nobody read by the end of
// their leases, and their records. What others made is not touched, nor what is locked. The answer tells of each record, and of each
// payload and lock file of a dead connector. With dryRun nothing is changed, and no lock taken. An error is about the directory only.
func Sweep(dir string, dryRun bool) ([]region.Swept, error) {
	d, err := openFolder(cmp.Or(dir, region.DefaultDir))
	if err != nil {
		return nil, err
	}
	defer d.close()
	return sweep(d, dryRun)
}

func sweep(d *folder, dryRun bool) (all []region.Swept, err error) {
	names, err := d.records()
	for _, name := range names {
		all = append(all, d.sweepRecord(name, dryRun)...)
	}
	return all, err
}

// records are the names of the records in the directory.
func (d *folder) records() ([]string, error) {
	f, err := os.Open(d.f.Name())
	if err != nil {
		return nil, fmt.Errorf("stage/shm: sweep: %w", err)
	}
	defer f.Close()
	names, err := f.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("stage/shm: sweep: %w", err)
	}
	names = slices.DeleteFunc(names, func(n string) bool { return !recordNames.MatchString(n) })
	slices.Sort(names)
	return names, nil
}

// openDead opens the record of a connector that is not alive any more, and locks it unless look is true. The second answer says why
// not, "" if it has gone.
func (d *folder) openDead(name string, look bool) (f *os.File, st status, why string) {
	fd, st, err := d.open(name, unix.O_RDONLY)
	if gone(err) {
		return nil, st, ""
	}
	if err != nil {
		return nil, st, err.Error()
	}
	f = os.NewFile(uintptr(fd), d.path(name))
	live := false
	if look {
		pid, _ := region.OwnerOf(d.path(name))
		live = pid != 0
	} else {
		live = unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) != nil
	}
	if live {
		f.Close()
		return nil, st, "of a live connector"
	}
	if now, err := d.stat(name); err != nil || now.inode != st.inode { // another swept it meanwhile
		f.Close()
		return nil, st, ""
	}
	return f, st, ""
}

func (d *folder) sweepRecord(name string, dryRun bool) (all []region.Swept) {
	f, st, why := d.openDead(name, dryRun)
	own := region.Swept{Path: d.path(name), Bytes: footprint(st.size), Reason: why}
	if f == nil {
		if why == "" {
			return nil
		}
		return append(all, own)
	}
	defer f.Close()
	puts, err := readRecord(f, st.size)
	if err != nil {
		own.Reason = err.Error()
		return append(all, own)
	}
	left := 0
	for _, p := range puts {
		s := d.sweepPut(p, dryRun)
		if s.Reason == "" {
			continue
		}
		if all = append(all, s); !s.Reaped {
			left++
		}
	}
	if left > 0 {
		own.Reason = fmt.Sprintf("of a dead connector; payloads of it that are kept: %d", left)
		return append(all, own)
	}
	own.Reason, own.Reaped = "of a dead connector", true
	if !dryRun {
		if _, err := d.unlink(name, st.inode); err != nil {
			own.Reason, own.Reaped = err.Error(), false
		}
	}
	return append(all, own)
}

// sweepPut reaps one payload of a dead connector. No reason: it is not there any more.
func (d *folder) sweepPut(p put, dryRun bool) (s region.Swept) {
	st, err := d.stat(p.key)
	if gone(err) {
		return d.sweepLock(p.key, dryRun)
	}
	if err != nil || !p.is(st) || d.check(p.key, st) != nil {
		return s // another's
	}
	s = region.Swept{Path: d.path(p.key), Bytes: footprint(st.size)}
	if left := time.Duration(p.end - boottime.Now()); left > 0 {
		s.Reason = fmt.Sprintf("its connector is dead; it may still be read, for %v", left.Round(time.Second))
		return s
	}
	s.Reason = "its connector is dead, and nobody read it in its lease"
	if dryRun {
		s.Reaped = true
		return s
	}
	l, err := d.tryLock(p.key)
	if err != nil {
		s.Reason = fmt.Sprintf("it is not reaped: %v", err)
		return s
	}
	defer d.free(p.key, l)
	if s.Reaped, err = d.unlink(p.key, st.inode); err != nil {
		s.Reason = err.Error()
	} else if !s.Reaped {
		return region.Swept{}
	}
	return s
}

// sweepLock reaps the lock file of a key that has no segment: its writer was killed before it made that, or its reader after it had
// taken it off. No reason: there is none.
func (d *folder) sweepLock(key string, dryRun bool) (s region.Swept) {
	st, err := d.stat(lockName(key))
	if err != nil || d.check(lockName(key), st) != nil {
		return s
	}
	s.Path = d.path(lockName(key))
	if time.Since(time.Unix(0, st.mtime)) < lockAge {
		s.Reason = fmt.Sprintf("a lock file without a segment, less than %v old: one may still be made", lockAge)
		return s
	}
	s.Reason = "a lock file of a dead connector's key, without a segment"
	if dryRun {
		s.Reaped = true
		return s
	}
	l, err := d.tryLock(key)
	if err != nil {
		s.Reason = fmt.Sprintf("it is not reaped: %v", err)
		return s
	}
	d.free(key, l)
	_, err = d.stat(lockName(key))
	s.Reaped = gone(err)
	return s
}

// unlinkOfDead removes the segment of a key if a dead connector put it. The caller has the key's lock.
func unlinkOfDead(d *folder, key string, st status) (bool, error) {
	names, err := d.records()
	if err != nil {
		return false, err
	}
	for _, name := range names {
		f, rec, _ := d.openDead(name, false)
		if f == nil {
			continue
		}
		puts, _ := readRecord(f, rec.size)
		f.Close()
		for _, p := range puts {
			if p.key == key && p.is(st) {
				_, err := d.unlink(key, st.inode)
				return true, err
			}
		}
	}
	return false, nil
}
