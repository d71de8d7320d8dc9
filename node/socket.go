package node

import (
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

// engineSocket is the listening unix socket of the engine API.
type engineSocket struct {
	*net.UnixListener
	path string
	dev  uint64
	ino  uint64
}

// backlog of connections that are not accepted yet; the kernel cuts it to net.core.somaxconn.
const listenBacklog = 128

// listenEngine binds path with mode 0600. A socket file that nobody listens on any more is replaced; anything else at the path is
// an error. Nodes that start at once on one path take turns by a lock on its directory, so none takes away what another has just
// bound.
func listenEngine(ctx context.Context, path string) (*engineSocket, error) {
	unlock, err := lockDir(ctx, filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	f := os.NewFile(uintptr(fd), path)
	defer func() { _ = f.Close() }() // the listener has a descriptor of its own
	return bindEngine(f, fd, path)
}

func bindEngine(f *os.File, fd int, path string) (*engineSocket, error) {
	// Linux gives the file the mode of the unbound socket, so it is never open to others, not for a moment.
	if err := unix.Fchmod(fd, 0o600); err != nil {
		return nil, fmt.Errorf("socket %s: fchmod: %w", path, err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, fmt.Errorf("socket %s: bind: %w", path, err)
	}
	s := &engineSocket{path: path}
	if err := s.open(f, fd); err != nil {
		return nil, errors.Join(fmt.Errorf("socket %s: %w", path, err), os.Remove(path))
	}
	return s, nil
}

func (s *engineSocket) open(f *os.File, fd int) error {
	var st unix.Stat_t
	if err := unix.Lstat(s.path, &st); err != nil {
		return err
	}
	s.dev, s.ino = st.Dev, st.Ino
	if err := unix.Chmod(s.path, 0o600); err != nil { // what a umask took away
		return err
	}
	if err := unix.Listen(fd, listenBacklog); err != nil {
		return err
	}
	l, err := net.FileListener(f)
	if err != nil {
		return err
	}
	s.UnixListener = l.(*net.UnixListener)
	s.SetUnlinkOnClose(false) // it goes by path, and the path may be another's by then
	return nil
}

// close ends the listener and takes its file away if it is still this one's.
func (s *engineSocket) close() error {
	err := s.UnixListener.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	unlock, lockErr := lockDir(context.Background(), filepath.Dir(s.path))
	if errors.Is(lockErr, os.ErrNotExist) {
		return err // the directory went, and the file with it
	}
	if lockErr != nil {
		return errors.Join(err, lockErr) // a dead socket's file does no harm: the next node replaces it
	}
	defer unlock()
	var st unix.Stat_t
	if unix.Lstat(s.path, &st) == nil && st.Dev == s.dev && st.Ino == s.ino {
		err = errors.Join(err, unix.Unlink(s.path))
	}
	return err
}

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

// lockDir takes turns with other nodes at the sockets of a directory, without a file of its own.
func lockDir(ctx context.Context, dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := unix.Flock(int(d.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = d.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			_ = d.Close()
			return nil, fmt.Errorf("lock of directory %s: %w", dir, err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			_ = d.Close()
			return nil, fmt.Errorf("lock of directory %s: held by another process: %w", dir, ctx.Err())
		}
	}
}
