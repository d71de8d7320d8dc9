package node

import (
	"bytes"
	"errors"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/boottime"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// A process is named in a region by its pid and the time of its start, since pids are given again: the pid in the upper bits, the
// start in clock ticks since boot in the lower ones (42 bits of 10 ms are a thousand years). 0: not known.
const (
	startBits = 42
	tick      = 10 * time.Millisecond // of /proc on every Linux
)

// sameProcess compares two names. What two time namespaces make of one start may differ by a tick; a pid is not given again so soon.
func sameProcess(a, b uint64) bool {
	return a != 0 && b != 0 && a>>startBits == b>>startBits && max(a, b)-min(a, b) <= 1
}

// processOf names a live process as this PID namespace sees it, 0 if it does not. The caller must know that the process lives
// after the call too (by a pidfd from before it), else the answer may be about another of the same pid.
func processOf(pid int) uint64 {
	start := startOf(pid)
	if pid <= 0 || start == 0 {
		return 0
	}
	return uint64(pid)<<startBits | start
}

// startOf is field 22 of /proc/PID/stat, less what this process's time namespace adds to it, so that the node that comes next finds
// the same in whatever namespace it is. 0 if there is no such process or the namespace is not known. Field 2 is the command's name
// in parentheses, which may hold anything.
func startOf(pid int) uint64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	const afterName = 22 - 3
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) <= afterName {
		return 0
	}
	n, err := strconv.ParseInt(string(f[afterName]), 10, 64)
	offset, known := boottime.Offset()
	if n -= int64(offset / tick); err != nil || !known || n < 0 {
		return 0
	}
	return uint64(n) & (1<<startBits - 1)
}

// pidNamespace tells the namespace that this process's pids count in from others of the same boot.
var pidNamespace = sync.OnceValue(func() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/self/ns/pid", &st) != nil {
		return 0
	}
	return st.Ino
})

// openProcess opens a pidfd; replaced in tests.
var openProcess = api.OpenProcess

// watchProcess opens a pidfd of a process named by processOf in this namespace. dead: it is gone for certain. A nil file
// without that: nothing can be said of it now.
func watchProcess(process uint64) (f *os.File, dead bool) {
	pid := int(process >> startBits)
	if pid <= 0 {
		return nil, false
	}
	f, err := openProcess(pid)
	if errors.Is(err, unix.ESRCH) {
		return nil, true
	}
	// The pidfd is of whoever had the pid when it was opened; that one's start tells who it is, or is unreadable because it has
	// ended since. Without a pidfd the start still tells that the pid is another's by now.
	now := processOf(pid)
	if err == nil && sameProcess(now, process) {
		return f, false
	}
	_ = f.Close() // of nil too
	return nil, now != 0 && !sameProcess(now, process) || unix.Kill(pid, 0) == unix.ESRCH
}
