package tensor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
)

// safe makes a .safetensors file of a header's text and data.
func safe(header string, data int) []byte {
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(header)))
	b = append(b, header...)
	return append(b, make([]byte, data)...)
}

const one = `"dtype":"F32","shape":[1],"data_offsets":`

func TestSafetensorsRulesAreTheFormats(t *testing.T) {
	for _, c := range []struct {
		name string
		file []byte
		want error // nil: it is read
	}{
		{"no tensor", safe(`{}`, 0), nil},
		{"one", safe(`{"a":{`+one+`[0,4]}}`, 4), nil},
		{"padded", safe(`{"a":{`+one+`[0,4]}}   `, 4), nil},
		{"not in order", safe(`{"a":{`+one+`[4,8]},"b":{`+one+`[0,4]}}`, 8), nil},
		{"a field that is not known", safe(`{"a":{`+one+`[0,4],"x":[{}]}}`, 4), nil},
		{"metadata", safe(`{"__metadata__":{"b":"2","a":"1"},"a":{`+one+`[0,4]}}`, 4), nil},
		{"metadata null", safe(`{"__metadata__":null,"a":{`+one+`[0,4]}}`, 4), nil},
		{"no name", safe(`{"":{`+one+`[0,4]}}`, 4), nil},
		{"no dimension", safe(`{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}`, 4), nil},
		{"no element, between others", safe(`{"c":{`+one+`[4,8]},"a":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]},"b":{`+one+`[0,4]}}`, 8), nil},

		{"empty", nil, ErrFile},
		{"seven bytes", make([]byte, 7), ErrFile},
		{"header past the end", safe(`{}`, 0)[:9], ErrFile},
		{"header of 2^63", append(binary.LittleEndian.AppendUint64(nil, 1<<63), '{'), ErrLimit},
		{"header over its limit", append(binary.LittleEndian.AppendUint64(nil, maxSafetensorsHeader+1), '{'), ErrLimit},
		{"data after the tensors", safe(`{"a":{`+one+`[0,4]}}`, 5), ErrFile},
		{"data that ends early", safe(`{"a":{`+one+`[0,4]}}`, 3), ErrFile},
		{"data without tensors", safe(`{}`, 1), ErrFile},
		{"padded with zeros", safe(`{"a":{`+one+"[0,4]}}\x00", 4), ErrFile},
		{"two values", safe(`{}{}`, 0), ErrFile},
		{"an array", safe(`[]`, 0), ErrFile},
		{"nothing", safe(``, 0), ErrFile},
		{"not JSON", safe(`{"a":`, 0), ErrFile},
		{"not UTF-8", safe("{\"a\xff\":{"+one+`[0,4]}}`, 4), ErrFile},
		{"name twice", safe(`{"a":{`+one+`[0,4]},"a":{`+one+`[4,8]}}`, 8), ErrFile},
		{"name twice, once escaped", safe(`{"a":{`+one+`[0,4]},"\u0061":{`+one+`[4,8]}}`, 8), ErrFile},
		{"field twice", safe(`{"a":{`+one+`[0,4],"shape":[1]}}`, 4), ErrFile},
		{"overlap", safe(`{"a":{`+one+`[0,4]},"b":{`+one+`[0,4]}}`, 4), ErrFile},
		{"overlap in part", safe(`{"a":{`+one+`[0,4]},"b":{`+one+`[2,6]}}`, 6), ErrFile},
		{"gap", safe(`{"a":{`+one+`[4,8]}}`, 8), ErrFile},
		{"offsets reversed", safe(`{"a":{`+one+`[4,0]}}`, 4), ErrFile},
		{"offsets of three", safe(`{"a":{`+one+`[0,4,4]}}`, 4), ErrLimit},
		{"offsets of one", safe(`{"a":{`+one+`[0]}}`, 4), ErrFile},
		{"offsets below 0", safe(`{"a":{`+one+`[-4,0]}}`, 4), ErrFile},
		{"bytes that are not the shape's", safe(`{"a":{`+one+`[0,8]}}`, 8), ErrFile},
		{"metadata that is a number", safe(`{"__metadata__":{"a":1}}`, 0), ErrFile},
		{"metadata that is an array", safe(`{"__metadata__":[]}`, 0), ErrFile},
		{"tensor that is a number", safe(`{"a":1}`, 0), ErrFile},
		{"shape of floats", safe(`{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}`, 4), ErrFile},
		{"shape of strings", safe(`{"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}}`, 4), ErrFile},
		{"shape below 0", safe(`{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}`, 4), ErrFile},
		{"shape over an int64", safe(`{"a":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}`, 0), ErrShape},
		{"65 dimensions", safe(`{"a":{"dtype":"U8","shape":[1`+strings.Repeat(",1", 64)+`],"data_offsets":[0,1]}}`, 1), ErrLimit},
		{"dtype that torch has not", safe(`{"a":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}`, 3), ErrDType},
		{"dtype that is a number", safe(`{"a":{"dtype":1,"shape":[4],"data_offsets":[0,3]}}`, 3), ErrDType},
		{"no dtype", safe(`{"a":{"shape":[4],"data_offsets":[0,4]}}`, 4), ErrFile},
		{"a long name", safe(`{"`+strings.Repeat("n", maxSafetensorsText+1)+`":{`+one+`[0,4]}}`, 4), ErrLimit},
	} {
		named, _, err := ParseSafetensors(c.file)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v", c.name, named, err)
		}
		if err == nil {
			for _, n := range named {
				if n.Tensor.Bytes() != int64(len(n.Tensor.Data())) {
					t.Errorf("%s: %v", c.name, n)
				}
			}
		}
	}
}

