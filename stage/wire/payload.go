package wire

import (
	"fmt"

	"github.com/tensorferry/tensorferry/tensor"
)

// Top says what was on top of a payload of kind tensors. The peers do not say it: with them a list of one tensor comes back bare,
// and a tuple as a list. Our extension carries it.
type Top uint8

// What may be on top.
const (
	TopUnknown Top = iota // of a plain peer: one tensor is bare, several are a list
	TopBare
	TopList
	TopTuple
)

// Payload is a value ready to be put: its kind and its tensors, in the order of Metadata.Specs.
type Payload struct {
	Kind    Kind
	Top     Top
	Tensors []tensor.Tensor // of kinds structured and object the first is the serialized part, in memory of its own
}

// PackOptions say how a value is packed.
type PackOptions struct {
	ObjectOptions
	// Exact packs so that plain peers too get back what was put: lists of one tensor, tuples on top and tuples without tensors
	// travel as structured payloads, where the peers themselves would lose them.
	Exact bool
}

// Pack makes a payload of a value, as the peers' put does: a tensor or a list or tuple of nothing but tensors is of kind tensors, a
// value with tensors in it structured, any other an object. Tensors are not copied. Errors are those of AppendObject.
func Pack(root tensor.Node, o PackOptions) (*Payload, error) {
	if err := tensor.Check(root); err != nil {
		return nil, err
	}
	if p := packTensors(root, o.Exact); p != nil {
		return p, nil
	}
	p := &Payload{Kind: Object, Tensors: make([]tensor.Tensor, 1)}
	serialize := AppendObject
	if tensor.HasTensor(root) || o.Exact && tensor.HasTuple(root) {
		skeleton, leaves, err := tensor.Split(root)
		if err != nil {
			return nil, err
		}
		root, serialize = skeleton, AppendSkeleton
		p.Kind, p.Tensors = Structured, append(p.Tensors, leaves...)
	}
	if n := len(p.Tensors); n > MaxTensors { // the first one is not the caller's
		return nil, fmt.Errorf("%w: %d tensors in a value, limit %d", ErrLimit, n-1, MaxTensors-1)
	}
	header, err := serialize(nil, root, o.ObjectOptions)
	if err != nil {
		return nil, err
	}
	p.Tensors[0], err = tensor.Of(header, int64(len(header)))
	return p, err
}

// packTensors gives nil if root is not of kind tensors.
func packTensors(root tensor.Node, exact bool) *Payload {
	var nodes []tensor.Node
	top := TopBare
	switch root := root.(type) {
	case tensor.Tensor:
		return &Payload{Tensors, TopBare, []tensor.Tensor{root}}
	case tensor.List:
		nodes, top = root, TopList
	case tensor.Tuple:
		nodes, top = root, TopTuple
	}
	if len(nodes) == 0 || len(nodes) > MaxTensors || exact && (top == TopTuple || len(nodes) == 1) {
		return nil
	}
	tensors := make([]tensor.Tensor, len(nodes))
	for i, n := range nodes {
		t, ok := n.(tensor.Tensor)
		if !ok {
			return nil
		}
		tensors[i] = t
	}
	return &Payload{Tensors, top, tensors}
}

// Unpack makes the value again. Tensors, and bytes in the serialized part, are views over p's tensors. Errors wrap ErrMalformed,
// ErrLimit, ErrSchema or ErrMarker, or one of package tensor's.
func (p *Payload) Unpack() (tensor.Node, error) {
	switch {
	case len(p.Tensors) == 0:
		return nil, fmt.Errorf("%w: a payload without tensors", ErrMalformed)
	case p.Kind == Tensors:
		return p.unpackTensors()
	case p.Kind != Structured && p.Kind != Object:
		return nil, fmt.Errorf("%w: kind %d", ErrSchema, p.Kind)
	}
	header, err := tensor.As[uint8](p.Tensors[0])
	if err != nil {
		return nil, fmt.Errorf("%w: the serialized part: %w", ErrMalformed, err)
	}
	if p.Kind == Object {
		return DecodeObject(header)
	}
	skeleton, err := DecodeSkeleton(header)
	if err != nil {
		return nil, err
	}
	root, err := tensor.Join(skeleton, p.Tensors[1:])
	if err != nil {
		// A plain peer's map that looks like a leaf ends here too: it is one leaf more than there are tensors.
		return nil, fmt.Errorf("%w: the skeleton does not fit its leaves: %w", ErrMarker, err)
	}
	return root, nil
}

func (p *Payload) unpackTensors() (tensor.Node, error) {
	top := p.Top
	if top == TopUnknown {
		top = TopList
		if len(p.Tensors) == 1 {
			top = TopBare
		}
	}
	if top == TopBare {
		if len(p.Tensors) > 1 {
			return nil, fmt.Errorf("%w: %d tensors where one was put", ErrMalformed, len(p.Tensors))
		}
		return p.Tensors[0], nil
	}
	nodes := make([]tensor.Node, len(p.Tensors))
	for i, t := range p.Tensors {
		nodes[i] = t
	}
	if top == TopTuple {
		return tensor.Tuple(nodes), nil
	}
	return tensor.List(nodes), nil
}

// Specs describe the payload's tensors, and give the sum of their bytes. The error wraps ErrLimit.
func (p *Payload) Specs() (specs []Spec, size int64, err error) {
	specs = make([]Spec, len(p.Tensors))
	for i, t := range p.Tensors {
		specs[i] = SpecOf(t)
		if size += t.Bytes(); size < 0 {
			return nil, 0, fmt.Errorf("%w: a payload of over 2^63 bytes", ErrLimit)
		}
	}
	return specs, size, nil
}
