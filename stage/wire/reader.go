package wire

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
)

// reader walks msgpack without copying. What str and bin return points into the frame.
type reader struct {
	buf  []byte
	rest []byte // the unread end of buf
	base int    // offset of buf in the frame
	path string // prefix of field names in errors, e.g. "ferry."
	name []byte // the field whose value is being read
}

func newReader(b []byte) reader { return reader{buf: b, rest: b} }

// in is a reader of the same place for what is inside the field being read. leave takes over how far it got.
func (r *reader) in() reader {
	sub := *r
	sub.path += clip(r.name) + "."
	sub.name = nil
	return sub
}

func (r *reader) leave(sub *reader) { r.rest = sub.rest }

func (r *reader) offset() int { return r.base + len(r.buf) - len(r.rest) }

func (r *reader) fail(kind error, format string, args ...any) error {
	return &FrameError{Field: r.path + clip(r.name), Offset: r.offset(), Reason: fmt.Sprintf(format, args...), kind: kind}
}

// refuse makes an error of package tensor ours.
func (r *reader) refuse(cause error) error {
	kind := ErrMalformed
	if errors.Is(cause, tensor.ErrLimit) {
		kind = ErrLimit
	}
	return &FrameError{Field: r.path + clip(r.name), Offset: r.offset(), Reason: cause.Error(), kind: kind, cause: cause}
}

func (r *reader) truncated() error { return r.fail(ErrMalformed, "truncated") }

// wrong turns an error of msgp, for a value that is still unread, into ours.
func (r *reader) wrong(want string, err error) error {
	if errors.Is(err, msgp.ErrShortBytes) {
		return r.truncated()
	}
	var below msgp.UintBelowZero
	if errors.As(err, &below) {
		return r.fail(ErrMalformed, "want %s, got %d", want, below.Value)
	}
	return r.fail(ErrMalformed, "want %s, got %s", want, msgp.NextType(r.rest))
}

// fields reads a map's header and gives the number of its fields.
func (r *reader) fields() (int, error) {
	n, rest, err := msgp.ReadMapHeaderBytes(r.rest)
	if err != nil {
		return 0, r.wrong("a map", err)
	}
	if uint64(n)*2 > uint64(len(rest)) {
		return 0, r.truncated()
	}
	r.rest = rest
	return int(n), nil
}

// next reads a field's name; nil for a name that is no string, which is nobody's here.
func (r *reader) next() ([]byte, error) {
	r.name = nil
	if msgp.NextType(r.rest) != msgp.StrType {
		return nil, r.skip()
	}
	name, rest, err := msgp.ReadStringZC(r.rest)
	if err != nil {
		return nil, r.wrong("a field name", err)
	}
	if !utf8.Valid(name) {
		return nil, r.fail(ErrMalformed, "a field name that is not UTF-8")
	}
	r.name, r.rest = name, rest
	return name, nil
}

// array reads an array's header. Each element takes at least size bytes.
func (r *reader) array(limit, size int) (int, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(r.rest)
	if err != nil {
		return 0, r.wrong("an array", err)
	}
	if uint64(n) > uint64(limit) {
		return 0, r.fail(ErrLimit, "%d elements, limit %d", n, limit)
	}
	if int(n)*size > len(rest) {
		return 0, r.truncated()
	}
	r.rest = rest
	return int(n), nil
}

func (r *reader) str(limit int) ([]byte, error) {
	s, rest, err := msgp.ReadStringZC(r.rest)
	if err != nil {
		return nil, r.wrong("a string", err)
	}
	if len(s) > limit {
		return nil, r.fail(ErrLimit, "%d bytes, limit %d", len(s), limit)
	}
	if !utf8.Valid(s) {
		return nil, r.fail(ErrMalformed, "a string that is not UTF-8")
	}
	r.rest = rest
	return s, nil
}

func (r *reader) text(limit int) (string, error) {
	s, err := r.str(limit)
	return string(s), err
}

func (r *reader) bin(limit int) ([]byte, error) {
	v, rest, err := msgp.ReadBytesZC(r.rest)
	if err != nil {
		return nil, r.wrong("bytes", err)
	}
	if len(v) > limit {
		return nil, r.fail(ErrLimit, "%d bytes, limit %d", len(v), limit)
	}
	r.rest = rest
	return slices.Clip(v), nil
}

// uint reads an integer from 0 to limit; another one is malformed.
func (r *reader) uint(limit uint64) (uint64, error) {
	u, rest, err := msgp.ReadUint64Bytes(r.rest)
	if err != nil {
		return 0, r.wrong("an integer from 0 up", err)
	}
	if u > limit {
		return 0, r.fail(ErrMalformed, "%d, at most %d makes sense", u, limit)
	}
	r.rest = rest
	return u, nil
}

// size reads an integer from 0 to limit, which is at most math.MaxInt64.
func (r *reader) size(limit int64) (int64, error) {
	u, err := r.uint(uint64(limit))
	return int64(u), err
}

