package wire

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/tensorferry/tensorferry/internal/msgpack"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
)

// ObjectOptions say what may be serialized.
type ObjectOptions struct {
	// PeerObjects lets maps through that a plain reader turns into one of its own objects (RequestOutput, CompletionOutput,
	// OmniRequestOutput) because of the keys they have: for relaying such objects. Without it they are refused with ErrMarker.
	PeerObjects bool
}

// AppendObject appends root serialized as the peers do. Tuples become lists, as theirs do: use Pack with Exact to keep them.
// Tensors and arrays are copied into it; they must be on the CPU.
//
// Errors wrap ErrMarker, ErrLimit, or one of package tensor's (tensor.Check), and b is returned as it was.
func AppendObject(b []byte, root tensor.Node, o ObjectOptions) ([]byte, error) {
	return appendValue(b, root, encoder{ObjectOptions: o})
}

// ObjectParts serializes as AppendObject does, and leaves the bytes of large tensors, arrays and images where they are: the parts one
// after the other are what AppendObject would append, size bytes in all. Those parts are views: root's memory must stay as it is while
// they are in use. Errors are those of AppendObject.
func ObjectParts(root tensor.Node, o ObjectOptions) (parts [][]byte, size int64, err error) {
	var cuts []cut
	b, err := appendValue(nil, root, encoder{ObjectOptions: o, cuts: &cuts})
	if err != nil {
		return nil, 0, err
	}
	size = int64(len(b))
	parts = make([][]byte, 0, 2*len(cuts)+1)
	at := 0
	for _, c := range cuts {
		parts = append(parts, b[at:c.at], c.data)
		size += int64(len(c.data))
		at = c.at
	}
	if at < len(b) {
		parts = append(parts, b[at:])
	}
	return parts, size, nil
}

// partMin is what is worth a part of its own.
const partMin = 16 << 10

// cut is where data of the caller's belongs in what was encoded, by offset.
type cut struct {
	at   int
	data []byte
}

// AppendSkeleton appends a skeleton (see tensor.Split) serialized as the peers do. Errors are those of AppendObject.
func AppendSkeleton(b []byte, skeleton tensor.Node, o ObjectOptions) ([]byte, error) {
	return appendValue(b, skeleton, encoder{ObjectOptions: o, skeleton: true})
}

func appendValue(b []byte, root tensor.Node, e encoder) ([]byte, error) {
	if err := tensor.Check(root); err != nil {
		return b, err
	}
	// Large payloads are copied once: grown by doubling, they would be several times.
	out, err := e.node(slices.Grow(b, e.room(root)), root)
	if err != nil {
		return b, err
	}
	return out, nil
}

// encoder writes trees that tensor.Check let through.
type encoder struct {
	ObjectOptions
	skeleton bool
	cuts     *[]cut // if set, large data is noted here and not copied
}

// room is about the encoded size.
func (e encoder) room(n tensor.Node) int {
	const marked = 96 // names, dtype and a few dimensions
	switch n := n.(type) {
	case tensor.String:
		return 5 + len(n)
	case tensor.Bytes:
		return 5 + len(n)
	case tensor.Ext:
		return 6 + len(n.Data)
	case tensor.Tensor:
		return marked + e.roomFor(n.Data())
	case tensor.NDArray:
		return marked + e.roomFor(n.Data)
	case tensor.Image:
		return marked + e.roomFor(n.Data)
	case tensor.Leaf:
		return 32
	case tensor.List:
		return e.roomAll(n)
	case tensor.Tuple:
		return e.roomAll(n)
	case tensor.Map:
		size := 5
		for _, x := range n {
			size += e.room(x.Key) + e.room(x.Value)
		}
		return size
	}
	return 9
}

func (e encoder) roomFor(data []byte) int {
	if e.cuts != nil && len(data) >= partMin {
		return 0
	}
	return len(data)
}

func (e encoder) roomAll(nodes []tensor.Node) int {
	size := 24
	for _, n := range nodes {
		size += e.room(n)
	}
	return size
}

