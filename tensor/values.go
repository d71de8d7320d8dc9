package tensor

import (
	"fmt"
	"unsafe"
)

// Element is the Go types that hold elements of a dtype. Float16, BFloat16 and Complex32 have none; their bits are read by way of
// uint8, uint16 and uint32 (see As).
type Element interface {
	bool | uint8 | int8 | uint16 | int16 | uint32 | int32 | uint64 | int64 | float32 | float64 | complex64 | complex128
}

// dtypeOf is the dtype whose elements T holds.
func dtypeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case bool:
		return Bool
	case uint8:
		return Uint8
	case int8:
		return Int8
	case uint16:
		return Uint16
	case int16:
		return Int16
	case uint32:
		return Uint32
	case int32:
		return Int32
	case uint64:
		return Uint64
	case int64:
		return Int64
	case float32:
		return Float32
	case float64:
		return Float64
	case complex64:
		return Complex64
	default:
		return Complex128
	}
}

// Of makes a tensor over the elements of v, no copy. The error wraps ErrShape if shape does not have len(v) elements.
func Of[T Element](v []T, shape ...int64) (Tensor, error) {
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(*new(T))))
	return New(dtypeOf[T](), shape, b)
}

// As gives t's elements where they are, no copy. T is the dtype's own Go type; uint8, uint16 and uint32 also read the bits of the
// one-, two- and four-byte dtypes that have none (float8, float16, bfloat16, complex32). The error wraps ErrDType, ErrDevice or
// ErrAlign. A bool tensor's bytes are checked to be 0 or 1: another byte wraps ErrDType.
func As[T Element](t Tensor) ([]T, error) {
	want, size := dtypeOf[T](), int(unsafe.Sizeof(*new(T)))
	if t.dtype != want && !(t.dtype.bitsOnly() && (want == Uint8 || want == Uint16 || want == Uint32) && t.dtype.Size() == int64(size)) {
		return nil, fmt.Errorf("%w: elements of %v asked as %v", ErrDType, t, want)
	}
	if !t.device.CPU() {
		return nil, fmt.Errorf("%w: the elements of %v are not in this process", ErrDevice, t)
	}
	if len(t.data) == 0 {
		return nil, nil
	}
	p := unsafe.SliceData(t.data)
	if uintptr(unsafe.Pointer(p))%unsafe.Alignof(*new(T)) != 0 {
		return nil, fmt.Errorf("%w: %v at %p; read a Clone of it", ErrAlign, t, p)
	}
	if want == Bool {
		for i, b := range t.data {
			if b > 1 {
				return nil, fmt.Errorf("%w: element %d of a bool tensor is %d", ErrDType, i, b)
			}
		}
	}
	return unsafe.Slice((*T)(unsafe.Pointer(p)), len(t.data)/size), nil
}

// bitsOnly is true for the dtypes without a Go type.
func (d DType) bitsOnly() bool {
	switch d {
	case Float8E4M3FN, Float8E4M3FNUZ, Float8E5M2, Float8E5M2FNUZ, Float8E8M0FNU, Float16, BFloat16, Complex32:
		return true
	}
	return false
}

// aligned makes n bytes that begin where any element may.
func aligned(n int) []byte {
	if n == 0 {
		return nil
	}
	words := make([]complex128, (n+15)/16)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), n)
}
