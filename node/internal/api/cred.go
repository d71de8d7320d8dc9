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

// PeerOf asks the kernel who is at the other end. watch asks for Peer.Process. ErrLimit: that needs a descriptor, and none is left; the rest
// of the Peer is good then.
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
			p.Process, opErr = system.peer(int(fd), p.PID)
		}
	})
	return p, errors.Join(err, opErr)
}

// Exhausted says whether an error means that the process or the machine has no descriptor or memory left for now. A nil error: no.
func Exhausted(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// pidfds are the system's ways to a pidfd.
type pidfds struct {
	peerOf func(sock int) (int, error)
	open   func(pid, flags int) (int, error)
}

var system = pidfds{
	peerOf: func(sock int) (int, error) { return unix.GetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_PEERPIDFD) },
	open:   unix.PidfdOpen,
}

// peer prefers SO_PEERPIDFD (Linux 6.5), which names the process that connected; a number may have been given to another since. So the
// number is used only where the kernel does not know the option. nil: the process cannot be watched, or is gone.
func (s pidfds) peer(sock, pid int) (*os.File, error) {
	fd, err := s.peerOf(sock)
	if errors.Is(err, unix.ENOPROTOOPT) && pid > 0 {
		fd, err = s.open(pid, 0)
	}
	if Exhausted(err) {
		return nil, fmt.Errorf("%w: the node cannot watch your process for now: %w", ErrLimit, err)
	}
	if err != nil {
		return nil, nil
	}
	return pidFile(fd), nil
}

// OpenProcess opens a pidfd of whoever has the pid now. The error is the system's: ESRCH means that nobody has it.
func OpenProcess(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, 0) // PIDFD_NONBLOCK is EINVAL before Linux 5.10
	if err != nil {
		return nil, err
	}
	if f := pidFile(fd); f != nil {
		return f, nil
	}
	return nil, unix.EINVAL
}

// pidFile owns fd. Non-blocking makes os.File wait in the runtime's poller, on no thread; nil if that cannot be had.
func pidFile(fd int) *os.File {
	unix.CloseOnExec(fd)
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

// Exited says whether the process of a pidfd is dead. False if f is closed.
func Exited(f *os.File) (dead bool) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) { dead = exited(int(fd)) })
	return err == nil && dead
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
