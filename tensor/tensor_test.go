package tensor

import (
	"errors"
	"math"
	"slices"
	"testing"
	"unsafe"
)

func mustNew(t testing.TB, d DType, s Shape, b []byte) Tensor {
	t.Helper()
	v, err := New(d, s, b)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func mustOf[T Element](t testing.TB, v []T, shape ...int64) Tensor {
	t.Helper()
	x, err := Of(v, shape...)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestATensorHasExactlyTheBytesOfItsShape(t *testing.T) {
	for _, c := range []struct {
		dtype DType
		shape Shape
		bytes int
		want  error
	}{
		{Float32, Shape{2, 3}, 24, nil},
		{Float32, Shape{2, 3}, 23, ErrShape},
		{Float32, Shape{2, 3}, 25, ErrShape},
		{Int64, Shape{}, 8, nil},
		{Int64, nil, 8, nil},
		{Float64, Shape{2, 0, 3}, 0, nil},
		{Float64, Shape{2, 0, 3}, 8, ErrShape},
		{Bool, Shape{-1}, 0, ErrShape},
		{Uint8, Shape{1 << 62, 2}, 0, ErrShape},
		{Uint8, Shape{1 << 32, 1 << 32}, 0, ErrShape},
		{Uint8, Shape{0, 1 << 62, 4}, 0, ErrShape}, // torch: "Stride calculation overflowed"
		{Complex128, Shape{1 << 60}, 0, ErrShape},
		{Uint8, make(Shape, MaxRank), 0, nil},
		{Uint8, make(Shape, MaxRank+1), 0, ErrLimit},
		{Invalid, Shape{1}, 0, ErrDType},
		{dtypes, Shape{1}, 1, ErrDType},
	} {
		x, err := New(c.dtype, c.shape, make([]byte, c.bytes))
		if !errors.Is(err, c.want) {
			t.Errorf("%v %v, %d bytes: %v, want %v", c.dtype, c.shape, c.bytes, err, c.want)
		}
		if x.Valid() != (c.want == nil) {
			t.Errorf("%v: valid %v", x, x.Valid())
		}
	}
}

func TestATensorIsAViewAndItsShapeIsItsOwn(t *testing.T) {
	mem := []byte{1, 2, 3, 4, 5, 6}
	shape := Shape{2, 2}
	x := mustNew(t, Uint8, shape, mem[:4])
	shape[0] = 9
	mem[0] = 7
	if x.Data()[0] != 7 || x.Shape()[0] != 2 || cap(x.Data()) != 4 {
		t.Errorf("%v %v, capacity %d", x.Data(), x.Shape(), cap(x.Data()))
	}
	c := x.Clone()
	mem[0] = 8
	if c.Data()[0] != 7 || x.Equal(c) {
		t.Error("a clone shares bytes")
	}
	y, err := x.Reshape(Shape{4})
	if err != nil || unsafe.SliceData(y.Data()) != unsafe.SliceData(mem) {
		t.Error("a reshaped tensor has other bytes", err)
	}
	if _, err := x.Reshape(Shape{3}); !errors.Is(err, ErrShape) {
		t.Error(err)
	}
}

func TestDTypeNamesAreTorchs(t *testing.T) {
	for _, d := range DTypes() {
		for _, name := range []string{d.Name(), d.String()} {
			if got, err := ParseDType(name); err != nil || got != d {
				t.Errorf("%s: %v, %v", name, got, err)
			}
		}
	}
	for _, name := range []string{"", "torch.", "torch.torch.float32", "float", "Float32", "invalid", "qint8"} {
		if _, err := ParseDType(name); !errors.Is(err, ErrDType) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if s := DType(200).String(); s != "torch.invalid" {
		t.Error(s)
	}
}

func TestDevicesAreNamedAsTorchDoes(t *testing.T) {
	for name, want := range map[string]Device{"cpu": {}, "cpu:0": {}, "cuda": {"cuda", -1}, "cuda:0": {"cuda", 0}, "npu:12": {"npu", 12}} {
		d, err := ParseDevice(name)
		if err != nil || d != want {
			t.Errorf("%s: %v, %v", name, d, err)
		}
		if d.String() != name && name != "cpu:0" {
			t.Errorf("%s prints as %s", name, d)
		}
	}
	for _, name := range []string{"", ":0", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "CUDA", "cu da", "cuda:0:1", "cuda:99999"} {
		if d, err := ParseDevice(name); !errors.Is(err, ErrDevice) {
			t.Errorf("%q: %v, %v", name, d, err)
		}
	}
}

func TestATensorOffTheCPUHasAnAddressAndNoBytes(t *testing.T) {
	x, err := OnDevice(BFloat16, Shape{4}, Device{"cuda", 1}, 0x7f0000)
	if err != nil || x.Data() != nil || x.Bytes() != 8 || x.Len() != 4 || x.String() != "torch.bfloat16[4] on cuda:1" {
		t.Error(x, err)
	}
	if _, err := As[uint16](x); !errors.Is(err, ErrDevice) {
		t.Error(err)
	}
	for _, addr := range []uint64{0, math.MaxUint64 - 6} {
		if _, err := OnDevice(BFloat16, Shape{4}, Device{"cuda", 1}, addr); !errors.Is(err, ErrDevice) {
			t.Error(addr, err)
		}
	}
	if _, err := OnDevice(BFloat16, Shape{4}, Device{}, 8); !errors.Is(err, ErrDevice) {
		t.Error(err)
	}
}

func TestElementsAreReadWhereTheyAre(t *testing.T) {
	x := mustOf(t, []float32{1, 2, 3}, 3)
	v, err := As[float32](x)
	if err != nil || !slices.Equal(v, []float32{1, 2, 3}) || unsafe.Pointer(&v[0]) != unsafe.Pointer(&x.Data()[0]) {
		t.Error(v, err)
	}
	if _, err := As[int32](x); !errors.Is(err, ErrDType) {
		t.Error(err)
	}
	if _, err := As[uint32](x); !errors.Is(err, ErrDType) {
		t.Error("bits of a dtype that has a Go type:", err)
	}
	b := mustNew(t, BFloat16, Shape{1}, []byte{0x80, 0x3f})
	bits, err := As[uint16](b.Clone())
	if err != nil || bits[0] != 0x3f80 {
		t.Error(bits, err)
	}
	mem := aligned(16)
	odd := mustNew(t, Int32, Shape{2}, mem[1:9])
	if _, err := As[int32](odd); !errors.Is(err, ErrAlign) {
		t.Error(err)
	}
	if _, err := As[int32](odd.Clone()); err != nil {
		t.Error(err)
	}
	if _, err := As[bool](mustNew(t, Bool, Shape{2}, []byte{1, 2})); !errors.Is(err, ErrDType) {
		t.Error(err)
	}
	if v, err := As[float64](mustNew(t, Float64, Shape{0}, nil)); err != nil || len(v) != 0 {
		t.Error(v, err)
	}
	if _, err := Of([]int8{1, 2}, 3); !errors.Is(err, ErrShape) {
		t.Error(err)
	}
}
