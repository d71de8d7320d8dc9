package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"github.com/pebbe/zmq4"
)

// address is a resolved host and port. libzmq is only ever given numbers: it would resolve a name on its I/O thread and hold up
// every heartbeat of the loop meanwhile.
type address struct {
	ip   netip.Addr
	any  bool // "*": all IPv4 interfaces
	port int
}

func (a address) v6() bool { return !a.any && a.ip.Is6() }

func (a address) String() string {
	if a.any {
		return "tcp://*:" + strconv.Itoa(a.port)
	}
	return "tcp://" + net.JoinHostPort(a.ip.String(), strconv.Itoa(a.port))
}

// literal parses a host that needs no lookup; it may be in brackets.
func literal(host string) (netip.Addr, bool) {
	if n := len(host); n > 2 && host[0] == '[' && host[n-1] == ']' {
		host = host[1 : n-1]
	}
	ip, err := netip.ParseAddr(host)
	return ip.Unmap(), err == nil
}

// resolve finds the address of host, IPv4 if it has one: libzmq's peers look for IPv4 unless told otherwise.
func resolve(ctx context.Context, host string, port int) (address, error) {
	if ip, ok := literal(host); ok {
		return address{ip: ip, port: port}, nil
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return address{}, err
	}
	found := netip.Addr{}
	for _, ip := range ips {
		ip = ip.Unmap()
		if ip.Is4() {
			return address{ip: ip, port: port}, nil
		}
		if !found.IsValid() {
			found = ip
		}
	}
	if !found.IsValid() {
		return address{}, &net.DNSError{Err: "no address", Name: host, IsNotFound: true}
	}
	return address{ip: found, port: port}, nil
}

// splitAddr parses "host:port" of a peer to dial.
func splitAddr(addr string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, fmt.Errorf("control: address %q: want HOST:PORT, an IPv6 host in brackets: %w", addr, err)
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil || n == 0 {
		return "", 0, fmt.Errorf("control: address %q: the port must be 1 to 65535", addr)
	}
	if host == "" || host == "*" {
		return "", 0, fmt.Errorf("control: address %q names no host to connect to", addr)
	}
	return host, int(n), nil
}

// sysErr turns libzmq's error numbers into the system's, so that errors.Is(err, syscall.EADDRINUSE) works.
func sysErr(err error) error {
	var no zmq4.Errno
	if errors.As(err, &no) && no < zmq4.EFSM {
		return syscall.Errno(no)
	}
	return err
}

// bindHint says what to do about a bind that failed.
func bindHint(err error) string {
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return "; another process listens there: choose another port, or 0 for any free one"
	case errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.ENODEV):
		return "; no interface of this machine has that address"
	case errors.Is(err, syscall.EACCES):
		return "; ports below 1024 need a privilege"
	}
	return ""
}
