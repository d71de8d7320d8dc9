package slab

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage/slab/gputest"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func filled(n int64, seed uint64) []byte {
	b := make([]byte, n)
	transfertest.Fill(b, seed)
	return b
}

// vramSlab is a slab over NIXL in this process, with memory of one GPU.
func vramSlab(t testing.TB, name string, g *gputest.GPU, n int64) (s *Slab, d *DeviceMemory, addr uint64) {
	t.Helper()
	p, err := nixl.New(nixl.Options{Library: libraryPath()})
	if err != nil {
		t.Skipf("no NIXL here: %v", err)
	}
	addr, free := g.Memory(n)
	t.Cleanup(free)
	// CUDA registers the slab too, and takes mappings of shared memory, not those of a disk's files.
	dir, err := os.MkdirTemp(region.DefaultDir, name)
	must(t, err)
	t.Cleanup(func() { must(t, os.Remove(dir)) })
	s = newSlab(t, dir, name, 8<<20, p)
	d, err = s.Device(patient(t), g.Device(), addr, n)
	must(t, err)
	t.Cleanup(func() { must(t, d.Close()) })
	return s, d, addr
}

// vramEnv makes TestVRAMProducerProcess the process of a producer with a payload of those sizes, the even ones of which are in VRAM of
// GPU 0. It writes what a plain reader and an own one are told, and ends with its stdin.
const vramEnv = "FERRY_SLAB_TEST_VRAM"

func TestVRAMProducerProcess(t *testing.T) {
	var sizes []int64
	for _, f := range strings.Fields(os.Getenv(vramEnv)) {
		var n int64
		_, err := fmt.Sscan(f, &n)
		must(t, err)
		sizes = append(sizes, n)
	}
	if len(sizes) == 0 {
		t.Skip("only in a process that another test starts")
	}
	g := gputest.New(t, 0)
	total := int64(0)
	host := make([]int64, len(sizes))
	for i, n := range sizes {
		if i%2 == 0 {
			total += roundUp(n, Align)
		} else {
			host[i] = n
		}
	}
	s, d, addr := vramSlab(t, "vram-producer", g, total)
	b, err := s.Alloc(patient(t), host)
	must(t, err)
	specs := describe(sizes).Specs
	at := addr
	for i, n := range sizes {
		want := filled(n, 7+uint64(i)*1000)
		if i%2 == 1 {
			copy(b.Slices()[i], want)
			continue
		}
		g.Write(at, want)
		must(t, b.Place(i, d, at, n))
		specs[i].Device = g.Device()
		at += uint64(roundUp(n, Align))
	}
	p := b.Payload(specs)
	defer p.Release()
	plain, err := offerPlain(t, p, "1")
	must(t, err)
	own, err := offer(t, p, "2", 0, transfer.NIXL)
	must(t, err)
	for _, m := range []*wire.Metadata{plain, own} {
		fmt.Printf("VRAM %x\n", wire.AppendReply(nil, &wire.Reply{Status: wire.Found, Metadata: m}, m.Ferry != nil))
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	must(t, p.Withdraw(patient(t), "1", true))
	must(t, p.Withdraw(patient(t), "2", true))
}

func startVRAMProducer(t testing.TB, sizes ...int64) (plain, own *wire.Metadata) {
	t.Helper()
	c := exec.Command(os.Args[0], "-test.run", "^TestVRAMProducerProcess$")
	c.Env = append(os.Environ(), vramEnv+"="+strings.Trim(fmt.Sprint(sizes), "[]"))
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	must(t, err)
	out, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	t.Cleanup(func() {
		_ = in.Close()
		_, _ = io.Copy(os.Stderr, out)
		_ = c.Wait()
	})
	var told []*wire.Metadata
	for lines := bufio.NewReader(out); len(told) < 2; {
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatalf("the producer: %v", err)
		}
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), "VRAM "); ok {
			b, err := hex.DecodeString(text)
			must(t, err)
			a, err := wire.DecodeReply(b)
			must(t, err)
			told = append(told, a.Metadata)
		}
	}
	return told[0], told[1]
}

// A payload in VRAM and DRAM of another process is read into VRAM and DRAM of this one, each into each.
func TestVRAMPayloadsOfAnotherProcess(t *testing.T) {
	g := gputest.New(t, 1)
	const n = 16 << 20
	sizes := []int64{n, 1 << 20, 700, 900, n}
	plain, own := startVRAMProducer(t, sizes...)
	s, d, addr := vramSlab(t, "vram-consumer", g, 4*n)
	for name, m := range map[string]*wire.Metadata{"plain": plain, "own": own} {
		t.Run(name, func(t *testing.T) {
			g.Write(addr, make([]byte, 4*n))
			b, err := s.Alloc(patient(t), []int64{0, 0, 700, 900, 0})
			must(t, err)
			defer b.Free()
			must(t, b.Place(0, d, addr, n))
			must(t, b.Place(1, d, addr+n, 1<<20))
			must(t, b.Place(4, d, addr+2*n, n))
			plane, err := s.Read(patient(t), m, b)
			must(t, err)
			if plane != transfer.NIXL {
				t.Error(plane)
			}
			for i, got := range [][]byte{g.Read(addr, n), g.Read(addr+n, 1<<20), b.Slices()[2], b.Slices()[3], g.Read(addr+2*n, n)} {
				if !bytes.Equal(got, filled(sizes[i], 7+uint64(i)*1000)) {
					t.Errorf("tensor %d of %d bytes has other bytes", i, sizes[i])
				}
			}
		})
	}
}

// BenchmarkVRAMGet reads a tensor in VRAM of another process, on GPU 0, into VRAM of this one, on GPU 1 where there are two.
func BenchmarkVRAMGet(b *testing.B) {
	g := gputest.New(b, 1)
	for _, n := range []int64{64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30} {
		b.Run(fmt.Sprintf("%dKiB", n>>10), func(b *testing.B) {
			plain, _ := startVRAMProducer(b, n)
			s, d, addr := vramSlab(b, "vram-bench", g, n)
			b.SetBytes(n)
			get := func() {
				x, err := s.Alloc(context.Background(), []int64{0})
				must(b, err)
				must(b, x.Place(0, d, addr, n))
				_, err = s.Read(context.Background(), plain, x)
				must(b, err)
				x.Free()
			}
			get() // connects
			for b.Loop() {
				get()
			}
			b.StopTimer()
			if !bytes.Equal(g.Read(addr, n), filled(n, 7)) {
				b.Error("other bytes")
			}
		})
	}
}
