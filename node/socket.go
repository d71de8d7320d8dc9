package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// ErrSocketInUse means that a live process serves the engine socket's path.
var ErrSocketInUse = errors.New("node: the socket is in use")

// engineSocket is the unix socket of the engine API. Nobody is accepted before listen.
type engineSocket struct {
	*net.UnixListener // nil before listen
	path              string
	lock              *pathLock

	bound *os.File // until listen
	dev   uint64   // of the socket's file
	ino   uint64
}

// backlog of connections that are not accepted yet; the kernel cuts it to net.core.somaxconn.
const listenBacklog = 128

// bindEngine takes a path for the engine API and binds it with mode 0600. The path is this node's until release: of nodes that start
// at once on one path, one gets it. A socket file that nobody listens on any more is replaced; anything else at the path is an error.
func bindEngine(ctx context.Context, path string) (*engineSocket, error) {
	lock, err := lockPath(ctx, path)
	if err != nil {
		return nil, err
	}
	s := &engineSocket{path: path, lock: lock}
	if err := s.bind(); err != nil {
		return nil, errors.Join(err, s.release())
	}
	return s, nil
}

// CheckSocket asks what the start of a node asks of the path of its engine socket: an error if it could not have it, now. "" is the
// default's path. A socket file that a dead process left is taken away.
func CheckSocket(ctx context.Context, path string) (abs string, err error) {
	if abs, err = filepath.Abs(cmp.Or(path, defaultSocket())); err != nil {
		return path, fmt.Errorf("socket %s: %w", path, err)
	}
	if len(abs) > maxSocketPath {
		return abs, fmt.Errorf("socket %s: %d bytes, a unix socket's path has at most %d; use a shorter directory", abs, len(abs), maxSocketPath)
	}
	s, err := bindEngine(ctx, abs)
	if err != nil {
		return abs, err
	}
	return abs, s.release()
}

func (s *engineSocket) bind() error {
	if err := removeStale(s.path); err != nil {
		return err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("socket %s: %w", s.path, err)
	}
	s.bound = os.NewFile(uintptr(fd), s.path)
	// Linux gives the file the mode of the unbound socket, so it is never open to others, not for a moment.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return fmt.Errorf("socket %s: fchmod: %w", s.path, err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: s.path}); err != nil {
		return fmt.Errorf("socket %s: bind: %w", s.path, err)
	}
	var st unix.Stat_t
	if err := unix.Lstat(s.path, &st); err != nil {
		return fmt.Errorf("socket %s: %w", s.path, err)
	}
	s.dev, s.ino = st.Dev, st.Ino
	if err := unix.Chmod(s.path, 0o600); err != nil { // what a umask took away
		return fmt.Errorf("socket %s: %w", s.path, err)
	}
	return nil
}

// listen lets engines connect.
func (s *engineSocket) listen() error {
	defer s.unbind() // the listener has a descriptor of its own
	if err := unix.Listen(int(s.bound.Fd()), listenBacklog); err != nil {
		return fmt.Errorf("socket %s: listen: %w", s.path, err)
	}
	l, err := net.FileListener(s.bound)
	if err != nil {
		return fmt.Errorf("socket %s: %w", s.path, err)
	}
	s.UnixListener = l.(*net.UnixListener)
	s.SetUnlinkOnClose(false) // it goes by path, and the path may be another's by then
	return nil
}

func (s *engineSocket) unbind() {
	if s.bound != nil {
		_ = s.bound.Close()
		s.bound = nil
	}
}

// lost says why no engine can find the socket any more: its file is gone, or another is in its place.
func (s *engineSocket) lost() error {
	var st unix.Stat_t
	switch err := unix.Lstat(s.path, &st); {
	case errors.Is(err, unix.ENOENT):
		return fmt.Errorf("the engine socket %s was removed: no engine can connect until it is put back or the node is started again", s.path)
	case err != nil:
		return fmt.Errorf("the engine socket %s: %w", s.path, err)
	case st.Dev != s.dev || st.Ino != s.ino:
		return fmt.Errorf("the engine socket %s was replaced by another file: no engine can connect until it is put back or the node is started again", s.path)
	}
	return nil
}

