package omni

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

// shown is how many bytes are compared as they are; more of them by their sum, as in omni_live.py.
const shown = 4096

// describe gives a value as omni_live.py writes it: exact, and equal only for equal ones.
func describe(n tensor.Node) any {
	all := func(nodes []tensor.Node) []any {
		out := make([]any, len(nodes))
		for i, n := range nodes {
			out[i] = describe(n)
		}
		return out
	}
	switch v := n.(type) {
	case tensor.Null:
		return nil
	case tensor.Flag:
		return bool(v)
	case tensor.Int:
		return ask{"int": strconv.FormatInt(int64(v), 10)}
	case tensor.Uint:
		return ask{"int": strconv.FormatUint(uint64(v), 10)}
	case tensor.Float:
		return ask{"float": hex.EncodeToString(binary.LittleEndian.AppendUint64(nil, math.Float64bits(float64(v))))}
	case tensor.String:
		return ask{"str": string(v)}
	case tensor.Bytes:
		if len(v) > shown {
			return ask{"bytes sha256": sumOf(v)}
		}
		return ask{"bytes": hex.EncodeToString(v)}
	case tensor.List:
		return ask{"list": all(v)}
	case tensor.Tuple:
		return ask{"tuple": all(v)}
	case tensor.Map:
		entries := make([]any, len(v))
		for i, e := range v {
			entries[i] = []any{describe(e.Key), describe(e.Value)}
		}
		return ask{"map": entries}
	case tensor.NDArray:
		return ask{"ndarray": []any{v.DType, shape(v.Shape), hex.EncodeToString(v.Data)}}
	case tensor.Tensor:
		d := ask{"tensor": v.DType().String(), "shape": shape(v.Shape())}
		if v.Bytes() <= shown {
			return d.with("data", hex.EncodeToString(v.Data()))
		}
		return d.with("sha256", sumOf(v.Data()))
	}
	return ask{"other": fmt.Sprintf("%T", n)}
}

func sumOf(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func shape(s tensor.Shape) []int64 { return append([]int64{}, s...) }

// same compares two descriptions.
func same(t *testing.T, what string, got, want any) {
	t.Helper()
	text := func(v any) string {
		b, err := json.Marshal(v)
		must(t, err)
		var plain any // so that keys are sorted
		must(t, json.Unmarshal(b, &plain))
		b, err = json.Marshal(plain)
		must(t, err)
		return string(b)
	}
	g, w := text(got), text(want)
	if g == w {
		return
	}
	from := 0
	for from < min(len(g), len(w)) && g[from] == w[from] {
		from++
	}
	from = max(0, from-200)
	t.Errorf("%s, from byte %d of its description:\n%.500s\nwant\n%.500s", what, from, g[from:], w[from:])
}

// theirs is what their get makes of a value, whoever put it: a list of one tensor is that tensor, a tuple of tensors a list, and
// tuples are lists where no tensor is in the value.
func theirs(n tensor.Node) tensor.Node {
	var items []tensor.Node
	switch v := n.(type) {
	case tensor.Tensor:
		return v
	case tensor.List:
		items = v
	case tensor.Tuple:
		items = v
	}
	only := len(items) > 0
	for _, i := range items {
		_, is := i.(tensor.Tensor)
		only = only && is
	}
	switch {
	case only && len(items) == 1:
		return items[0]
	case only:
		return tensor.List(items)
	case tensor.HasTensor(n):
		return n
	}
	return untupled(n)
}

func untupled(n tensor.Node) tensor.Node {
	all := func(nodes []tensor.Node) tensor.List {
		out := make(tensor.List, len(nodes))
		for i, n := range nodes {
			out[i] = untupled(n)
		}
		return out
	}
	switch v := n.(type) {
	case tensor.List:
		return all(v)
	case tensor.Tuple:
		return all(v)
	case tensor.Map:
		out := make(tensor.Map, len(v))
		for i, e := range v {
			out[i] = tensor.Entry{Key: e.Key, Value: untupled(e.Value)}
		}
		return out
	}
	return n
}

// raw makes a tensor with bytes that differ.
func raw(d tensor.DType, seed int, sizes ...int64) tensor.Tensor {
	n, err := d.Bytes(sizes)
	if err != nil {
		panic(err) // a mistake of the test
	}
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(i*7 + i>>8*13 + seed)
		if d == tensor.Bool {
			data[i] &= 1
		}
	}
	v, err := tensor.New(d, sizes, data)
	if err != nil {
		panic(err)
	}
	return v
}

type (
	list  = tensor.List
	tuple = tensor.Tuple
	dict  = tensor.Map
)

var field = tensor.Field

