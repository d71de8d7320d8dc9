package wire

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"
	"unsafe"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

func encode(t testing.TB, n tensor.Node) []byte {
	t.Helper()
	return must(AppendObject(nil, n, ObjectOptions{}))(t)
}

func TestMapsThatWouldArriveAsSomethingElseAreRefused(t *testing.T) {
	yes := tensor.Flag(true)
	for _, c := range []struct {
		name             string
		m                dict
		object, skeleton error
	}{
		{"tensor", dict{field(markTensor, yes)}, ErrMarker, ErrMarker},
		{"tensor by 1", dict{field("x", num(1)), field(markTensor, num(1))}, ErrMarker, ErrMarker},
		{"tensor by text", dict{field(markTensor, str("x"))}, ErrMarker, ErrMarker},
		{"tensor by a list", dict{field(markTensor, list{tensor.Null{}})}, ErrMarker, ErrMarker},
		{"array", dict{field(markArray, tensor.Float(0.5))}, ErrMarker, ErrMarker},
		{"image", dict{field(markImage, tensor.Bytes{0})}, ErrMarker, ErrMarker},
		{"markers that are false", dict{field(markTensor, tensor.Flag(false)), field(markArray, num(0)), field(markImage, str(""))}, nil, nil},
		{"markers that are empty", dict{field(markTensor, list{}), field(markArray, dict{}), field(markImage, tensor.Null{})}, nil, nil},
		{"leaf", dict{field(markLeaf, num(0))}, nil, ErrMarker},
		{"tuple", dict{field(markTuple, list{})}, nil, ErrMarker},
		{"leaf among others", dict{field(markLeaf, num(0)), field("x", num(0))}, nil, nil},
		{"OmniRequestOutput", dict{field("finished", yes), field("final_output_type", str("text"))}, ErrMarker, ErrMarker},
		{"OmniRequestOutput of images", dict{field("finished", yes), field("images", list{})}, ErrMarker, ErrMarker},
		{"CompletionOutput", dict{field("index", num(0)), field("text", str("")), field("token_ids", list{}), field("finish_reason", tensor.Null{}), field("more", num(1))}, ErrMarker, ErrMarker},
		{"RequestOutput", dict{field("request_id", str("")), field("prompt", str("")), field("prompt_token_ids", list{}), field("outputs", list{}), field("finished", yes)}, ErrMarker, ErrMarker},
		{"finished alone", dict{field("finished", yes)}, nil, nil},
	} {
		for _, n := range []tensor.Node{c.m, list{num(1), dict{field("deep", c.m)}}} {
			b, err := AppendObject([]byte("x"), n, ObjectOptions{})
			if !errors.Is(err, c.object) || err != nil && string(b) != "x" {
				t.Errorf("%s: object: %v, %q", c.name, err, b)
			}
			if _, err := AppendSkeleton(nil, n, ObjectOptions{}); !errors.Is(err, c.skeleton) {
				t.Errorf("%s: skeleton: %v", c.name, err)
			}
			if err == nil {
				if back, err := DecodeObject(b[1:]); err != nil || !tensor.Equal(back, n) {
					t.Errorf("%s: %v (%v)", c.name, back, err)
				}
			}
			if strings.Contains(c.name, "Output") {
				b, err := AppendObject(nil, n, ObjectOptions{PeerObjects: true})
				if err != nil {
					t.Errorf("%s, relayed: %v", c.name, err)
				}
				if back, err := DecodeObject(b); err != nil || !tensor.Equal(back, n) {
					t.Errorf("%s, relayed: %v (%v)", c.name, back, err)
				}
			}
		}
	}
}