// close ends the listener and takes the socket's file away if it is still this one's. Idempotent.
func (s *engineSocket) close() error {
	s.unbind()
	var err error
	if s.UnixListener != nil {
		if err = s.UnixListener.Close(); errors.Is(err, net.ErrClosed) {
			err = nil
		}
	}
	if s.ino != 0 && s.lost() == nil {
		err = errors.Join(err, unix.Unlink(s.path))
	}
	return err
}

// release closes, and leaves the path to others.
func (s *engineSocket) release() error { return errors.Join(s.close(), s.lock.release()) }

// removeStale takes away the socket file of a node that is gone.
func removeStale(path string) error {
	if stale, err := staleSocket(path); err != nil || !stale {
		return err
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("socket %s: left by a process that is gone, and cannot be removed: %w", path, err)
	}
	return nil
}

// staleSocket tells if the socket file of a node that is gone is at path; an error if something else is.
func staleSocket(path string) (bool, error) {
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("socket %s: %w", path, err)
	}
	if st.Mode().Type() != os.ModeSocket {
		return false, fmt.Errorf("socket %s: a file that is not a socket is there: choose another path or remove it", path)
	}
	// A socket whose listener is alive, busy or stopped takes the connection or is full; only a dead one refuses.
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = c.Close()
		return false, fmt.Errorf("%w: %s: another process listens there: end it or choose another socket", ErrSocketInUse, path)
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return false, fmt.Errorf("%w: %s: %w: end its owner or choose another socket", ErrSocketInUse, path, err)
	}
	return true, nil
}

// pathLock is the right to a socket's path: a lock on an empty file beside it, of this user's own and open to nobody else, so that
// nobody else can hold it, also in a directory that all may write to. It ends with its process. The file goes at release, and stays
// behind a process that was killed, as its socket does.
type pathLock struct {
	file *os.File
	name string
}

const (
	lockSuffix = ".lock"
	lockWait   = 5 * time.Second // for a node that is ending, or a sweep
	lockPoll   = 10 * time.Millisecond
)

// lockPath takes the right to a socket's path. ErrSocketInUse: another process has it.
func lockPath(ctx context.Context, path string) (*pathLock, error) {
	name := path + lockSuffix
	ctx, cancel := context.WithTimeout(ctx, lockWait)
	defer cancel()
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		f, err := tryLock(name)
		if err != nil {
			return nil, fmt.Errorf("socket %s: its lock file %s: %w", path, name, err)
		}
		if f != nil {
			return &pathLock{f, name}, nil
		}
		// Where somebody listens there is nothing to wait for.
		if _, err := staleSocket(path); err != nil {
			return nil, err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("%w: %s: another node starts or ends there, it holds %s: end it or choose another socket: %w", ErrSocketInUse, path, name, ctx.Err())
		}
	}
}

// tryLock is nil without an error if another process has the lock.
func tryLock(name string) (*os.File, error) {
	fd, err := unix.Open(name, unix.O_RDWR|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0o600)
	if err != nil {
		if errors.Is(err, unix.EACCES) || errors.Is(err, unix.ELOOP) {
			err = fmt.Errorf("%w: what is there is not this user's own file: remove it, or choose another socket", err)
		}
		return nil, err
	}
	f := os.NewFile(uintptr(fd), name)
	own, err := locked(fd, name)
	if err != nil || !own {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func locked(fd int, name string) (bool, error) {
	var st, now unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || int(st.Uid) != os.Geteuid() {
		return false, fmt.Errorf("it is uid %d's, or no regular file, and this process is uid %d: remove it, or choose another socket", st.Uid, os.Geteuid())
	}
	err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) || errors.Is(err, unix.EINTR) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	// Who had it before has taken the file away, and the name may be another's by now.
	return unix.Lstat(name, &now) == nil && now.Dev == st.Dev && now.Ino == st.Ino, nil
}

// release gives the path up. The file goes while it is locked, so whoever waits for it sees that.
func (l *pathLock) release() error {
	var st, now unix.Stat_t
	var err error
	if unix.Fstat(int(l.file.Fd()), &st) == nil && unix.Lstat(l.name, &now) == nil && now.Dev == st.Dev && now.Ino == st.Ino {
		err = unix.Unlink(l.name)
	}
	return errors.Join(err, l.file.Close())
}
