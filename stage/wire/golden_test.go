package wire

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tensorferry/tensorferry/tensor"
)

// golden is interop/golden/omni.json: what vLLM-Omni 0.30 itself wrote.
type golden struct {
	Serializer map[string]struct {
		Hex   hexBytes `json:"hex"`
		Error string   `json:"serialize_error"`
	} `json:"serializer"`
	Put map[string]struct {
		Key    string   `json:"key"`
		Size   int64    `json:"size"`
		Hex    hexBytes `json:"returned_msgpack_hex"`
		Header hexBytes `json:"header_hex"`
	} `json:"put"`
	Exchange map[string][]struct {
		Request hexBytes `json:"request_hex"`
		Reply   hexBytes `json:"reply_hex"`
	} `json:"exchange"`
	NotFound struct {
		Request hexBytes `json:"request_hex"`
		Reply   hexBytes `json:"reply_hex"`
	} `json:"not_found"`
	Probes []struct {
		Name   string          `json:"name"`
		Socket string          `json:"socket"`
		Frames []hexBytes      `json:"frames_hex"`
		Reply  json.RawMessage `json:"reply"`
	} `json:"router_probes"`
	SHM struct {
		Segment    hexBytes `json:"segment_hex"`
		Serializer hexBytes `json:"serializer_hex"`
	} `json:"shm"`
}

type hexBytes []byte

func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

func readGolden(t testing.TB) *golden {
	t.Helper()
	b, err := os.ReadFile("../../interop/golden/omni.json")
	if err != nil {
		t.Fatal(err)
	}
	g := new(golden)
	if err := json.Unmarshal(b, g); err != nil {
		t.Fatal(err)
	}
	return g
}

// fill makes a tensor as interop/peers/omni/payloads.py does: element i is (i*7 + seed) mod 251 in the element's own type.
func fill[T int8 | uint8 | int32 | int64 | float32](t testing.TB, seed int, shape ...int64) tensor.Tensor {
	t.Helper()
	n, err := tensor.Shape(shape).Len()
	if err != nil {
		t.Fatal(err)
	}
	v := make([]T, n)
	for i := range v {
		v[i] = T((i*7 + seed) % 251)
	}
	return must(tensor.Of(v, shape...))(t)
}

func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func raw(t testing.TB, d tensor.DType, shape tensor.Shape, data ...byte) tensor.Tensor {
	t.Helper()
	return must(tensor.New(d, shape, data))(t)
}

type (
	list  = tensor.List
	tuple = tensor.Tuple
	dict  = tensor.Map
	str   = tensor.String
	num   = tensor.Int
)

func field(name string, v tensor.Node) tensor.Entry { return tensor.Field(name, v) }

