package region

import (
	"bufio"
	"math"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// memory tells how much this process may still take. A tmpfs is often allowed to grow past that: in Kubernetes an emptyDir of
// medium Memory counts against the container's own limit.
type memory struct{ proc, cgroup string } // where /proc and /sys/fs/cgroup are

var systemMemory = memory{"/proc", "/sys/fs/cgroup"}

// memoryFree is the tightest limit and what is left under it.
type memoryFree struct {
	free int64
	what string
	fix  string
}

// free looks at the machine and at this process's control groups up to the root, of either generation. Page cache that can be
// dropped counts as free, and so does swap, so that what is refused could not have been had. ok is false where nothing is known.
func (m memory) free() (tightest memoryFree, ok bool) {
	host := readTable(filepath.Join(m.proc, "meminfo"))
	available, ok := host["MemAvailable:"]
	if !ok {
		return memoryFree{}, false
	}
	swap := host["SwapFree:"] << 10
	tightest = memoryFree{available<<10 + swap, "the memory of this machine", fixHost}
	for _, dir := range m.groups() {
		if free, ok := groupFree(dir); ok && free+swap < tightest.free {
			tightest = memoryFree{free + swap, "the memory limit of " + dir, fixMemory}
		}
	}
	return tightest, true
}

// groups are the directories of the control groups that may limit this process, innermost first. A path that is not there
// (a container sees the host's name of its group, but only its own group mounted) is skipped for its parents.
func (m memory) groups() []string {
	b, err := os.ReadFile(filepath.Join(m.proc, "self/cgroup"))
	if err != nil {
		return nil
	}
	var dirs []string
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3) // id:controllers:path
		if len(f) != 3 {
			continue
		}
		root := m.cgroup // generation 2 has no controllers here
		if f[1] != "" {
			if !contains(f[1], "memory") {
				continue
			}
			root = filepath.Join(m.cgroup, "memory")
		}
		for p := path.Clean("/" + f[2]); ; p = path.Dir(p) {
			dirs = append(dirs, filepath.Join(root, p))
			if p == "/" {
				break
			}
		}
	}
	return dirs
}

func contains(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// groupFree is what is left under one group's own limit; false if it has none.
func groupFree(dir string) (int64, bool) {
	for _, g := range [...]struct{ limit, usage, inactive, active string }{
		{"memory.max", "memory.current", "inactive_file", "active_file"},
		{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file"},
	} {
		limit, ok := readNumber(filepath.Join(dir, g.limit))
		if !ok || limit > math.MaxInt64/2 { // "max", or how generation 1 says it
			continue
		}
		usage, ok := readNumber(filepath.Join(dir, g.usage))
		if !ok {
			continue
		}
		stat := readTable(filepath.Join(dir, "memory.stat"))
		return max(0, limit-max(0, usage-stat[g.inactive]-stat[g.active])), true
	}
	return 0, false
}

func readNumber(file string) (int64, bool) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	return n, err == nil
}

// readTable reads lines of a word and a number; what does not look so is skipped.
func readTable(file string) map[string]int64 {
	f, err := os.Open(file)
	if err != nil {
		return nil
	}
	defer f.Close()
	table := map[string]int64{}
	for s := bufio.NewScanner(f); s.Scan(); {
		if f := strings.Fields(s.Text()); len(f) >= 2 {
			if n, err := strconv.ParseInt(f[1], 10, 64); err == nil {
				table[f[0]] = n
			}
		}
	}
	return table
}
