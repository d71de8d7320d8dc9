package tensor

import (
	"fmt"
	"strconv"
)

// numpyItem is the bytes of one element of a numpy dtype given by its array protocol type string. Structured and object dtypes
// have no such string or no bytes, and are refused with ErrDType.
func numpyItem(descr string) (int64, error) {
	bad := fmt.Errorf("%w: numpy's %.64q; give one such as <f4", ErrDType, descr)
	if len(descr) < 3 {
		return 0, bad
	}
	if o := descr[0]; o != '<' && o != '>' && o != '|' {
		return 0, bad
	}
	digits := descr[2:]
	unit := int64(1)
	switch descr[1] {
	case 'b', 'i', 'u', 'f', 'c', 'S', 'V':
	case 'U':
		unit = 4
	case 'm', 'M': // the unit of time may follow: <M8[ns]
		for i := range digits {
			if digits[i] == '[' && digits[len(digits)-1] == ']' {
				digits = digits[:i]
				break
			}
		}
	default:
		return 0, bad
	}
	n, err := strconv.ParseInt(digits, 10, 32)
	if err != nil || n < 0 || strconv.FormatInt(n, 10) != digits {
		return 0, bad
	}
	if n == 0 && unit == 1 && descr[1] != 'S' && descr[1] != 'V' {
		return 0, bad
	}
	return n * unit, nil
}

// numpyDType is torch's dtype of a numpy one. The error wraps ErrDType.
func numpyDType(descr string) (d DType, bigEndian bool, err error) {
	if len(descr) > 1 {
		if d, ok := dtypeByNumpy[descr[1:]]; ok {
			return d, descr[0] == '>', nil
		}
	}
	return Invalid, false, fmt.Errorf("%w: torch has none for numpy's %.64q", ErrDType, descr)
}

// Strided is the array as a tensor of torch's dtypes; View and Contiguous make one of it. The error wraps ErrDType or ErrShape.
func (a NDArray) Strided() (Strided, error) {
	if err := a.Check(); err != nil {
		return Strided{}, err
	}
	d, big, err := numpyDType(a.DType)
	if err != nil {
		return Strided{}, err
	}
	return Strided{DType: d, Shape: a.Shape, Strides: a.Shape.Strides(), Storage: a.Data, BigEndian: big}, nil
}

// NumPy gives t as a numpy array over the same bytes. The error wraps ErrDType for a dtype that numpy does not have (bfloat16,
// float8), ErrDevice off the CPU.
func (t Tensor) NumPy() (NDArray, error) {
	if !t.device.CPU() {
		return NDArray{}, fmt.Errorf("%w: the bytes of %v are not in this process", ErrDevice, t)
	}
	descr := dtypeTable[t.dtype].numpy
	if descr == "" {
		return NDArray{}, fmt.Errorf("%w: numpy has none for %v", ErrDType, t.dtype)
	}
	return NDArray{descr, t.shape, t.data}, nil
}
