package nixl

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"
)

// gpu is as much of the CUDA driver as these tests need: memory on one device. Without a GPU the test is skipped.
type gpu struct {
	t                                                      testing.TB
	alloc, free, toDevice, toHost, setCurrent, synchronize uintptr
	context                                                uintptr
	number                                                 int
}

// newGPU takes the device of that number, or the last one there is.
func newGPU(t testing.TB, number int) *gpu {
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
	g := &gpu{
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

//go:uintptrescapes
func (g *gpu) must(name string, f uintptr, args ...uintptr) {
	g.t.Helper()
	if r, _, _ := purego.SyscallN(f, args...); int32(r) != 0 {
		g.t.Fatalf("%s gives %d", name, int32(r))
	}
}

// memory allocates n bytes of VRAM.
func (g *gpu) memory(n int) Range {
	g.t.Helper()
	g.must("cuCtxSetCurrent", g.setCurrent, g.context)
	var p uintptr
	g.must("cuMemAlloc", g.alloc, uintptr(unsafe.Pointer(&p)), uintptr(n))
	g.t.Cleanup(func() { purego.SyscallN(g.free, p) })
	return Range{Addr: p, Len: uint64(n), Device: uint64(g.number)}
}

func (g *gpu) write(to Range, b []byte) {
	g.must("cuCtxSetCurrent", g.setCurrent, g.context)
	g.must("cuMemcpyHtoD", g.toDevice, to.Addr, uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	g.must("cuCtxSynchronize", g.synchronize)
}

func (g *gpu) read(from Range) []byte {
	b := make([]byte, from.Len)
	g.must("cuCtxSetCurrent", g.setCurrent, g.context)
	g.must("cuMemcpyDtoH", g.toHost, uintptr(unsafe.Pointer(&b[0])), from.Addr, uintptr(len(b)))
	return b
}

func TestReadsBetweenDRAMAndVRAMOfTwoAgents(t *testing.T) {
	l := realLibrary(t)
	g := newGPU(t, 0)
	const n = 64 << 20
	pattern := make([]byte, n)
	for i := range pattern {
		pattern[i] = byte(i*11 + i>>13)
	}
	for _, c := range []struct{ from, to MemoryType }{{VRAM, VRAM}, {DRAM, VRAM}, {VRAM, DRAM}} {
		t.Run(fmt.Sprintf("%v to %v", c.from, c.to), func(t *testing.T) {
			runtime.LockOSThread() // a CUDA context is current for a thread
			defer runtime.UnlockOSThread()
			memory := func(m MemoryType, fill []byte) Range {
				if m == VRAM {
					r := g.memory(n)
					g.write(r, fill)
					return r
				}
				b := mapped(t, n)
				copy(b, fill)
				return RangeOf(b)
			}
			agent := func(name string, m MemoryType, r Range) *Agent {
				a, err := l.NewAgent(uniqueName(name), AgentConfig{})
				must(t, err)
				t.Cleanup(func() { must(t, a.Close()) })
				_, err = a.CreateBackend("UCX", nil)
				must(t, err)
				_, err = a.Register(m, []Range{r})
				must(t, err)
				return a
			}
			source, destination := memory(c.from, pattern), memory(c.to, make([]byte, n))
			producer, consumer := agent("vram-producer", c.from, source), agent("vram-consumer", c.to, destination)
			r, err := consumer.NewRequest(Read, Descs{c.to, []Range{destination}}, Descs{c.from, []Range{source}}, add(t, consumer, producer),
				RequestOptions{Notification: []byte("x")})
			must(t, err)
			defer r.Release()
			must(t, run(t, r))
			var got []byte
			if c.to == VRAM {
				got = g.read(destination)
			} else {
				got = unsafe.Slice((*byte)(pointer(destination.Addr)), n)
			}
			if !bytes.Equal(got, pattern) {
				t.Error("bytes differ")
			}
			waitNotifications(t, producer, 1)
		})
	}
}

// vramProducer, in the environment of this test binary, makes it a process that offers that many bytes of VRAM: it writes its agent's
// metadata and the address to stdout, and ends with its stdin.
const vramProducer = "NIXL_TEST_VRAM_PRODUCER"

func TestVRAMProducerProcess(t *testing.T) {
	n, err := strconv.Atoi(os.Getenv(vramProducer))
	if err != nil {
		t.Skip("only in a process that BenchmarkReadVRAM starts")
	}
	l := realLibrary(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	memory := newGPU(t, 0).memory(n)
	a, err := l.NewAgent(fmt.Sprint("vram-producer-", os.Getpid()), AgentConfig{})
	must(t, err)
	defer a.Close()
	_, err = a.CreateBackend("UCX", nil)
	must(t, err)
	_, err = a.Register(VRAM, []Range{memory})
	must(t, err)
	md, err := a.LocalMetadata()
	must(t, err)
	fmt.Printf("VRAM %x %d\n", md, memory.Addr)
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// BenchmarkReadVRAM reads VRAM of another process, on GPU 0, into VRAM of this one, on GPU 1 where there are two.
func BenchmarkReadVRAM(b *testing.B) {
	l := realLibrary(b)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	g := newGPU(b, 1)
	for _, n := range []int{64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			metadata, address := startVRAMProducer(b, n)
			destination := g.memory(n)
			a, err := l.NewAgent(uniqueName("vram-consumer"), AgentConfig{})
			must(b, err)
			defer a.Close()
			_, err = a.CreateBackend("UCX", nil)
			must(b, err)
			_, err = a.Register(VRAM, []Range{destination})
			must(b, err)
			peer, err := a.AddPeer(metadata)
			must(b, err)
			r, err := a.NewRequest(Read, Descs{VRAM, []Range{destination}}, Descs{VRAM, []Range{{Addr: address, Len: uint64(n)}}}, peer, RequestOptions{})
			must(b, err)
			defer r.Release()
			b.SetBytes(int64(n))
			for b.Loop() {
				done, err := r.Post()
				must(b, err)
				if !done {
					must(b, r.Wait(b.Context()))
				}
			}
		})
	}
}

func startVRAMProducer(b *testing.B, n int) (metadata []byte, address uintptr) {
	b.Helper()
	c := exec.Command(os.Args[0], "-test.run", "^TestVRAMProducerProcess$")
	c.Env = append(os.Environ(), vramProducer+"="+strconv.Itoa(n))
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	must(b, err)
	out, err := c.StdoutPipe()
	must(b, err)
	must(b, c.Start())
	b.Cleanup(func() {
		_ = in.Close()
		_ = c.Wait()
	})
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if _, err := fmt.Sscanf(lines.Text(), "VRAM %x %d", &metadata, &address); err == nil {
			return metadata, address
		}
	}
	b.Fatal("the producer said nothing")
	return nil, 0
}
