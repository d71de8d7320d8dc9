// Package leftover ends the processes that outlive a test by design: serve agents whose node has ended wait for the next one, or for
// peers that may still READ, for minutes.
package leftover

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// End kills every process that runs a program of the folder dir, which is the tests' own.
func End(dir string) {
	links, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, link := range links {
		program, err := os.Readlink(link)
		if err != nil || !strings.HasPrefix(program, dir+"/") {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link))); err == nil && pid != os.Getpid() {
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}
