package wire

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
)

// small is metadata with one value in each place that the table below changes.
func small() *Metadata {
	return &Metadata{
		Kind: Tensors, AgentMetadata: []byte("a"), Size: 12, Generation: TextID("g"), SenderHost: "h", SenderPort: 1,
		Groups: []Group{{"DRAM", []Region{{Tensor: 0, Addr: 64, Bytes: 8}, {Tensor: 2, Addr: 128, Bytes: 4}}}},
		Specs: []Spec{
			{DType: tensor.Float32, Shape: tensor.Shape{2}, Size: 8},
			{DType: tensor.Float32, Shape: tensor.Shape{0}},
			{DType: tensor.Float32, Size: 4},
		},
	}
}

// changes to small(), and what is said to it.
var metadataChanges = []struct {
	name   string
	change func(*Metadata)
	want   error
}{
	{"as it is", func(*Metadata) {}, nil},
	{"no sender", func(m *Metadata) { m.SenderHost, m.SenderPort = "", 0 }, nil},
	{"legacy", func(m *Metadata) { m.Legacy, m.Generation = true, ID{} }, nil},
	{"any generation", func(m *Metadata) { m.Generation = ID{} }, nil},
	{"two groups", func(m *Metadata) {
		r := m.Groups[0].Regions
		m.Groups = []Group{{"VRAM", r[1:]}, {"DRAM", r[:1]}}
	}, nil},
	{"another memory type", func(m *Metadata) { m.Groups[0].MemoryType = "OBJ" }, nil},

	{"no tensor", func(m *Metadata) { m.Specs, m.Groups, m.Size = nil, nil, 0 }, ErrMalformed},
	{"size of a tensor", func(m *Metadata) { m.Specs[0].Size = 4; m.Size = 8 }, ErrMalformed},
	{"size in all", func(m *Metadata) { m.Size = 13 }, ErrMalformed},
	{"size of all over 2^63", func(m *Metadata) {
		huge := Spec{DType: tensor.Uint8, Shape: tensor.Shape{1 << 62}, Size: 1 << 62}
		m.Specs = []Spec{huge, huge}
	}, ErrMalformed},
	{"no memory type", func(m *Metadata) { m.Groups[0].MemoryType = "" }, ErrMalformed},
	{"a group of nothing", func(m *Metadata) { m.Groups = append(m.Groups, Group{MemoryType: "VRAM"}) }, ErrMalformed},
	{"a tensor in no group", func(m *Metadata) { m.Groups[0].Regions = m.Groups[0].Regions[:1] }, ErrMalformed},
	{"a tensor twice", func(m *Metadata) { m.Groups[0].Regions[1] = m.Groups[0].Regions[0] }, ErrMalformed},
	{"an index too large", func(m *Metadata) { m.Groups[0].Regions[1].Tensor = 3 }, ErrMalformed},
	{"an empty tensor in a group", func(m *Metadata) {
		m.Groups[0].Regions = append(m.Groups[0].Regions, Region{Tensor: 1, Addr: 1})
	}, ErrMalformed},
	{"bytes of a region", func(m *Metadata) { m.Groups[0].Regions[0].Bytes = 7 }, ErrMalformed},
	{"address 0", func(m *Metadata) { m.Groups[0].Regions[0].Addr = 0 }, ErrMalformed},
	{"an address past the end", func(m *Metadata) { m.Groups[0].Regions[0].Addr = 1<<64 - 8 }, ErrMalformed},
	{"no agent", func(m *Metadata) { m.AgentMetadata = nil }, ErrMalformed},
	{"object of two tensors", func(m *Metadata) { m.Kind = Object }, ErrMalformed},
	{"skeleton in floats", func(m *Metadata) { m.Kind = Structured }, ErrMalformed},
	{"skeleton of no bytes", func(m *Metadata) {
		m.Kind = Structured
		m.Specs = []Spec{{DType: tensor.Uint8, Shape: tensor.Shape{0}}}
		m.Groups, m.Size = nil, 0
	}, ErrMalformed},
	{"too many groups", func(m *Metadata) { m.Groups = make([]Group, MaxGroups+1) }, ErrLimit},
}