func (e encoder) node(b []byte, n tensor.Node) ([]byte, error) {
	switch n := n.(type) {
	case tensor.Null:
		return msgp.AppendNil(b), nil
	case tensor.Flag:
		return msgp.AppendBool(b, bool(n)), nil
	case tensor.Int:
		return msgpack.AppendInt(b, int64(n)), nil
	case tensor.Uint:
		return msgp.AppendUint64(b, uint64(n)), nil
	case tensor.Float:
		return msgp.AppendFloat64(b, float64(n)), nil
	case tensor.String:
		return e.bytes(msgp.AppendString(b, string(n)), len(n))
	case tensor.Bytes:
		return e.bytes(msgp.AppendBytes(b, n), len(n))
	case tensor.Ext:
		return appendExt(b, n)
	case tensor.List:
		return e.nodes(b, n)
	case tensor.Tuple:
		if e.skeleton {
			b = msgp.AppendString(msgp.AppendMapHeader(b, 1), markTuple)
		}
		return e.nodes(b, n)
	case tensor.Map:
		return e.entries(b, n)
	case tensor.Leaf:
		if !e.skeleton {
			return b, fmt.Errorf("%w: leaf %d outside a skeleton", tensor.ErrTree, int(n))
		}
		if n < 0 {
			return b, fmt.Errorf("%w: leaf %d", tensor.ErrTree, int(n))
		}
		return msgpack.AppendInt(msgp.AppendString(msgp.AppendMapHeader(b, 1), markLeaf), int64(n)), nil
	case tensor.Tensor:
		if e.skeleton {
			return b, fmt.Errorf("%w: %v in a skeleton; tensors are its leaves (tensor.Split)", tensor.ErrTree, n)
		}
		if !n.Device().CPU() {
			return b, fmt.Errorf("%w: %v is not in this process and cannot be serialized", tensor.ErrDevice, n)
		}
		return e.marked(b, markTensor, fieldDType, n.DType().Name(), n.Shape(), n.Data())
	case tensor.NDArray:
		return e.marked(b, markArray, fieldDType, n.DType, n.Shape, n.Data)
	case tensor.Image:
		return e.marked(b, markImage, fieldMode, n.Mode, n.Shape, n.Data)
	}
	return b, fmt.Errorf("%w: a node of kind %T", tensor.ErrTree, n)
}

// bytes checks that a length could be written.
func (e encoder) bytes(b []byte, n int) ([]byte, error) {
	if uint64(n) > math.MaxUint32 {
		return b, fmt.Errorf("%w: %d bytes in one value, limit 2^32-1", ErrLimit, n)
	}
	return b, nil
}

func (e encoder) nodes(b []byte, nodes []tensor.Node) (_ []byte, err error) {
	b = msgp.AppendArrayHeader(b, uint32(len(nodes))) // tensor.MaxNodes is under 2^32
	for _, n := range nodes {
		if b, err = e.node(b, n); err != nil {
			return b, err
		}
	}
	return b, nil
}

func (e encoder) entries(b []byte, m tensor.Map) (_ []byte, err error) {
	if mark := marked(m); mark != "" {
		return b, fmt.Errorf("%w: a map whose key %s is true would arrive as a tensor, array or image", ErrMarker, mark)
	}
	if e.skeleton && len(m) == 1 {
		if k, _ := m[0].Key.(tensor.String); k == markLeaf || k == markTuple {
			return b, fmt.Errorf("%w: a map with the only key %s would arrive as a tensor or a tuple", ErrMarker, string(k))
		}
	}
	if !e.PeerObjects {
		if o := peerObject(m); o != "" {
			return b, fmt.Errorf("%w: a map with keys of a vLLM %s would arrive as one; set PeerObjects if it is one", ErrMarker, o)
		}
	}
	b = msgp.AppendMapHeader(b, uint32(len(m)))
	for _, x := range m {
		if b, err = e.node(b, x.Key); err != nil {
			return b, err
		}
		if b, err = e.node(b, x.Value); err != nil {
			return b, err
		}
	}
	return b, nil
}

func (e encoder) marked(b []byte, mark, field, value string, shape tensor.Shape, data []byte) ([]byte, error) {
	if uint64(len(data)) > math.MaxUint32 {
		return b, fmt.Errorf("%w: %d bytes in one tensor or array of a serialized value, limit 2^32-1; send it as a leaf", ErrLimit, len(data))
	}
	b = msgp.AppendMapHeader(b, 4)
	b = msgp.AppendBool(msgp.AppendString(b, mark), true)
	b = msgpack.AppendStr(b, field, value)
	b = appendShape(b, shape)
	b = msgp.AppendString(b, fieldData)
	if e.cuts == nil || len(data) < partMin {
		return msgp.AppendBytes(b, data), nil
	}
	b = msgp.AppendBytesHeader(b, uint32(len(data)))
	*e.cuts = append(*e.cuts, cut{len(b), data})
	return b, nil
}

// appendExt writes the shortest form, as msgspec does.
func appendExt(b []byte, x tensor.Ext) ([]byte, error) {
	n := len(x.Data)
	switch {
	case n == 1 || n == 2 || n == 4 || n == 8 || n == 16:
		code := byte(0xd4)
		for m := n; m > 1; m /= 2 {
			code++
		}
		b = append(b, code)
	case n <= math.MaxUint8:
		b = append(b, 0xc7, byte(n))
	case n <= math.MaxUint16:
		b = append(b, 0xc8, byte(n>>8), byte(n))
	case uint64(n) <= math.MaxUint32:
		b = append(b, 0xc9, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
	default:
		return b, errors.Join(ErrLimit, fmt.Errorf("an extension value of %d bytes", n))
	}
	return append(append(b, byte(x.Type)), x.Data...), nil
}