func TestWhatCannotBeSerializedIsRefused(t *testing.T) {
	gpu := must(tensor.OnDevice(tensor.Float32, tensor.Shape{1}, tensor.Device{Kind: "cuda"}, 64))(t)
	x := fill[uint8](t, 0, 3)
	for _, c := range []struct {
		name     string
		n        tensor.Node
		object   error
		skeleton error
	}{
		{"nil", nil, tensor.ErrTree, tensor.ErrTree},
		{"on a device", list{gpu}, tensor.ErrDevice, tensor.ErrTree},
		{"tensor", list{x}, nil, tensor.ErrTree},
		{"leaf", list{tensor.Leaf(0)}, tensor.ErrTree, nil},
		{"leaf below 0", list{tensor.Leaf(-1)}, tensor.ErrTree, tensor.ErrTree},
		{"bad text", str("\xff"), tensor.ErrTree, tensor.ErrTree},
	} {
		if _, err := AppendObject(nil, c.n, ObjectOptions{}); !errors.Is(err, c.object) {
			t.Errorf("%s: object: %v", c.name, err)
		}
		if _, err := AppendSkeleton(nil, c.n, ObjectOptions{}); !errors.Is(err, c.skeleton) {
			t.Errorf("%s: skeleton: %v", c.name, err)
		}
	}
}

// mapOf is a msgpack map of names and raw values.
func mapOf(fields ...string) []byte {
	b := msgp.AppendMapHeader(nil, uint32(len(fields)/2))
	for i := 0; i < len(fields); i += 2 {
		b = append(msgp.AppendString(b, fields[i]), fields[i+1]...)
	}
	return b
}

func bin(n int) string { return string(msgp.AppendBytes(nil, make([]byte, n))) }
func text(s string) string {
	return string(msgp.AppendString(nil, s))
}

// hostile are serialized values that are refused, and why.
var hostile = []struct {
	name string
	b    []byte
	want error
}{
	{"nothing", nil, ErrMalformed},
	{"a pickle", []byte("\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x8c\x06system\x93."), ErrMalformed},
	{"a pickle of protocol 2", []byte("\x80\x02cos\nsystem\n."), ErrMalformed},
	{"a pickle of protocol 0", []byte("cos\nsystem\n(S'id'\ntR."), ErrMalformed},
	{"the byte that is never used", []byte{0xc1}, ErrMalformed},
	{"two values", []byte{0xc0, 0xc0}, ErrMalformed},
	{"array cut", []byte{0x92, 0xc0}, ErrMalformed},
	{"map cut", []byte{0x81, 0xa1, 'a'}, ErrMalformed},
	{"text cut", []byte{0xd9, 9, 'a'}, ErrMalformed},
	{"extension cut", []byte{0xd6, 1, 2}, ErrMalformed},
	{"text that is not UTF-8", []byte{0xa1, 0xff}, ErrMalformed},
	{"key that is not UTF-8", []byte{0x81, 0xa1, 0xff, 0xc0}, ErrMalformed},
	{"key of an array", []byte{0x81, 0x90, 0xc0}, ErrMalformed},
	{"key of a map", []byte{0x81, 0x80, 0xc0}, ErrMalformed},
	{"key of an extension", []byte{0x81, 0xd4, 1, 1, 0xc0}, ErrMalformed},
	{"key twice", []byte{0x82, 1, 0xc0, 1, 0xc0}, ErrMalformed},
	{"key twice for Python", []byte{0x82, 1, 0xc0, 0xc3, 0xc0}, ErrMalformed},
	{"array of 2^32-1 in five bytes", []byte{0xdd, 0xff, 0xff, 0xff, 0xff}, ErrMalformed},
	{"map of 2^32-1 in five bytes", []byte{0xdf, 0xff, 0xff, 0xff, 0xff}, ErrMalformed},
	{"more values than the limit", append([]byte{0xdd, 0, 0x40, 0, 1}, make([]byte, tensor.MaxNodes+1)...), ErrLimit},
	{"10,000 arrays in one another", bytes.Repeat([]byte{0x91}, 10_000), ErrLimit},
	{"10,000 maps in one another", bytes.Repeat([]byte{0x81, 0xa1, 'a'}, 10_000), ErrLimit},
	{"tensor without shape", mapOf(markTensor, "\xc3", "dtype", text("int8"), "data", bin(1)), ErrMalformed},
	{"tensor with a field that would be dropped", mapOf(markTensor, "\xc3", "dtype", text("int8"), "shape", "\x91\x01", "data", bin(1), "x", "\xc0"), ErrMalformed},
	{"tensor of too many bytes", mapOf(markTensor, "\xc3", "dtype", text("int8"), "shape", "\x91\x01", "data", bin(2)), ErrMalformed},
	{"tensor whose memory would be left as it was", mapOf(markTensor, "\xc3", "dtype", text("int8"), "shape", "\x91\x64", "data", bin(0)), ErrMalformed},
	{"tensor with a dimension -1", mapOf(markTensor, "\xc3", "dtype", text("int8"), "shape", "\x91\xff", "data", bin(1)), ErrMalformed},
	{"tensor of 2^64 bytes", mapOf(markTensor, "\xc3", "dtype", text("int64"), "shape", "\x92\xce\xff\xff\xff\xff\xce\xff\xff\xff\xff", "data", bin(1)), ErrMalformed},
	{"tensor of 65 dimensions", mapOf(markTensor, "\xc3", "dtype", text("int8"), "shape", "\xdc\x00\x41"+strings.Repeat("\x01", 65), "data", bin(1)), ErrLimit},
	{"tensor of an attribute of torch", mapOf(markTensor, "\xc3", "dtype", text("load"), "shape", "\x91\x01", "data", bin(1)), ErrMalformed},
	{"tensor of text", mapOf(markTensor, "\xc3", "dtype", text("int8"), "shape", "\x91\x01", "data", text("a")), ErrMalformed},
	{"array of objects", mapOf(markArray, "\xc3", "dtype", text("|O"), "shape", "\x91\x01", "data", bin(8)), ErrMalformed},
	{"array of records", mapOf(markArray, "\xc3", "dtype", text("i4,f4"), "shape", "\x91\x01", "data", bin(8)), ErrMalformed},
	{"image of one dimension", mapOf(markImage, "\xc3", "mode", text("L"), "shape", "\x91\x01", "data", bin(1)), ErrMalformed},
	{"image without a mode", mapOf(markImage, "\xc3", "dtype", text("L"), "shape", "\x92\x01\x01", "data", bin(1)), ErrMalformed},
}

