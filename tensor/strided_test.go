package tensor

import (
	"errors"
	"math"
	"slices"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

func TestAViewIsGivenOnlyWhereItIsRight(t *testing.T) {
	mem := mustOf(t, []int32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 12).Data()
	for _, c := range []struct {
		name string
		s    Strided
		view bool
		want []int32
	}{
		{"row-major", Strided{DType: Int32, Shape: Shape{3, 4}, Strides: []int64{4, 1}}, true, []int32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}},
		{"row-major at an offset", Strided{DType: Int32, Shape: Shape{2, 2}, Strides: []int64{2, 1}, Offset: 5}, true, []int32{5, 6, 7, 8}},
		{"transposed", Strided{DType: Int32, Shape: Shape{4, 3}, Strides: []int64{1, 4}}, false, []int32{0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11}},
		{"every other", Strided{DType: Int32, Shape: Shape{3}, Strides: []int64{2}, Offset: 1}, false, []int32{1, 3, 5}},
		{"expanded", Strided{DType: Int32, Shape: Shape{2, 3}, Strides: []int64{0, 1}, Offset: 9}, false, []int32{9, 10, 11, 9, 10, 11}},
		{"a dimension of one, any stride", Strided{DType: Int32, Shape: Shape{1, 2}, Strides: []int64{77, 1}, Offset: 3}, true, []int32{3, 4}},
		{"no dimension", Strided{DType: Int32, Offset: 7}, true, []int32{7}},
		{"no element", Strided{DType: Int32, Shape: Shape{2, 0}, Strides: []int64{5, 5}, Offset: 99}, true, nil},
		{"three dimensions permuted", Strided{DType: Int32, Shape: Shape{2, 2, 3}, Strides: []int64{3, 6, 1}}, false, []int32{0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11}},
	} {
		c.s.Storage = mem
		v, err := c.s.View()
		if (err == nil) != c.view || err != nil && !errors.Is(err, ErrStrides) {
			t.Errorf("%s: view: %v", c.name, err)
		}
		if c.view && len(c.want) > 0 && unsafe.Pointer(&v.Data()[0]) != unsafe.Pointer(&mem[c.s.Offset*4]) {
			t.Errorf("%s: the view is a copy", c.name)
		}
		x, err := c.s.Contiguous()
		if err != nil {
			t.Fatal(c.name, err)
		}
		got, err := As[int32](x)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v (%v)", c.name, got, c.want, err)
		}
		dst := make([]byte, x.Bytes())
		if err := c.s.CopyTo(dst); err != nil || string(dst) != string(x.Data()) {
			t.Errorf("%s: copied %v (%v)", c.name, dst, err)
		}
		if err := c.s.CopyTo(make([]byte, x.Bytes()+1)); !errors.Is(err, ErrShape) {
			t.Error(c.name, err)
		}
	}
}

func TestStridesThatLeaveTheStorageAreRefused(t *testing.T) {
	for _, s := range []Strided{
		{Shape: Shape{5}, Strides: []int64{1}},
		{Shape: Shape{2}, Strides: []int64{4}},
		{Shape: Shape{1}, Strides: []int64{1}, Offset: 4},
		{Shape: Shape{1}, Strides: []int64{1}, Offset: -1},
		{Shape: Shape{2}, Strides: []int64{-1}, Offset: 1},
		{Shape: Shape{2}, Strides: nil},
		{Shape: Shape{3}, Strides: []int64{math.MaxInt64}},
		{Shape: Shape{2, 2}, Strides: []int64{math.MaxInt64, math.MaxInt64}, Offset: math.MaxInt64},
	} {
		s.DType, s.Storage = Int16, make([]byte, 8)
		if _, err := s.View(); !errors.Is(err, ErrStrides) {
			t.Errorf("%+v: view: %v", s, err)
		}
		if _, err := s.Contiguous(); !errors.Is(err, ErrStrides) {
			t.Errorf("%+v: copy: %v", s, err)
		}
	}
	huge := Strided{DType: Uint8, Shape: Shape{1 << 50}, Strides: []int64{0}, Storage: []byte{1}}
	if _, err := huge.Contiguous(); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
}