// goldenObjects are the values of the golden file's serializer, by its names: what was given, and what comes back if that is not
// the same. peer says that a plain reader makes an object of its own of it.
func goldenObjects(t testing.TB) map[string]struct {
	in, back tensor.Node
	peer     bool
} {
	i32 := must(tensor.Of([]int32{0, 1, 2, 3}, 2, 2))(t)
	fortran := must(tensor.Of([]int64{0, 1, 2, 3, 4, 5}, 2, 3))(t)
	fill23 := fill[float32](t, 0, 2, 3)
	transposed := tensor.Strided{DType: tensor.Float32, Shape: tensor.Shape{3, 2}, Strides: []int64{1, 3}, Storage: fill23.Data()}
	return map[string]struct {
		in, back tensor.Node
		peer     bool
	}{
		"none":                   {in: tensor.Null{}},
		"true":                   {in: tensor.Flag(true)},
		"int_small":              {in: num(7)},
		"int_neg":                {in: num(-5)},
		"int_u64":                {in: tensor.Uint(1<<64 - 1)},
		"int_i64min":             {in: num(-1 << 63)},
		"float":                  {in: tensor.Float(1.5)},
		"str":                    {in: str("héllo")},
		"bytes":                  {in: tensor.Bytes{0, 0xff}},
		"list":                   {in: list{num(1), str("a"), tensor.Null{}}},
		"tuple":                  {in: tuple{num(1), num(2)}, back: list{num(1), num(2)}},
		"dict_order":             {in: dict{field("b", num(1)), field("a", num(2))}},
		"dict_intkey":            {in: dict{{Key: num(1), Value: str("x")}, {Key: num(-1), Value: str("y")}}},
		"set":                    {in: list{num(3)}},
		"nested":                 {in: dict{field("a", list{dict{field("b", tuple{num(1), list{tensor.Float(2.5)}})}}), field("c", tensor.Bytes("x"))}, back: dict{field("a", list{dict{field("b", list{num(1), list{tensor.Float(2.5)}})}}), field("c", tensor.Bytes("x"))}},
		"tensor_f32_2x3":         {in: fill23},
		"tensor_bf16":            {in: raw(t, tensor.BFloat16, tensor.Shape{3}, 0x80, 0x3f, 0, 0x41, 0x70, 0x41)},
		"tensor_bool":            {in: raw(t, tensor.Bool, tensor.Shape{3}, 0, 1, 0)},
		"tensor_i64_scalar":      {in: must(tensor.Of([]int64{7}))(t)},
		"tensor_empty":           {in: raw(t, tensor.Float32, tensor.Shape{2, 0, 3})},
		"tensor_noncontig":       {in: must(transposed.Contiguous())(t)},
		"tensor_complex64":       {in: must(tensor.Of([]complex64{1 + 2i}, 1))(t)},
		"tensor_f8e4m3":          {in: raw(t, tensor.Float8E4M3FN, tensor.Shape{3}, 0x38, 0x50, 0x57)},
		"tensor_requires_grad":   {in: must(tensor.Of([]float32{1, 1}, 2))(t)},
		"ndarray_i4":             {in: must(i32.NumPy())(t)},
		"ndarray_be":             {in: tensor.NDArray{DType: ">i4", Shape: tensor.Shape{2}, Data: []byte{0, 0, 0, 0, 0, 0, 0, 1}}},
		"ndarray_fortran":        {in: must(fortran.NumPy())(t)},
		"pil_rgb_2x1":            {in: tensor.Image{Mode: "RGB", Shape: tensor.Shape{1, 2, 3}, Data: []byte{1, 2, 3, 4, 5, 6}}},
		"slice":                  {in: tuple{num(1), num(7), num(2)}, back: list{num(1), num(7), num(2)}},
		"dataclass":              {in: plainDataclass},
		"struct":                 {in: dict{field("hidden_states", dict{field("output", fill[float32](t, 6, 2, 4))}), field("meta", dict{field("left_context_size", num(2)), field("token_role_ids", fill[int64](t, 1, 3))}), field("request_id", str("req-struct"))}},
		"marker_collision":       {in: must(tensor.Of([]float32{1}, 1))(t)}, // what the peers took for a tensor is one
		"marker_false":           {in: dict{field("__tensor__", tensor.Flag(false)), field("x", num(1))}},
		"looks_like_omni_output": {in: dict{field("finished", tensor.Flag(true)), field("images", list{num(1)})}, peer: true},
		"looks_like_completion":  {in: dict{field("index", num(0)), field("text", str("t")), field("token_ids", list{num(1)}), field("finish_reason", tensor.Null{})}, peer: true},
	}
}

var plainDataclass = dict{field("name", str("p")), field("steps", num(3)), field("scale", tensor.Float(1.5))}

func TestSerializerIsByteEqualToThePeersBothWays(t *testing.T) {
	g := readGolden(t)
	objects := goldenObjects(t)
	for name, c := range g.Serializer {
		t.Run(name, func(t *testing.T) {
			o, ok := objects[name]
			if c.Error != "" {
				if ok {
					t.Error("the peers refuse it")
				}
				return // conjugated tensors and numpy scalars: neither is a Node
			}
			if !ok {
				t.Fatal("no value for it here")
			}
			got, err := AppendObject([]byte("x"), o.in, ObjectOptions{PeerObjects: o.peer})
			if err != nil {
				t.Fatal(err)
			}
			want := string(c.Hex)
			if name == "struct" {
				// msgspec writes a struct of more than 15 fields with a 16-bit count also if few of them are left.
				want = strings.Replace(want, "meta\xde\x00\x02", "meta\x82", 1)
			}
			if d := cmp.Diff("x"+want, string(got)); d != "" {
				t.Errorf("encoded (-want +got):\n%s", d)
			}
			back, err := DecodeObject(c.Hex)
			if err != nil {
				t.Fatal(err)
			}
			value := o.back
			if value == nil {
				value = o.in
			}
			if !tensor.Equal(value, back) {
				t.Errorf("decoded %v, want %v", back, value)
			}
		})
	}
	if !slices.Equal(g.SHM.Segment, g.SHM.Serializer) {
		t.Error("a shared memory segment is not just the serialized value")
	}
	back, err := DecodeObject(g.SHM.Segment)
	if err != nil || !tensor.Equal(back, dict{field("a", must(tensor.Of([]float32{1, 1}, 2))(t))}) {
		t.Error(back, err)
	}
}

