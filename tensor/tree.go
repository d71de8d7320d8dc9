package tensor

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"
)

// Node is one value of a tree: one of the types below, Ext, NDArray, Image and Tensor, as values. A nil Node is an error wherever
// a tree is taken.
type Node interface{ node() }

// The kinds of values. What an engine's Python has for each is in the comment.
type (
	Null   struct{} // None
	Flag   bool     // bool
	Int    int64    // int
	Uint   uint64   // int over the largest int64; smaller ones are Int
	Float  float64  // float
	String string   // str, UTF-8
	Bytes  []byte   // bytes; may be a view
	List   []Node   // list
	Tuple  []Node   // tuple
	Map    []Entry  // dict: entries in order, keys are scalars and differ
	Leaf   int      // stands for a tensor in a skeleton; see Split
)

// Ext is a msgpack extension value; type -1 is a datetime with its zone.
type Ext struct {
	Type int8
	Data []byte // may be a view
}

// Entry is one key and its value. A key is one of Null, Flag, Int, Uint, Float, String and Bytes.
type Entry struct {
	Key, Value Node
}

// NDArray is a numpy array: as Tensor, but any numpy dtype, in either byte order. Row-major.
type NDArray struct {
	DType string // numpy's array protocol type string, such as "<f4", ">i2", "|b1", "<U3"
	Shape Shape
	Data  []byte // may be a view
}

// Image is pixels with a mode's name, as the peers send a PIL image. Row-major uint8, height first.
type Image struct {
	Mode  string // PIL's, such as "RGB"
	Shape Shape  // height, width, and channels if there is more than one
	Data  []byte // may be a view
}

func (Null) node()    {}
func (Flag) node()    {}
func (Int) node()     {}
func (Uint) node()    {}
func (Float) node()   {}
func (String) node()  {}
func (Bytes) node()   {}
func (List) node()    {}
func (Tuple) node()   {}
func (Map) node()     {}
func (Leaf) node()    {}
func (Ext) node()     {}
func (Tensor) node()  {}
func (NDArray) node() {}
func (Image) node()   {}

// Field makes an entry of a map whose key is a string.
func Field(name string, value Node) Entry { return Entry{String(name), value} }

// Get gives the value of a key that is a string; nil if there is none.
func (m Map) Get(name string) Node {
	for _, e := range m {
		if k, ok := e.Key.(String); ok && string(k) == name {
			return e.Value
		}
	}
	return nil
}

// Check is the error that Split and the encoders would give for root, nil if it can travel: nodes are there, keys are scalars
// that differ in Python too (1, 1.0 and True are one key there), depth and number are within MaxDepth and MaxNodes, text is UTF-8,
// arrays and images have the bytes of their shape. A skeleton's leaves are allowed. Errors wrap ErrTree, ErrLimit, ErrShape or ErrDType, and
// name the place, such as $.layers[3].
func Check(root Node) error {
	w := walk{visit: func(n Node, _ *path) (Node, error) { return n, nil }}
	_, err := w.node(root, nil, 0)
	return err
}

// Split takes a tree apart: the skeleton is root with every tensor replaced by a Leaf, numbered from 0 in the order of appearance;
// leaves are the tensors. The skeleton shares what it can with root. Errors are those of Check, and ErrTree for a Leaf in root.
func Split(root Node) (skeleton Node, leaves []Tensor, err error) {
	w := walk{visit: func(n Node, at *path) (Node, error) {
		switch n := n.(type) {
		case Tensor:
			leaves = append(leaves, n)
			return Leaf(len(leaves) - 1), nil
		case Leaf:
			return nil, fmt.Errorf("%w: leaf %d at %v: this already is a skeleton", ErrTree, int(n), at)
		}
		return n, nil
	}}
	if skeleton, err = w.node(root, nil, 0); err != nil {
		return nil, nil, err
	}
	return skeleton, leaves, nil
}

