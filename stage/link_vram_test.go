package stage

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/slab/gputest"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// newVRAMLink gives a Link over NIXL in this process, as users have it who own device memory.
func newVRAMLink(t testing.TB, hostBytes int64, set ...func(*LinkOptions)) *Link {
	t.Helper()
	p, err := nixl.New(nixl.Options{}) // NIXL_CAPI_LIB names the library
	if err != nil {
		t.Skipf("no NIXL here: %v", err)
	}
	// CUDA registers the slab too, and takes mappings of shared memory, not those of a disk's files.
	dir, err := os.MkdirTemp(region.DefaultDir, "stage-vram")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	s, err := slab.New(t.Context(), slab.Options{Dir: dir, Name: "vram", Bytes: hostBytes, Planes: []transfer.Plane{p}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := errors.Join(s.Close(ctx), p.Close()); err != nil {
			t.Error(err)
		}
	})
	return newLink(t, 0, append(set, func(o *LinkOptions) { o.Slab = s })...)
}

// vramEnv makes TestVRAMPutterProcess the process that puts a payload with a tensor of so many bytes on GPU 0 and one as large, or as
// large as a slab has room for, on the CPU. It writes the metadata, and ends with its stdin.
const vramEnv = "STAGE_TEST_VRAM"

// most is how large the tensors on the CPU are at most.
const most = 16 << 20

// vramTensors are what is put: seeded bytes.
func vramTensors(n int64) (onDevice, onCPU []byte) {
	onDevice, onCPU = make([]byte, n), make([]byte, min(n, most))
	transfertest.Fill(onDevice, 7)
	transfertest.Fill(onCPU, 1007)
	return onDevice, onCPU
}

func vramValue(t testing.TB, device, cpu tensor.Tensor) tensor.Node {
	empty, err := tensor.New(tensor.BFloat16, tensor.Shape{4, 0}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return tensor.Map{tensor.Field("hidden", device), tensor.Field("ids", tensor.List{cpu, empty}), tensor.Field("n", tensor.Int(7))}
}

func TestVRAMPutterProcess(t *testing.T) {
	var n int64
	var mixed bool
	if _, err := fmt.Sscan(os.Getenv(vramEnv), &n, &mixed); err != nil {
		t.Skip("only in a process that another test starts")
	}
	g := gputest.New(t, 0)
	l := newVRAMLink(t, 3*most)
	addr, free := g.Memory(n)
	defer free()
	d, err := l.o.Slab.Device(t.Context(), g.Device(), addr, n)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}()
	onDevice, onCPU := vramTensors(n)
	g.Write(addr, onDevice)
	hidden, err := tensor.OnDevice(tensor.Uint8, tensor.Shape{n}, g.Device(), addr)
	if err != nil {
		t.Fatal(err)
	}
	ids, err := tensor.New(tensor.Uint8, tensor.Shape{int64(len(onCPU))}, onCPU)
	if err != nil {
		t.Fatal(err)
	}
	var v tensor.Node = hidden
	if mixed {
		v = vramValue(t, hidden, ids)
	}
	p := mustPut(t, l, "k", v, PutOptions{Borrow: true, Readers: 1 << 30})
	fmt.Printf("VRAM %x\n", p.Metadata)
	_, _ = io.Copy(io.Discard, os.Stdin)
	eventually(t, "it can be cleaned up", func() bool { return l.Cleanup("k") == nil })
	receive(t, p.Released())
}

// startVRAMPutter gives the metadata of what that process puts.
func startVRAMPutter(t testing.TB, n int64, mixed bool) []byte {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run", "^TestVRAMPutterProcess$")
	c.Env = append(os.Environ(), fmt.Sprint(vramEnv, "=", n, " ", mixed))
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	t.Cleanup(func() {
		_ = in.Close()
		rest, _ := io.ReadAll(lines)
		if err := c.Wait(); err != nil {
			t.Errorf("the process that puts: %v\n%s", err, rest)
		}
	})
	for said := ""; ; {
		line, err := lines.ReadString('\n')
		if said += line; err != nil {
			t.Fatalf("the process that puts: %v\n%s", err, said)
		}
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "VRAM "); ok {
			metadata, err := hex.DecodeString(text)
			if err != nil {
				t.Fatal(err)
			}
			return metadata
		}
	}
}

