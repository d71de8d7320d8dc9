package node

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/tensorferry/tensorferry/internal/hostname"
)

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
		if !hostname.Valid(e) {
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