func TestHostileValuesAreTypedErrors(t *testing.T) {
	for _, c := range hostile {
		for name, decode := range map[string]func([]byte) (tensor.Node, error){"object": DecodeObject, "skeleton": DecodeSkeleton} {
			n, err := decode(c.b)
			var f *FrameError
			if !errors.Is(err, c.want) || !errors.As(err, &f) || f.Offset > len(c.b) {
				t.Errorf("%s, as %s: %v, %v, want %v", c.name, name, n, err, c.want)
			}
		}
	}
	for name, b := range map[string][]byte{
		"a leaf below 0":         mapOf(markLeaf, "\xff"),
		"a leaf of text":         mapOf(markLeaf, text("0")),
		"a leaf that is true":    mapOf(markLeaf, "\xc3"),
		"a leaf of a million":    mapOf(markLeaf, "\xce\x00\x0f\x42\x40"),
		"a tuple without a list": mapOf(markTuple, "\xc0"),
	} {
		if n, err := DecodeSkeleton(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v, %v", name, n, err)
		}
		if _, err := DecodeObject(b); err != nil {
			t.Errorf("%s in an object: %v", name, err)
		}
	}
	if _, err := DecodeObject(hostile[1].b); !strings.Contains(err.Error(), "pickle") {
		t.Error(err)
	}
}

func TestLargeValuesAreViewsOfTheFrame(t *testing.T) {
	in := dict{field("t", fill[uint8](t, 1, 100)), field("b", tensor.Bytes("bytes")), field("n", must(fill[float32](t, 0, 4).NumPy())(t)),
		field("i", tensor.Image{Mode: "L", Shape: tensor.Shape{1, 2}, Data: []byte{1, 2}}), field("e", tensor.Ext{Type: -1, Data: []byte{0, 0, 0, 1}})}
	b := encode(t, in)
	out := must(DecodeObject(b))(t).(dict)
	if !tensor.Equal(in, out) {
		t.Fatal(out)
	}
	for name, data := range map[string][]byte{
		"tensor": out.Get("t").(tensor.Tensor).Data(), "bytes": out.Get("b").(tensor.Bytes), "array": out.Get("n").(tensor.NDArray).Data,
		"image": out.Get("i").(tensor.Image).Data, "extension": out.Get("e").(tensor.Ext).Data,
	} {
		off := uintptr(unsafe.Pointer(unsafe.SliceData(data))) - uintptr(unsafe.Pointer(unsafe.SliceData(b)))
		if off >= uintptr(len(b)) {
			t.Errorf("%s is a copy", name)
		}
		if cap(data) != len(data) {
			t.Errorf("%s: appending to it would write into the frame", name)
		}
	}
}