func TestConjugatedAndNegatedTensorsArriveAsTheyAreMeant(t *testing.T) {
	in := []complex64{1 + 2i, -3 - 4i}
	for _, c := range []struct {
		conj, neg bool
		want      []complex64
	}{
		{true, false, []complex64{1 - 2i, -3 + 4i}},
		{false, true, []complex64{-1 - 2i, 3 + 4i}},
		{true, true, []complex64{-1 + 2i, 3 - 4i}},
	} {
		s := Strided{DType: Complex64, Shape: Shape{2}, Strides: []int64{1}, Storage: mustOf(t, in, 2).Data(), Conj: c.conj, Neg: c.neg}
		if _, err := s.View(); !errors.Is(err, ErrStrides) {
			t.Error("the bytes as they are:", err)
		}
		x, err := s.Contiguous()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := As[complex64](x); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v (%v)", c, got, err)
		}
	}
	neg := Strided{DType: Float64, Shape: Shape{2}, Strides: []int64{2}, Storage: mustOf(t, []float64{1, 9, -2}, 3).Data(), Neg: true}
	x, err := neg.Contiguous()
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := As[float64](x); !slices.Equal(got, []float64{-1, 2}) {
		t.Error(got)
	}
	if _, err := (&Strided{DType: Float32, Conj: true, Storage: make([]byte, 4)}).View(); !errors.Is(err, ErrDType) {
		t.Error(err)
	}
	if _, err := (&Strided{DType: Int32, Neg: true, Storage: make([]byte, 4)}).View(); !errors.Is(err, ErrDType) {
		t.Error(err)
	}
}

func TestBigEndianElementsAreTurnedByACopyOnly(t *testing.T) {
	s := Strided{DType: Int32, Shape: Shape{2}, Strides: []int64{1}, Storage: []byte{0, 0, 0, 1, 0, 0, 2, 0}, BigEndian: true}
	if _, err := s.View(); !errors.Is(err, ErrStrides) {
		t.Error(err)
	}
	x, err := s.Contiguous()
	if err != nil {
		t.Fatal(err)
	}
	if v, _ := As[int32](x); !slices.Equal(v, []int32{1, 512}) {
		t.Error(v)
	}
	c := Strided{DType: Complex64, Storage: []byte{0x3f, 0x80, 0, 0, 0x40, 0, 0, 0}, BigEndian: true, Conj: true}
	if x, err = c.Contiguous(); err != nil {
		t.Fatal(err)
	}
	if v, _ := As[complex64](x); v[0] != 1-2i {
		t.Error(v)
	}
	one := Strided{DType: Int8, Shape: Shape{1}, Strides: []int64{1}, Storage: []byte{1}, BigEndian: true}
	if _, err := one.View(); err != nil {
		t.Error("bytes have no order:", err)
	}
}

// Copies of any strides are compared with an index computed element by element.
func TestCopiesHaveTheElementsThatStridesSay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d := rapid.SampledFrom([]DType{Int8, Int16, Int32, Int64, Complex128}).Draw(t, "dtype")
		rank := rapid.IntRange(0, 4).Draw(t, "rank")
		s := Strided{DType: d, Shape: make(Shape, rank), Strides: make([]int64, rank), Offset: rapid.Int64Range(0, 3).Draw(t, "offset")}
		last := s.Offset
		for i := range rank {
			s.Shape[i] = rapid.Int64Range(0, 4).Draw(t, "dim")
			s.Strides[i] = rapid.Int64Range(0, 9).Draw(t, "stride")
			last += max(s.Shape[i]-1, 0) * s.Strides[i]
		}
		s.Storage = make([]byte, (last+1)*d.Size())
		for i := range s.Storage {
			s.Storage[i] = byte(i * 7)
		}
		x, err := s.Contiguous()
		if err != nil {
			t.Fatal(err)
		}
		for i := range x.Len() {
			at, rest := s.Offset, i
			for j := rank - 1; j >= 0; j-- {
				at += rest % s.Shape[j] * s.Strides[j]
				rest /= s.Shape[j]
			}
			size := d.Size()
			if string(x.Data()[i*size:(i+1)*size]) != string(s.Storage[at*size:(at+1)*size]) {
				t.Fatalf("%+v: element %d is wrong", s, i)
			}
		}
		if v, err := s.View(); err == nil && !v.Equal(x) {
			t.Fatalf("%+v: the view differs from the copy", s)
		}
	})
}
