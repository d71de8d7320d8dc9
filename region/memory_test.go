package region

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFreeMemoryIsWhatTheTightestLimitLeaves(t *testing.T) {
	const meminfo = "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 100 kB\nHugePages_Total: 0\n"
	for name, c := range map[string]struct {
		files map[string]string
		free  int64
		what  string // the end of it
		ok    bool
	}{
		"nothing is known": {nil, 0, "", false},
		"no groups":        {map[string]string{"proc/meminfo": meminfo}, 8100 << 10, "this machine", true},
		"generation 2, the parent is tighter": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/pod/box\n",
			"cg/pod/box/memory.max": "4000000\n", "cg/pod/box/memory.current": "1000000\n",
			"cg/pod/box/memory.stat": "anon 5\ninactive_file 100000\nactive_file 200000\n",
			"cg/pod/memory.max":      "3000000\n", "cg/pod/memory.current": "2500000\n",
		}, 500000 + 100<<10, "cg/pod", true},
		"page cache is free": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/box\n",
			"cg/box/memory.max": "4000000\n", "cg/box/memory.current": "3900000\n",
			"cg/box/memory.stat": "anon 5\ninactive_file 1000000\nactive_file 200000\n",
		}, 1300000 + 100<<10, "cg/box", true},
		"over the limit": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/box\n",
			"cg/box/memory.max": "4000000\n", "cg/box/memory.current": "4000001\n",
		}, 100 << 10, "cg/box", true},
		"no limit": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "0::/box\n",
			"cg/box/memory.max": "max\n", "cg/box/memory.current": "1000000\n",
		}, 8100 << 10, "this machine", true},
		"generation 1, seen from a container": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
			"cg/memory/memory.limit_in_bytes": "2000000\n", "cg/memory/memory.usage_in_bytes": "1500000\n",
			"cg/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\ntotal_active_file 10000\n",
		}, 560000 + 100<<10, "cg/memory", true},
		"generation 1, no limit": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "4:memory:/\n",
			"cg/memory/memory.limit_in_bytes": "9223372036854771712\n", "cg/memory/memory.usage_in_bytes": "1500000\n",
		}, 8100 << 10, "this machine", true},
		"nonsense": {map[string]string{
			"proc/meminfo": meminfo, "proc/self/cgroup": "x\n\n:::::\n0::\n",
			"cg/memory.max": "lots", "cg/memory.current": "-",
		}, 8100 << 10, "this machine", true},
	} {
		root := t.TempDir()
		for file, text := range c.files {
			path := filepath.Join(root, file)
			must(0, os.MkdirAll(filepath.Dir(path), 0o755))
			must(0, os.WriteFile(path, []byte(text), 0o644))
		}
		got, ok := memory{filepath.Join(root, "proc"), filepath.Join(root, "cg")}.free()
		if ok != c.ok || got.free != c.free || !strings.HasSuffix(got.what, c.what) {
			t.Errorf("%s: %+v, %t, want %d of %s", name, got, ok, c.free, c.what)
		}
	}
	if _, ok := systemMemory.free(); !ok {
		t.Error("nothing is known of this machine")
	}
}
