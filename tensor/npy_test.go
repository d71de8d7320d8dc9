package tensor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"
)

// npy makes a .npy file of a header's text and data.
func npy(major byte, dict string, data []byte) []byte {
	b := append([]byte(npyMagic), major, 0)
	if major == 1 {
		b = binary.LittleEndian.AppendUint16(b, uint16(len(dict)))
	} else {
		b = binary.LittleEndian.AppendUint32(b, uint32(len(dict)))
	}
	return append(append(b, dict...), data...)
}

func TestNPYFilesAreReadWhereTheyAre(t *testing.T) {
	six := mustOf(t, []int16{0, 1, 2, 3, 4, 5}, 6).Data()
	for _, c := range []struct {
		name  string
		file  []byte
		want  []int16
		shape Shape
		view  bool
	}{
		{"version 1", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }\n", six), []int16{0, 1, 2, 3, 4, 5}, Shape{2, 3}, true},
		{"version 2", npy(2, `{"shape": (6,), "descr": "<i2", "fortran_order": False}`, six), []int16{0, 1, 2, 3, 4, 5}, Shape{6}, true},
		{"version 3", npy(3, "{'descr':'<i2','fortran_order':False,'shape':(1,6)}", six), []int16{0, 1, 2, 3, 4, 5}, Shape{1, 6}, true},
		{"column-major", npy(1, "{'descr': '<i2', 'fortran_order': True, 'shape': (2, 3), }", six), []int16{0, 2, 4, 1, 3, 5}, Shape{2, 3}, false},
		{"column-major of one row", npy(1, "{'descr': '<i2', 'fortran_order': True, 'shape': (1, 6), }", six), []int16{0, 1, 2, 3, 4, 5}, Shape{1, 6}, true},
		{"big-endian", npy(1, "{'descr': '>i2', 'fortran_order': False, 'shape': (6,), }", six), []int16{0, 256, 512, 768, 1024, 1280}, Shape{6}, false},
		{"one element", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (), }", six[2:4]), []int16{1}, Shape{}, true},
		{"no element", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 0, 3), }", nil), nil, Shape{2, 0, 3}, true},
		{"of Python 2", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (2L, 3L), }", six), []int16{0, 1, 2, 3, 4, 5}, Shape{2, 3}, true},
	} {
		s, err := ParseNPY(c.file)
		if err != nil {
			t.Error(c.name, err)
			continue
		}
		if _, err := s.View(); (err == nil) != c.view {
			t.Errorf("%s: view: %v", c.name, err)
		}
		x, err := s.Contiguous()
		if err != nil || !slices.Equal(x.Shape(), c.shape) {
			t.Errorf("%s: %v (%v)", c.name, x, err)
		}
		if got, err := As[int16](x.Clone()); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v (%v)", c.name, got, c.want, err)
		}
	}
}

