package node

import (
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// leastFiles is how many descriptors a node must be able to open. An idle one has 32, the nixl plane's agents have their own. Each engine
// takes two, a peer one that asks and about six that is asked. libzmq ends the process in some places where it finds none left.
const leastFiles = 256

// checkFiles raises the soft limit of descriptors to the hard one, and refuses one that is too low.
func checkFiles() error {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return fmt.Errorf("how many descriptors may be open: %w", err)
	}
	if r.Cur < r.Max {
		r.Cur = r.Max
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
			return fmt.Errorf("raise the limit of descriptors to %d: %w", r.Max, err)
		}
	}
	if r.Max < leastFiles {
		return fmt.Errorf("%d descriptors may be open (RLIMIT_NOFILE), a node needs at least %d: %s", r.Max, leastFiles, filesFix)
	}
	return nil
}

const filesFix = "ulimit -n 4096, LimitNOFILE=4096 in a systemd unit, or docker run --ulimit nofile=4096"

// listenFix is what to do when a port cannot be listened on: fix, unless the process or the machine has no descriptors left, or the host is
// not this machine's.
func listenFix(err error, fix string) string {
	var name *net.DNSError
	switch {
	case errors.As(err, &name), errors.Is(err, unix.EADDRNOTAVAIL):
		return "give an address of this machine, or a name that stands for one"
	case errors.Is(err, unix.EMFILE):
		return "allow the process more descriptors: " + filesFix
	case errors.Is(err, unix.ENFILE):
		return "the machine has no descriptors left: end what holds them, or raise fs.file-max"
	}
	return fix
}