func TestSafetensorsAreViewsAndComeBackAsTheyWereWritten(t *testing.T) {
	var in []Named
	for i, d := range DTypes() {
		if dtypeTable[d].safetensors == "" {
			continue
		}
		b := make([]byte, 3*d.Size())
		for j := range b {
			b[j] = byte(i + j)
		}
		in = append(in, Named{fmt.Sprintf("t \"%02d\"\n", i), mustNew(t, d, Shape{3, 1}, b)})
	}
	in = append(in, Named{"scalar", mustOf(t, []int64{7})}, Named{"empty", mustNew(t, Float64, Shape{2, 0, 3}, nil)})
	var file bytes.Buffer
	text := []Text{{"a", "1"}, {"b\\", "ü\t"}}
	if err := WriteSafetensors(&file, in, text); err != nil {
		t.Fatal(err)
	}
	out, meta, err := ParseSafetensors(file.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(text, meta); d != "" {
		t.Error(d)
	}
	SafetensorsOrder(in)
	if d := cmp.Diff(in, out); d != "" {
		t.Error(d)
	}
	inside := uintptr(unsafe.Pointer(unsafe.SliceData(file.Bytes())))
	for _, n := range out {
		if n.Tensor.Bytes() == 0 {
			continue
		}
		off := uintptr(unsafe.Pointer(unsafe.SliceData(n.Tensor.Data()))) - inside
		if off >= uintptr(file.Len()) {
			t.Errorf("%q is a copy", n.Name)
		}
		if off%uintptr(dtypeTable[n.Tensor.DType()].part) != 0 {
			t.Errorf("%q is not aligned: offset %d", n.Name, off)
		}
	}
}

func TestSafetensorsThatCannotBeWrittenAreRefused(t *testing.T) {
	x := mustOf(t, []int8{1}, 1)
	c128 := mustOf(t, []complex128{1}, 1)
	gpu, err := OnDevice(Float32, Shape{1}, Device{"cuda", 0}, 64)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		named []Named
		text  []Text
		want  error
	}{
		{"no such dtype", []Named{{"a", c128}}, nil, ErrDType},
		{"zero tensor", []Named{{"a", Tensor{}}}, nil, ErrDType},
		{"twice", []Named{{"a", x}, {"a", x}}, nil, ErrFile},
		{"reserved", []Named{{"__metadata__", x}}, nil, ErrFile},
		{"not UTF-8", []Named{{"\xff", x}}, nil, ErrFile},
		{"a long name", []Named{{strings.Repeat("n", maxSafetensorsText+1), x}}, nil, ErrLimit},
		{"metadata twice", nil, []Text{{"a", "1"}, {"a", "1"}}, ErrFile},
		{"on a device", []Named{{"a", gpu}}, nil, ErrDevice},
	} {
		var w bytes.Buffer
		if err := WriteSafetensors(&w, c.named, c.text); !errors.Is(err, c.want) || w.Len() > 0 {
			t.Errorf("%s: %v, %d bytes written", c.name, err, w.Len())
		}
	}
}

func FuzzParseSafetensors(f *testing.F) {
	f.Add(safe(`{"__metadata__":{"k":"v"},"a":{`+one+`[0,4]},"b":{"dtype":"BF16","shape":[2,0],"data_offsets":[4,4]}}`, 4))
	f.Add(safe(`{"a":{`+one+`[4,8]},"b":{`+one+`[0,4]}} `, 8))
	f.Add(safe(`{"a":{"dtype":"F32","shape":[4294967296,4294967296,0],"data_offsets":[0,0]}}`, 0))
	f.Fuzz(func(t *testing.T, b []byte) {
		named, text, err := ParseSafetensors(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		var file bytes.Buffer
		if err := WriteSafetensors(&file, named, text); err != nil {
			t.Fatal(err)
		}
		again, text2, err := ParseSafetensors(file.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		SafetensorsOrder(named)
		SafetensorsOrder(again) // tensors without bytes may be read in another order
		if d := cmp.Diff(named, again) + cmp.Diff(text, text2); d != "" {
			t.Fatal(d)
		}
	})
}

func BenchmarkParseSafetensors50(b *testing.B) {
	named := make([]Named, 50)
	for i := range named {
		named[i] = Named{fmt.Sprintf("model.layers.%d.weight", i), mustOf(b, make([]float32, 256), 256)}
	}
	var file bytes.Buffer
	if err := WriteSafetensors(&file, named, nil); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := ParseSafetensors(file.Bytes()); err != nil {
			b.Fatal(err)
		}
	}
}
