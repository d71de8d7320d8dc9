package chaos

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// host is a thread with namespaces of its own. Processes that it starts are in them, and are killed by the kernel when it ends, so
// that a test that is killed leaves nothing.
type host struct {
	jobs chan func()
	done chan struct{}
	tid  int
}

// newHost makes a host of the given namespaces (CLONE_NEW flags, 0 for none) and sets it up.
func newHost(t *testing.T, namespaces int, setup func() error) *host {
	t.Helper()
	h := &host{jobs: make(chan func()), done: make(chan struct{})}
	ready := make(chan error, 1)
	go func() {
		defer close(h.done)
		runtime.LockOSThread() // and never unlocked: the thread goes with the goroutine
		h.tid = unix.Gettid()
		err := unshare(namespaces)
		if err == nil && setup != nil {
			err = setup()
		}
		ready <- err
		for job := range h.jobs {
			job()
		}
	}()
	t.Cleanup(func() {
		close(h.jobs)
		<-h.done
	})
	if err := <-ready; err != nil {
		t.Fatal(err)
	}
	return h
}

func unshare(namespaces int) error {
	if namespaces == 0 {
		return nil
	}
	if err := unix.Unshare(namespaces); err != nil {
		return fmt.Errorf("unshare: %w", err)
	}
	if namespaces&unix.CLONE_NEWNS != 0 {
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return fmt.Errorf("mounts made private: %w", err)
		}
	}
	if namespaces&unix.CLONE_NEWNET != 0 {
		return command("ip", "link", "set", "lo", "up")
	}
	return nil
}

// do runs f on the host's thread.
func (h *host) do(f func()) {
	done := make(chan struct{})
	h.jobs <- func() {
		defer close(done)
		f()
	}
	<-done
}

// try is do for what can fail.
func (h *host) try(f func() error) (err error) {
	h.do(func() { err = f() })
	return err
}

// command runs a program; on a host's thread, in its namespaces.
func command(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// needNamespaces skips where they are not to be had.
func needNamespaces(t *testing.T, namespaces int) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("namespaces and mounts need root")
	}
	failed := make(chan error)
	go func() {
		runtime.LockOSThread()
		failed <- unshare(namespaces)
	}()
	if err := <-failed; err != nil {
		t.Skipf("no namespaces here: %v", err)
	}
}

// mountTmpfs mounts a small tmpfs in the host's namespace.
func mountTmpfs(dir string, size int64) error {
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("size=%d", size)); err != nil {
		return fmt.Errorf("tmpfs on %s: %w", dir, err)
	}
	return nil
}

func TestWhatKeepsTheMemoryOfAFileIsNamed(t *testing.T) {
	needNamespaces(t, unix.CLONE_NEWNS)
	dir := t.TempDir()
	h := newHost(t, unix.CLONE_NEWNS, func() error { return mountTmpfs(dir, 1<<20) })
	err := h.try(func() error {
		f, err := os.Create(filepath.Join(dir, "pool"))
		if err != nil {
			return err
		}
		err = errors.Join(f.Truncate(1<<16), os.Remove(f.Name()))
		m, mapErr := unix.Mmap(int(f.Fd()), 0, 1<<16, unix.PROT_READ, unix.MAP_SHARED)
		if err = errors.Join(err, mapErr); err != nil {
			return errors.Join(err, f.Close())
		}
		open := mapped(dir)
		err = f.Close()
		closed := mapped(dir)
		err = errors.Join(err, unix.Munmap(m))
		name := filepath.Join(dir, "pool") + " (deleted)"
		if a, b := strings.Count(open, name), strings.Count(closed, name); a != 2 || b != 1 || mapped(dir) != "" {
			t.Errorf("mapped and open:\n%s\nmapped:\n%s", open, closed)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
