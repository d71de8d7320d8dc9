package api

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// An engine is told that it may come again, not that it is denied for good.
func TestAPeerThatCannotBeWatchedForWantOfDescriptorsIsALimit(t *testing.T) {
	sock, _ := socketPair(t)
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		t.Fatal(err)
	}
	free, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(free)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(free), Max: r.Max}); err != nil {
		t.Fatal(err)
	}
	peer, err := PeerOf(sock, true)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, ErrLimit) || CodeOf(err) != CodeLimit || !Exhausted(err) {
		t.Errorf("%v: code %q, want %q", err, CodeOf(err), CodeLimit)
	}
	if peer.PID != os.Getpid() || peer.UID != os.Getuid() || peer.Process != nil { // for the log
		t.Errorf("%+v", peer)
	}
}

func TestAPidIsOpenedOnlyWhereTheKernelCannotNameThePeerItself(t *testing.T) {
	gives := func(err error) func() (int, error) {
		return func() (int, error) {
			if err != nil {
				return -1, err
			}
			return unix.PidfdOpen(os.Getpid(), 0)
		}
	}
	for _, c := range []struct {
		name         string
		option, open error
		pid          int
		watched      bool
		limit        bool
		opened       bool
	}{
		{name: "named by the kernel", pid: 7, watched: true},
		{name: "an older kernel", option: unix.ENOPROTOOPT, pid: 7, opened: true, watched: true},
		{name: "an older kernel, another namespace", option: unix.ENOPROTOOPT},
		{name: "an older kernel, gone", option: unix.ENOPROTOOPT, open: unix.ESRCH, pid: 7, opened: true},
		{name: "an older kernel, no descriptors", option: unix.ENOPROTOOPT, open: unix.EMFILE, pid: 7, opened: true, limit: true},
		{name: "reaped: whoever has its pid now is another", option: unix.ESRCH, pid: 7},
		{name: "the process has no descriptors", option: unix.EMFILE, pid: 7, limit: true},
		{name: "the machine has no descriptors", option: unix.ENFILE, pid: 7, limit: true},
		{name: "no memory", option: unix.ENOMEM, pid: 7, limit: true},
	} {
		opened := false
		s := pidfds{
			peerOf: func(int) (int, error) { return gives(c.option)() },
			open: func(pid, flags int) (int, error) {
				opened = true
				if pid != c.pid || flags != 0 {
					t.Errorf("%s: pidfd_open(%d, %d)", c.name, pid, flags)
				}
				return gives(c.open)()
			},
		}
		f, err := s.peer(3, c.pid)
		if (f != nil) != c.watched || errors.Is(err, ErrLimit) != c.limit || (err != nil) != c.limit || opened != c.opened {
			t.Errorf("%s: watched %v, %v, pid opened %v", c.name, f != nil, err, opened)
		}
		if f != nil {
			_ = f.Close()
		}
	}
}