// int reads an integer from low to high.
func (r *reader) int(low, high int64) (int64, error) {
	i, rest, err := msgp.ReadInt64Bytes(r.rest)
	if err != nil {
		var over msgp.UintOverflow
		if errors.As(err, &over) {
			return 0, r.fail(ErrMalformed, "%d, at most %d makes sense", over.Value, high)
		}
		return 0, r.wrong("an integer", err)
	}
	if i < low || i > high {
		return 0, r.fail(ErrMalformed, "%d, want %d to %d", i, low, high)
	}
	r.rest = rest
	return i, nil
}

func (r *reader) bool() (bool, error) {
	v, rest, err := msgp.ReadBoolBytes(r.rest)
	if err != nil {
		return false, r.wrong("a boolean", err)
	}
	r.rest = rest
	return v, nil
}

// null passes over nil if it comes next.
func (r *reader) null() bool {
	if msgp.NextType(r.rest) != msgp.NilType {
		return false
	}
	r.rest = r.rest[1:]
	return true
}

// version reads an extension version, which must be ours.
func (r *reader) version() error {
	at := *r
	v, err := r.int(math.MinInt64, math.MaxInt64)
	if err == nil && v != ExtensionVersion {
		return at.fail(ErrMalformed, "extension version %d, this end speaks %d", v, ExtensionVersion)
	}
	return err
}

// end checks that nothing comes after the message.
func (r *reader) end() error {
	r.name = nil
	if len(r.rest) > 0 {
		return r.fail(ErrMalformed, "%d bytes after the message", len(r.rest))
	}
	return nil
}

// missing is the error for a field that must be there.
func (r *reader) missing(name string) error {
	r.name = nil
	return r.fail(ErrMalformed, "%s is missing", name)
}

// raw reads one value of any kind and gives a reader over it.
func (r *reader) raw() (reader, error) {
	start, base := r.rest, r.offset()
	if err := r.skip(); err != nil {
		return reader{}, err
	}
	value := start[:len(start)-len(r.rest)]
	return reader{buf: value, rest: value, base: base, path: r.path + clip(r.name) + "."}, nil
}

// skip passes over one value of any kind. It does not recurse; the message's own map is the first level of MaxDepth.
func (r *reader) skip() error {
	var left [MaxDepth - 1]uint64 // values still to come in each open map or array
	depth := 0
	for {
		var open uint64 // values in the map or array that begins here
		switch b := r.rest; msgp.NextType(b) {
		case msgp.MapType:
			n, rest, err := msgp.ReadMapHeaderBytes(b)
			if err != nil {
				return r.truncated()
			}
			open, r.rest = 2*uint64(n), rest
		case msgp.ArrayType:
			n, rest, err := msgp.ReadArrayHeaderBytes(b)
			if err != nil {
				return r.truncated()
			}
			open, r.rest = uint64(n), rest
		default:
			n, ok := leafSize(b)
			if !ok {
				return r.fail(ErrMalformed, "no msgpack value begins with this byte")
			}
			if n > uint64(len(b)) {
				return r.truncated()
			}
			r.rest = b[n:]
		}
		if open > 0 {
			if depth == len(left) {
				return r.fail(ErrLimit, "nested deeper than %d", MaxDepth)
			}
			if open > uint64(len(r.rest)) {
				return r.truncated()
			}
			left[depth] = open
			depth++
			continue
		}
		for depth > 0 {
			if left[depth-1]--; left[depth-1] > 0 {
				break
			}
			depth--
		}
		if depth == 0 {
			return nil
		}
	}
}

// leafSize is the encoded size of a value that is no map and no array: more than len(b) if it is cut short, not ok if no value
// begins so. (msgp.Skip recurses, and by up to 100,000 levels.)
func leafSize(b []byte) (n uint64, ok bool) {
	if len(b) == 0 {
		return 1, true
	}
	switch c := b[0]; {
	case c <= 0x7f || c >= 0xe0: // integers in one byte
		return 1, true
	case c >= 0xa0 && c <= 0xbf: // fixstr
		return 1 + uint64(c&0x1f), true
	case c == 0xc0 || c == 0xc2 || c == 0xc3: // nil, booleans
		return 1, true
	case c >= 0xc4 && c <= 0xc6: // bin
		return sized(b, 1<<(c-0xc4), 0), true
	case c >= 0xc7 && c <= 0xc9: // ext: a type byte before the data
		return sized(b, 1<<(c-0xc7), 1), true
	case c == 0xca: // float32
		return 5, true
	case c == 0xcb: // float64
		return 9, true
	case c >= 0xcc && c <= 0xcf: // uint
		return 1 + 1<<(c-0xcc), true
	case c >= 0xd0 && c <= 0xd3: // int
		return 1 + 1<<(c-0xd0), true
	case c >= 0xd4 && c <= 0xd8: // fixext
		return 2 + 1<<(c-0xd4), true
	case c >= 0xd9 && c <= 0xdb: // str
		return sized(b, 1<<(c-0xd9), 0), true
	}
	return 0, false
}

// sized is the size of a value whose length is a big-endian number of width bytes after its first byte.
func sized(b []byte, width int, extra uint64) uint64 {
	head := uint64(1 + width)
	if uint64(len(b)) < head {
		return head
	}
	var n uint64
	for _, c := range b[1:head] {
		n = n<<8 | uint64(c)
	}
	return head + n + extra
}
