package node

import (
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
	if err := s.close(); err != nil {
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
	defer s.close()
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
	if err := s.close(); err != nil {
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
					_ = s.close()
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
		if err := s.close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestClosingLeavesAnothersSocketAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	first, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil { // by hand
		t.Fatal(err)
	}
	second, err := listenEngine(testContext(t), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the second node's socket is gone: %v", err)
	}
	if err := second.close(); err != nil {
		t.Error(err)
	}
}
