package node

import (
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Another port does not help a process that may open no more files.
func TestAPortThatCannotBeListenedOnIsToldWithWhatHelps(t *testing.T) {
	for errno, want := range map[error]string{
		unix.EADDRINUSE: "use a free port",
		unix.EMFILE:     "ulimit -n",
		unix.ENFILE:     "fs.file-max",

		unix.EADDRNOTAVAIL: "an address of this machine",
		&net.DNSError{Err: "no such host", Name: "nobody's"}: "an address of this machine",
	} {
		err := fmt.Errorf("admin: %w", &net.OpError{Op: "listen", Err: os.NewSyscallError("socket", errno)})
		if got := listenFix(err, "use a free port"); !strings.Contains(got, want) {
			t.Errorf("%v: %q, want %q", errno, got, want)
		}
	}
}
