package ec

import (
	"net"
	"net/netip"
)

// machineAddrs are the addresses of this machine's interfaces, as of now. A connection from the machine to itself has one of them, or a
// loopback address, at both ends. A network namespace is a machine of its own.
func machineAddrs() map[netip.Addr]bool {
	own := map[netip.Addr]bool{}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return own // then peers of this machine go on as others do, unless they come by loopback
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(n.IP); ok {
				own[ip.Unmap()] = true
			}
		}
	}
	return own
}
