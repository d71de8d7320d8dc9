package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// The floor of small pulls: a byte there and back between two processes that have been idle since their last turn, over a unix socket as
// engines and nodes have it. No pull that an engine asks another process for can take less, whatever its bytes cost.

// echoSocket is the descriptor that the child finds its end at.
const echoSocket = 3

// echo is a child that sends back what it gets.
type echo struct {
	cmd  *exec.Cmd
	conn net.Conn
}

func startEcho(self string) (*echo, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	e := &echo{cmd: exec.Command(self, "-role", "echo")}
	e.cmd.Stderr, e.cmd.ExtraFiles = os.Stderr, []*os.File{theirs}
	e.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if e.conn, err = net.FileConn(ours); err != nil {
		return nil, err
	}
	if err := e.cmd.Start(); err != nil {
		return nil, errors.Join(err, e.conn.Close())
	}
	return e, nil
}

func (e *echo) roundTrip() (time.Duration, error) {
	var b [1]byte
	begin := time.Now()
	if _, err := e.conn.Write(b[:]); err != nil {
		return 0, fmt.Errorf("echo: %w", err)
	}
	if _, err := e.conn.Read(b[:]); err != nil {
		return 0, fmt.Errorf("echo: %w", err)
	}
	return time.Since(begin), nil
}

func (e *echo) close() error { return errors.Join(e.conn.Close(), e.cmd.Wait()) }

func runEcho() error {
	f := os.NewFile(echoSocket, "echo")
	conn, err := net.FileConn(f)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := f.Close(); err != nil {
		return err
	}
	var b [1]byte
	for {
		if _, err := conn.Read(b[:]); err != nil {
			return nil //nolint:nilerr // the parent is done
		}
		if _, err := conn.Write(b[:]); err != nil {
			return err
		}
	}
}
