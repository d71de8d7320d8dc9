package wire

import (
	"math"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
)

// DecodeObject reads what the peers' serializer, or AppendObject, wrote. Maps that the peers would turn into their own objects stay
// maps. The data of tensors, arrays, images, bytes and extensions are views over b: whoever owns b keeps it alive and unchanged
// while they are in use. Elements may be unaligned there (see tensor.As).
//
// Errors are *FrameError. Where the peers quietly make something else of a value, it is refused: a tensor with fields that they
// drop, a tensor without data but with elements (they leave its memory as it was), a shape with -1.
func DecodeObject(b []byte) (tensor.Node, error) { return decodeValue(b, false) }

// DecodeSkeleton reads what the peers, or AppendSkeleton, wrote: as DecodeObject, with leaves and tuples in it.
func DecodeSkeleton(b []byte) (tensor.Node, error) { return decodeValue(b, true) }

func decodeValue(b []byte, skeleton bool) (tensor.Node, error) {
	d := decoder{reader: newReader(b), skeleton: skeleton, left: tensor.MaxNodes}
	if len(b) > 1 && b[0] == pickleProto && b[1] >= 2 && b[1] <= 5 {
		return nil, d.fail(ErrMalformed, "this looks like a Python pickle; none is ever read here")
	}
	n, err := d.node(0)
	if err != nil {
		return nil, err
	}
	return n, d.end()
}

// pickleProto is the first byte of a pickle of protocol 2 to 5 (the protocol is the second). In msgpack it is an empty map.
const pickleProto = 0x80

// decoder reads values of any kind.
type decoder struct {
	reader
	skeleton bool
	left     int // values that may still come
}

// node reads a value that is in depth maps, lists and tuples.
func (d *decoder) node(depth int) (tensor.Node, error) {
	switch msgp.NextType(d.rest) {
	case msgp.NilType:
		d.rest = d.rest[1:]
		return tensor.Null{}, nil
	case msgp.BoolType:
		v, err := d.bool()
		return tensor.Flag(v), err
	case msgp.IntType, msgp.UintType:
		return d.integer()
	case msgp.Float32Type:
		v, rest, err := msgp.ReadFloat32Bytes(d.rest)
		if err != nil {
			return nil, d.wrong("a float", err)
		}
		d.rest = rest
		return tensor.Float(v), nil
	case msgp.Float64Type:
		v, rest, err := msgp.ReadFloat64Bytes(d.rest)
		if err != nil {
			return nil, d.wrong("a float", err)
		}
		d.rest = rest
		return tensor.Float(v), nil
	case msgp.StrType:
		v, err := d.text(math.MaxInt)
		return tensor.String(v), err
	case msgp.BinType:
		v, err := d.bin(math.MaxInt)
		return tensor.Bytes(v), err
	case msgp.ArrayType:
		v, err := d.list(depth, false)
		return tensor.List(v), err
	case msgp.MapType:
		return d.entries(depth)
	}
	return d.ext()
}

func (d *decoder) integer() (tensor.Node, error) {
	if u, rest, err := msgp.ReadUint64Bytes(d.rest); err == nil {
		d.rest = rest
		if u > math.MaxInt64 {
			return tensor.Uint(u), nil
		}
		return tensor.Int(u), nil
	}
	i, err := d.int(math.MinInt64, math.MaxInt64)
	return tensor.Int(i), err
}

// ext reads an extension value: msgp knows some types of them by name.
func (d *decoder) ext() (tensor.Node, error) {
	n, ok := leafSize(d.rest)
	if !ok {
		return nil, d.fail(ErrMalformed, "no msgpack value begins with this byte")
	}
	if n > uint64(len(d.rest)) {
		return nil, d.truncated()
	}
	head := 1 // of the type
	if c := d.rest[0]; c >= 0xc7 && c <= 0xc9 {
		head += 1 << (c - 0xc7)
	}
	v := tensor.Ext{Type: int8(d.rest[head]), Data: d.rest[head+1 : n : n]}
	d.rest = d.rest[n:]
	return v, nil
}

// take counts n values before memory is made for them. Each takes at least a byte of what is left.
func (d *decoder) take(n uint64) error {
	if n > uint64(len(d.rest)) {
		return d.truncated()
	}
	if n > uint64(d.left) {
		return d.fail(ErrLimit, "more than %d values", tensor.MaxNodes)
	}
	d.left -= int(n)
	return nil
}

