package node

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// listenEngine binds and listens, as a node does at its start and at its end.
func listenEngine(ctx context.Context, path string) (*engineSocket, error) {
	s, err := bindEngine(ctx, path)
	if err != nil {
		return nil, err
	}
	return s, s.listen()
}

func TestTheSocketIsForItsOwnerAlone(t *testing.T) {
	old := unix.Umask(0)
	defer unix.Umask(old)
	path := filepath.Join(t.TempDir(), "s")
	s, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	st, err := os.Lstat(path)
	if err != nil || st.Mode() != os.ModeSocket|0o600 {
		t.Errorf("%v, %v", st.Mode(), err)
	}
	if err := s.release(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after close: %v", err)
	}
}

func TestALiveNodesSocketIsNeverReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	s, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	defer s.release()
	// Nobody accepts: as with a node that is stopped. Once the backlog is full, connecting does not even succeed.
	for range 200 {
		_, err := listenEngine(testContext(t), path)
		if !errors.Is(err, ErrSocketInUse) || !strings.Contains(err.Error(), path) {
			t.Fatalf("%v; want ErrSocketInUse", err)
		}
	}
}

func TestADeadNodesSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	_ = l.Close()
	s, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.release(); err != nil {
		t.Error(err)
	}
}

func TestAFileThatIsNoSocketIsLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := listenEngine(testContext(t), path); err == nil || !strings.Contains(err.Error(), "not a socket") {
		t.Errorf("%v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "precious" {
		t.Errorf("%q, %v", b, err)
	}
}

func TestOfNodesThatStartAtOnceOneGetsTheSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	for range 50 {
		// A dead one's file is there each time: taking it away must not take away a winner's.
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(fd)
		var wg sync.WaitGroup
		var won atomic.Pointer[engineSocket]
		for range 8 {
			wg.Go(func() {
				s, err := listenEngine(testContext(t), path)
				switch {
				case err == nil && !won.CompareAndSwap(nil, s):
					t.Error("two have it")
					_ = s.release()
				case err != nil && !errors.Is(err, ErrSocketInUse):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		s := won.Load()
		if s == nil {
			t.Fatal("none has it")
		}
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatalf("the winner's socket is not at the path: %v", err)
		}
		_ = c.Close()
		if err := s.release(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestASocketThatWasReplacedIsLeftAloneAndSaidToBeLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	first, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.lost(); err != nil {
		t.Error(err)
	}
	if err := os.Remove(path); err != nil { // by hand
		t.Fatal(err)
	}
	if err := first.lost(); err == nil || !strings.Contains(err.Error(), path+" was removed") {
		t.Errorf("removed: %v", err)
	}
	other, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := first.lost(); err == nil || !strings.Contains(err.Error(), path+" was replaced") {
		t.Errorf("replaced: %v", err)
	}
	if err := first.release(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the other socket is gone: %v", err)
	}
}

// Between bind and listen a socket refuses like a dead one's: it must not be taken for that.
func TestASocketThatIsNotListenedOnYetIsNotTakenAway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	s, err := bindEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	cancel()
	if _, err := bindEngine(ctx, path); !errors.Is(err, ErrSocketInUse) || !strings.Contains(err.Error(), path+lockSuffix) {
		t.Errorf("another node: %v", err)
	}
	if _, err := SweepSocket(ctx, path, false); !errors.Is(err, ErrSocketInUse) {
		t.Errorf("a sweep: %v", err)
	}
	if err := s.listen(); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the socket is not at its path: %v", err)
	}
	_ = c.Close()
	if err := s.release(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// In a directory that all may write to, such as /tmp, anybody can lock the directory.
func TestALockOnTheDirectoryKeepsNobodyFromStarting(t *testing.T) {
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir.Name(), "s")
	s, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Lstat(path + lockSuffix); err != nil || st.Mode() != 0o600 {
		t.Errorf("the lock file: %v, %v", st.Mode(), err)
	}
	if err := s.release(); err != nil {
		t.Error(err)
	}
}

func TestALockFileOfAnothersIsAnErrorThatSaysWhatToDo(t *testing.T) {
	for _, c := range []struct {
		name string
		make func(path string) error
	}{
		{"a symbolic link", func(path string) error { return os.Symlink(os.DevNull, path) }},
		{"a link to nothing", func(path string) error { return os.Symlink(path+".target", path) }},
		{"a fifo", func(path string) error { return unix.Mkfifo(path, 0o600) }},
		{"another user's", func(path string) error {
			if err := os.WriteFile(path, nil, 0o666); err != nil {
				return err
			}
			return os.Chown(path, 12345, 12345)
		}},
	} {
		path := filepath.Join(t.TempDir(), "s")
		if err := c.make(path + lockSuffix); errors.Is(err, os.ErrPermission) {
			t.Logf("%s: %v", c.name, err)
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		before, _ := os.Lstat(path + lockSuffix)
		_, err := bindEngine(testContext(t), path)
		if err == nil || !strings.Contains(err.Error(), path+lockSuffix) || !strings.Contains(err.Error(), "remove it, or choose another socket") {
			t.Errorf("%s: %v", c.name, err)
		}
		if after, _ := os.Lstat(path + lockSuffix); after == nil || !os.SameFile(before, after) {
			t.Errorf("%s: was taken away", c.name)
		}
		if _, err := os.Lstat(path + lockSuffix + ".target"); err == nil {
			t.Errorf("%s: was followed", c.name)
		}
	}
}

// What a killed node leaves is its socket and the lock's file.
func TestALockFileWithoutItsProcessIsTakenOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	if err := os.WriteFile(path+lockSuffix, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.release(); err != nil {
		t.Error(err)
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
