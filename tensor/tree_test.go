package tensor

import (
	"errors"
	"math"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestSplitNumbersLeavesInOrderAndJoinPutsThemBack(t *testing.T) {
	a, b, c := mustOf(t, []float32{1}, 1), mustOf(t, []int64{2}), mustOf(t, []uint8{}, 0)
	root := Map{
		Field("x", List{a, Int(1), Tuple{Null{}, b}}),
		Field("y", Map{{Int(-1), c}, {Bytes{0}, Bytes{1, 2}}}),
		Field("z", String("s")),
	}
	skeleton, leaves, err := Split(root)
	if err != nil {
		t.Fatal(err)
	}
	want := Map{
		Field("x", List{Leaf(0), Int(1), Tuple{Null{}, Leaf(1)}}),
		Field("y", Map{{Int(-1), Leaf(2)}, {Bytes{0}, Bytes{1, 2}}}),
		Field("z", String("s")),
	}
	if !Equal(skeleton, want) {
		t.Errorf("%v, want %v", skeleton, want)
	}
	if len(leaves) != 3 || !leaves[0].Equal(a) || !leaves[1].Equal(b) || !leaves[2].Equal(c) {
		t.Error(leaves)
	}
	if HasTensor(skeleton) || !HasTensor(root) {
		t.Error("the split tree was changed, or the skeleton has tensors")
	}
	back, err := Join(skeleton, leaves)
	if err != nil || !Equal(back, root) {
		t.Error(back, err)
	}
	if !Equal(skeleton, want) {
		t.Error("Join changed the skeleton")
	}
}

func TestJoinTakesEveryLeafExactlyOnce(t *testing.T) {
	leaves := []Tensor{mustOf(t, []int8{1}, 1), mustOf(t, []int8{2}, 1)}
	for name, skeleton := range map[string]Node{
		"twice":          List{Leaf(0), Leaf(1), Leaf(0)},
		"not there":      List{Leaf(0), Leaf(2)},
		"below 0":        List{Leaf(0), Leaf(-1)},
		"left over":      List{Leaf(1)},
		"a tensor":       List{Leaf(0), Leaf(1), leaves[0]},
		"nil":            List{Leaf(0), Leaf(1), nil},
		"nothing at all": Null{},
	} {
		if n, err := Join(skeleton, leaves); !errors.Is(err, ErrTree) {
			t.Errorf("%s: %v, %v", name, n, err)
		}
	}
}

func nest(n int) Node {
	var v Node = Null{}
	for range n {
		v = List{v}
	}
	return v
}

func TestTreesThatCannotTravelAreRefusedAndThePlaceIsNamed(t *testing.T) {
	loop := make(List, 1)
	loop[0] = loop
	double := Node(Null{})
	for range 60 {
		double = Tuple{double, double}
	}
	for _, c := range []struct {
		name  string
		root  Node
		want  error
		place string
	}{
		{"nil", nil, ErrTree, "$"},
		{"nil inside", Map{Field("a", List{Int(1), nil})}, ErrTree, `$."a"[1]`},
		{"key of a list", Map{{List{}, Int(1)}}, ErrTree, "$"},
		{"key of nothing", Map{{nil, Int(1)}}, ErrTree, "$"},
		{"key twice", Map{Field("a", Int(1)), Field("a", Int(2))}, ErrTree, "$"},
		{"key twice for Python", List{Map{{Int(1), Null{}}, {Flag(true), Null{}}}}, ErrTree, "$[0]"},
		{"key twice for Python, float", Map{{Float(-0.0), Null{}}, {Int(0), Null{}}}, ErrTree, "$"},
		{"key twice for Python, large", Map{{Float(1 << 63), Null{}}, {Uint(1 << 63), Null{}}}, ErrTree, "$"},
		{"text that is not UTF-8", List{String("\xff")}, ErrTree, "$[0]"},
		{"key that is not UTF-8", Map{Field("\xff", Null{})}, ErrTree, "$"},
		{"zero tensor", List{Tensor{}}, ErrTree, "$[0]"},
		{"too deep", nest(MaxDepth + 1), ErrLimit, "$[0]"},
		{"a loop", loop, ErrLimit, "$[0]"},
		{"too many", double, ErrLimit, ""},
		{"array", List{NDArray{"<f4", Shape{2}, make([]byte, 7)}}, ErrShape, "$[0]"},
		{"array of objects", NDArray{"|O", Shape{2}, nil}, ErrDType, "$"},
		{"image", Image{"RGB", Shape{2, 2, 3}, make([]byte, 11)}, ErrShape, "$"},
		{"image of one dimension", Image{"L", Shape{2}, make([]byte, 2)}, ErrShape, "$"},
	} {
		if err := Check(c.root); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.place) {
			t.Errorf("%s: %v, want %v at %s", c.name, err, c.want, c.place)
		}
		if c.place == "" {
			continue // it takes a while
		}
		if _, _, err := Split(c.root); !errors.Is(err, c.want) {
			t.Errorf("%s: split: %v", c.name, err)
		}
	}
	if _, _, err := Split(List{Leaf(0)}); !errors.Is(err, ErrTree) {
		t.Error(err)
	}
	many := make(Map, 40)
	for i := range many {
		many[i] = Entry{Int(i), Null{}}
	}
	for _, ok := range []Node{Null{}, nest(MaxDepth), Map{}, List{}, many, Map{{Float(math.NaN()), Null{}}, {Float(0.5), Null{}}, {Null{}, Null{}}, {String("1"), Null{}}, {Bytes("1"), Null{}}, {Int(1), Null{}}}} {
		if err := Check(ok); err != nil {
			t.Error(err)
		}
	}
	many[39].Key = Float(3)
	if err := Check(many); !errors.Is(err, ErrTree) {
		t.Error("a key twice among many:", err)
	}
}

