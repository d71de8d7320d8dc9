package shm

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// folder is the directory where the segments are.
type folder struct {
	f   *os.File
	fd  int // f's
	uid uint32
}

// inode names a file whatever it is called. A tmpfs counts its inodes up, so that none comes twice.
type inode struct{ dev, ino uint64 }

func openFolder(dir string) (*folder, error) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "stage/shm: open directory", Path: dir, Err: err}
	}
	return &folder{os.NewFile(uintptr(fd), dir), fd, uint32(os.Geteuid())}, nil
}

func (d *folder) close() error { return d.f.Close() }

func (d *folder) path(name string) string { return filepath.Join(d.f.Name(), name) }

func (d *folder) failed(op, name string, err error) error {
	return &fs.PathError{Op: "stage/shm: " + op, Path: d.path(name), Err: err}
}

// status is what a file is.
type status struct {
	inode
	size  int64
	links uint64
	mode  uint32
	uid   uint32
	mtime int64 // ns
}

func statusOf(st *unix.Stat_t) status {
	return status{inode{uint64(st.Dev), st.Ino}, st.Size, uint64(st.Nlink), st.Mode, st.Uid, st.Mtim.Nano()}
}

// stat looks at a name, and follows no link. fs.ErrNotExist: nothing is there.
func (d *folder) stat(name string) (status, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(d.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return status{}, d.failed("stat", name, err)
	}
	return statusOf(&st), nil
}

func (d *folder) statFD(fd int, name string) (status, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return status{}, d.failed("stat", name, err)
	}
	return statusOf(&st), nil
}

// check refuses what no connector of this user made.
func (d *folder) check(name string, st status) error {
	why := ""
	switch {
	case st.mode&unix.S_IFMT == unix.S_IFLNK:
		why = "is a symbolic link"
	case st.mode&unix.S_IFMT != unix.S_IFREG:
		why = "is no regular file"
	case st.uid != d.uid:
		why = fmt.Sprintf("is of uid %d, this process has %d", st.uid, d.uid)
	case st.links > 1:
		why = fmt.Sprintf("has %d names", st.links)
	default:
		return nil
	}
	return fmt.Errorf("%w: %s %s", ErrForeign, d.path(name), why)
}

// open opens a file that check lets through. Nothing is waited for: unix.EAGAIN is a file with a lease on it.
func (d *folder) open(name string, flags int) (fd int, st status, err error) {
	fd, err = unix.Openat(d.fd, name, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0o600)
	switch {
	case err == unix.ELOOP:
		return -1, status{}, fmt.Errorf("%w: %s is a symbolic link", ErrForeign, d.path(name))
	case err == unix.EACCES || err == unix.EISDIR || err == unix.ENXIO || err == unix.EPERM:
		return -1, status{}, fmt.Errorf("%w: open %s: %w", ErrForeign, d.path(name), err)
	case err != nil:
		return -1, status{}, d.failed("open", name, err)
	}
	if st, err = d.statFD(fd, name); err == nil {
		err = d.check(name, st)
	}
	if err != nil {
		unix.Close(fd)
		return -1, status{}, err
	}
	return fd, st, nil
}

// unlink takes a name away if it is still that file's. False: it is not, or somebody else did it.
func (d *folder) unlink(name string, of inode) (bool, error) {
	st, err := d.stat(name)
	if err == nil && st.inode == of {
		if err := unix.Unlinkat(d.fd, name, 0); err == nil {
			return true, nil
		} else if err != unix.ENOENT {
			return false, d.failed("unlink", name, err)
		}
		return false, nil
	}
	if gone(err) {
		err = nil
	}
	return false, err
}

// Leases: fcntl(2) tells by them who else has a file open. unix.F_RDLCK: nobody has it open, or mapped, for writing, and none will
// until the descriptor is closed (who tries waits, 45 s at most). unix.F_WRLCK: nobody else has it open at all. False: somebody has, or
// the file system knows no leases (known is false).
func lease(fd, kind int) (held, known bool) {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETLEASE, kind)
	return err == nil, err == nil || err == unix.EAGAIN
}
