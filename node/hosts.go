package node

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
)

var hostName = regexp.MustCompile(`^[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})$`)

// validHost is true of IP addresses and of what may be a host name.
func validHost(host string) bool {
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	return hostName.MatchString(host)
}

// isLoopback is decided from the text alone: a name that some resolver maps to 127.0.0.1 today may go elsewhere tomorrow.
func isLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}

func isUnspecified(host string) bool {
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsUnspecified()
}

// hostList is allow_hosts: which hosts an announcement may make this node connect to.
type hostList struct {
	names    map[string]bool
	prefixes []netip.Prefix
}

func newHostList(entries []string) (*hostList, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	l := &hostList{names: map[string]bool{}}
	for _, e := range entries {
		if p, err := netip.ParsePrefix(e); err == nil {
			l.prefixes = append(l.prefixes, p.Masked())
			continue
		}
		if a, err := netip.ParseAddr(e); err == nil {
			a = a.Unmap().WithZone("")
			l.prefixes = append(l.prefixes, netip.PrefixFrom(a, a.BitLen()))
			continue
		}
		if !hostName.MatchString(e) {
			return nil, bad("allow_hosts", quoted(e), "give host names, IP addresses or networks such as 10.0.0.0/8")
		}
		l.names[strings.ToLower(e)] = true
	}
	return l, nil
}

// allow is ec.ConsumerOptions.AllowHost. Names are compared as they are written, so that a resolver cannot lead around the list.
func (l *hostList) allow(host string) error {
	if l == nil || l.names[strings.ToLower(host)] {
		return nil
	}
	if a, err := netip.ParseAddr(host); err == nil {
		a = a.Unmap().WithZone("")
		for _, p := range l.prefixes {
			if p.Contains(a) {
				return nil
			}
		}
	}
	return fmt.Errorf("host %q is not in allow_hosts", host)
}
