package interop

import (
	"bufio"
	"encoding/hex"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// UCX listens on every interface unless it is told not to, and asks nobody who he is. Nothing of a node that is on loopback may be
// open to the network, NIXL's agents neither.
func TestNothingOfANodeOnLoopbackListensElsewhere(t *testing.T) {
	n := startNode(t, "--admin", "127.0.0.1:0")
	for role, pid := range map[string]int{"node": n.cmd.Process.Pid, "serve": n.agentOf("serve"), "fetch": n.agentOf("fetch")} {
		all := listening(t, pid)
		if role != "fetch" && len(all) == 0 {
			t.Errorf("%s listens nowhere, so this test sees nothing", role)
		}
		for _, a := range all {
			if !a.Addr().IsLoopback() {
				t.Errorf("%s listens on %v", role, a)
			}
		}
	}
	n.stopClean()
}

// listening gives the addresses of a process's TCP sockets that listen.
func listening(t *testing.T, pid int) []netip.AddrPort {
	t.Helper()
	proc := filepath.Join("/proc", strconv.Itoa(pid))
	fds, err := os.ReadDir(filepath.Join(proc, "fd"))
	must(t, err)
	own := map[string]bool{}
	for _, fd := range fds {
		if link, err := os.Readlink(filepath.Join(proc, "fd", fd.Name())); err == nil && strings.HasPrefix(link, "socket:[") {
			own[strings.Trim(link, "socket:[]")] = true
		}
	}
	var all []netip.AddrPort
	for _, table := range []string{"net/tcp", "net/tcp6"} {
		f, err := os.Open(filepath.Join(proc, table))
		must(t, err)
		for lines := bufio.NewScanner(f); lines.Scan(); {
			const stateListen = "0A"
			if c := strings.Fields(lines.Text()); len(c) > 9 && c[3] == stateListen && own[c[9]] {
				all = append(all, address(t, c[1]))
			}
		}
		must(t, f.Close())
	}
	return all
}

// address reads the kernel's form: words of 4 bytes in the machine's order (little endian), in hex, and the port.
func address(t *testing.T, s string) netip.AddrPort {
	t.Helper()
	host, port, _ := strings.Cut(s, ":")
	b, err := hex.DecodeString(host)
	must(t, err)
	for i := 0; i+4 <= len(b); i += 4 {
		b[i], b[i+1], b[i+2], b[i+3] = b[i+3], b[i+2], b[i+1], b[i]
	}
	a, ok := netip.AddrFromSlice(b)
	p, err := strconv.ParseUint(port, 16, 16)
	if must(t, err); !ok {
		t.Fatalf("no address: %s", s)
	}
	return netip.AddrPortFrom(a.Unmap(), uint16(p))
}
