// Package gputest is as much of the CUDA driver as tests of device memory need.
package gputest

import (
	"runtime"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/tensorferry/tensorferry/tensor"
)

// GPU is one device. Its methods end the test on an error.
type GPU struct {
	t                                         testing.TB
	alloc, free, toDevice, toHost, setCurrent uintptr
	synchronize                               uintptr
	context                                   uintptr
	number                                    int
}

// New takes the device of that number, or the last one there is. Without any the test is skipped.
func New(t testing.TB, number int) *GPU {
	t.Helper()
	lib, err := purego.Dlopen("libcuda.so.1", purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		t.Skipf("no CUDA driver here: %v", err)
	}
	sym := func(name string) uintptr {
		p, err := purego.Dlsym(lib, name)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	g := &GPU{
		t: t, alloc: sym("cuMemAlloc_v2"), free: sym("cuMemFree_v2"), toDevice: sym("cuMemcpyHtoD_v2"), toHost: sym("cuMemcpyDtoH_v2"),
		setCurrent: sym("cuCtxSetCurrent"), synchronize: sym("cuCtxSynchronize"),
	}
	if r, _, _ := purego.SyscallN(sym("cuInit"), 0); int32(r) != 0 {
		t.Skipf("no GPU here: cuInit gives %d", int32(r))
	}
	var count, device int32
	g.must("cuDeviceGetCount", sym("cuDeviceGetCount"), uintptr(unsafe.Pointer(&count)))
	g.number = min(number, int(count)-1)
	g.must("cuDeviceGet", sym("cuDeviceGet"), uintptr(unsafe.Pointer(&device)), uintptr(g.number))
	g.must("cuDevicePrimaryCtxRetain", sym("cuDevicePrimaryCtxRetain"), uintptr(unsafe.Pointer(&g.context)), uintptr(device))
	return g
}

// Device is its name.
func (g *GPU) Device() tensor.Device { return tensor.Device{Kind: "cuda", Index: g.number} }

//go:uintptrescapes
func (g *GPU) must(name string, f uintptr, args ...uintptr) {
	g.t.Helper()
	if r, _, _ := purego.SyscallN(f, args...); int32(r) != 0 {
		g.t.Fatalf("%s gives %d", name, int32(r))
	}
}

// enter makes the device's context current, which it is for a thread.
func (g *GPU) enter() (leave func()) {
	g.t.Helper()
	runtime.LockOSThread()
	g.must("cuCtxSetCurrent", g.setCurrent, g.context)
	return runtime.UnlockOSThread
}

// Memory allocates n bytes, which the caller frees.
func (g *GPU) Memory(n int64) (addr uint64, free func()) {
	g.t.Helper()
	defer g.enter()()
	var p uintptr
	g.must("cuMemAlloc", g.alloc, uintptr(unsafe.Pointer(&p)), uintptr(n))
	return uint64(p), func() { purego.SyscallN(g.free, p) }
}

// Write copies b to the device, and waits for that.
func (g *GPU) Write(to uint64, b []byte) {
	g.t.Helper()
	defer g.enter()()
	g.must("cuMemcpyHtoD", g.toDevice, uintptr(to), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	g.must("cuCtxSynchronize", g.synchronize)
}

// Read copies n bytes from the device.
func (g *GPU) Read(from uint64, n int64) []byte {
	g.t.Helper()
	defer g.enter()()
	b := make([]byte, n)
	g.must("cuMemcpyDtoH", g.toHost, uintptr(unsafe.Pointer(&b[0])), uintptr(from), uintptr(n))
	return b
}
