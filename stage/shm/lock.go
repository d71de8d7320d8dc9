package shm

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// raceTries bounds loops that go round when another process was faster.
const raceTries = 64

// errBusy: another connector has the key's lock.
var errBusy = errors.New("its lock is held")

// keyLock is a key's lock file, locked: only who has it makes or takes the key's segment.
type keyLock struct {
	d     *folder
	name  string
	flags int // of open
	fd    int
	inode inode
}

// openLock opens a key's lock file. flags are unix.O_RDWR if its close shall wake who waits for it, unix.O_CREAT to make one that is
// missing (else fs.ErrNotExist). errBusy: somebody is just removing it.
func (d *folder) openLock(key string, flags int) (*keyLock, error) {
	name := lockName(key)
	fd, st, err := d.open(name, flags)
	if errors.Is(err, unix.EAGAIN) {
		return nil, errBusy
	}
	if err != nil {
		return nil, err
	}
	return &keyLock{d, name, flags, fd, st.inode}, nil
}

// take locks the file that the name means now: a reader may have removed the one that was opened, as the last act of a read, and who
// holds the lock of that one keeps nobody away. errBusy: another has it. fs.ErrNotExist: it has gone, and flags do not make one. After an
// error take can be tried again.
func (l *keyLock) take() error {
	for range raceTries {
		if err := unix.Flock(l.fd, unix.LOCK_EX|unix.LOCK_NB); err == unix.EWOULDBLOCK {
			return errBusy
		} else if err != nil {
			return l.d.failed("lock", l.name, err)
		}
		if l.current() {
			return nil
		}
		fd, st, err := l.d.open(l.name, l.flags)
		unix.Flock(l.fd, unix.LOCK_UN)
		if errors.Is(err, unix.EAGAIN) {
			return errBusy
		}
		if err != nil {
			return err
		}
		unix.Close(l.fd)
		l.fd, l.inode = fd, st.inode
	}
	return errBusy
}

// current is true if the name still means this file.
func (l *keyLock) current() bool {
	st, err := l.d.stat(l.name)
	return err == nil && st.inode == l.inode
}

// remove ends the lock together with its file, unless another process has that open: one that waits for the lock to write the key
// again. A plain one would not notice that its file has gone, and its payload would have none that a plain reader finds; so the file
// stays, for that payload's reader to remove. Between the look and the removal are some microseconds.
func (l *keyLock) remove() {
	alone, known := lease(l.fd, unix.F_WRLCK)
	for range 2 {
		if alone || !known {
			break
		}
		time.Sleep(50 * time.Microsecond) // who only looks is gone by then
		alone, known = lease(l.fd, unix.F_WRLCK)
	}
	if alone || !known {
		_, _ = l.d.unlink(l.name, l.inode) // the next put of the key uses one that is left
	}
	l.close()
}

// close ends the lock and leaves the file. Calls after the first do nothing.
func (l *keyLock) close() {
	if l.fd >= 0 {
		unix.Close(l.fd)
		l.fd = -1
	}
}

// tryLock takes a key's lock, made if it is missing. errBusy: another has it.
func (d *folder) tryLock(key string) (*keyLock, error) {
	l, err := d.openLock(key, unix.O_RDWR|unix.O_CREAT)
	if err != nil {
		return nil, err
	}
	if err := l.take(); err != nil {
		l.close()
		return nil, err
	}
	return l, nil
}

// giveLock makes the lock file of a key whose segment has none: without one plain readers do not read it.
func (d *folder) giveLock(key string) (inode, error) {
	fd, st, err := d.open(lockName(key), unix.O_RDWR|unix.O_CREAT)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		return inode{}, err
	}
	if err == nil {
		unix.Close(fd)
	}
	return st.inode, nil
}

// free ends a lock that was taken: its file goes if the key has no segment.
func (d *folder) free(key string, l *keyLock) {
	if _, err := d.stat(key); gone(err) {
		l.remove()
	}
	l.close()
}
