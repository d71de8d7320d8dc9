// Package hostname tells of a host what its text alone can: a name that some resolver maps to 127.0.0.1 today may go elsewhere tomorrow.
package hostname

import (
	"net/netip"
	"regexp"
	"strings"
)

var name = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}$`)

// Valid is true of IP addresses, without brackets, and of what may be a host's name.
func Valid(host string) bool {
	_, err := netip.ParseAddr(host)
	return err == nil || name.MatchString(host)
}

// Loopback is true of a host that only this machine reaches.
func Loopback(host string) bool {
	a, ok := address(host)
	return ok && a.IsLoopback() || strings.EqualFold(host, "localhost")
}

// Unspecified is true of the address that stands for all of a machine's, which nobody can dial.
func Unspecified(host string) bool {
	a, ok := address(host)
	return ok && a.IsUnspecified()
}

// address takes an IPv6 address also in brackets.
func address(host string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return a.Unmap(), err == nil
}
