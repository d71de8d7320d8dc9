package nixl

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// realLibrary is NIXL itself: the one that NIXL_CAPI_LIB names, or that of the venv that PEERS_PYTHON belongs to, or the one that Load
// finds; without it the test is skipped, or fails where FERRY_INTEROP_REQUIRED is set.
func realLibrary(t testing.TB) *Library {
	t.Helper()
	var opts []Option
	if python := os.Getenv("PEERS_PYTHON"); python != "" && os.Getenv(LibraryEnv) == "" {
		if m, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(python)), "lib/python3*/site-packages", wheelFile)); len(m) > 0 {
			opts = append(opts, WithPath(m[len(m)-1]))
		}
	}
	l, err := Load(opts...)
	switch {
	case err != nil && os.Getenv("FERRY_INTEROP_REQUIRED") != "":
		t.Fatalf("the real NIXL is not here, and FERRY_INTEROP_REQUIRED is set: %v", err)
	case err != nil:
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
