package demo

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	tempPrefix = "ferry-demo-"
	tempLock   = "lock"      // a file in it that is locked while its demo lives; nodes lock the directory itself
	tempYoung  = time.Minute // one without that file is not yet locked
)

// tempDir is a directory for the demo's sockets and logs.
type tempDir struct {
	path string
	lock *os.File // nil: it never had one
}

// newTempDir makes one, after it has removed those of demos that were killed.
func newTempDir(log *slog.Logger) (*tempDir, error) {
	sweepTemp(os.TempDir(), log)
	for {
		path, err := os.MkdirTemp("", tempPrefix)
		if err != nil {
			return nil, err
		}
		lock, err := lockTemp(path, os.O_CREATE, unix.LOCK_EX)
		if err == nil {
			return &tempDir{path, lock}, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return nil, errors.Join(err, os.RemoveAll(path))
		}
		// Another demo took it for one whose owner is dead, before it was locked.
	}
}

func (d *tempDir) remove() error {
	err := os.RemoveAll(d.path)
	if d.lock != nil {
		err = errors.Join(err, d.lock.Close())
	}
	return err
}

// lockTemp is fs.ErrNotExist if the directory was removed meanwhile. Children do not inherit the lock.
func lockTemp(dir string, open, how int) (*os.File, error) {
	path := filepath.Join(dir, tempLock)
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW|open, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		if err = unix.Flock(int(f.Fd()), how); err != unix.EINTR {
			break
		}
	}
	if err == nil {
		_, err = os.Lstat(path)
	} else {
		err = fmt.Errorf("lock %s: %w", path, err)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// sweepTemp removes what demos of this user left that were killed.
func sweepTemp(in string, log *slog.Logger) {
	paths, _ := filepath.Glob(filepath.Join(in, tempPrefix+"*")) // of a pattern that is well formed
	for _, path := range paths {
		info, err := os.Lstat(path)
		if err != nil || !info.IsDir() {
			continue
		}
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
			continue
		}
		lock, err := lockTemp(path, 0, unix.LOCK_EX|unix.LOCK_NB)
		if err != nil && !(errors.Is(err, fs.ErrNotExist) && time.Since(info.ModTime()) >= tempYoung) {
			continue // its demo lives, or another one removes it
		}
		if err := (&tempDir{path, lock}).remove(); err != nil {
			log.Warn("left by a demo that was killed, and not removed", "path", path, "error", err)
		}
	}
}
