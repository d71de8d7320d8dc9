package nixl

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// realLibrary is NIXL itself, from the venv that PEERS_PYTHON belongs to or from where Load finds it; without it the test is skipped.
func realLibrary(t testing.TB) *Library {
	t.Helper()
	var opts []Option
	if python := os.Getenv("PEERS_PYTHON"); python != "" {
		if m, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(python)), "lib/python3*/site-packages", wheelFile)); len(m) > 0 {
			opts = append(opts, WithPath(m[len(m)-1]))
		}
	}
	l, err := Load(opts...)
	if err != nil {
		t.Skipf("the real NIXL is not here: %v", err)
	}
	return l
}

// mapped is anonymous memory outside of the Go heap.
func mapped(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}
