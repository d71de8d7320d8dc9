package tensor

import (
	"fmt"
	"strings"
)

// DType is a torch dtype that travels.
type DType uint8

// The dtypes. Those of float8 are torch's, one byte each.
const (
	Invalid DType = iota
	Bool
	Uint8
	Int8
	Uint16
	Int16
	Uint32
	Int32
	Uint64
	Int64
	Float8E4M3FN
	Float8E4M3FNUZ
	Float8E5M2
	Float8E5M2FNUZ
	Float8E8M0FNU
	Float16
	BFloat16
	Float32
	Float64
	Complex32
	Complex64
	Complex128
	dtypes // their number
)

// dtypeTable has each dtype's names. rank is the dtype's place in a .safetensors file, whose data is sorted by it, largest
// first (safetensors 0.8, its enum of dtypes).
var dtypeTable = [dtypes]struct {
	name        string // torch's, without its prefix
	size        int64  // bytes of one element
	part        int64  // bytes of one real number: half of size for complex dtypes
	safetensors string // "": has none
	rank        uint8
	numpy       string // array protocol type string, little-endian; "": has none
}{
	Invalid:        {name: "invalid"},
	Bool:           {"bool", 1, 1, "BOOL", 1, "|b1"},
	Uint8:          {"uint8", 1, 1, "U8", 2, "|u1"},
	Int8:           {"int8", 1, 1, "I8", 3, "|i1"},
	Uint16:         {"uint16", 2, 2, "U16", 10, "<u2"},
	Int16:          {"int16", 2, 2, "I16", 9, "<i2"},
	Uint32:         {"uint32", 4, 4, "U32", 14, "<u4"},
	Int32:          {"int32", 4, 4, "I32", 13, "<i4"},
	Uint64:         {"uint64", 8, 8, "U64", 19, "<u8"},
	Int64:          {"int64", 8, 8, "I64", 18, "<i8"},
	Float8E4M3FN:   {"float8_e4m3fn", 1, 1, "F8_E4M3", 5, ""},
	Float8E4M3FNUZ: {"float8_e4m3fnuz", 1, 1, "F8_E4M3FNUZ", 7, ""},
	Float8E5M2:     {"float8_e5m2", 1, 1, "F8_E5M2", 4, ""},
	Float8E5M2FNUZ: {"float8_e5m2fnuz", 1, 1, "F8_E5M2FNUZ", 8, ""},
	Float8E8M0FNU:  {"float8_e8m0fnu", 1, 1, "F8_E8M0", 6, ""},
	Float16:        {"float16", 2, 2, "F16", 11, "<f2"},
	BFloat16:       {"bfloat16", 2, 2, "BF16", 12, ""},
	Float32:        {"float32", 4, 4, "F32", 15, "<f4"},
	Float64:        {"float64", 8, 8, "F64", 17, "<f8"},
	Complex32:      {"complex32", 4, 2, "", 0, ""},
	Complex64:      {"complex64", 8, 4, "C64", 16, "<c8"},
	Complex128:     {"complex128", 16, 8, "", 0, "<c16"},
}

const torchPrefix = "torch."

var (
	dtypeByName        = make(map[string]DType, dtypes)
	dtypeBySafetensors = make(map[string]DType, dtypes)
	dtypeByNumpy       = make(map[string]DType, dtypes)
)

func init() {
	for d := Bool; d < dtypes; d++ {
		e := dtypeTable[d]
		dtypeByName[e.name] = d
		if e.safetensors != "" {
			dtypeBySafetensors[e.safetensors] = d
		}
		if e.numpy != "" {
			dtypeByNumpy[e.numpy[1:]] = d
		}
	}
}

// ParseDType takes torch's name of a dtype, "torch.bfloat16" or "bfloat16". The error wraps ErrDType.
func ParseDType(name string) (DType, error) {
	if d, ok := dtypeByName[strings.TrimPrefix(name, torchPrefix)]; ok {
		return d, nil
	}
	return Invalid, fmt.Errorf("%w: %.64q; give torch's name of one, such as torch.bfloat16", ErrDType, name)
}

// DTypes are all that travel, in no particular order.
func DTypes() []DType {
	all := make([]DType, 0, dtypes-1)
	for d := Bool; d < dtypes; d++ {
		all = append(all, d)
	}
	return all
}

func (d DType) valid() bool { return d > Invalid && d < dtypes }

// Name is torch's name without its prefix, "bfloat16".
func (d DType) Name() string {
	if d >= dtypes {
		d = Invalid
	}
	return dtypeTable[d].name
}

// String is the name as torch prints it, "torch.bfloat16".
func (d DType) String() string { return torchPrefix + d.Name() }

// Size is the bytes of one element, 0 for Invalid.
func (d DType) Size() int64 {
	if d >= dtypes {
		return 0
	}
	return dtypeTable[d].size
}

// Complex is true for the dtypes whose elements are a real and an imaginary part.
func (d DType) Complex() bool { return d == Complex32 || d == Complex64 || d == Complex128 }

// floating is true if an element, or each part of it, has its sign in its highest bit.
func (d DType) floating() bool {
	switch d {
	case Float8E4M3FN, Float8E5M2, Float16, BFloat16, Float32, Float64:
		return true
	}
	return d.Complex()
}

// Bytes is the bytes of a tensor of that shape. The error wraps ErrDType, ErrShape or ErrLimit.
func (d DType) Bytes(shape Shape) (int64, error) {
	if !d.valid() {
		return 0, fmt.Errorf("%w: number %d is none", ErrDType, d)
	}
	return shape.bytes(d.Size())
}
