package api

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Peer is the process at the other end of a socket, as it was when the connection was made.
type Peer struct {
	PID int // 0 if it is in a PID namespace that is not seen from here
	UID int

	// Process is readable once the process is dead: all its threads gone, all its descriptors closed. nil if the kernel gives no
	// pidfd for it. The caller closes it.
	Process *os.File
}

// PeerOf asks the kernel who is at the other end. watch asks for Peer.Process.
func PeerOf(sock *net.UnixConn, watch bool) (Peer, error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		return Peer{}, fmt.Errorf("engine api: %w", err)
	}
	var p Peer
	var opErr error
	err = raw.Control(func(fd uintptr) {
		cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err != nil {
			opErr = fmt.Errorf("engine api: SO_PEERCRED: %w", err)
			return
		}
		p.PID, p.UID = int(cred.Pid), int(cred.Uid)
		if watch {
			p.Process = pidfd(int(fd), p.PID)
		}
	})
	if err = errors.Join(err, opErr); err != nil {
		return Peer{}, err
	}
	return p, nil
}

// pidfd prefers SO_PEERPIDFD (Linux 6.5), which names the process that connected; a number may have been given to another since.
func pidfd(sock, pid int) *os.File {
	fd, err := unix.GetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_PEERPIDFD)
	if err != nil {
		if pid <= 0 {
			return nil
		}
		if fd, err = unix.PidfdOpen(pid, 0); err != nil {
			return nil
		}
	}
	unix.CloseOnExec(fd)
	// Non-blocking makes os.File wait in the runtime's poller, on no thread.
	if err := unix.SetNonblock(fd, true); err != nil {
		_ = unix.Close(fd)
		return nil
	}
	return os.NewFile(uintptr(fd), "pidfd")
}

// WaitExit returns nil once the process of a pidfd is dead, or an error once f is closed.
func WaitExit(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Read(func(fd uintptr) bool { return exited(int(fd)) })
}

func exited(pidfd int) bool {
	set := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(set, 0)
		if !errors.Is(err, syscall.EINTR) {
			return err == nil && n > 0
		}
	}
}
