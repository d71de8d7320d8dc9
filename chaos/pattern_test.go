package chaos

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"github.com/zeebo/xxh3"

	"github.com/tensorferry/tensorferry/ec"
)

// The pools of all worlds: rows of 64 KiB, so that a few dozen of them are sent the way large encodings are.
const (
	blockBytes = 64 << 10
	dtype      = "torch.bfloat16"
	model      = "chaos"
	version    = "0.32.0"
)

func keyName(i int) string { return fmt.Sprintf("img-%04d", i) }

// specOf says what a key's entry is; like its bytes it follows from the key alone. One in eight is large.
func specOf(key string) ec.Spec {
	h := xxh3.HashString(key)
	rows := 1 + int64(h>>8%6)
	if h%8 == 0 {
		rows = 33 + int64(h>>8%16) // over 2 MiB
	}
	// The last row is not full: an entry's end is not a block's end.
	width := int64(blockBytes/2) - int64(h>>16%100)
	return ec.Spec{Dtype: dtype, Shape: []int64{rows, width}, Bytes: rows * width * 2}
}

// word is the i-th of a key's words.
func word(seed uint64, i int) uint64 {
	hi, lo := bits.Mul64(seed^uint64(i)*0x9e3779b97f4a7c15, 0xd6e8feb86659fd93)
	return hi ^ lo
}

// fill writes a key's bytes from offset at on. The memory is shared with other processes, so the race detector knows nothing of it.
//
//go:norace
func fill(b []byte, key string, at int) {
	seed := xxh3.HashString(key)
	var w [8]byte
	for i := 0; i < len(b); {
		binary.LittleEndian.PutUint64(w[:], word(seed, (at+i)/8))
		i += copy(b[i:], w[(at+i)%8:])
	}
}

// wrong is the offset of the first byte that is not the key's, -1 if there is none.
//
//go:norace
func wrong(b []byte, key string, at int) int {
	seed := xxh3.HashString(key)
	i := 0
	for ; i < len(b) && (at+i)%8 != 0; i++ {
		if b[i] != byteAt(seed, at+i) {
			return at + i
		}
	}
	for ; i+8 <= len(b); i += 8 {
		if binary.LittleEndian.Uint64(b[i:]) != word(seed, (at+i)/8) {
			break
		}
	}
	for ; i < len(b); i++ {
		if b[i] != byteAt(seed, at+i) {
			return at + i
		}
	}
	return -1
}

func byteAt(seed uint64, i int) byte { return byte(word(seed, i/8) >> (i % 8 * 8)) }

// fillAll and check go over an entry's pieces.
func fillAll(bufs [][]byte, key string) {
	at := 0
	for _, b := range bufs {
		fill(b, key, at)
		at += len(b)
	}
}

// check gives an error that says which byte of an entry is wrong, and whose it looks like.
func check(bufs [][]byte, key string) error {
	at := 0
	for _, b := range bufs {
		if i := wrong(b, key, at); i >= 0 {
			return fmt.Errorf("%s: byte %d of %d is wrong%s", key, i, specOf(key).Bytes, whose(b[i-at:], i))
		}
		at += len(b)
	}
	if int64(at) != specOf(key).Bytes {
		return fmt.Errorf("%s: %d bytes, want %d", key, at, specOf(key).Bytes)
	}
	return nil
}

func whose(b []byte, at int) string {
	n := min(64, len(b))
	zero := true
	for _, v := range b[:n] {
		zero = zero && v == 0
	}
	if zero {
		return ": zeros"
	}
	for i := range 10_000 {
		for off := at % 8; off < 4<<20; off += blockBytes {
			if wrong(b[:n], keyName(i), off+at%blockBytes-at%8) < 0 {
				return fmt.Sprintf(": it is %s, offset %d", keyName(i), off+at%blockBytes-at%8)
			}
		}
	}
	return fmt.Sprintf(": %x", b[:min(16, n)])
}
