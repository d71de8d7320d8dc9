package omni

import (
	"errors"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func TestGoGetsWhatARealProducerPut(t *testing.T) {
	e := newOurs(t, settings{getsOnly: true})
	for name, how := range map[string]func(s *peer, r stage.Request) stage.Request{
		"by metadata": func(_ *peer, r stage.Request) stage.Request { return r },
		"by endpoint": func(s *peer, r stage.Request) stage.Request { return stage.Request{Key: r.Key, From: s.at} },
		"by metadata that names an endpoint": func(s *peer, r stage.Request) stage.Request {
			return stage.Request{Key: r.Key, Metadata: endpointMap(s.at), Wait: true}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSender(t, nil, nil)
			for what, v := range values() {
				m := s.put(what, describe(v))
				e.get(how(s, stage.Request{Key: what, Metadata: m}), describe(theirs(v)))
			}
			s.drained()
		})
	}
}

// fill is that of payloads.py: element i of a tensor is (7i + seed) mod 251.
func fill[T float32 | int32](seed int, n int64) []T {
	v := make([]T, n)
	for i := range v {
		v[i] = T((i*7 + seed) % 251)
	}
	return v
}

func of[T tensor.Element](t *testing.T, v []T, shape ...int64) tensor.Tensor {
	t.Helper()
	x, err := tensor.Of(v, shape...)
	must(t, err)
	return x
}

// What only Python has.
func TestGoGetsWhatOnlyPythonCanPut(t *testing.T) {
	e := newOurs(t, settings{bytes: 128 << 20, getsOnly: true})
	s := newSender(t, nil, nil)
	get := func(name named, want tensor.Node) {
		t.Helper()
		e.get(stage.Request{Key: string(name), Metadata: s.put(string(name), name)}, describe(want))
	}

	rows, turned := fill[float32](9, 24), make([]float32, 24)
	for i := range turned {
		turned[i] = rows[i%4*6+i/4]
	}
	every, second := fill[int32](5, 10), make([]int32, 5)
	for i := range second {
		second[i] = every[2*i]
	}
	get("noncontig", dict{field("t", of(t, turned, 6, 4)), field("s", of(t, second, 5))})
	get("dataclass", dict{field("name", tensor.String("p")), field("steps", tensor.Int(3)), field("scale", tensor.Float(1.5))})

	ones := make([]float32, 16<<20)
	for i := range ones {
		ones[i] = 1
	}
	get("big64", of(t, ones, 16<<20))
	get("big", of(t, fill[float32](3, 1<<20), 1<<20))
	layers := make(list, 50)
	for i := range layers {
		layers[i] = of(t, fill[float32](i, 16384), 16384)
	}
	get("fifty", dict{field("layers", layers), field("meta", dict{field("finished", tensor.Flag(true))})})

	// A struct travels with every field; those that are not set are None, at every level.
	got, err := e.Get(patient(t), stage.Request{Key: "struct", Metadata: s.put("struct", named("struct"))})
	must(t, err)
	set := pruned(got.Root).(dict)
	same(t, "struct", describe(set.Get("hidden_states")), describe(dict{field("output", of(t, fill[float32](6, 8), 2, 4))}))
	if n := len(got.Root.(dict)); n <= len(set) || set.Get("request_id") != tensor.String("req-struct") {
		t.Errorf("struct: %d fields, %d of them set, request_id %v", n, len(set), set.Get("request_id"))
	}
	must(t, got.Release())
	e.told()
	s.drained()
}

// pruned is a value without what is None in its maps.
func pruned(n tensor.Node) tensor.Node {
	m, ok := n.(dict)
	if !ok {
		return n
	}
	out := dict{}
	for _, e := range m {
		if e.Value != (tensor.Null{}) {
			out = append(out, tensor.Entry{Key: e.Key, Value: pruned(e.Value)})
		}
	}
	return out
}

// A done of a plain reader uses the payload up, also of one that could not READ.
func TestAGetWithoutNIXLLeavesARealProducersPayloadToOneWithIt(t *testing.T) {
	s := newSender(t, nil, nil)
	root := dict{field("x", of(t, fill[float32](3, 24), 4, 6))}
	m := s.put("k", describe(root))
	dir := transfertest.Dir(t)
	c, err := connect.OpenReader(patient(t), connect.Options{Planes: []string{transfer.Mapped, transfer.TCP}, Dir: dir})
	must(t, err)
	for _, r := range []stage.Request{{Key: "k", Metadata: m}, {Key: "k", From: s.at, Wait: true}} {
		if _, err := c.Get(patient(t), r); !errors.Is(err, slab.ErrNoPlane) || !strings.HasSuffix(err.Error(), "nothing was taken") {
			t.Error(err)
		}
	}
	must(t, c.Close(patient(t)))
	e := newOurs(t, settings{getsOnly: true})
	e.get(stage.Request{Key: "k", Metadata: m}, describe(theirs(root)))
	s.drained()
}
