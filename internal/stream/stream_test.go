package stream

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"

	"golang.org/x/sys/unix"
)

func TestCopyCopiesExactlyItsBytes(t *testing.T) {
	src := make([]byte, 200<<10)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(src) // never fails
	for _, n := range []int{1, 63, 64, 65, 16383, 16384, 16385, 16384 + 64, 40000, 65536 + 7, 150 << 10} {
		for _, at := range []int{0, 1, 31, 64, 4095} {
			for _, to := range []int{64, 65, 127, 4096} {
				dst := make([]byte, to+n+64)
				Copy(dst[to:to+n], src[at:at+n])
				if !bytes.Equal(dst[to:to+n], src[at:at+n]) {
					t.Fatalf("%d bytes from %d to %d: wrong", n, at, to)
				}
				if !bytes.Equal(dst[:to], make([]byte, to)) || !bytes.Equal(dst[to+n:], make([]byte, 64)) {
					t.Fatalf("%d bytes from %d to %d: wrote outside", n, at, to)
				}
			}
		}
	}
}

func BenchmarkCopy(b *testing.B) {
	const pool = 512 << 20
	mem := func() []byte {
		m, err := unix.Mmap(-1, 0, pool, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = unix.Munmap(m) })
		return m
	}
	src, dst := mem(), mem()
	for _, n := range []int{256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20} {
		for _, cold := range []bool{false, true} {
			for _, c := range []struct {
				name string
				f    func(dst, src []byte)
			}{{"go", func(d, s []byte) { copy(d, s) }}, {"stream", Copy}} {
				b.Run(fmt.Sprintf("%dKiB/cold=%v/%s", n>>10, cold, c.name), func(b *testing.B) {
					b.SetBytes(int64(n))
					at := 0
					for b.Loop() {
						if c.f(dst[at:at+n], src[at:at+n]); cold {
							if at += n; at+n > pool {
								at = 0
							}
						}
					}
				})
			}
		}
	}
}
