package control

import (
	"net/netip"

	"golang.org/x/sys/unix"
)

// cut ends the connection of p. libzmq has no call for that, but its descriptor does, if it still is the one: libzmq may have closed
// it just now.
func (r *Router) cut(p *peer) {
	if addr, ours := r.remote(p.fd); ours && addr == p.src.Addr {
		reset(p.fd)
	}
}

// remote is the address at the other end of fd, if that is a connection to this router.
func (r *Router) remote(fd int) (addr string, ours bool) {
	local, err := unix.Getsockname(fd)
	if err != nil {
		return "", false
	}
	remote, err := unix.Getpeername(fd)
	if err != nil {
		return "", false
	}
	_, port := ipPort(local)
	ip, _ := ipPort(remote)
	return ip.String(), port == r.port
}

// reset ends a connection that libzmq has, which then closes it. The kernel is not to keep what the peer has not taken.
func reset(fd int) {
	unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	unix.Shutdown(fd, unix.SHUT_RDWR)
}

func ipPort(sa unix.Sockaddr) (netip.Addr, int) {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrFrom4(sa.Addr), sa.Port
	case *unix.SockaddrInet6:
		return netip.AddrFrom16(sa.Addr).Unmap(), sa.Port
	}
	return netip.Addr{}, 0
}
