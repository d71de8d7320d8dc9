// Package msgpack reads the msgpack messages of peers that are not trusted, as strictly as their own decoders do: text is not bytes,
// an integer is no float, text is UTF-8, nothing is read past the end. Depth and sizes are known before anything is allocated for them,
// nothing recurses, and no input ends the process. It writes fields as the peers do: in the shortest form, and none that has its default.
package msgpack

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"unicode/utf8"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/internal/shorten"
)

// MaxDepth is how many maps and arrays may be in one another in what a Reader passes over; the message's own map is the first.
const MaxDepth = 16

// shownBytes is how much of a field's name, which may be a stranger's, goes into a fault.
const shownBytes = 64

var (
	// ErrMalformed is the Kind of what is not msgpack, or not the value that was asked for.
	ErrMalformed = errors.New("malformed")
	// ErrLimit is the Kind of what may be well formed, but is over a limit and was not looked at further.
	ErrLimit = errors.New("over a limit")
)

// Fault says what is wrong with a message, and where.
type Fault struct {
	Field  string // the field being read, e.g. "ferry.planes", shortened; "" for the message itself
	Offset int    // of the offending value from the start of the frame, in bytes
	Reason string
	Kind   error // ErrMalformed, ErrLimit, or what Fail or Refuse was given
	Cause  error // what Refuse was given, else nil
}

// KindIn is Kind in a protocol that has errors of its own for ErrMalformed and ErrLimit.
func (f *Fault) KindIn(malformed, limit error) error {
	switch {
	case errors.Is(f.Kind, ErrMalformed):
		return malformed
	case errors.Is(f.Kind, ErrLimit):
		return limit
	}
	return f.Kind
}

// Reader walks one message without copying: what Str, Bin and Fields give points into it.
//
// The first fault sticks. After it every read gives a zero value, no loop over Fields goes on, and Fault tells what it was; so a decoder
// reads all its fields and looks at the end. A copy of a Reader reads on from the same place by itself.
type Reader struct {
	// AnyKey lets the key of a map be something else than text: Fields gives nil for it. Else it is a fault.
	AnyKey bool

	rest  []byte // what is unread
	end   int    // offset of the end of rest in the frame, in bytes
	path  string // prefix of field names, e.g. "ferry."
	name  []byte // the field whose value is being read
	fault *Fault
}

// New reads b, which is at offset base of its frame.
func New(b []byte, base int) Reader { return Reader{rest: b, end: base + len(b)} }

// Fault is the first one, nil if there was none.
func (r *Reader) Fault() *Fault { return r.fault }

// OK says that there was no fault so far.
func (r *Reader) OK() bool { return r.fault == nil }

// Offset is that of the next value from the start of the frame, in bytes. It has no meaning after a fault.
func (r *Reader) Offset() int { return r.end - len(r.rest) }

// Left is how many bytes are unread.
func (r *Reader) Left() int { return len(r.rest) }

// Type is that of the next value; msgp.InvalidType if there is none.
func (r *Reader) Type() msgp.Type { return msgp.NextType(r.rest) }

// Fail is a fault at the next value.
func (r *Reader) Fail(kind error, format string, args ...any) {
	r.FailAt(r.Offset(), kind, format, args...)
}

// FailAt is a fault at an offset that was taken before.
func (r *Reader) FailAt(offset int, kind error, format string, args ...any) {
	if r.fault == nil {
		r.stop(&Fault{Offset: offset, Reason: fmt.Sprintf(format, args...), Kind: kind})
	}
}

// Refuse makes a fault of another package's error, about a value at an offset that was taken before.
func (r *Reader) Refuse(offset int, kind, cause error) {
	if r.fault == nil {
		r.stop(&Fault{Offset: offset, Reason: cause.Error(), Kind: kind, Cause: cause})
	}
}

func (r *Reader) stop(f *Fault) {
	f.Field = r.path + shorten.Text(r.name, shownBytes)
	r.fault, r.rest = f, nil
}

// Truncated is the fault of a message that ends too early.
func (r *Reader) Truncated() { r.Fail(ErrMalformed, "truncated") }

// wrong makes a fault of an error of msgp, for a value that is still unread.
func (r *Reader) wrong(want string, err error) {
	if r.fault != nil {
		return
	}
	if errors.Is(err, msgp.ErrShortBytes) {
		r.Truncated()
		return
	}
	var below msgp.UintBelowZero
	if errors.As(err, &below) {
		r.Fail(ErrMalformed, "want %s, got %d", want, below.Value)
		return
	}
	r.Fail(ErrMalformed, "want %s, got %s", want, r.Type())
}

// At names the field that later faults are put down to, nil for the message itself. Fields does so for each of its own.
func (r *Reader) At(field []byte) { r.name = field }