// Join puts the leaves back. Every leaf must be in the skeleton exactly once; ErrTree otherwise. A tree in which something only
// looks like a leaf is caught by this: it makes more leaves than there are tensors.
func Join(skeleton Node, leaves []Tensor) (Node, error) {
	used := make([]bool, len(leaves))
	n := 0
	w := walk{visit: func(v Node, at *path) (Node, error) {
		switch v := v.(type) {
		case Leaf:
			if v < 0 || int(v) >= len(leaves) {
				return nil, fmt.Errorf("%w: leaf %d at %v, of %d", ErrTree, int(v), at, len(leaves))
			}
			if used[v] {
				return nil, fmt.Errorf("%w: leaf %d at %v for the second time", ErrTree, int(v), at)
			}
			used[v] = true
			n++
			return leaves[v], nil
		case Tensor:
			return nil, fmt.Errorf("%w: a tensor in a skeleton, at %v", ErrTree, at)
		}
		return v, nil
	}}
	root, err := w.node(skeleton, nil, 0)
	if err != nil {
		return nil, err
	}
	if n < len(leaves) {
		return nil, fmt.Errorf("%w: leaf %d of %d is not in the skeleton", ErrTree, slices.Index(used, false), len(leaves))
	}
	return root, nil
}

// HasTensor is true if a tensor is in the tree, within MaxDepth.
func HasTensor(root Node) bool {
	found := false
	w := walk{visit: func(n Node, _ *path) (Node, error) {
		if _, ok := n.(Tensor); ok {
			found = true
			return nil, errStop
		}
		return n, nil
	}}
	_, _ = w.node(root, nil, 0) // it is looked at for tensors only; its faults are Check's
	return found
}

// HasTuple is true if a tuple is in the tree, within MaxDepth.
func HasTuple(root Node) bool { return hasTuple(root, 0) }

func hasTuple(n Node, depth int) bool {
	if depth > MaxDepth {
		return false
	}
	switch n := n.(type) {
	case Tuple:
		return true
	case List:
		return slices.ContainsFunc(n, func(v Node) bool { return hasTuple(v, depth+1) })
	case Map:
		return slices.ContainsFunc(n, func(e Entry) bool { return hasTuple(e.Value, depth+1) })
	}
	return false
}

var errStop = fmt.Errorf("%w: stop", ErrTree)

// walk rebuilds a tree with every node that is no map, list or tuple replaced by what visit gives. Parts in which nothing is
// replaced are shared.
type walk struct {
	visit func(Node, *path) (Node, error)
	count int
}

// path is where a node is, innermost first; nil is the root.
type path struct {
	up  *path
	key Node // of a map
	i   int  // in a list or tuple, if key is nil
}

func (p *path) String() string {
	if p == nil {
		return "$"
	}
	switch k := p.key.(type) {
	case nil:
		return p.up.String() + "[" + strconv.Itoa(p.i) + "]"
	case String:
		return p.up.String() + "." + strconv.Quote(string(k[:min(len(k), 40)]))
	default:
		return p.up.String() + "." + fmt.Sprintf("%.40v", k)
	}
}

func (w *walk) node(n Node, at *path, depth int) (Node, error) {
	if w.count++; w.count > MaxNodes {
		return nil, fmt.Errorf("%w: more than %d values in a tree", ErrLimit, MaxNodes)
	}
	switch v := n.(type) {
	case nil:
		return nil, fmt.Errorf("%w: nil at %v; None is tensor.Null{}", ErrTree, at)
	case Map:
		return w.entries(v, at, depth)
	case List:
		nodes, changed, err := w.nodes(v, at, depth)
		if err != nil || !changed {
			return n, err
		}
		return List(nodes), nil
	case Tuple:
		nodes, changed, err := w.nodes(v, at, depth)
		if err != nil || !changed {
			return n, err
		}
		return Tuple(nodes), nil
	case String:
		if !utf8.ValidString(string(v)) {
			return nil, fmt.Errorf("%w: text that is not UTF-8 at %v; send it as Bytes", ErrTree, at)
		}
	case Tensor:
		if !v.Valid() {
			return nil, fmt.Errorf("%w: the zero Tensor at %v", ErrTree, at)
		}
	case NDArray:
		if err := v.Check(); err != nil {
			return nil, fmt.Errorf("%w, at %v", err, at)
		}
	case Image:
		if err := v.Check(); err != nil {
			return nil, fmt.Errorf("%w, at %v", err, at)
		}
	}
	return w.visit(n, at)
}