// wrap puts n into depth lists.
func wrap(n tensor.Node, depth int) tensor.Node {
	for range depth {
		n = list{n}
	}
	return n
}

func TestDepthIsThatOfTheTreeNotOfItsMarkers(t *testing.T) {
	x := fill[uint8](t, 0, 2)
	pic := tensor.Image{Mode: "L", Shape: tensor.Shape{1, 1}, Data: []byte{1}}
	for _, n := range []tensor.Node{x, must(x.NumPy())(t), pic, tensor.Null{}} {
		deep := wrap(n, tensor.MaxDepth)
		if back, err := DecodeObject(encode(t, deep)); err != nil || !tensor.Equal(back, deep) {
			t.Errorf("%T: %v", n, err)
		}
		deeper := append([]byte{0x91}, encode(t, deep)...)
		if _, err := DecodeObject(deeper); !errors.Is(err, ErrLimit) {
			t.Errorf("%T, one deeper: %v", n, err)
		}
		if _, err := AppendObject(nil, list{deep}, ObjectOptions{}); !errors.Is(err, tensor.ErrLimit) {
			t.Errorf("%T, one deeper: %v", n, err)
		}
	}
	skeleton := tensor.Node(tensor.Leaf(0))
	for range tensor.MaxDepth {
		skeleton = tuple{skeleton}
	}
	b := must(AppendSkeleton(nil, skeleton, ObjectOptions{}))(t)
	if back, err := DecodeSkeleton(b); err != nil || !tensor.Equal(back, skeleton) {
		t.Error(err)
	}
	deepest := wrap(dict{}, tensor.MaxDepth)
	if _, err := AppendObject(nil, deepest, ObjectOptions{}); !errors.Is(err, tensor.ErrLimit) {
		t.Error(err)
	}
	if _, err := DecodeObject(append(bytes.Repeat([]byte{0x91}, tensor.MaxDepth), 0x80)); !errors.Is(err, ErrLimit) {
		t.Error("an empty map one level too deep:", err)
	}
}

func TestExactPayloadsComeBackAsTheyWerePut(t *testing.T) {
	a, b := fill[float32](t, 1, 5), fill[int64](t, 2, 3)
	for name, c := range map[string]struct {
		root         tensor.Node
		plain, exact Kind
		top          Top
	}{
		"bare":                   {a, Tensors, Tensors, TopBare},
		"list of one":            {list{a}, Tensors, Structured, TopList},
		"list":                   {list{a, b}, Tensors, Tensors, TopList},
		"tuple":                  {tuple{a, b}, Tensors, Structured, TopTuple},
		"tuple of one":           {tuple{a}, Tensors, Structured, TopTuple},
		"empty list":             {list{}, Object, Object, 0},
		"empty tuple":            {tuple{}, Object, Structured, 0},
		"tuple deep inside":      {dict{field("x", list{tuple{num(1)}})}, Object, Structured, 0},
		"tensors and more":       {dict{field("x", list{a, tuple{b, num(1)}})}, Structured, Structured, 0},
		"the same tensor twice":  {dict{field("x", a), field("y", a)}, Structured, Structured, 0},
		"list with an odd thing": {list{a, tensor.Null{}}, Structured, Structured, 0},
		"no tensor":              {dict{field("x", num(1))}, Object, Object, 0},
		"nothing":                {tensor.Null{}, Object, Object, 0},
	} {
		plain := must(Pack(c.root, PackOptions{}))(t)
		if plain.Kind != c.plain || plain.Top != c.top {
			t.Errorf("%s: %v, top %d", name, plain.Kind, plain.Top)
		}
		if plain.Kind != Object { // between own ends, where Top is known
			if got, err := plain.Unpack(); err != nil || !tensor.Equal(got, c.root) {
				t.Errorf("%s: %v (%v)", name, got, err)
			}
		}
		exact := must(Pack(c.root, PackOptions{Exact: true}))(t)
		if exact.Kind != c.exact {
			t.Errorf("%s: exact: %v", name, exact.Kind)
		}
		exact.Top = TopUnknown // as a plain peer reads it
		if got, err := exact.Unpack(); err != nil || !tensor.Equal(got, c.root) {
			t.Errorf("%s: exact: %v (%v)", name, got, err)
		}
	}
}