// Missing is the fault of a message without a field that must be there.
func (r *Reader) Missing(field string) {
	r.name = nil
	r.Fail(ErrMalformed, "%s is missing", field)
}

// End checks that nothing comes after the message.
func (r *Reader) End() {
	r.name = nil
	if len(r.rest) > 0 {
		r.Fail(ErrMalformed, "%d bytes after the message", len(r.rest))
	}
}

// Place is where a Reader was when it entered a field.
type Place struct {
	path string
	name []byte
}

// Enter puts path, e.g. "planes.", before the names of fields in faults, until Leave.
func (r *Reader) Enter(path string) Place {
	outer := Place{r.path, r.name}
	r.path += path
	return outer
}

// Leave goes back to the names of before Enter.
func (r *Reader) Leave(outer Place) { r.path, r.name = outer.path, outer.name }

// Fields reads a map and gives the names of its fields. The body of the loop reads or skips the value of each.
func (r *Reader) Fields() iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for n := r.fields(); n > 0 && r.fault == nil; n-- {
			if name := r.field(); r.fault != nil || !yield(name) {
				return
			}
		}
	}
}

// fields reads a map's header and gives the number of its fields.
func (r *Reader) fields() int {
	n, rest, err := msgp.ReadMapHeaderBytes(r.rest)
	if err != nil {
		r.wrong("a map", err)
		return 0
	}
	if uint64(n)*2 > uint64(len(rest)) {
		r.Truncated()
		return 0
	}
	r.rest = rest
	return int(n)
}

func (r *Reader) field() []byte {
	r.name = nil
	if r.AnyKey && r.Type() != msgp.StrType {
		r.Skip()
		return nil
	}
	name, rest, err := msgp.ReadStringZC(r.rest)
	if err != nil {
		r.wrong("a field name", err)
		return nil
	}
	if !utf8.Valid(name) {
		r.Fail(ErrMalformed, "a field name that is not UTF-8")
		return nil
	}
	r.name, r.rest = name, rest
	return name
}

// MapHeader reads the number of a map's entries, which may be more than there are bytes.
func (r *Reader) MapHeader() uint32 {
	n, rest, err := msgp.ReadMapHeaderBytes(r.rest)
	if err != nil {
		r.wrong("a map", err)
		return 0
	}
	r.rest = rest
	return n
}

// ArrayHeader reads the number of an array's elements, which may be more than there are bytes.
func (r *Reader) ArrayHeader() uint32 {
	n, rest, err := msgp.ReadArrayHeaderBytes(r.rest)
	if err != nil {
		r.wrong("an array", err)
		return 0
	}
	r.rest = rest
	return n
}

// Array reads the number of an array's elements, at most limit. Each takes at least size bytes.
func (r *Reader) Array(limit, size int) int {
	n, rest, err := msgp.ReadArrayHeaderBytes(r.rest)
	if err != nil {
		r.wrong("an array", err)
		return 0
	}
	if uint64(n) > uint64(limit) {
		r.Fail(ErrLimit, "%d elements, limit %d", n, limit)
		return 0
	}
	if int(n)*size > len(rest) {
		r.Truncated()
		return 0
	}
	r.rest = rest
	return int(n)
}

// Str reads text of at most limit bytes. It is nil after a fault only.
func (r *Reader) Str(limit int) []byte {
	s, rest, err := msgp.ReadStringZC(r.rest)
	if err != nil {
		r.wrong("a string", err)
		return nil
	}
	if len(s) > limit {
		r.Fail(ErrLimit, "%d bytes, limit %d", len(s), limit)
		return nil
	}
	if !utf8.Valid(s) {
		r.Fail(ErrMalformed, "a string that is not UTF-8")
		return nil
	}
	r.rest = rest
	return s
}

// Text is a copy of what Str gives.
func (r *Reader) Text(limit int) string { return string(r.Str(limit)) }

// Bin reads at most limit bytes, which have no room after them.
func (r *Reader) Bin(limit int) []byte {
	v, rest, err := msgp.ReadBytesZC(r.rest)
	if err != nil {
		r.wrong("bytes", err)
		return nil
	}
	if len(v) > limit {
		r.Fail(ErrLimit, "%d bytes, limit %d", len(v), limit)
		return nil
	}
	r.rest = rest
	return slices.Clip(v)
}

// Uint reads an integer from 0 to limit; another one is malformed.
func (r *Reader) Uint(limit uint64) uint64 {
	u, rest, err := msgp.ReadUint64Bytes(r.rest)
	if err != nil {
		r.wrong("an integer from 0 up", err)
		return 0
	}
	if u > limit {
		r.Fail(ErrMalformed, "%d, at most %d makes sense", u, limit)
		return 0
	}
	r.rest = rest
	return u
}

