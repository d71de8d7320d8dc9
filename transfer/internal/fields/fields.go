// Package fields reads and writes the little-endian fields of the planes' metadata.
package fields

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/transfer"
)

// AppendString appends s with a length of two bytes. s must be shorter than 64 KiB.
func AppendString(b []byte, s string) []byte {
	b = binary.LittleEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}

// Reader takes fields off a buffer that a peer sent. After the first field that is not there OK is false, and every further field
// is zero. Nothing that it returns aliases the buffer, but for Bytes.
type Reader struct {
	b   []byte
	bad bool
}

// NewReader reads b.
func NewReader(b []byte) *Reader { return &Reader{b: b} }

// Open reads what the metadata of a plane begins with: the plane's magic and its version in two bytes. The error says what is wrong.
func Open(b []byte, magic string, version uint16) (*Reader, error) {
	if len(b) > transfer.MaxMetadata {
		return nil, fmt.Errorf("%d bytes, at most %d", len(b), transfer.MaxMetadata)
	}
	r := NewReader(b)
	if string(r.Bytes(len(magic))) != magic {
		return nil, errors.New("not of this plane")
	}
	if v := r.Uint16(); v != version {
		return nil, fmt.Errorf("version %d, %d is known", v, version)
	}
	return r, nil
}

// OK says whether every field asked for was there.
func (r *Reader) OK() bool { return !r.bad }

// Len is the number of bytes left.
func (r *Reader) Len() int { return len(r.b) }

// Bytes takes n bytes, which alias the buffer.
func (r *Reader) Bytes(n int) []byte {
	if r.bad || n < 0 || n > len(r.b) {
		r.bad = true
		return nil
	}
	out := r.b[:n:n]
	r.b = r.b[n:]
	return out
}

// Uint16 takes two bytes.
func (r *Reader) Uint16() uint16 {
	if b := r.Bytes(2); b != nil {
		return binary.LittleEndian.Uint16(b)
	}
	return 0
}

// Uint32 takes four bytes.
func (r *Reader) Uint32() uint32 {
	if b := r.Bytes(4); b != nil {
		return binary.LittleEndian.Uint32(b)
	}
	return 0
}

// Uint64 takes eight bytes.
func (r *Reader) Uint64() uint64 {
	if b := r.Bytes(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

// Str takes a string that AppendString wrote.
func (r *Reader) Str() string { return string(r.Bytes(int(r.Uint16()))) }