func TestBadNPYFilesAreTypedErrors(t *testing.T) {
	ok := "{'descr': '<i2', 'fortran_order': False, 'shape': (2,), }"
	for _, c := range []struct {
		name string
		file []byte
		want error
	}{
		{"empty", nil, ErrFile},
		{"short", []byte(npyMagic), ErrFile},
		{"other magic", []byte("\x93NUMPX\x01\x00\x00\x00"), ErrFile},
		{"version 0", npy(0, ok, make([]byte, 4)), ErrFile},
		{"version 4", npy(4, ok, make([]byte, 4)), ErrFile},
		{"version 2 cut in its length", npy(2, "", nil)[:11], ErrFile},
		{"header past the end", npy(1, ok, nil)[:40], ErrFile},
		{"header of 4 GiB", append([]byte(npyMagic), 2, 0, 255, 255, 255, 255), ErrLimit},
		{"too little data", npy(1, ok, make([]byte, 3)), ErrFile},
		{"too much data", npy(1, ok, make([]byte, 5)), ErrFile},
		{"no dict", npy(1, "[]", nil), ErrFile},
		{"key missing", npy(1, "{'descr': '<i2', 'shape': (2,)}", make([]byte, 4)), ErrFile},
		{"key twice", npy(1, "{'descr': '<i2', 'descr': '<i2', 'fortran_order': False, 'shape': (2,)}", make([]byte, 4)), ErrFile},
		{"another key", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (2,), 'x': 1}", make([]byte, 4)), ErrFile},
		{"text after it", npy(1, ok+"x", make([]byte, 4)), ErrFile},
		{"order that is no bool", npy(1, "{'descr': '<i2', 'fortran_order': 0, 'shape': (2,), }", make([]byte, 4)), ErrFile},
		{"shape that is a number", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (2), }", make([]byte, 4)), ErrFile},
		{"shape below 0", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (-2,), }", make([]byte, 4)), ErrFile},
		{"shape over 2^63", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (99999999999999999999,), }", nil), ErrFile},
		{"shape whose bytes are over 2^63", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", nil), ErrShape},
		{"65 dimensions", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': ("+strings.Repeat("1, ", 65)+"), }", nil), ErrLimit},
		{"an expression", npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (__import__('os'),), }", nil), ErrFile},
		{"records", npy(1, "{'descr': [('a', '<i2')], 'fortran_order': False, 'shape': (2,), }", nil), ErrDType},
		{"objects, that is a pickle", npy(1, "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", []byte("\x80\x04.")), ErrDType},
		{"text", npy(1, "{'descr': '<U1', 'fortran_order': False, 'shape': (1,), }", make([]byte, 4)), ErrDType},
		{"long double", npy(1, "{'descr': '<f16', 'fortran_order': False, 'shape': (1,), }", make([]byte, 16)), ErrDType},
		{"raw bytes", npy(1, "{'descr': '<V2', 'fortran_order': False, 'shape': (2,), }", make([]byte, 4)), ErrDType},
	} {
		if s, err := ParseNPY(c.file); !errors.Is(err, c.want) {
			t.Errorf("%s: %+v, %v", c.name, s, err)
		}
	}
}

func TestRawBytesAreReadAsWhatTheyAreSaidToBe(t *testing.T) {
	file := npy(1, "{'descr': '<V2', 'fortran_order': False, 'shape': (2,), }", []byte{0x80, 0x3f, 0, 0x40})
	s, err := ParseNPYAs(file, BFloat16)
	if err != nil {
		t.Fatal(err)
	}
	if x, err := s.View(); err != nil || x.String() != "torch.bfloat16[2]" {
		t.Error(x, err)
	}
	for _, d := range []DType{Float8E5M2, Float32, Invalid} {
		if _, err := ParseNPYAs(file, d); !errors.Is(err, ErrDType) {
			t.Errorf("as %v: %v", d, err)
		}
	}
	if _, err := ParseNPYAs(npy(1, "{'descr': '<f2', 'fortran_order': False, 'shape': (1,), }", []byte{0, 0}), BFloat16); !errors.Is(err, ErrDType) {
		t.Error("elements that say what they are:", err)
	}
}

func TestNPYFilesAreWrittenAsNumpyDoes(t *testing.T) {
	var b bytes.Buffer
	if err := WriteNPY(&b, mustOf(t, []float32{0, 1, 2}, 3)); err != nil {
		t.Fatal(err)
	}
	want := "\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }" + strings.Repeat(" ", 60) + "\n" +
		"\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@"
	if b.String() != want {
		t.Errorf("%q\nwant %q", b.String(), want)
	}
	for _, d := range []DType{BFloat16, Float8E4M3FN, Complex32} {
		x, err := New(d, Shape{0}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := WriteNPY(&b, x); !errors.Is(err, ErrDType) {
			t.Error(d, err)
		}
	}
	gpu, err := OnDevice(Float32, Shape{1}, Device{"cuda", 0}, 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := WriteNPY(&b, gpu); !errors.Is(err, ErrDevice) {
		t.Error(err)
	}
}

func FuzzParseNPY(f *testing.F) {
	f.Add(npy(1, "{'descr': '<i2', 'fortran_order': False, 'shape': (2, 3), }\n", make([]byte, 12)))
	f.Add(npy(2, "{'descr': '>c8', 'fortran_order': True, 'shape': (2, 1), }\n", make([]byte, 16)))
	f.Add(npy(3, "{'descr': '|V1', 'fortran_order': False, 'shape': (), }\n", make([]byte, 1)))
	f.Add([]byte(npyMagic + "\x02\x00\xff\xff\xff\xff"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := ParseNPY(b)
		if err != nil {
			if s, err = ParseNPYAs(b, BFloat16); err != nil {
				checkFuzzError(t, err)
				return
			}
		}
		x, err := s.Contiguous()
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		if x.DType() == BFloat16 {
			return // numpy has no name for it
		}
		var out bytes.Buffer
		if err := WriteNPY(&out, x); err != nil {
			t.Fatal(err)
		}
		again, err := ParseNPY(out.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if y, err := again.View(); err != nil || !y.Equal(x) {
			t.Fatalf("%v, want %v (%v)", y, x, err)
		}
	})
}

// checkFuzzError fails if an error of a reader is none of those that callers tell apart.
func checkFuzzError(t *testing.T, err error) {
	t.Helper()
	for _, e := range []error{ErrFile, ErrDType, ErrShape, ErrLimit} {
		if errors.Is(err, e) {
			return
		}
	}
	t.Fatalf("an error of another kind: %v", err)
}
