// Package tensor has tensors as they travel between engines: dtype, shape, and the bytes where they are, plus trees of them
// (payloads), and the files they are kept in (.safetensors, .npy).
//
// Nothing here copies a tensor's bytes unless its name says so (Contiguous, CopyTo, Clone): a Tensor is a view over memory that
// somebody else owns, such as a shared region, a mapped file or a received message. Whoever made the view keeps that memory
// alive and unchanged while the view is in use.
//
// Elements are little-endian, in row-major order. Machines of the other byte order are not supported: the typed views (As, Of)
// read elements as the machine does.
//
// Functions keep no state and are safe for concurrent use; so are values that nobody changes.
package tensor

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
)

// Limits of what is taken for a tensor or a tree.
const (
	MaxRank  = 64      // dimensions; torch's and numpy's own limit
	MaxDepth = 100     // maps, lists and tuples in one another (the peers' decoder ends at about 1,000, its rebuilding earlier)
	MaxNodes = 4 << 20 // values in one tree
)

var (
	// ErrDType: no such dtype, or one that cannot go where it was asked to.
	ErrDType = errors.New("tensor: dtype")
	// ErrShape: a shape that no tensor has, or a number of bytes that is not that of dtype and shape.
	ErrShape = errors.New("tensor: shape")
	// ErrStrides: strides that leave the memory, or a view that would have to be a copy.
	ErrStrides = errors.New("tensor: strides")
	// ErrAlign: the bytes do not begin where the machine can read elements of that type; Clone gives a tensor whose bytes do.
	ErrAlign = errors.New("tensor: alignment")
	// ErrDevice: a device's name that is none, or bytes asked of a tensor that is not in this machine's memory.
	ErrDevice = errors.New("tensor: device")
	// ErrTree: a tree that cannot travel: a nil node, a key that is no scalar, a key given twice, a leaf that is not there.
	ErrTree = errors.New("tensor: tree")
	// ErrFile: not a valid .safetensors or .npy file.
	ErrFile = errors.New("tensor: file")
	// ErrLimit: over a limit of this package.
	ErrLimit = errors.New("tensor: over a limit")
)

// Tensor is a contiguous tensor: dtype, shape and where its bytes are. The zero Tensor is none (Valid is false).
// It is a small value: copies share the bytes. The shape is the tensor's own, nobody may change it.
type Tensor struct {
	dtype  DType
	shape  Shape
	data   []byte // nil off the CPU
	device Device
	addr   uint64 // off the CPU
	bytes  int64
}

// New makes a view over data, which must have exactly the bytes of dtype and shape; data is nil or empty for a tensor without
// elements. The shape is copied, the bytes are not. The error wraps ErrDType, ErrShape or ErrLimit.
func New(dtype DType, shape Shape, data []byte) (Tensor, error) {
	n, err := dtype.Bytes(shape)
	if err != nil {
		return Tensor{}, err
	}
	if int64(len(data)) != n {
		return Tensor{}, fmt.Errorf("%w: %d bytes for %v of shape %v, which has %d", ErrShape, len(data), dtype, shape, n)
	}
	return Tensor{dtype: dtype, shape: slices.Clone(shape), data: data[:n:n], bytes: n}, nil
}

// OnDevice makes a tensor whose bytes are at an address of a device, not in this process. The error wraps ErrDType, ErrShape,
// ErrLimit or ErrDevice.
func OnDevice(dtype DType, shape Shape, device Device, addr uint64) (Tensor, error) {
	n, err := dtype.Bytes(shape)
	if err != nil {
		return Tensor{}, err
	}
	if device.CPU() {
		return Tensor{}, fmt.Errorf("%w: %v has no address space of its own; use New", ErrDevice, device)
	}
	if n > 0 && (addr == 0 || addr+uint64(n) < addr) {
		return Tensor{}, fmt.Errorf("%w: %d bytes at address %#x", ErrDevice, n, addr)
	}
	return Tensor{dtype: dtype, shape: slices.Clone(shape), device: device, addr: addr, bytes: n}, nil
}

// Valid is false for the zero Tensor only.
func (t Tensor) Valid() bool { return t.dtype != Invalid }

// DType is the type of t's elements.
func (t Tensor) DType() DType { return t.dtype }

// Shape is t's own: not to be changed.
func (t Tensor) Shape() Shape { return t.shape }

// Data is the tensor's bytes, nil if they are not in this process.
func (t Tensor) Data() []byte { return t.data }

// Device is where the bytes are.
func (t Tensor) Device() Device { return t.device }

// Addr is the bytes' address on a device, 0 on the CPU.
func (t Tensor) Addr() uint64 { return t.addr }

// Len is the number of elements: 1 for a tensor of no dimensions.
func (t Tensor) Len() int64 {
	if !t.Valid() {
		return 0
	}
	return t.bytes / t.dtype.Size()
}

// Bytes is the number of bytes.
func (t Tensor) Bytes() int64 { return t.bytes }

// Reshape gives the same bytes another shape of as many elements. The error wraps ErrShape.
func (t Tensor) Reshape(shape Shape) (Tensor, error) {
	n, err := t.dtype.Bytes(shape)
	if err != nil {
		return Tensor{}, err
	}
	if n != t.bytes {
		return Tensor{}, fmt.Errorf("%w: %v cannot become %v", ErrShape, t, shape)
	}
	t.shape = slices.Clone(shape)
	return t, nil
}

// Clone copies the bytes into memory of their own, aligned for every dtype. A tensor off the CPU is returned as it is.
func (t Tensor) Clone() Tensor {
	if t.data != nil {
		t.data = append(aligned(len(t.data))[:0], t.data...)
	}
	return t
}

// Equal is true for the same dtype, shape and bytes (so a NaN equals itself, and 0.0 is not -0.0). Off the CPU the address
// stands for the bytes.
func (t Tensor) Equal(u Tensor) bool {
	return t.dtype == u.dtype && t.device == u.device && t.addr == u.addr && slices.Equal(t.shape, u.shape) && bytes.Equal(t.data, u.data)
}

// String is such as "torch.bfloat16[4 8]", with the device unless it is the CPU.
func (t Tensor) String() string {
	s := t.dtype.String() + t.shape.String()
	if !t.device.CPU() {
		s += " on " + t.device.String()
	}
	return s
}