// Size is Uint of what fits 63 bits.
func (r *Reader) Size(limit int64) int64 { return int64(r.Uint(uint64(limit))) }

// Int reads an integer from low to high; another one is malformed.
func (r *Reader) Int(low, high int64) int64 {
	i, rest, err := msgp.ReadInt64Bytes(r.rest)
	if err != nil {
		var over msgp.UintOverflow
		if errors.As(err, &over) {
			r.Fail(ErrMalformed, "%d, at most %d makes sense", over.Value, high)
			return 0
		}
		r.wrong("an integer", err)
		return 0
	}
	if i < low || i > high {
		r.Fail(ErrMalformed, "%d, want %d to %d", i, low, high)
		return 0
	}
	r.rest = rest
	return i
}

// Integer reads one of any size: below 0, u is its two's complement.
func (r *Reader) Integer() (u uint64, below bool) {
	if u, rest, err := msgp.ReadUint64Bytes(r.rest); err == nil {
		r.rest = rest
		return u, false
	}
	i, rest, err := msgp.ReadInt64Bytes(r.rest)
	if err != nil {
		r.wrong("an integer", err)
		return 0, false
	}
	r.rest = rest
	return uint64(i), true
}

// Float reads one of 4 or 8 bytes.
func (r *Reader) Float() float64 {
	if r.Type() == msgp.Float32Type {
		v, rest, err := msgp.ReadFloat32Bytes(r.rest)
		if err != nil {
			r.wrong("a float", err)
			return 0
		}
		r.rest = rest
		return float64(v)
	}
	v, rest, err := msgp.ReadFloat64Bytes(r.rest)
	if err != nil {
		r.wrong("a float", err)
		return 0
	}
	r.rest = rest
	return v
}

// Bool reads true or false.
func (r *Reader) Bool() bool {
	v, rest, err := msgp.ReadBoolBytes(r.rest)
	if err != nil {
		r.wrong("a boolean", err)
		return false
	}
	r.rest = rest
	return v
}

// Null passes over nil and says so, if it comes next.
func (r *Reader) Null() bool {
	if r.Type() != msgp.NilType {
		return false
	}
	r.rest = r.rest[1:]
	return true
}

// Ext reads an extension value of any type, also of those that msgp knows by name. It must be what comes next.
func (r *Reader) Ext() (kind int8, data []byte) {
	n, ok := leafSize(r.rest)
	if !ok {
		r.Fail(ErrMalformed, "no msgpack value begins with this byte")
		return 0, nil
	}
	if n > uint64(len(r.rest)) {
		r.Truncated()
		return 0, nil
	}
	head := 1 // of the type
	if c := r.rest[0]; c >= 0xc7 && c <= 0xc9 {
		head += 1 << (c - 0xc7)
	}
	kind, data = int8(r.rest[head]), r.rest[head+1:n:n]
	r.rest = r.rest[n:]
	return kind, data
}

// Raw passes over one value of any kind and gives a Reader of it, in whose faults path, e.g. "ferry.", stands before the names of
// fields. After a fault there is nothing in it.
func (r *Reader) Raw(path string) Reader {
	value := r.rest
	base := r.Offset()
	r.Skip()
	if r.fault != nil {
		return Reader{}
	}
	sub := New(value[:len(value)-len(r.rest)], base)
	sub.AnyKey, sub.path = r.AnyKey, r.path+path
	return sub
}

// Skip passes over one value of any kind.
func (r *Reader) Skip() {
	var left [MaxDepth - 1]uint64 // values still to come in each open map or array
	depth := 0
	for {
		var open uint64 // values in the map or array that begins here
		switch b := r.rest; msgp.NextType(b) {
		case msgp.MapType:
			n, rest, err := msgp.ReadMapHeaderBytes(b)
			if err != nil {
				r.Truncated()
				return
			}
			open, r.rest = 2*uint64(n), rest
		case msgp.ArrayType:
			n, rest, err := msgp.ReadArrayHeaderBytes(b)
			if err != nil {
				r.Truncated()
				return
			}
			open, r.rest = uint64(n), rest
		default:
			n, ok := leafSize(b)
			if !ok {
				r.Fail(ErrMalformed, "no msgpack value begins with this byte")
				return
			}
			if n > uint64(len(b)) {
				r.Truncated()
				return
			}
			r.rest = b[n:]
		}
		if open > 0 {
			if depth == len(left) {
				r.Fail(ErrLimit, "nested deeper than %d", MaxDepth)
				return
			}
			if open > uint64(len(r.rest)) {
				r.Truncated()
				return
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
			return
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
