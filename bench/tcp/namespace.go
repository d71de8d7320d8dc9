package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// hosts are two network namespaces joined by a veth pair: two machines, as far as TCP can tell.
type hosts struct {
	a, b           string // namespaces
	addrA, addrB   string
	deviceA, peerB string // interfaces
	created        []string
}

func newHosts() (*hosts, error) {
	id := fmt.Sprintf("ferry%d", os.Getpid()%100000)
	h := &hosts{a: id + "a", b: id + "b", addrA: "10.213.7.1", addrB: "10.213.7.2", deviceA: id + "x", peerB: id + "y"}
	for _, ns := range []string{h.a, h.b} {
		if err := ip("netns", "add", ns); err != nil {
			return nil, errors.Join(err, h.close())
		}
		h.created = append(h.created, ns)
	}
	for _, args := range [][]string{
		{"link", "add", h.deviceA, "netns", h.a, "type", "veth", "peer", "name", h.peerB, "netns", h.b},
		{"-n", h.a, "addr", "add", h.addrA + "/24", "dev", h.deviceA},
		{"-n", h.b, "addr", "add", h.addrB + "/24", "dev", h.peerB},
		{"-n", h.a, "link", "set", h.deviceA, "up"},
		{"-n", h.b, "link", "set", h.peerB, "up"},
		{"-n", h.a, "link", "set", "lo", "up"},
		{"-n", h.b, "link", "set", "lo", "up"},
	} {
		if err := ip(args...); err != nil {
			return nil, errors.Join(err, h.close())
		}
	}
	return h, nil
}

// close deletes the namespaces, and with them their interfaces.
func (h *hosts) close() error {
	var errs []error
	for _, ns := range h.created {
		errs = append(errs, ip("netns", "del", ns))
	}
	return errors.Join(errs...)
}

func ip(args ...string) error {
	out, err := exec.Command("ip", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

// child is a process that answers lines with lines.
type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func start(ns string, env []string, name string, args ...string) (*child, error) {
	cmd := exec.Command("ip", append([]string{"netns", "exec", ns, name}, args...)...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return &child{cmd: cmd, in: in, out: bufio.NewReader(out)}, nil
}

func (c *child) line() (string, error) {
	s, err := c.out.ReadString('\n')
	return strings.TrimSpace(s), err
}

func (c *child) ask(line string) (string, error) {
	if _, err := fmt.Fprintln(c.in, line); err != nil {
		return "", err
	}
	return c.line()
}

// close ends the child by the end of its input.
func (c *child) close() {
	_ = c.in.Close()
	_ = c.cmd.Wait()
}