// goldenPayloads are the values that were put, by the golden file's names.
func goldenPayloads(t testing.TB) map[string]tensor.Node {
	empty := raw(t, tensor.Float64, tensor.Shape{2, 0, 3})
	bf16 := make([]byte, 0, 64)
	for i := range 32 {
		f := must(tensor.Of([]float32{float32((i*7 + 1) % 251)}, 1))(t).Data()
		bf16 = append(bf16, f[2], f[3]) // exact: under 256
	}
	f16 := []byte{0, 0x44, 0x80, 0x49, 0x80, 0x4c, 0x40, 0x4e} // 4, 11, 18, 25
	t46 := tensor.Strided{DType: tensor.Float32, Shape: tensor.Shape{6, 4}, Strides: []int64{1, 6}, Storage: fill[float32](t, 9, 4, 6).Data()}
	s10 := tensor.Strided{DType: tensor.Int32, Shape: tensor.Shape{5}, Strides: []int64{2}, Storage: fill[int32](t, 5, 10).Data()}
	return map[string]tensor.Node{
		"tensor":    fill[float32](t, 0, 4, 8),
		"list":      list{fill[float32](t, 1, 5), fill[int32](t, 2, 2, 3)},
		"scalar":    must(tensor.Of([]int64{7}))(t),
		"empty":     empty,
		"noncontig": dict{field("t", must(t46.Contiguous())(t)), field("s", must(s10.Contiguous())(t))},
		"nested": dict{
			field("hidden", raw(t, tensor.BFloat16, tensor.Shape{4, 8}, bf16...)),
			field("ids", fill[int64](t, 2, 6)),
			field("empty", raw(t, tensor.Float32, tensor.Shape{2, 0, 3})),
			field("scalar", must(tensor.Of([]int64{7}))(t)),
			field("pair", tuple{fill[float32](t, 3, 3), str("tail")}),
			field("deep", list{dict{field("k", raw(t, tensor.Float16, tensor.Shape{2, 2}, f16...))},
				list{tensor.Null{}, tensor.Flag(true), tensor.Flag(false)}, tuple{num(1), num(-2), tensor.Float(3.5)}}),
			field("text", str("héllo")),
			field("n", num(1<<40)),
			field("neg", num(-5)),
			field("none", tensor.Null{}),
			field("raw", tensor.Bytes{0, 1, 0xfe, 0xff}),
		},
		"object": dict{field("prompt", str("a cat")), field("steps", num(8)), field("tup", tuple{num(1), str("x")}),
			field("blob", tensor.Bytes{0xff, 0}), field("none", tensor.Null{}), field("f", tensor.Float(0.5))},
	}
}