func TestMetadataIsAsStrictAsThePeers(t *testing.T) {
	for _, c := range metadataChanges {
		m := small()
		c.change(m)
		if err := m.Check(); !errors.Is(err, c.want) {
			t.Errorf("%s: Check: %v, want %v", c.name, err, c.want)
		}
		if _, err := DecodeMetadata(AppendMetadata(nil, m)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

// patched replaces the one place of old, both given as msgpack.
func patched(t *testing.T, b []byte, old, new []byte) []byte {
	t.Helper()
	if bytes.Count(b, old) != 1 {
		t.Fatalf("%q is %d times in it", old, bytes.Count(b, old))
	}
	return bytes.Replace(b, old, new, 1)
}

func named(name string, v ...byte) []byte { return append(msgp.AppendString(nil, name), v...) }

// metadataPatches replace the one place of old in small() as it is encoded, and what is said to it.
var (
	regionBytes     = []byte{0x94, 64, 8, 0, 0xa0}
	metadataPatches = []struct {
		name     string
		old, new []byte
		want     error
	}{
		{"schema 2", named(fieldSchema, 1), named(fieldSchema, 2), ErrSchema},
		{"schema below 0", named(fieldSchema, 1), named(fieldSchema, 0xff), ErrSchema},
		{"schema as text", named(fieldSchema, 1), named(fieldSchema, textBytes("1")...), ErrSchema},
		{"schema nil", named(fieldSchema, 1), named(fieldSchema, 0xc0), ErrSchema},
		{"schema in nine bytes", named(fieldSchema, 1), named(fieldSchema, 0xcf, 0, 0, 0, 0, 0, 0, 0, 1), nil},
		{"no schema", named(fieldSchema, 1), named("schema", 1), ErrMalformed},
		{"kind pages", named(fieldKind, textBytes("tensors")...), named(fieldKind, textBytes("pages")...), ErrSchema},
		{"kind as a number", named(fieldKind, textBytes("tensors")...), named(fieldKind, 1), ErrMalformed},
		{"no kind", named(fieldKind), named("kinds"), ErrMalformed},
		{"no groups", named(fieldGroups), named("groups"), ErrMalformed},
		{"no specs", named(fieldSpecs), named("specs"), ErrMalformed},
		{"no size", named(fieldSize, 12), named("bytes", 12), nil},
		{"size of floats", named(fieldSize, 12), named(fieldSize, 0xca, 0x41, 0x40, 0, 0), ErrMalformed},
		{"dtype without its prefix", named(fieldDType, append(textBytes("torch.float32"), 0xa6)...), named(fieldDType, append(textBytes("float32"), 0xa6)...), nil},
		{"region of three", regionBytes, []byte{0x93, 64, 8, 0}, nil},
		{"region of two", regionBytes, []byte{0x92, 64, 8}, ErrMalformed},
		{"region of five", regionBytes, []byte{0x95, 64, 8, 0, 0xa0, 0xa0}, ErrLimit},
		{"region whose fourth is anything", regionBytes, []byte{0x94, 64, 8, 0, 0x91, 0xc0}, nil},
		{"address true", regionBytes, []byte{0x94, 0xc3, 8, 0, 0xa0}, ErrMalformed},
		{"address below 0", regionBytes, []byte{0x94, 0xff, 8, 0, 0xa0}, ErrMalformed},
		{"device below 0", regionBytes, []byte{0x94, 64, 8, 0xff, 0xa0}, ErrMalformed},
		{"bytes of floats", regionBytes, []byte{0x94, 64, 0xca, 0x41, 0, 0, 0, 0, 0xa0}, ErrMalformed},
		{"dimension true", named(fieldShape, 0x91, 2), named(fieldShape, 0x91, 0xc3), ErrMalformed},
		{"dimension below 0", named(fieldShape, 0x91, 2), named(fieldShape, 0x91, 0xfe), ErrMalformed},
		{"dimension of floats", named(fieldShape, 0x91, 2), named(fieldShape, 0x91, 0xca, 0x40, 0, 0, 0), ErrMalformed},
		{"shape nil", named(fieldShape, 0x91, 2), named(fieldShape, 0xc0), ErrMalformed},
		{"host nil", named(fieldHost, textBytes("h")...), named(fieldHost, 0xc0), nil},
		{"port nil", named(fieldPort, 1), named(fieldPort, 0xc0), nil},
		{"port 65536", named(fieldPort, 1), named(fieldPort, 0xce, 0, 1, 0, 0), ErrMalformed},
		{"generation of an array", named(fieldGeneration, textBytes("g")...), named(fieldGeneration, 0x90), ErrMalformed},
		{"a name that is no string", named(fieldPort, 1), []byte{1, 1}, nil},
	}
)

func textBytes(s string) []byte { return msgp.AppendString(nil, s) }

// onePatch gives the metadata that a patch is for.
func onePatch(name string) *Metadata {
	m := small()
	if strings.HasPrefix(name, "dtype") {
		// Three tensors have the same dtype; take one with the device after it.
		m.Specs, m.Groups[0].Regions, m.Size = m.Specs[:1], m.Groups[0].Regions[:1], 8
	}
	return m
}

// oddMetadata is small() with each of the changes and patches, encoded.
func oddMetadata(t *testing.T) map[string][]byte {
	odd := make(map[string][]byte)
	for _, c := range metadataChanges {
		m := small()
		c.change(m)
		odd[c.name] = AppendMetadata(nil, m)
	}
	for _, c := range metadataPatches {
		odd[c.name] = patched(t, AppendMetadata(nil, onePatch(c.name)), c.old, c.new)
	}
	return odd
}

func TestOddMetadataOnTheWireIsJudged(t *testing.T) {
	base := AppendMetadata(nil, small())
	for _, c := range metadataPatches {
		t.Run(c.name, func(t *testing.T) {
			_, err := DecodeMetadata(patched(t, AppendMetadata(nil, onePatch(c.name)), c.old, c.new))
			if !errors.Is(err, c.want) {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
	for _, d := range []string{"torch.qint8", "torch.float31", "float", ""} {
		b := patched(t, AppendMetadata(nil, onePatch("dtype")), textBytes("torch.float32"), textBytes(d))
		if _, err := DecodeMetadata(b); !errors.Is(err, tensor.ErrDType) || !errors.Is(err, ErrMalformed) {
			t.Errorf("dtype %q: %v", d, err)
		}
	}
	for i := range base {
		if _, err := DecodeMetadata(base[:i]); !errors.Is(err, ErrMalformed) {
			t.Fatalf("cut at %d: %v", i, err)
		}
	}
	if _, err := DecodeMetadata(append(base, 0)); !errors.Is(err, ErrMalformed) {
		t.Error("a byte after it:", err)
	}
	if _, err := DecodeMetadata(make([]byte, MaxReply+1)); !errors.Is(err, ErrLimit) {
		t.Error("over the limit:", err)
	}
}

func TestAnotherSchemaIsToldFromMalformedMetadata(t *testing.T) {
	b := mapOf("kind", "\x05", "schema_version", "\x02", "tensor_specs", "\xc0")
	if _, err := DecodeMetadata(b); !errors.Is(err, ErrSchema) {
		t.Error(err)
	}
	b = mapOf("kind", "\x05", "schema_version", "\x01")
	if _, err := DecodeMetadata(b); !errors.Is(err, ErrMalformed) {
		t.Error(err)
	}
	b = mapOf("schema_version", "\xcf\xff\xff\xff\xff\xff\xff\xff\xff")
	if _, err := DecodeMetadata(b); !errors.Is(err, ErrSchema) {
		t.Error(err)
	}
}

func TestErrorsNameTheFieldAndItsPlace(t *testing.T) {
	b := AppendMetadata(nil, small())
	at := bytes.Index(b, []byte("torch.float32"))
	b[at] = 'T'
	_, err := DecodeMetadata(b)
	var f *FrameError
	if !errors.As(err, &f) || f.Field != "tensor_specs.dtype" || f.Offset != at-1 {
		t.Errorf("%+v", err)
	}
}

func TestHandoffsAreTakenAsThePeersDo(t *testing.T) {
	m := small()
	m.SenderHost, m.SenderPort = "10.1.1.1", 5000
	legacy := small()
	legacy.Legacy = true
	endpoint := func(b []byte, fields ...any) []byte {
		b = msgp.AppendMapHeader(b, uint32(len(fields)/2))
		for i := 0; i < len(fields); i += 2 {
			b = msgp.AppendString(b, fields[i].(string))
			b, _ = msgp.AppendIntf(b, fields[i+1])
		}
		return b
	}
	for name, c := range map[string]struct {
		b    []byte
		want Handoff
	}{
		"metadata":               {AppendMetadata(nil, m), Handoff{Host: "10.1.1.1", Port: 5000, Generation: TextID("g")}},
		"legacy":                 {AppendMetadata(nil, legacy), Handoff{Host: "h", Port: 1, Legacy: legacy}},
		"source":                 {endpoint(nil, "source_host", "a", "source_port", 7), Handoff{Host: "a", Port: 7}},
		"sender before source":   {endpoint(nil, "source_host", "a", "source_port", 7, "sender_host", "b", "sender_zmq_port", 8), Handoff{Host: "b", Port: 8}},
		"half a sender":          {endpoint(nil, "source_host", "a", "source_port", 7, "sender_host", "b"), Handoff{Host: "a", Port: 7}},
		"half a source":          {endpoint(nil, "source_host", "a"), Handoff{}},
		"nothing":                {endpoint(nil), Handoff{}},
		"another schema":         {endpoint(nil, "schema_version", 2, "generation", "g", "sender_host", "b", "sender_zmq_port", 8), Handoff{Host: "b", Port: 8}},
		"of the shared memory":   {endpoint(nil, "shm", map[string]any{"name": "x", "size": 3}, "size", 3), Handoff{}},
		"any generation, direct": {endpoint(nil, "schema_version", 1, "generation", nil), Handoff{}},
	} {
		h, err := DecodeHandoff(c.b)
		if err != nil {
			t.Error(name, err)
			continue
		}
		if h.Host != c.want.Host || h.Port != c.want.Port || h.Generation != c.want.Generation || (h.Legacy == nil) != (c.want.Legacy == nil) {
			t.Errorf("%s: %+v, want %+v", name, h, c.want)
		}
	}
	m.Ferry = &FerryMetadata{V: 1, Node: "n", Local: "tensorferry-0f"}
	if h, err := DecodeHandoff(AppendMetadata(nil, m)); err != nil || h.Ferry == nil || h.Ferry.Node != "n" || h.Ferry.Local != "tensorferry-0f" {
		t.Errorf("of an own producer: %+v, %v", h, err)
	}
	m.Ferry.Local = string(make([]byte, MaxLocal+1))
	if _, err := DecodeHandoff(AppendMetadata(nil, m)); !errors.Is(err, ErrLimit) {
		t.Error("a name over the limit:", err)
	}
	if _, err := DecodeHandoff(endpoint(nil, "schema_version", 1)); !errors.Is(err, ErrMalformed) {
		t.Error("legacy metadata that is none:", err)
	}
	for _, b := range [][]byte{nil, {0x90}, {0xc0}, endpoint(nil, "source_port", 70000), append(endpoint(nil), 0)} {
		if h, err := DecodeHandoff(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%x: %+v, %v", b, h, err)
		}
	}
}
