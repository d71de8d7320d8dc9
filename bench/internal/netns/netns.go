// Package netns makes two network namespaces joined by a veth pair: two machines, as far as TCP can tell.
package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// Pair is two network namespaces.
type Pair struct {
	A, B             string // namespaces
	AddrA, AddrB     string
	DeviceA, DeviceB string // interfaces

	created []string
}

// New makes them. It needs root. The caller closes the pair.
func New() (*Pair, error) {
	id := fmt.Sprintf("ferry%d", os.Getpid()%100000)
	p := &Pair{A: id + "a", B: id + "b", AddrA: "10.213.7.1", AddrB: "10.213.7.2", DeviceA: id + "x", DeviceB: id + "y"}
	for _, ns := range []string{p.A, p.B} {
		if err := ip("netns", "add", ns); err != nil {
			return nil, errors.Join(err, p.Close())
		}
		p.created = append(p.created, ns)
	}
	for _, args := range [][]string{
		{"link", "add", p.DeviceA, "netns", p.A, "type", "veth", "peer", "name", p.DeviceB, "netns", p.B},
		{"-n", p.A, "addr", "add", p.AddrA + "/24", "dev", p.DeviceA},
		{"-n", p.B, "addr", "add", p.AddrB + "/24", "dev", p.DeviceB},
		{"-n", p.A, "link", "set", p.DeviceA, "up"},
		{"-n", p.B, "link", "set", p.DeviceB, "up"},
		{"-n", p.A, "link", "set", "lo", "up"},
		{"-n", p.B, "link", "set", "lo", "up"},
	} {
		if err := ip(args...); err != nil {
			return nil, errors.Join(err, p.Close())
		}
	}
	return p, nil
}

// Close deletes the namespaces, and with them their interfaces.
func (p *Pair) Close() error {
	var errs []error
	for _, ns := range p.created {
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

// Command is one that runs in a namespace; "" is our own.
func Command(ns, name string, args ...string) *exec.Cmd {
	if ns == "" {
		return exec.Command(name, args...)
	}
	return exec.Command("ip", append([]string{"netns", "exec", ns, name}, args...)...)
}