func TestPutsAreByteEqualToThePeers(t *testing.T) {
	g := readGolden(t)
	values := goldenPayloads(t)
	for name, c := range g.Put {
		t.Run(name, func(t *testing.T) {
			theirs, err := DecodeMetadata(c.Hex)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(c.Hex), string(AppendMetadata(nil, theirs))); d != "" {
				t.Errorf("encoded again (-want +got):\n%s", d)
			}
			if theirs.Size != c.Size {
				t.Errorf("size %d, want %d", theirs.Size, c.Size)
			}
			if theirs.Legacy || theirs.Generation.IsZero() || !theirs.Claim.IsZero() || theirs.SenderHost != "127.0.0.1" || theirs.SenderPort != 35349 {
				t.Errorf("%+v", theirs)
			}
			var p *Payload
			if v, ok := values[name]; ok {
				if p, err = Pack(v, PackOptions{}); err != nil {
					t.Fatal(err)
				}
			} else { // the struct: its skeleton is long, so it is taken from the file
				skeleton, err := DecodeSkeleton(c.Header)
				if err != nil {
					t.Fatal(err)
				}
				root, err := tensor.Join(skeleton, []tensor.Tensor{fill[float32](t, 6, 2, 4), fill[int64](t, 1, 3)})
				if err != nil {
					t.Fatal(err)
				}
				if p, err = Pack(root, PackOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			if len(c.Header) > 0 && string(p.Tensors[0].Data()) != string(c.Header) {
				t.Errorf("header %x\nwant   %x", p.Tensors[0].Data(), c.Header)
			}
			specs, size, err := p.Specs()
			if err != nil {
				t.Fatal(err)
			}
			ours := *theirs
			ours.Kind, ours.Specs, ours.Size = p.Kind, specs, size
			if err := ours.Check(); err != nil {
				t.Error(err)
			}
			if d := cmp.Diff(string(c.Hex), string(AppendMetadata(nil, &ours))); d != "" {
				t.Errorf("our payload (-want +got):\n%s", d)
			}
		})
	}
}

func TestPayloadsComeBackAsThePeersWouldHaveThem(t *testing.T) {
	values := goldenPayloads(t)
	values["list1"] = list{fill[float32](t, 1, 5)}
	values["tuple"] = tuple{fill[float32](t, 1, 5), fill[uint8](t, 2, 2)}
	back := map[string]tensor.Node{
		"list1": values["list1"].(list)[0],
		"tuple": list(values["tuple"].(tuple)),
		"object": dict{field("prompt", str("a cat")), field("steps", num(8)), field("tup", list{num(1), str("x")}),
			field("blob", tensor.Bytes{0xff, 0}), field("none", tensor.Null{}), field("f", tensor.Float(0.5))},
	}
	for name, v := range values {
		p, err := Pack(v, PackOptions{})
		if err != nil {
			t.Fatal(name, err)
		}
		p.Top = TopUnknown // a plain peer does not say
		want := back[name]
		if want == nil {
			want = v
		}
		if got, err := p.Unpack(); err != nil || !tensor.Equal(want, got) {
			t.Errorf("%s: %v, want %v (%v)", name, got, want, err)
		}
	}
}

func TestRequestsAndRepliesAreByteEqualToThePeersBothWays(t *testing.T) {
	g := readGolden(t)
	claims := 0
	for name, exchange := range g.Exchange {
		for i, x := range exchange {
			q, err := DecodeRequest(x.Request)
			if err != nil {
				t.Fatal(name, err)
			}
			want := &Request{Op: Get, Key: g.Put[name].Key, Generation: q.Generation, Claim: q.Claim}
			if i > 0 {
				want.Op = Done
			}
			if q.Claim.IsZero() || len(q.Claim.String()) != 32 || (q.Op == Done && q.Generation.IsZero()) {
				t.Errorf("%s: %+v", name, q)
			}
			if d := cmp.Diff(want, q, cmp.AllowUnexported(ID{})); d != "" {
				t.Errorf("%s: %s", name, d)
			}
			if d := cmp.Diff(string(x.Request), string(AppendRequest(nil, q))); d != "" {
				t.Errorf("%s: request (-want +got):\n%s", name, d)
			}
			a, err := DecodeReply(x.Reply)
			if err != nil {
				t.Fatal(name, err)
			}
			if wantStatus := []Status{Found, Acked}[min(i, 1)]; a.Status != wantStatus {
				t.Errorf("%s: %v, want %v", name, a.Status, wantStatus)
			}
			if a.Metadata != nil {
				if a.Metadata.Claim != q.Claim {
					t.Errorf("%s: claim %v, want %v", name, a.Metadata.Claim, q.Claim)
				}
				claims++
			}
			if d := cmp.Diff(string(x.Reply), string(AppendReply(nil, a, false))); d != "" {
				t.Errorf("%s: reply (-want +got):\n%s", name, d)
			}
		}
	}
	if claims != len(g.Put) {
		t.Errorf("%d claims of %d payloads", claims, len(g.Put))
	}
	q, err := DecodeRequest(g.NotFound.Request)
	if err != nil || q.Op != Get || !q.Generation.IsZero() || q.Key != "no-such-key" || string(AppendRequest(nil, q)) != string(g.NotFound.Request) {
		t.Errorf("%+v, %v", q, err)
	}
	if a, err := DecodeReply(g.NotFound.Reply); err != nil || a.Status != NotFound || string(AppendReply(nil, a, false)) != string(g.NotFound.Reply) {
		t.Errorf("%+v, %v", a, err)
	}
}

// What the peers' own ROUTER answered to odd requests, and what ours comes to: an error is no answer.
func TestProbesAreJudgedAsThePeersDo(t *testing.T) {
	g := readGolden(t)
	for _, p := range g.Probes {
		if p.Socket != "REQ" {
			continue // frames are the socket's to judge
		}
		q, err := DecodeRequest(p.Frames[0])
		want := string(p.Reply)
		answered := strings.HasPrefix(want, "[")
		if answered != (err == nil) {
			t.Errorf("%s: %+v, %v, want %s", p.Name, q, err, want)
			continue
		}
		if err != nil {
			continue
		}
		// The probe's producer has the key "probe" only.
		var got string
		switch {
		case q.Op == Done:
			got = bareAck
		case q.Op == Get && !q.Claim.IsZero() && q.Key == "probe" && (q.Generation.IsZero() || q.Generation != TextID(strings.Repeat("0", 32))):
			got = "metadata"
		default:
			got = bareNotFound
		}
		if !strings.Contains(want, got) {
			t.Errorf("%s: %s, want %s", p.Name, got, want)
		}
	}
}