func TestGetFindsTextKeysOnly(t *testing.T) {
	m := Map{{Int(1), Null{}}, Field("a", Int(2))}
	if m.Get("a") != Int(2) || m.Get("1") != nil {
		t.Error(m)
	}
}

func TestEqualTellsKindsApart(t *testing.T) {
	x := mustOf(t, []float32{1}, 1)
	all := []Node{Null{}, Flag(true), Int(1), Uint(1), Float(1), String("1"), Bytes("1"), List{}, Tuple{}, Map{}, Leaf(1), Ext{1, nil}, x,
		NDArray{"<f4", Shape{1}, x.Data()}, Image{"L", Shape{1, 1}, []byte{1}}, Float(math.Copysign(0, -1)), Float(0), Float(math.NaN())}
	for i, a := range all {
		for j, b := range all {
			if Equal(a, b) != (i == j) {
				t.Errorf("%T %v and %T %v", a, a, b, b)
			}
		}
	}
}

// drawTree makes any tree that can travel.
func drawTree(t *rapid.T, depth int) Node {
	kind := rapid.IntRange(0, 10).Draw(t, "kind")
	if depth == 0 {
		kind %= 7
	}
	switch kind {
	case 0:
		return Null{}
	case 1:
		return Flag(rapid.Bool().Draw(t, "flag"))
	case 2:
		return Int(rapid.Int64().Draw(t, "int"))
	case 3:
		return Float(rapid.Float64().Draw(t, "float"))
	case 4:
		return String(rapid.String().Draw(t, "string"))
	case 5:
		return Bytes(rapid.SliceOfN(rapid.Byte(), 0, 5).Draw(t, "bytes"))
	case 6:
		x, err := Of(rapid.SliceOfN(rapid.Byte(), 3, 3).Draw(t, "data"), 3)
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	nodes := make([]Node, rapid.IntRange(0, 4).Draw(t, "n"))
	for i := range nodes {
		nodes[i] = drawTree(t, depth-1)
	}
	switch kind {
	case 7:
		return List(nodes)
	case 8:
		return Tuple(nodes)
	}
	m := make(Map, len(nodes))
	for i, n := range nodes {
		m[i] = Entry{Int(i), n}
	}
	return m
}

func TestJoinUndoesSplit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		root := drawTree(t, 4)
		skeleton, leaves, err := Split(root)
		if err != nil {
			t.Fatal(err)
		}
		if HasTensor(skeleton) || HasTensor(root) != (len(leaves) > 0) {
			t.Fatalf("%d leaves of %v", len(leaves), root)
		}
		back, err := Join(skeleton, leaves)
		if err != nil || !Equal(back, root) {
			t.Fatalf("%v, want %v (%v)", back, root, err)
		}
	})
}

func BenchmarkSplitJoin50Leaves(b *testing.B) {
	layers := make(List, 50)
	for i := range layers {
		layers[i] = mustOf(b, make([]float32, 16384), 16384)
	}
	root := Map{Field("layers", layers), Field("meta", Map{Field("finished", Flag(true))})}
	b.ReportAllocs()
	for b.Loop() {
		skeleton, leaves, err := Split(root)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := Join(skeleton, leaves); err != nil {
			b.Fatal(err)
		}
	}
}

func TestATupleIsFoundWhereverItIs(t *testing.T) {
	deep := Node(Tuple{})
	for range MaxDepth {
		deep = List{deep}
	}
	for _, c := range []struct {
		root Node
		want bool
	}{
		{Tuple{}, true},
		{List{Int(1), Map{Field("a", Null{}), Field("b", List{Tuple{Int(1)}})}}, true},
		{deep, true},
		{List{deep}, false}, // past MaxDepth nothing is looked at
		{List{Map{Field("a", List{})}, String("x")}, false},
		{Null{}, false},
		{nil, false},
	} {
		if got := HasTuple(c.root); got != c.want {
			t.Errorf("%.40v: %v", c.root, got)
		}
	}
}
