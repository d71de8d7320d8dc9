package nixl

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// realPath is the library in the venv that PEERS_PYTHON belongs to, unless NIXL_CAPI_LIB names one, or "" for where it is found; without
// one the test is skipped, or fails where FERRY_INTEROP_REQUIRED is set.
func realPath(t testing.TB) string {
	t.Helper()
	if python := os.Getenv("PEERS_PYTHON"); python != "" && os.Getenv(binding.LibraryEnv) == "" {
		m, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(python)), "lib/python3*/site-packages/.nixl_cu1*.mesonpy.libs/libnixl_capi.so"))
		if len(m) > 0 {
			return m[len(m)-1]
		}
	}
	if found := binding.Find(); len(found) > 0 {
		return ""
	}
	if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
		t.Fatal("no NIXL here, and FERRY_INTEROP_REQUIRED is set")
	}
	t.Skip("no NIXL here: pip install nixl, or set PEERS_PYTHON to the python of a venv that has it")
	return ""
}

// agentEnv makes this test binary an agent process.
const agentEnv = "FERRY_NIXL_TEST_AGENT"

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(agentEnv) != "":
	case os.Getenv(nodeEnv) != "":
		runNode()
	case os.Getenv(ownerEnv) != "":
		runOwner()
	default:
		os.Exit(m.Run())
	}
	if err := RunAgent(os.NewFile(AgentSocket, "socket")); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// processes are options for agents in processes of their own.
func processes(t testing.TB) Options {
	t.Helper()
	path := realPath(t)
	return Options{Library: path, Command: []string{"/usr/bin/env", agentEnv + "=1", os.Args[0]}}
}

func newPlane(t testing.TB, o Options) *Plane {
	t.Helper()
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func TestNIXLPlaneConformsOverTheFake(t *testing.T) {
	transfertest.Run(t, func(t *testing.T, _ string) (producer, consumer transfer.Plane) {
		l := binding.NewFake().Library()
		return newPlane(t, Options{Loaded: l}), newPlane(t, Options{Loaded: l})
	})
}

func TestNIXLPlaneConformsInThisProcess(t *testing.T) {
	path := realPath(t)
	transfertest.Run(t, func(t *testing.T, _ string) (producer, consumer transfer.Plane) {
		return newPlane(t, Options{Library: path}), newPlane(t, Options{Library: path})
	})
}

func TestNIXLPlaneConformsInProcessesOfItsOwn(t *testing.T) {
	o := processes(t)
	transfertest.Run(t, func(t *testing.T, _ string) (producer, consumer transfer.Plane) {
		return newPlane(t, o), newPlane(t, o)
	})
}