// nodes walks the values of a list or tuple. They are copied when the first of them is replaced.
func (w *walk) nodes(in []Node, at *path, depth int) (out []Node, changed bool, err error) {
	if depth == MaxDepth {
		return nil, false, tooDeep(at)
	}
	here := path{up: at}
	for i, n := range in {
		here.i = i
		m, err := w.node(n, &here, depth+1)
		if err != nil {
			return nil, false, err
		}
		if !changed {
			if same(n, m) {
				continue
			}
			out, changed = slices.Clone(in), true
		}
		out[i] = m
	}
	return out, changed, nil
}

func (w *walk) entries(in Map, at *path, depth int) (Node, error) {
	if depth == MaxDepth {
		return nil, tooDeep(at)
	}
	if err := in.CheckKeys(); err != nil {
		return nil, fmt.Errorf("%w, at %v", err, at)
	}
	here := path{up: at}
	out, changed := in, false
	for i, e := range in {
		here.key = e.Key
		m, err := w.node(e.Value, &here, depth+1)
		if err != nil {
			return nil, err
		}
		if !changed {
			if same(e.Value, m) {
				continue
			}
			out, changed = slices.Clone(in), true
		}
		out[i].Value = m
	}
	return out, nil
}

func tooDeep(at *path) error {
	s := at.String()
	return fmt.Errorf("%w: nested deeper than %d, at %s...", ErrLimit, MaxDepth, s[:min(len(s), 60)])
}

// same is true if m is n untouched: what is replaced changes its kind, or is a container that was copied.
func same(n, m Node) bool {
	switch n := n.(type) {
	case Map:
		m, ok := m.(Map)
		return ok && len(n) == len(m) && (len(n) == 0 || &n[0] == &m[0])
	case List:
		m, ok := m.(List)
		return ok && len(n) == len(m) && (len(n) == 0 || &n[0] == &m[0])
	case Tuple:
		m, ok := m.(Tuple)
		return ok && len(n) == len(m) && (len(n) == 0 || &n[0] == &m[0])
	case Tensor:
		_, replaced := m.(Leaf)
		return !replaced
	case Leaf:
		_, replaced := m.(Tensor)
		return !replaced
	}
	return true
}

// scalar is a key as Python compares keys.
type scalar struct {
	kind byte
	num  uint64
	text string
}

// scalarOf is not ok for what cannot be a key.
func scalarOf(n Node) (scalar, bool) {
	switch n := n.(type) {
	case Null:
		return scalar{kind: 'n'}, true
	case Flag:
		if n {
			return scalar{kind: 'i', num: 1}, true
		}
		return scalar{kind: 'i'}, true
	case Int:
		return scalar{kind: 'i', num: uint64(n)}, true
	case Uint:
		if n <= math.MaxInt64 {
			return scalar{kind: 'i', num: uint64(n)}, true
		}
		return scalar{kind: 'u', num: uint64(n)}, true
	case Float:
		f := float64(n)
		switch {
		case f != math.Trunc(f): // also NaN
		case f >= -1<<63 && f < 1<<63:
			return scalar{kind: 'i', num: uint64(int64(f))}, true
		case f >= 1<<63 && f < 1<<64:
			return scalar{kind: 'u', num: uint64(f)}, true
		}
		return scalar{kind: 'f', num: math.Float64bits(f)}, true
	case String:
		return scalar{kind: 's', text: string(n)}, true
	case Bytes:
		return scalar{kind: 'b', text: string(n)}, true
	}
	return scalar{}, false
}