// list reads an array. The list of a shape is in a tensor's map and no level of the tree.
func (d *decoder) list(depth int, shape bool) ([]tensor.Node, error) {
	if depth >= tensor.MaxDepth && !shape {
		return nil, d.fail(ErrLimit, "nested deeper than %d", tensor.MaxDepth)
	}
	n, rest, err := msgp.ReadArrayHeaderBytes(d.rest)
	if err != nil {
		return nil, d.wrong("an array", err)
	}
	d.rest = rest
	if err := d.take(uint64(n)); err != nil {
		return nil, err
	}
	v := make([]tensor.Node, n)
	for i := range v {
		if v[i], err = d.node(depth + 1); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// entries reads a map, or what it stands for.
func (d *decoder) entries(depth int) (tensor.Node, error) {
	at := *d
	n, rest, err := msgp.ReadMapHeaderBytes(d.rest)
	if err != nil {
		return nil, d.wrong("a map", err)
	}
	d.rest = rest
	if err := d.take(2 * uint64(n)); err != nil {
		return nil, err
	}
	// At the last level a map may still be a tensor, an array or an image: those have no level below.
	if depth > tensor.MaxDepth || depth == tensor.MaxDepth && n < 4 && !d.skeleton {
		return nil, at.fail(ErrLimit, "nested deeper than %d", tensor.MaxDepth)
	}
	m := make(tensor.Map, n)
	for i := range m {
		key, err := d.key()
		if err != nil {
			return nil, err
		}
		m[i].Key = key
		name, _ := key.(tensor.String)
		if m[i].Value, err = d.value(depth, name, n == 1); err != nil {
			return nil, err
		}
	}
	if d.skeleton && n == 1 {
		if v, err := at.stands(m[0]); v != nil || err != nil {
			return v, err
		}
	}
	if mark := marked(m); mark != "" {
		return at.marked(m, mark)
	}
	if depth == tensor.MaxDepth {
		return nil, at.fail(ErrLimit, "nested deeper than %d", tensor.MaxDepth)
	}
	if err := m.CheckKeys(); err != nil {
		return nil, at.refuse(err)
	}
	return m, nil
}

// key reads a map's key, which is a scalar.
func (d *decoder) key() (tensor.Node, error) {
	switch msgp.NextType(d.rest) {
	case msgp.NilType, msgp.BoolType, msgp.IntType, msgp.UintType, msgp.Float32Type, msgp.Float64Type, msgp.StrType, msgp.BinType:
		return d.node(0) // no level of the tree
	}
	if len(d.rest) == 0 {
		return nil, d.truncated()
	}
	return nil, d.fail(ErrMalformed, "a key that is no scalar")
}

// value reads the value of a key in a map at depth. A tuple's list is the tuple: it is not a level below its map.
func (d *decoder) value(depth int, key tensor.String, only bool) (tensor.Node, error) {
	if msgp.NextType(d.rest) == msgp.ArrayType {
		switch {
		case d.skeleton && only && key == markTuple:
			v, err := d.list(depth, false)
			return tensor.Tuple(v), err
		case depth == tensor.MaxDepth && key == fieldShape:
			v, err := d.list(depth, true)
			return tensor.List(v), err
		}
	}
	return d.node(depth + 1)
}

// stands gives the leaf or tuple that the only entry of a map makes it, nil if it is none. d is where the map begins.
func (d *decoder) stands(e tensor.Entry) (tensor.Node, error) {
	switch k, _ := e.Key.(tensor.String); k {
	case markLeaf:
		i, ok := e.Value.(tensor.Int)
		if !ok || i < 0 || i >= MaxTensors {
			return nil, d.fail(ErrMalformed, "a leaf whose index is no integer from 0 to %d", MaxTensors-1)
		}
		return tensor.Leaf(i), nil
	case markTuple:
		v, ok := e.Value.(tensor.Tuple)
		if !ok {
			return nil, d.fail(ErrMalformed, "a tuple without a list")
		}
		return v, nil
	}
	return nil, nil
}

// marked makes the tensor, array or image of a map. d is where the map begins.
func (d *decoder) marked(m tensor.Map, mark string) (tensor.Node, error) {
	field := fieldDType
	if mark == markImage {
		field = fieldMode
	}
	value, ok1 := m.Get(field).(tensor.String)
	list, ok2 := m.Get(fieldShape).(tensor.List)
	data, ok3 := m.Get(fieldData).(tensor.Bytes)
	if !ok1 || !ok2 || !ok3 || len(m) != 4 {
		return nil, d.fail(ErrMalformed, "a map with %s has to have just %s, %s and %s", mark, field, fieldShape, fieldData)
	}
	if len(list) > tensor.MaxRank {
		return nil, d.fail(ErrLimit, "%d dimensions, limit %d", len(list), tensor.MaxRank)
	}
	shape := make(tensor.Shape, len(list))
	for i, n := range list {
		dim, ok := n.(tensor.Int)
		if !ok || dim < 0 {
			return nil, d.fail(ErrMalformed, "%s: dimension %d is no integer from 0 up", mark, i)
		}
		shape[i] = int64(dim)
	}
	var n tensor.Node
	var err error
	switch mark {
	case markTensor:
		n, err = newTensor(string(value), shape, data)
	case markArray:
		a := tensor.NDArray{DType: string(value), Shape: shape, Data: data}
		n, err = a, a.Check()
	default:
		p := tensor.Image{Mode: string(value), Shape: shape, Data: data}
		n, err = p, p.Check()
	}
	if err != nil {
		return nil, d.refuse(err)
	}
	return n, nil
}

// newTensor is a view over data.
func newTensor(dtype string, shape tensor.Shape, data []byte) (tensor.Node, error) {
	t, err := tensor.ParseDType(dtype)
	if err != nil {
		return nil, err
	}
	return tensor.New(t, shape, data)
}
