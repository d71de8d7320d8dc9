package msgpack

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
)

// message makes a map of names and encoded values in turn.
func message(parts ...any) []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(parts)/2))
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			b = msgp.AppendString(b, p)
		case []byte:
			b = append(b, p...)
		}
	}
	return b
}

func TestValuesAreReadAsTheyAreWritten(t *testing.T) {
	b := message("str", msgp.AppendString(nil, "é"), "bin", msgp.AppendBytes(nil, []byte{1, 2}), "uint", msgp.AppendUint64(nil, math.MaxUint64),
		"int", msgp.AppendInt64(nil, -7), "low", msgp.AppendInt64(nil, math.MinInt64), "bool", msgp.AppendBool(nil, true), "f4", msgp.AppendFloat32(nil, 0.5),
		"f8", msgp.AppendFloat64(nil, 1e300), "nil", []byte{0xc0}, "fixext", []byte{0xd5, 5, 8, 9}, "ext", []byte{0xc8, 0, 3, 0xff, 7, 8, 9},
		"array", []byte{0x92, 1, 2}, "later", []byte{0x81, 0xa1, 'a', 0x91, 0xc0}, "end", []byte{3})
	r := New(b, 0)
	for name := range r.Fields() {
		got, want := any(nil), any(nil)
		switch string(name) {
		case "str":
			got, want = r.Text(2), "é"
		case "bin":
			got, want = r.Bin(2), []byte{1, 2}
		case "uint":
			got, want = r.Uint(math.MaxUint64), uint64(math.MaxUint64)
		case "int":
			got, want = r.Int(-7, 0), int64(-7)
		case "low":
			u, below := r.Integer()
			got, want = []any{u, below}, []any{uint64(1) << 63, true}
		case "bool":
			got, want = r.Bool(), true
		case "f4":
			got, want = r.Float(), 0.5
		case "f8":
			got, want = r.Float(), 1e300
		case "nil":
			got, want = r.Null(), true
		case "fixext":
			kind, data := r.Ext()
			got, want = []any{kind, data}, []any{int8(5), []byte{8, 9}}
		case "ext":
			kind, data := r.Ext()
			got, want = []any{kind, data}, []any{int8(-1), []byte{7, 8, 9}}
		case "array":
			got, want = []any{r.Array(2, 1), r.Size(1), r.Size(2)}, []any{2, int64(1), int64(2)}
		case "end":
			got, want = []any{r.Null(), r.Size(3)}, []any{false, int64(3)}
		default:
			r.Skip()
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
	if r.End(); !r.OK() || r.Left() != 0 || r.Offset() != len(b) {
		t.Errorf("%v, %d bytes left", r.Fault(), r.Left())
	}
}

// Each reads one value of a map's field "f", which is at offset 103 of its frame.
func TestAFaultNamesTheFieldItsPlaceAndTheReason(t *testing.T) {
	long := strings.Repeat("é", 40)
	for _, c := range []struct {
		name  string
		value []byte
		read  func(*Reader)
		kind  error
		says  string
	}{
		{"text for bytes", []byte{0xa1, 'x'}, func(r *Reader) { r.Bin(9) }, ErrMalformed, "f (103): want bytes, got str"},
		{"bytes for text", []byte{0xc4, 1, 'x'}, func(r *Reader) { r.Str(9) }, ErrMalformed, "f (103): want a string, got bin"},
		{"a float for an integer", msgp.AppendFloat64(nil, 1), func(r *Reader) { r.Uint(9) }, ErrMalformed, "f (103): want an integer from 0 up, got float64"},
		{"text for a float", msgp.AppendString(nil, "a long text"), func(r *Reader) { r.Float() }, ErrMalformed, "f (103): want a float, got str"},
		{"nil for a boolean", []byte{0xc0}, func(r *Reader) { r.Bool() }, ErrMalformed, "f (103): want a boolean, got nil"},
		{"a number for a map", []byte{1}, func(r *Reader) { r.Fields()(func([]byte) bool { return true }) }, ErrMalformed, "f (103): want a map, got int"},
		{"a number for an array", []byte{1}, func(r *Reader) { r.Array(9, 1) }, ErrMalformed, "f (103): want an array, got int"},
		{"below 0", []byte{0xff}, func(r *Reader) { r.Uint(9) }, ErrMalformed, "f (103): want an integer from 0 up, got -1"},
		{"over a number's limit", []byte{10}, func(r *Reader) { r.Uint(9) }, ErrMalformed, "f (103): 10, at most 9 makes sense"},
		{"out of a range", []byte{10}, func(r *Reader) { r.Int(-9, 9) }, ErrMalformed, "f (103): 10, want -9 to 9"},
		{"over 63 bits", msgp.AppendUint64(nil, math.MaxUint64), func(r *Reader) { r.Int(0, 9) }, ErrMalformed, "f (103): 18446744073709551615, at most 9 makes sense"},
		{"not UTF-8", []byte{0xa1, 0xff}, func(r *Reader) { r.Str(9) }, ErrMalformed, "f (103): a string that is not UTF-8"},
		{"long text", []byte{0xa2, 'x', 'y'}, func(r *Reader) { r.Str(1) }, ErrLimit, "f (103): 2 bytes, limit 1"},
		{"long bytes", []byte{0xc4, 2, 'x', 'y'}, func(r *Reader) { r.Bin(1) }, ErrLimit, "f (103): 2 bytes, limit 1"},
		{"a long array", []byte{0x92, 1, 2}, func(r *Reader) { r.Array(1, 1) }, ErrLimit, "f (103): 2 elements, limit 1"},
		{"a cut array", []byte{0x92, 1, 2}, func(r *Reader) { r.Array(2, 2) }, ErrMalformed, "f (103): truncated"},
		{"an array that promises 4 Gi", []byte{0xdd, 255, 255, 255, 255}, func(r *Reader) { r.Array(math.MaxInt, 8) }, ErrMalformed, "f (103): truncated"},
		{"a map that promises 4 Gi", []byte{0xdf, 255, 255, 255, 255}, func(r *Reader) { r.Skip() }, ErrMalformed, "f (108): truncated"},
		{"text that promises 4 Gi", []byte{0xdb, 255, 255, 255, 255}, func(r *Reader) { r.Str(math.MaxInt) }, ErrMalformed, "f (103): truncated"},
		{"bytes that promise 4 Gi", []byte{0xc6, 255, 255, 255, 255}, func(r *Reader) { r.Skip() }, ErrMalformed, "f (103): truncated"},
		{"no msgpack", []byte{0xc1}, func(r *Reader) { r.Skip() }, ErrMalformed, "f (103): no msgpack value begins with this byte"},
		{"no extension", []byte{0xc1}, func(r *Reader) { r.Ext() }, ErrMalformed, "f (103): no msgpack value begins with this byte"},
		{"a cut extension", []byte{0xc7, 9, 1}, func(r *Reader) { r.Ext() }, ErrMalformed, "f (103): truncated"},
		{"a name that is no text", []byte{0x81, 1, 1}, func(r *Reader) { r.Fields()(func([]byte) bool { return true }) }, ErrMalformed, " (104): want a field name, got int"},
		{"a name that is not UTF-8", []byte{0x81, 0xa1, 0xff, 1}, func(r *Reader) { r.Fields()(func([]byte) bool { return true }) }, ErrMalformed, " (104): a field name that is not UTF-8"},
		{"a cut name", []byte{0x81, 0xa9, 'x'}, func(r *Reader) { r.Fields()(func([]byte) bool { return true }) }, ErrMalformed, " (104): truncated"},
		{"another field's", []byte{1}, func(r *Reader) { r.At([]byte("g")); r.Bool() }, ErrMalformed, "g (103): want a boolean, got int"},
		{"inside", message("g", []byte{1}), func(r *Reader) {
			defer r.Leave(r.Enter("f."))
			for range r.Fields() {
				r.Bool()
			}
		}, ErrMalformed, "f.g (106): want a boolean, got int"},
		{"back from inside", []byte{1}, func(r *Reader) { r.Leave(r.Enter("f.")); r.Bool() }, ErrMalformed, "f (103): want a boolean, got int"},
		{"put aside", message(long, []byte{1}), func(r *Reader) {
			aside := r.Raw("f.")
			for range aside.Fields() {
				aside.Bool()
			}
			*r = aside
		}, ErrMalformed, "f." + strings.Repeat("é", 32) + "... (186): want a boolean, got int"},
		{"missing", []byte{1}, func(r *Reader) { r.Skip(); r.Missing("g") }, ErrMalformed, " (104): g is missing"},
		{"not the end", []byte{1}, func(r *Reader) { r.End() }, ErrMalformed, " (103): 1 bytes after the message"},
		{"the caller's", []byte{1}, func(r *Reader) {
			at := r.Offset()
			r.Skip()
			r.FailAt(at, errors.ErrUnsupported, "no %d", 1)
		}, errors.ErrUnsupported, "f (103): no 1"},
		{"another package's", []byte{1}, func(r *Reader) { r.Refuse(r.Offset(), ErrLimit, errors.ErrUnsupported) }, ErrLimit, "f (103): unsupported operation"},
		{"the first", []byte{1}, func(r *Reader) { r.Bool(); r.Fail(ErrLimit, "second"); r.Missing("g"); r.End(); r.Truncated() }, ErrMalformed, "f (103): want a boolean, got int"},
	} {
		r := New(message("f", c.value), 100)
		for range r.Fields() {
			if c.read(&r); r.OK() {
				t.Errorf("%s: no fault", c.name)
			}
		}
		f := r.Fault()
		if f == nil {
			continue
		}
		if got := fmt.Sprintf("%s (%d): %s", f.Field, f.Offset, f.Reason); got != c.says || !errors.Is(f.Kind, c.kind) {
			t.Errorf("%s: %s (%v), want %s (%v)", c.name, got, f.Kind, c.says, c.kind)
		}
	}
}

func TestNothingIsReadAfterAFault(t *testing.T) {
	r := New(message("a", []byte{1}, "b", []byte{2}), 0)
	var seen []string
	for name := range r.Fields() {
		seen = append(seen, string(name))
		r.Bool()
	}
	if !slices.Equal(seen, []string{"a"}) {
		t.Errorf("fields %q", seen)
	}
	u, below := r.Integer()
	kind, data := r.Ext()
	aside := r.Raw("x.")
	for i, empty := range []bool{r.Left() == 0, r.Type() == msgp.InvalidType, r.Str(9) == nil, r.Text(9) == "", r.Bin(9) == nil, r.Uint(9) == 0, r.Size(9) == 0,
		r.Int(0, 9) == 0, u == 0, !below, r.Float() == 0, !r.Bool(), !r.Null(), kind == 0, data == nil, r.Array(9, 1) == 0, r.MapHeader() == 0,
		r.ArrayHeader() == 0, aside.Left() == 0, aside.OK()} {
		if !empty {
			t.Errorf("value %d is not zero", i)
		}
	}
	for name := range r.Fields() {
		t.Errorf("a field %q", name)
	}
}

func TestAKeyThatIsNoTextIsNobodysWhereThatIsAllowed(t *testing.T) {
	r := New([]byte{0x83, 0x91, 1, 2, 0xa1, 'a', 3, 0xc0, 4}, 0)
	r.AnyKey = true
	var names [][]byte
	for name := range r.Fields() {
		names = append(names, name)
		r.Skip()
	}
	if d := cmp.Diff([][]byte{nil, []byte("a"), nil}, names); d != "" || !r.OK() {
		t.Error(d, r.Fault())
	}
}

func TestACopyReadsByItself(t *testing.T) {
	r := New([]byte{1, 2}, 0)
	ahead := r
	if ahead.Bool(); ahead.OK() || !r.OK() || r.Uint(9) != 1 {
		t.Errorf("%v and %v", r.Fault(), ahead.Fault())
	}
}

func TestALoopThatIsLeftLeavesTheRest(t *testing.T) {
	r := New(message("a", []byte{1}, "b", []byte{2}), 0)
	for range r.Fields() {
		break
	}
	if v := r.Uint(9); v != 1 {
		t.Errorf("%d", v)
	}
}

// A message's own map is the first level.
func TestSkipGoesJustSoDeep(t *testing.T) {
	for _, open := range []byte{0x91, 0x81} {
		for depth, ok := range map[int]bool{MaxDepth - 1: true, MaxDepth: false, 100_000: false} {
			one := []byte{open}
			if open == 0x81 {
				one = []byte{open, 0xc0}
			}
			r := New(append(bytes.Repeat(one, depth), 0xc0), 0)
			if r.Skip(); r.OK() != ok {
				t.Errorf("%d of %#x: %v", depth, open, r.Fault())
			}
			if f := r.Fault(); f != nil && !errors.Is(f.Kind, ErrLimit) {
				t.Errorf("%d of %#x: %v", depth, open, f)
			}
		}
	}
}

// FuzzSkip holds Skip against msgp's, which knows no depth and takes an unknown first byte for none.
func FuzzSkip(f *testing.F) {
	f.Add([]byte{0x82, 0xa1, 'a', 0x92, 1, 2, 0xc7, 2, 1, 3, 4, 0xd9, 1, 'x'})
	f.Add([]byte{0xdd, 255, 255, 255, 255})
	f.Add([]byte{0xc9, 0, 0, 0, 1, 1, 1})
	f.Add([]byte{0xc1})
	f.Fuzz(func(t *testing.T, b []byte) {
		r := New(b, 10)
		r.Skip()
		rest, err := msgp.Skip(b)
		switch f := r.Fault(); {
		case f == nil && err != nil:
			t.Fatalf("%x was passed over: %v", b, err)
		case f == nil && (len(rest) != r.Left() || r.Offset() != 10+len(b)-len(rest)):
			t.Fatalf("%d bytes left of %x, want %d", r.Left(), b, len(rest))
		case f != nil && err == nil && !errors.Is(f.Kind, ErrLimit):
			t.Fatalf("%x: %+v", b, f)
		case f != nil && (f.Offset < 10 || f.Offset > 10+len(b)):
			t.Fatalf("%x: a fault at %d", b, f.Offset)
		}
	})
}
