// Package boottime tells the time since the machine was booted, sleep included, in a way that all of its processes agree on: Linux
// lets a time namespace (of a container, say) add an offset to that clock, and to the start times in /proc; here it is taken off
// again.
package boottime

import (
	"bytes"
	"math"
	"os"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Now is nanoseconds since boot.
func Now() int64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts) != nil { // never, on kernels since 2.6.39
		return math.MaxInt64
	}
	off, _ := Offset()
	return ts.Nano() - int64(off)
}

// ID tells this boot of the machine from its others, and from those of other machines: a UUID as text.
func ID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return string(bytes.TrimSpace(b)), err
}

// Offset is what this process's time namespace adds to the clock. False: it cannot be known.
func Offset() (offset time.Duration, known bool) {
	r := read()
	return r.offset, r.known
}

type reading struct {
	offset time.Duration
	known  bool
}

// A process stays in its time namespace: only one that is started can be put into another.
var read = sync.OnceValue(func() reading {
	own, err := os.Readlink("/proc/self/ns/time")
	if os.IsNotExist(err) {
		return reading{known: true} // a kernel before 5.6, or without them
	}
	children, err2 := os.Readlink("/proc/self/ns/time_for_children")
	text, err3 := os.ReadFile("/proc/self/timens_offsets") // of the children's
	if err != nil || err2 != nil || err3 != nil || own != children {
		return reading{}
	}
	off, ok := parse(text)
	return reading{off, ok}
})

// parse finds the line "boottime SECONDS NANOSECONDS".
func parse(text []byte) (time.Duration, bool) {
	for line := range bytes.Lines(text) {
		f := bytes.Fields(line)
		if len(f) != 3 || string(f[0]) != "boottime" {
			continue
		}
		s, err := strconv.ParseInt(string(f[1]), 10, 64)
		ns, err2 := strconv.ParseInt(string(f[2]), 10, 64)
		if err != nil || err2 != nil || s > math.MaxInt64/int64(time.Second) || s < math.MinInt64/int64(time.Second) {
			return 0, false
		}
		return time.Duration(s)*time.Second + time.Duration(ns), true
	}
	return 0, false
}
