package wire

import (
	"math"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/tensor"
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
	d := decoder{reader: newReader(b, 0), skeleton: skeleton, left: tensor.MaxNodes}
	if len(b) > 1 && b[0] == pickleProto && b[1] >= 2 && b[1] <= 5 {
		d.Fail(ErrMalformed, "this looks like a Python pickle; none is ever read here")
	}
	n := d.node(0)
	d.End()
	if err := d.err(); err != nil {
		return nil, err
	}
	return n, nil
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
func (d *decoder) node(depth int) tensor.Node {
	switch d.Type() {
	case msgp.NilType:
		d.Null()
		return tensor.Null{}
	case msgp.BoolType:
		return tensor.Flag(d.Bool())
	case msgp.IntType, msgp.UintType:
		u, below := d.Integer()
		if !below && u > math.MaxInt64 {
			return tensor.Uint(u)
		}
		return tensor.Int(int64(u))
	case msgp.Float32Type, msgp.Float64Type:
		return tensor.Float(d.Float())
	case msgp.StrType:
		return tensor.String(d.Text(math.MaxInt))
	case msgp.BinType:
		return tensor.Bytes(d.Bin(math.MaxInt))
	case msgp.ArrayType:
		return tensor.List(d.list(depth, false))
	case msgp.MapType:
		return d.entries(depth)
	}
	kind, data := d.Ext()
	return tensor.Ext{Type: kind, Data: data}
}

// take counts n values before memory is made for them. Each takes at least a byte of what is left.
func (d *decoder) take(n uint64) int {
	switch {
	case n > uint64(d.Left()):
		d.Truncated()
		return 0
	case n > uint64(d.left):
		d.Fail(ErrLimit, "more than %d values", tensor.MaxNodes)
		return 0
	}
	d.left -= int(n)
	return int(n)
}

// list reads an array. The list of a shape is in a tensor's map and no level of the tree.
func (d *decoder) list(depth int, shape bool) []tensor.Node {
	if depth >= tensor.MaxDepth && !shape {
		d.Fail(ErrLimit, "nested deeper than %d", tensor.MaxDepth)
	}
	v := make([]tensor.Node, d.take(uint64(d.ArrayHeader())))
	for i := range v {
		if v[i] = d.node(depth + 1); !d.OK() {
			return nil
		}
	}
	return v
}

// entries reads a map, or what it stands for.
func (d *decoder) entries(depth int) tensor.Node {
	at := d.Offset()
	n := d.take(2*uint64(d.MapHeader())) / 2
	// At the last level a map may still be a tensor, an array or an image: those have no level below.
	if depth > tensor.MaxDepth || depth == tensor.MaxDepth && n < 4 && !d.skeleton {
		d.FailAt(at, ErrLimit, "nested deeper than %d", tensor.MaxDepth)
	}
	m := make(tensor.Map, n)
	for i := range m {
		m[i].Key = d.key()
		name, _ := m[i].Key.(tensor.String)
		if m[i].Value = d.value(depth, name, n == 1); !d.OK() {
			return nil
		}
	}
	if d.skeleton && n == 1 {
		if v := d.stands(at, m[0]); v != nil {
			return v
		}
	}
	if mark := marked(m); mark != "" {
		return d.marked(at, m, mark)
	}
	if depth == tensor.MaxDepth {
		d.FailAt(at, ErrLimit, "nested deeper than %d", tensor.MaxDepth)
	}
	if err := m.CheckKeys(); err != nil {
		d.refuse(at, err)
	}
	return m
}

// key reads a map's key, which is a scalar.
func (d *decoder) key() tensor.Node {
	switch d.Type() {
	case msgp.NilType, msgp.BoolType, msgp.IntType, msgp.UintType, msgp.Float32Type, msgp.Float64Type, msgp.StrType, msgp.BinType:
		return d.node(0) // no level of the tree
	}
	if d.Left() == 0 {
		d.Truncated()
	}
	d.Fail(ErrMalformed, "a key that is no scalar")
	return nil
}

// value reads the value of a key in a map at depth. A tuple's list is the tuple: it is not a level below its map.
func (d *decoder) value(depth int, key tensor.String, only bool) tensor.Node {
	if d.Type() == msgp.ArrayType {
		switch {
		case d.skeleton && only && key == markTuple:
			return tensor.Tuple(d.list(depth, false))
		case depth == tensor.MaxDepth && key == fieldShape:
			return tensor.List(d.list(depth, true))
		}
	}
	return d.node(depth + 1)
}

// stands gives the leaf or tuple that the only entry of a map makes it, nil if it is none. at is where the map begins.
func (d *decoder) stands(at int, e tensor.Entry) tensor.Node {
	switch k, _ := e.Key.(tensor.String); k {
	case markLeaf:
		i, ok := e.Value.(tensor.Int)
		if !ok || i < 0 || i >= MaxTensors {
			d.FailAt(at, ErrMalformed, "a leaf whose index is no integer from 0 to %d", MaxTensors-1)
		}
		return tensor.Leaf(i)
	case markTuple:
		v, ok := e.Value.(tensor.Tuple)
		if !ok {
			d.FailAt(at, ErrMalformed, "a tuple without a list")
		}
		return v
	}
	return nil
}

// marked makes the tensor, array or image of a map, nil after a fault. at is where the map begins.
func (d *decoder) marked(at int, m tensor.Map, mark string) tensor.Node {
	field := fieldDType
	if mark == markImage {
		field = fieldMode
	}
	value, ok1 := m.Get(field).(tensor.String)
	list, ok2 := m.Get(fieldShape).(tensor.List)
	data, ok3 := m.Get(fieldData).(tensor.Bytes)
	if !ok1 || !ok2 || !ok3 || len(m) != 4 {
		d.FailAt(at, ErrMalformed, "a map with %s has to have just %s, %s and %s", mark, field, fieldShape, fieldData)
		return nil
	}
	if len(list) > tensor.MaxRank {
		d.FailAt(at, ErrLimit, "%d dimensions, limit %d", len(list), tensor.MaxRank)
		return nil
	}
	shape := make(tensor.Shape, len(list))
	for i, n := range list {
		dim, ok := n.(tensor.Int)
		if !ok || dim < 0 {
			d.FailAt(at, ErrMalformed, "%s: dimension %d is no integer from 0 up", mark, i)
			return nil
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
		d.refuse(at, err)
		return nil
	}
	return n
}

// newTensor is a view over data.
func newTensor(dtype string, shape tensor.Shape, data []byte) (tensor.Node, error) {
	t, err := tensor.ParseDType(dtype)
	if err != nil {
		return nil, err
	}
	return tensor.New(t, shape, data)
}
