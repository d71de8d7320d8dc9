package slab

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/tcp"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// What this test binary is instead of a test, by its environment.
const (
	agentEnv = "FERRY_SLAB_TEST_AGENT" // an agent process
	ownerEnv = "FERRY_SLAB_TEST_OWNER" // a process that has a slab in that directory
)

func TestMain(m *testing.M) {
	switch {
	case os.Getenv(agentEnv) != "":
		if err := nixl.RunAgent(os.NewFile(nixl.AgentSocket, "socket")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	case os.Getenv(ownerEnv) != "":
		own(os.Getenv(ownerEnv))
	default:
		os.Exit(m.Run())
	}
	os.Exit(0)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// context that no test should reach the end of.
func patient(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), transfertest.Patience)
	t.Cleanup(cancel)
	return ctx
}

// leaks checks, after all cleanups that follow, that no goroutine, descriptor or file is left.
func leaks(t *testing.T, dir string) {
	t.Helper()
	goroutines, files := runtime.NumGoroutine(), descriptors(t)
	t.Cleanup(func() {
		transfertest.Eventually(t, "goroutines and descriptors to be gone", func() bool {
			return runtime.NumGoroutine() <= goroutines && descriptors(t) <= files
		})
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	})
}

func descriptors(t testing.TB) int {
	names, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(names)
}

// newSlab makes a slab whose planes are closed after it.
func newSlab(t testing.TB, dir, name string, size int64, planes ...transfer.Plane) *Slab {
	t.Helper()
	s, err := New(patient(t), Options{Dir: dir, Name: name, Bytes: size, Planes: planes})
	must(t, err)
	t.Cleanup(func() {
		if err := s.Close(patient(t)); err != nil {
			t.Errorf("closing slab %s: %v", name, err)
		}
		for _, p := range planes {
			must(t, p.Close())
		}
	})
	return s
}

// makers of a plane by name; a skipped one skips the test.
var makers = map[string]func(t testing.TB, dir string) transfer.Plane{
	transfer.Mapped: func(t testing.TB, dir string) transfer.Plane {
		p, err := mapped.New(mapped.Options{Dirs: []string{dir}})
		must(t, err)
		return p
	},
	transfer.TCP: func(t testing.TB, _ string) transfer.Plane {
		p, err := tcp.New(t.Context(), tcp.Options{})
		must(t, err)
		return p
	},
	"nixl fake": func(t testing.TB, _ string) transfer.Plane { return fakeNIXL(t) },
	"nixl":      func(t testing.TB, _ string) transfer.Plane { return realNIXL(t) },
}

var fake = binding.NewFake() // whose agents meet

func fakeNIXL(t testing.TB) *nixl.Plane {
	t.Helper()
	p, err := nixl.New(nixl.Options{Loaded: fake.Library(), Drain: 20 * time.Millisecond})
	must(t, err)
	return p
}

// realNIXL runs agents in processes of their own, by the library of the venv that PEERS_PYTHON belongs to, or else that is found.
func realNIXL(t testing.TB) *nixl.Plane {
	t.Helper()
	p, err := nixl.New(nixl.Options{Library: libraryPath(), Command: []string{"/usr/bin/env", agentEnv + "=1", os.Args[0]}, Loopback: true})
	if err != nil {
		if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
			t.Fatal(err)
		}
		t.Skipf("no NIXL here: %v", err)
	}
	return p
}

// libraryPath is that of the venv that PEERS_PYTHON belongs to, or "" for where it is found.
func libraryPath() string {
	if python := os.Getenv("PEERS_PYTHON"); python != "" {
		m, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(python)), "lib/python3*/site-packages/.nixl_cu1*.mesonpy.libs/libnixl_capi.so"))
		if len(m) > 0 {
			return m[len(m)-1]
		}
	}
	return ""
}

// describe gives metadata of tensors of those sizes, as a Store has it.
func describe(sizes []int64) *wire.Metadata {
	m := &wire.Metadata{Kind: wire.Tensors, Generation: wire.TextID("g"), Claim: wire.TextID("c")}
	for _, n := range sizes {
		m.Specs = append(m.Specs, wire.Spec{DType: tensor.Uint8, Shape: tensor.Shape{n}, Size: n})
		m.Size += n
	}
	return m
}

// put publishes tensors of those sizes, filled by the seed.
func put(t testing.TB, s *Slab, seed uint64, sizes ...int64) *Payload {
	t.Helper()
	b, err := s.Alloc(patient(t), sizes)
	must(t, err)
	for i, to := range b.Slices() {
		transfertest.Fill(to, seed+uint64(i)*1000)
	}
	return b.Payload(describe(sizes).Specs)
}

// offer claims p as an own reader with those planes does, and lets what it is told go over the wire.
func offer(t testing.TB, p *Payload, grant string, inline int64, planes ...string) (*wire.Metadata, error) {
	t.Helper()
	m := describe(sizesOf(p.specs))
	m.Ferry = &wire.FerryMetadata{LeaseMS: 1000}
	if err := p.Offer(patient(t), grant, &wire.FerryRequest{Planes: planes, Inline: inline}, m); err != nil {
		return nil, err
	}
	return overTheWire(t, m), nil
}

// offerPlain claims p as an unmodified peer does.
func offerPlain(t testing.TB, p *Payload, grant string) (*wire.Metadata, error) {
	t.Helper()
	m := describe(sizesOf(p.specs))
	if err := p.Offer(patient(t), grant, nil, m); err != nil {
		return nil, err
	}
	return overTheWire(t, m), nil
}

func overTheWire(t testing.TB, m *wire.Metadata) *wire.Metadata {
	t.Helper()
	got, err := wire.DecodeReply(wire.AppendReply(nil, &wire.Reply{Status: wire.Found, Metadata: m}, m.Ferry != nil))
	must(t, err)
	return got.Metadata
}

func sizesOf(specs []wire.Spec) (sizes []int64) {
	for _, s := range specs {
		sizes = append(sizes, s.Size)
	}
	return sizes
}

// get reads m into a buffer of its own and compares it.
func get(t testing.TB, s *Slab, m *wire.Metadata, seed uint64) (plane string) {
	t.Helper()
	b, err := s.Alloc(patient(t), sizesOf(m.Specs))
	must(t, err)
	defer b.Free()
	plane, err = s.Read(patient(t), m, b)
	must(t, err)
	compare(t, b.Slices(), seed)
	return plane
}

func compare(t testing.TB, got [][]byte, seed uint64) {
	t.Helper()
	for i := range got {
		want := make([]byte, len(got[i]))
		transfertest.Fill(want, seed+uint64(i)*1000)
		if !bytes.Equal(got[i], want) {
			t.Errorf("tensor %d of %d bytes has other bytes", i, len(want))
		}
	}
}
