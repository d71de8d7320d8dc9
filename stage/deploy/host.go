package deploy

import (
	"net"
	"net/netip"
	"strings"

	"github.com/tensorferry/tensorferry/internal/hostname"
)

// routed are addresses out in the world, one for each family. vLLM-Omni looks at the route to the first: both then find the same
// address of this machine. Nothing is ever sent there.
var routed = []struct{ network, address string }{{"udp4", "8.8.8.8:80"}, {"udp6", "[2001:4860:4860::8888]:80"}}

// detectHost finds the address of this machine that others would use: the one on the route outwards, which a connected UDP socket
// knows without a packet; else the first that is neither loopback nor link-local; else loopback. The last two come with a warning.
func detectHost() (host, warning string) {
	for _, r := range routed {
		c, err := net.Dial(r.network, r.address)
		if err != nil {
			continue
		}
		a, err := netip.ParseAddrPort(c.LocalAddr().String())
		c.Close()
		if err == nil && !a.Addr().IsLoopback() {
			return a.Addr().Unmap().String(), ""
		}
	}
	var found netip.Addr
	addrs, _ := net.InterfaceAddrs() // of an error, there are none
	for _, x := range addrs {
		p, err := netip.ParsePrefix(x.String())
		if err != nil || !p.Addr().Unmap().IsGlobalUnicast() {
			continue
		}
		if !found.IsValid() || found.Is6() && p.Addr().Unmap().Is4() {
			found = p.Addr().Unmap()
		}
	}
	if found.IsValid() {
		return found.String(), "no route leads outwards, so this is just the first address of this machine: set host if others use another"
	}
	return "127.0.0.1", "this machine has loopback alone, so nobody elsewhere can connect: set host if that is not so"
}

// isAuto is true of what stands for detection. All of it is vLLM-Omni's.
func isAuto(host string) bool {
	switch host {
	case "", "*", "0.0.0.0", "::":
		return true
	}
	return strings.EqualFold(host, "auto")
}

// remote is true of a host that is not this machine's loopback.
func remote(host string) bool { return host != "" && !hostname.Loopback(host) }
