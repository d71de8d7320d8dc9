package api

import (
	"fmt"
	"math"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"
)

// reader walks one frame. The first error sticks; every read after it gives zero values, and no loop goes on.
type reader struct {
	b   []byte
	err error
}

func (r *reader) fail(format string, a ...any) {
	if r.err == nil {
		r.err = fmt.Errorf("%w: "+format, append([]any{ErrMalformed}, a...)...)
		r.b = nil
	}
}

// take keeps the outcome of one read of package msgp. Its errors are not wrapped: they say no more than "bad bytes here".
func (r *reader) take(rest []byte, err error) bool {
	if r.err != nil {
		return false
	}
	if err != nil {
		r.fail("%v", err)
		return false
	}
	r.b = rest
	return true
}

// count is the size of a map or array: each element takes at least width bytes, so a header that promises more than there is gets refused before
// anything is allocated for it.
func (r *reader) count(n uint32, rest []byte, err error, width, limit int) int {
	if !r.take(rest, err) {
		return 0
	}
	if int64(n)*int64(width) > int64(len(r.b)) {
		r.fail("a header promises %d elements, %d bytes are left", n, len(r.b))
		return 0
	}
	if int64(n) > int64(limit) {
		r.fail("%d elements, at most %d", n, limit)
		return 0
	}
	return int(n)
}

func (r *reader) array(width, limit int) int {
	n, rest, err := msgp.ReadArrayHeaderBytes(r.b)
	return r.count(n, rest, err, width, limit)
}

// object calls field for each key of a map. field returns false for a key it does not know: its value is skipped.
func (r *reader) object(field func(key []byte) bool) {
	n, rest, err := msgp.ReadMapHeaderBytes(r.b)
	left := r.count(n, rest, err, 2, maxFields)
	for ; left > 0 && r.err == nil; left-- {
		k, rest, err := msgp.ReadStringZC(r.b)
		if !r.take(rest, err) {
			return
		}
		if !field(k) {
			r.skip(maxDepth)
		}
		if r.err != nil {
			r.err = fmt.Errorf("%w, in %.64q", r.err, k)
		}
	}
}

func (r *reader) skip(depth int) {
	if r.err != nil {
		return
	}
	if depth == 0 {
		r.fail("nested too deeply")
		return
	}
	switch msgp.NextType(r.b) {
	case msgp.MapType:
		n, rest, err := msgp.ReadMapHeaderBytes(r.b)
		for left := 2 * r.count(n, rest, err, 2, math.MaxInt32); left > 0 && r.err == nil; left-- {
			r.skip(depth - 1)
		}
	case msgp.ArrayType:
		for left := r.array(1, math.MaxInt32); left > 0 && r.err == nil; left-- {
			r.skip(depth - 1)
		}
	default:
		rest, err := msgp.Skip(r.b)
		r.take(rest, err)
	}
}

func (r *reader) str(limit int) string {
	v := r.raw(limit)
	if !utf8.ValidString(v) {
		r.fail("a string that is not UTF-8")
		return ""
	}
	return v
}

// raw is str without the check of UTF-8: for what Op.Check looks at, so that it spoils one operation and not the connection.
func (r *reader) raw(limit int) string {
	v, rest, err := msgp.ReadStringZC(r.b)
	if !r.take(rest, err) {
		return ""
	}
	if len(v) > limit {
		r.fail("a string of %d bytes, at most %d", len(v), limit)
		return ""
	}
	return string(v)
}

func (r *reader) bin(limit int) []byte {
	v, rest, err := msgp.ReadBytesZC(r.b)
	if !r.take(rest, err) {
		return nil
	}
	if len(v) > limit {
		r.fail("%d bytes, at most %d", len(v), limit)
		return nil
	}
	return append([]byte(nil), v...)
}

func (r *reader) uint() uint64 {
	v, rest, err := msgp.ReadUint64Bytes(r.b)
	r.take(rest, err)
	return v
}

func (r *reader) int() int64 {
	v, rest, err := msgp.ReadInt64Bytes(r.b)
	r.take(rest, err)
	return v
}

func (r *reader) int32() int {
	v := r.int()
	if v < math.MinInt32 || v > math.MaxInt32 {
		r.fail("%d does not fit 32 bits", v)
		return 0
	}
	return int(v)
}

func (r *reader) uint32() uint32 {
	v := r.uint()
	if v > math.MaxUint32 {
		r.fail("%d does not fit 32 bits", v)
		return 0
	}
	return uint32(v)
}

func (r *reader) bool() bool {
	v, rest, err := msgp.ReadBoolBytes(r.b)
	r.take(rest, err)
	return v
}