// values are what both ends put.
func values() map[string]tensor.Node {
	f32 := tensor.Float32
	fifty := make(list, 50)
	for i := range fifty {
		fifty[i] = raw(f32, i, 100)
	}
	var deep tensor.Node = raw(tensor.Int16, 3, 2)
	for range 30 {
		deep = tuple{dict{field("d", list{deep})}}
	}
	zeros := dict{}
	scalars := dict{}
	rows := dict{}
	for _, d := range tensor.DTypes() {
		zeros = append(zeros, field(d.Name(), raw(d, 0, 2, 0, 3)))
		scalars = append(scalars, field(d.Name(), raw(d, 5)))
		rows = append(rows, field(d.Name(), raw(d, 1, 3, 5)))
	}
	v := map[string]tensor.Node{
		"tensor": raw(f32, 0, 4, 8), "0-dim": raw(tensor.Int64, 7), "no elements": raw(tensor.Float64, 0, 2, 0, 3),
		"no elements, one dimension": raw(f32, 0, 0), "one byte": raw(tensor.Uint8, 9, 1), "eight dimensions": raw(f32, 1, 1, 2, 1, 3, 1, 2, 1, 2),
		"list": list{raw(f32, 1, 5), raw(tensor.Int32, 2, 2, 3)}, "list of one": list{raw(f32, 1, 5)}, "tuple": tuple{raw(f32, 1, 5), raw(tensor.Uint8, 2, 2)},
		"tuple of one": tuple{raw(f32, 1, 5)}, "list with nothing between": list{raw(f32, 1, 5), raw(f32, 0, 0), raw(f32, 2, 3)},
		"list of nothing": list{raw(f32, 1, 0), raw(tensor.Int8, 0, 3, 0)},
		"all dtypes":      rows, "0-dim of all dtypes": scalars, "no elements of all dtypes": zeros, "fifty": dict{field("layers", fifty), field("meta", dict{field("finished", tensor.Flag(true))})},
		"deep": deep, "tensor beside nothing": list{raw(f32, 1, 2), tensor.Null{}}, "tensor in a tuple in a tuple": tuple{tuple{raw(f32, 1, 2)}, tuple{}},
		"keys": dict{{Key: tensor.Int(-3), Value: raw(f32, 1, 2)}, {Key: tensor.String(""), Value: tensor.Int(1)}, {Key: tensor.Int(1 << 40), Value: list{}}},
		"nested": dict{
			field("hidden", raw(tensor.BFloat16, 1, 4, 8)), field("ids", raw(tensor.Int64, 2, 6)), field("empty", raw(f32, 0, 2, 0, 3)),
			field("scalar", raw(tensor.Int64, 7)), field("pair", tuple{raw(f32, 3, 3), tensor.String("tail")}),
			field("deep", list{dict{field("k", raw(tensor.Float16, 4, 2, 2))}, list{tensor.Null{}, tensor.Flag(true), tensor.Flag(false)},
				tuple{tensor.Int(1), tensor.Int(-2), tensor.Float(3.5)}}),
			field("text", tensor.String("héllo")), field("n", tensor.Int(1<<40)), field("neg", tensor.Int(-5)), field("none", tensor.Null{}),
			field("raw", tensor.Bytes("\x00\x01\xfe\xff")), field("dict", dict{}), field("list", list{}), field("tuple", tuple{}),
		},
		"arrays": dict{field("x", raw(f32, 1, 2)), field("a", tensor.NDArray{DType: "<f8", Shape: tensor.Shape{1, 2}, Data: make([]byte, 16)}),
			field("b", tensor.NDArray{DType: "|b1", Shape: tensor.Shape{3}, Data: []byte{1, 0, 1}})},
		"object": dict{field("prompt", tensor.String("a cat")), field("steps", tensor.Int(8)), field("tup", tuple{tensor.Int(1), tensor.String("x")}),
			field("blob", tensor.Bytes("\xff\x00")), field("none", tensor.Null{}), field("f", tensor.Float(0.5))},
		"numbers": list{tensor.Int(math.MinInt64), tensor.Uint(math.MaxUint64), tensor.Int(-1), tensor.Int(-33), tensor.Int(128), tensor.Float(math.Inf(-1)),
			tensor.Float(math.Copysign(0, -1)), tensor.Float(5e-324), tensor.Float(math.MaxFloat64)},
		"an object of an array": tensor.NDArray{DType: "<i4", Shape: tensor.Shape{2}, Data: []byte{1, 2, 3, 4, 5, 6, 7, 8}},
		"none":                  tensor.Null{}, "true": tensor.Flag(true), "int": tensor.Int(-7), "text": tensor.String("é\x00\U0001f600"), "no text": tensor.String(""),
		"bytes": tensor.Bytes("\x00\xff"), "no bytes": tensor.Bytes{}, "a KB of bytes": tensor.Bytes(make([]byte, 1000)), "empty dict": dict{}, "empty list": list{}, "empty tuple": tuple{},
	}
	random := rand.New(rand.NewPCG(6, 30))
	for i := range 20 {
		v[fmt.Sprint("random ", i)] = tree(random, 4)
	}
	return v
}

// tree makes some value.
func tree(r *rand.Rand, depth int) tensor.Node {
	kinds := 11
	if depth == 0 {
		kinds = 7
	}
	switch r.IntN(kinds) {
	case 0:
		return tensor.Null{}
	case 1:
		return tensor.Int(r.Uint64() >> r.IntN(64))
	case 2:
		return tensor.Float(r.NormFloat64())
	case 3:
		return tensor.String(fmt.Sprint("s", r.IntN(1000)))
	case 4:
		return tensor.Bytes(fmt.Sprint("b", r.IntN(1000)))
	case 5, 6, 7:
		all := tensor.DTypes()
		sizes := make(tensor.Shape, r.IntN(4))
		for i := range sizes {
			sizes[i] = int64(r.IntN(6))
		}
		return raw(all[r.IntN(len(all))], r.IntN(250), sizes...)
	case 8:
		v := dict{}
		for i := range r.IntN(5) {
			v = append(v, field(fmt.Sprint("k", i), tree(r, depth-1)))
		}
		return v
	case 9:
		return tuple(branches(r, depth))
	}
	return list(branches(r, depth))
}

func branches(r *rand.Rand, depth int) []tensor.Node {
	v := make([]tensor.Node, r.IntN(5))
	for i := range v {
		v[i] = tree(r, depth-1)
	}
	return v
}

// endpointMap is the metadata of who knows only where the producer is.
func endpointMap(e stage.Endpoint) []byte {
	b := msgp.AppendMapHeader(nil, 2)
	b = msgp.AppendString(msgp.AppendString(b, "source_host"), e.Host)
	return msgp.AppendInt(msgp.AppendString(b, "source_port"), e.Port)
}

func readProc(pid int, name string) ([]byte, error) {
	return os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
}