func TestPayloadsThatDoNotFitAreRefused(t *testing.T) {
	x := fill[uint8](t, 0, 3)
	header := func(b []byte) tensor.Tensor { return must(tensor.Of(b, int64(len(b))))(t) }
	two := append(append([]byte{0x92}, mapOf(markLeaf, "\x00")...), mapOf(markLeaf, "\x00")...)
	for name, c := range map[string]struct {
		p    Payload
		want error
	}{
		"no tensor":            {Payload{Kind: Tensors}, ErrMalformed},
		"no kind":              {Payload{Tensors: []tensor.Tensor{x}}, ErrSchema},
		"bare, of two":         {Payload{Tensors, TopBare, []tensor.Tensor{x, x}}, ErrMalformed},
		"skeleton of floats":   {Payload{Kind: Structured, Tensors: []tensor.Tensor{fill[float32](t, 0, 1)}}, ErrMalformed},
		"skeleton of nothing":  {Payload{Kind: Structured, Tensors: []tensor.Tensor{raw(t, tensor.Uint8, tensor.Shape{0})}}, ErrMalformed},
		"a leaf twice":         {Payload{Kind: Structured, Tensors: []tensor.Tensor{header(two), x}}, ErrMarker},
		"a tensor left over":   {Payload{Kind: Structured, Tensors: []tensor.Tensor{header([]byte{0xc0}), x}}, ErrMarker},
		"an object that is no": {Payload{Kind: Object, Tensors: []tensor.Tensor{header([]byte{0xc1})}}, ErrMalformed},
	} {
		if n, err := c.p.Unpack(); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, %v", name, n, err)
		}
	}
	many := make(list, MaxTensors)
	for i := range many {
		many[i] = x
	}
	if _, err := Pack(dict{field("x", many)}, PackOptions{}); !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), "65536 tensors in a value, limit 65535") {
		t.Error(err)
	}
	if p, err := Pack(dict{field("x", many[1:])}, PackOptions{}); err != nil || len(p.Tensors) != MaxTensors {
		t.Error(err)
	}
	if p, err := Pack(many, PackOptions{}); err != nil || len(p.Tensors) != MaxTensors {
		t.Error(err)
	}
}

func TestOddRequestsAreJudged(t *testing.T) {
	get := func(fields ...string) []byte { return append([]byte(prefixGet), mapOf(fields...)...) }
	for _, c := range []struct {
		name string
		b    []byte
		want error
		op   Op
	}{
		{"empty", nil, nil, Unknown},
		{"half a prefix", []byte(prefixGet[:5]), nil, Unknown},
		{"a later prefix", []byte("nixl_abort\x80"), nil, Unknown},
		{"no body", []byte(prefixGet), ErrMalformed, 0},
		{"body of nil", append([]byte(prefixGet), 0xc0), ErrMalformed, 0},
		{"no claim", get("key", text("k")), nil, Get},
		{"claim empty", get("key", text("k"), "claim_id", text("")), nil, Get},
		{"claim nil", get("key", text("k"), "claim_id", "\xc0"), nil, Get},
		{"claim 0", get("key", text("k"), "claim_id", "\x00"), nil, Get},
		{"claim false", get("key", text("k"), "claim_id", "\xc2"), nil, Get},
		{"claim true", get("key", text("k"), "claim_id", "\xc3"), ErrMalformed, 0},
		{"claim of an array", get("key", text("k"), "claim_id", "\x91\x01"), ErrMalformed, 0},
		{"no key", get("claim_id", text("c")), nil, Get},
		{"key nil", get("key", "\xc0", "claim_id", text("c")), nil, Get},
		{"key of a number", get("key", "\x05", "claim_id", text("c")), nil, Get},
		{"key of a map", get("key", "\x80", "claim_id", text("c")), ErrMalformed, 0},
		{"key too long", get("key", text(strings.Repeat("k", MaxKey+1)), "claim_id", text("c")), ErrLimit, 0},
		{"claim too long", get("key", text("k"), "claim_id", text(strings.Repeat("c", MaxID+1))), ErrLimit, 0},
		{"generation of floats", get("key", text("k"), "generation", "\xca\x00\x00\x00\x00"), ErrMalformed, 0},
		{"nested too deep", get("x", strings.Repeat("\x91", 40)+"\xc0"), ErrLimit, 0},
		{"too long", append([]byte(prefixGet), make([]byte, MaxRequest)...), ErrLimit, 0},
		{"a byte after it", append(get("key", text("k")), 0), ErrMalformed, 0},
	} {
		q, err := DecodeRequest(c.b)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %+v, %v, want %v", c.name, q, err, c.want)
			continue
		}
		if err == nil && (q.Op != c.op || !q.Claim.IsZero()) {
			t.Errorf("%s: %+v claims", c.name, q)
		}
	}
	for _, b := range [][]byte{nil, []byte("nixl_nack"), []byte(prefixAnswer), append([]byte(prefixAnswer), mapOf()...),
		append([]byte(prefixAnswer), mapOf("status", "\x01")...), append([]byte(prefixAnswer), mapOf("status", "\x09")...), {0x90}, {0x80}} {
		if a, err := DecodeReply(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("reply %q: %+v, %v", b, a, err)
		}
	}
	if b := AppendRequest([]byte("x"), &Request{Op: Unknown}); string(b) != "x" {
		t.Errorf("%q", b)
	}
}

