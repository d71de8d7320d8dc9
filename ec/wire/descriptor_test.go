package wire

import (
	"bytes"
	"encoding/hex"
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
)

func TestMemDescriptorIsByteEqualToThePeersBothWays(t *testing.T) {
	for _, c := range readGolden(t).MemDescriptor {
		if got := AppendMemDescriptor(nil, c.Base, c.Blocks, c.BlockSize); !bytes.Equal(got, c.Hex) {
			t.Errorf("base %#x: %s, want %s", c.Base, hex.EncodeToString(got), hex.EncodeToString(c.Hex))
		}
		got, err := DecodeMemDescriptor(c.Hex, c.Blocks)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(descriptors(c.Descs), got); d != "" {
			t.Error(d)
		}
	}
}

func TestMemDescriptorAtEveryWidthOfAddressIsThatOfAPlainEncoder(t *testing.T) {
	for _, base := range []uint64{0, 1 << 6, 1<<8 - 64, 1<<16 - 64, 1<<32 - 64, 1 << 47, math.MaxUint64 - 1<<42} {
		for _, size := range []int64{1, 127, 128, 255, 256, 7168, 65536, 1 << 32} {
			want := msgp.AppendArrayHeader([]byte("before"), 200)
			for i := range uint64(200) {
				want = msgp.AppendArrayHeader(want, 3)
				want = msgp.AppendUint64(want, base+i*uint64(size))
				want = msgp.AppendUint64(want, uint64(size))
				want = msgp.AppendUint64(want, 0)
			}
			if got := AppendMemDescriptor([]byte("before"), base, 200, size); !bytes.Equal(got, want) {
				t.Errorf("base %#x, blocks of %d: differs", base, size)
			}
		}
	}
	if got := AppendMemDescriptor(nil, 0, 0, 2048); !bytes.Equal(got, []byte{0x90}) {
		t.Errorf("no blocks: %x", got)
	}
}

func TestMemDescriptorIsEncodedInOneAllocationOfItsSize(t *testing.T) {
	var b []byte
	n := testing.AllocsPerRun(5, func() { b = AppendMemDescriptor(nil, 0x7f1122334000, 100_000, 7168) })
	if n > 2 { // slices.Grow takes two under the race detector
		t.Errorf("%v allocations", n)
	}
	if spare := cap(b) - len(b); spare > len(b)/8 {
		t.Errorf("%d bytes in a buffer of %d", len(b), cap(b))
	}
}

func TestMemDescriptorThatMakesNoSenseIsRefused(t *testing.T) {
	for _, c := range []struct {
		name, hex string
		want      error
		says      string
	}{
		{"empty", "90", nil, ""},
		{"one block", "9193cd1000cd080000", nil, ""},
		{"longer encodings", "dd00000001dc0003cf0000000000001000d300000000000008" + "00d000", nil, ""},
		{"to the end of the address space", "9193cf00000000000000" + "00cfffffffffffffffff00", nil, ""},
		{"past the end of it", "9193cf00000000000000" + "01cfffffffffffffffff00", ErrMalformed, "18446744073709551615, at most"},
		{"over the number of blocks", "93930102009301020093010200", ErrLimit, "3 elements, limit 2"},
		{"two numbers", "9192010200", ErrMalformed, "a descriptor of 2 numbers"},
		{"a negative address", "9193ff0200", ErrMalformed, "got -1 (byte 2)"},
		{"a device over 32 bits", "91930102cf0000000100000000", ErrMalformed, "4294967296"},
		{"a float address", "9193ca000000000200", ErrMalformed, "got float32"},
		{"a trailing byte", "9000", ErrMalformed, "1 bytes after"},
		{"cut short", "9193cd1000cd08", ErrMalformed, "truncated"},
		{"nothing", "", ErrMalformed, "truncated"},
		{"a map", "80", ErrMalformed, "want an array, got map"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := DecodeMemDescriptor(bytesOf(c.hex), 2)
			checkError(t, err, c.want, c.says)
		})
	}
}