// CheckKeys is nil if the keys are scalars that differ, in Python too: 1, 1.0 and True are one key there. Errors wrap ErrTree.
func (m Map) CheckKeys() error {
	const few = 16 // compared one by one up to here
	var seen map[scalar]bool
	if len(m) > few {
		seen = make(map[scalar]bool, len(m))
	}
	var first [few]scalar
	for i, e := range m {
		k, ok := scalarOf(e.Key)
		if !ok {
			return fmt.Errorf("%w: a key of kind %T; keys are scalars", ErrTree, e.Key)
		}
		if k.kind == 's' && !utf8.ValidString(k.text) {
			return fmt.Errorf("%w: key %.40q is not UTF-8", ErrTree, k.text)
		}
		again := false
		if seen != nil {
			again = seen[k]
			seen[k] = true
		} else {
			again = slices.Contains(first[:i], k)
			first[i] = k
		}
		if again {
			return fmt.Errorf("%w: key %.40v twice (Python takes 1, 1.0 and True for one)", ErrTree, e.Key)
		}
	}
	return nil
}

// Check is nil if a has the bytes of its dtype and shape. Errors wrap ErrDType (also for dtypes of Python objects), ErrShape or
// ErrLimit.
func (a NDArray) Check() error {
	item, err := numpyItem(a.DType)
	if err != nil {
		return err
	}
	return checkBytes(a.Shape, item, a.Data)
}

// Check is nil if m has the bytes of its shape. Errors wrap ErrShape or ErrLimit.
func (m Image) Check() error {
	if len(m.Shape) != 2 && len(m.Shape) != 3 {
		return fmt.Errorf("%w: an image of shape %v", ErrShape, m.Shape)
	}
	return checkBytes(m.Shape, 1, m.Data)
}

func checkBytes(s Shape, item int64, data []byte) error {
	n, err := s.bytes(item)
	if err == nil && n != int64(len(data)) {
		err = fmt.Errorf("%w: %d bytes for shape %v of %d bytes each", ErrShape, len(data), s, item)
	}
	return err
}

// Equal is true for trees of the same kinds and values, entries of maps in the same order. A NaN equals itself; -0.0 is not 0.0.
// Both must be within MaxDepth.
func Equal(a, b Node) bool {
	switch a := a.(type) {
	case Map:
		b, ok := b.(Map)
		return ok && slices.EqualFunc(a, b, func(a, b Entry) bool { return Equal(a.Key, b.Key) && Equal(a.Value, b.Value) })
	case List:
		b, ok := b.(List)
		return ok && slices.EqualFunc(a, b, Equal)
	case Tuple:
		b, ok := b.(Tuple)
		return ok && slices.EqualFunc(a, b, Equal)
	case Bytes:
		b, ok := b.(Bytes)
		return ok && bytes.Equal(a, b)
	case Ext:
		b, ok := b.(Ext)
		return ok && a.Type == b.Type && bytes.Equal(a.Data, b.Data)
	case Float:
		b, ok := b.(Float)
		return ok && math.Float64bits(float64(a)) == math.Float64bits(float64(b))
	case Tensor:
		b, ok := b.(Tensor)
		return ok && a.Equal(b)
	case NDArray:
		b, ok := b.(NDArray)
		return ok && a.DType == b.DType && slices.Equal(a.Shape, b.Shape) && bytes.Equal(a.Data, b.Data)
	case Image:
		b, ok := b.(Image)
		return ok && a.Mode == b.Mode && slices.Equal(a.Shape, b.Shape) && bytes.Equal(a.Data, b.Data)
	}
	return a == b // the other kinds are comparable
}