// drawValue makes any value that AppendObject takes and gives back as it was.
func drawValue(t *rapid.T, depth int) tensor.Node {
	kind := rapid.IntRange(0, 12).Draw(t, "kind")
	if depth == 0 {
		kind %= 10
	}
	switch kind {
	case 0:
		return tensor.Null{}
	case 1:
		return tensor.Flag(rapid.Bool().Draw(t, "flag"))
	case 2:
		return num(rapid.Int64().Draw(t, "int"))
	case 3:
		return tensor.Uint(rapid.Uint64Min(math.MaxInt64+1).Draw(t, "uint"))
	case 4:
		return tensor.Float(rapid.Float64().Draw(t, "float"))
	case 5:
		return str(rapid.String().Draw(t, "text"))
	case 6:
		return tensor.Bytes(rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "bytes"))
	case 7:
		return tensor.Ext{Type: rapid.Int8().Draw(t, "type"), Data: rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "data")}
	case 8:
		d := rapid.SampledFrom(tensor.DTypes()).Draw(t, "dtype")
		shape := tensor.Shape(rapid.SliceOfN(rapid.Int64Range(0, 3), 0, 3).Draw(t, "shape"))
		n, _ := d.Bytes(shape)
		x, err := tensor.New(d, shape, rapid.SliceOfN(rapid.Byte(), int(n), int(n)).Draw(t, "data"))
		if err != nil {
			t.Fatal(err)
		}
		return x
	case 9:
		return tensor.NDArray{DType: rapid.SampledFrom([]string{"<i4", ">f4", "|b1", "<U1", "<M8[ns]"}).Draw(t, "numpy"), Shape: tensor.Shape{0, 2}}
	}
	nodes := make([]tensor.Node, rapid.IntRange(0, 20).Draw(t, "n")/(1+depth%2*4))
	for i := range nodes {
		nodes[i] = drawValue(t, depth-1)
	}
	if kind == 10 {
		return list(nodes)
	}
	m := make(dict, len(nodes))
	for i, n := range nodes {
		m[i] = tensor.Entry{Key: num(i), Value: n}
		if kind == 12 {
			m[i].Key = str(rapid.String().Draw(t, "key") + string(rune('a'+i)))
		}
	}
	if m.CheckKeys() != nil {
		return dict{}
	}
	return m
}

func TestSerializedValuesComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := drawValue(t, 3)
		b, err := AppendObject(nil, in, ObjectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		out, err := DecodeObject(b)
		if err != nil || !tensor.Equal(in, out) {
			t.Fatalf("%v, want %v (%v)", out, in, err)
		}
	})
}
