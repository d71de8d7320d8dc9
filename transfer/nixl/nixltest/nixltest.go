// Package nixltest is for tests that kill or stop a reader of memory that NIXL serves. UCX now and then ends a process whose reader is
// gone (seen over tcp with NIXL 1.3.2 and 1.5.1), be it an agent of this module or a real peer. Such a test has to bear that, and nothing else.
package nixltest

import (
	"bytes"
	"fmt"
	"regexp"
	"testing"
)

// ucxEnd is a line by which UCX says that it ends its process, before it calls abort. Seen: "ucp_request.inl:319 Fatal: unexpected error:
// Endpoint timeout" and "stubs.c:107 Assertion `0' failed". A pid is padded
// to five characters.
var ucxEnd = regexp.MustCompile(`\[\S+:\d+ *:\d+:\d+ *\]\s+\w+\.(c|h|inl):\d+\s+(Fatal: |Assertion ).*`)

// crash is what Python's faulthandler prints when native code ends its process.
var crash = regexp.MustCompile(`(?m)^Fatal Python error: (Segmentation fault|Bus error|Aborted)$`)

// EndedByUCX says of a process that is gone that UCX ended it, by what it printed. It ends the test if UCX did not say so: then something
// else did. name is for the report.
func EndedByUCX(t testing.TB, name string, printed []byte) bool {
	t.Helper()
	return said(t, name, printed, ucxEnd)
}

// Crashed is EndedByUCX of a real peer in Python, with its faulthandler enabled, that native code may also have ended: NIXL's, of which
// nothing is this module's. It is for peers whose source went away under their READ.
func Crashed(t testing.TB, name string, printed []byte) bool {
	t.Helper()
	return said(t, name, printed, ucxEnd, crash)
}

func said(t testing.TB, name string, printed []byte, lines ...*regexp.Regexp) bool {
	t.Helper()
	for _, l := range lines {
		if line := l.Find(printed); line != nil {
			t.Logf("its own NIXL ended %s, as it may: %s", name, line)
			return true
		}
	}
	t.Fatalf("%s ended, and its NIXL does not say that it ended it; its end:\n%s", name, printed[max(0, len(printed)-4000):])
	return false
}

// AgentSaid gives what an agent process printed, and how it died, out of the text log of the plane that had it. It is whole when died is true.
func AgentSaid(log []byte, pid int) (said []byte, died bool) {
	its := fmt.Appendf(nil, " pid=%d ", pid)
	for line := range bytes.Lines(log) {
		if !bytes.Contains(line, its) {
			continue
		}
		said = append(said, line...)
		died = died || bytes.Contains(line, []byte("an agent process died"))
	}
	return said, died
}