// newVRAMGetter gives a Link that gets into a pool of GPU 1.
func newVRAMGetter(t testing.TB, n int64) (*Link, *slab.DevicePool, *gputest.GPU) {
	t.Helper()
	g := gputest.New(t, 1)
	l := newVRAMLink(t, 3*most, onlyGets)
	addr, free := g.Memory(n)
	t.Cleanup(free)
	p, err := l.o.Slab.DevicePool(t.Context(), g.Device(), addr, n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return l, p, g
}

// What another process put on GPU 0 is got on GPU 1, or on the CPU, and what is on the CPU too.
func TestAPayloadOfAnotherProcessesGPUIsGotOnThisOnesAndOnTheCPU(t *testing.T) {
	const n = 1 << 20
	l, pool, g := newVRAMGetter(t, 8*n)
	metadata := startVRAMPutter(t, n, true)
	onDevice, onCPU := vramTensors(n)
	bytesOn := func(v tensor.Node) (tensor.Device, []byte) {
		x := v.(tensor.Tensor)
		if x.Device().CPU() {
			return x.Device(), x.Data()
		}
		return x.Device(), g.Read(x.Addr(), x.Bytes())
	}
	for name, c := range map[string]struct {
		r           Request
		hidden, ids tensor.Device
	}{
		"as it was":         {Request{Device: pool}, g.Device(), tensor.Device{}},
		"all on the device": {Request{Device: pool, AllOnDevice: true}, g.Device(), g.Device()},
		"on the CPU":        {Request{}, tensor.Device{}, tensor.Device{}},
	} {
		c.r.Key, c.r.Metadata = "k", metadata
		got := mustGet(t, l, c.r)
		m := got.Root.(tensor.Map)
		if device, b := bytesOn(m.Get("hidden")); device != c.hidden || !bytes.Equal(b, onDevice) {
			t.Errorf("%s: hidden on %v, its bytes are right: %v", name, device, bytes.Equal(b, onDevice))
		}
		if device, b := bytesOn(m.Get("ids").(tensor.List)[0]); device != c.ids || !bytes.Equal(b, onCPU) {
			t.Errorf("%s: ids on %v, its bytes are right: %v", name, device, bytes.Equal(b, onCPU))
		}
		if m.Get("n") != tensor.Int(7) || got.Plane != transfer.NIXL {
			t.Errorf("%s: %v by %s", name, m.Get("n"), got.Plane)
		}
		if err := got.Release(); err != nil {
			t.Error(err)
		}
	}
}

// BenchmarkGetVRAM gets what another process put on GPU 0 on GPU 1: claim, READ, verify, release.
func BenchmarkGetVRAM(b *testing.B) {
	for _, n := range []int64{64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30} {
		for _, mixed := range []bool{false, true} {
			name := fmt.Sprintf("%dKiB", n>>10)
			if mixed {
				name += "+host"
			}
			b.Run(name, func(b *testing.B) {
				l, pool, g := newVRAMGetter(b, n)
				r := Request{Key: "k", Metadata: startVRAMPutter(b, n, mixed), Device: pool}
				onDevice, onCPU := vramTensors(n)
				b.SetBytes(n)
				if mixed {
					b.SetBytes(n + int64(len(onCPU)))
				}
				last := mustGet(b, l, r) // connects
				for b.Loop() {
					if err := last.Release(); err != nil {
						b.Fatal(err)
					}
					last = mustGet(b, l, r)
				}
				v := last.Root
				if mixed {
					v = v.(tensor.Map).Get("hidden")
				}
				if x := v.(tensor.Tensor); !bytes.Equal(g.Read(x.Addr(), n), onDevice) {
					b.Error("other bytes")
				}
				if err := last.Release(); err != nil {
					b.Error(err)
				}
			})
		}
	}
}
