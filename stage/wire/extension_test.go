package wire

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tensorferry/tensorferry/internal/msgpack"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tinylib/msgp/msgp"
)

var ids = cmp.AllowUnexported(ID{})

func fullRequest() *Request {
	return &Request{Op: Get, Key: "req_0_1", Claim: TextID("c1"), Ferry: &FerryRequest{V: 1, Try: 9, Node: "n", Epoch: 1 << 60,
		Planes: []string{"mapped", "tcp"}, Inline: 65536, Sum: true, WaitMS: 30000, Reason: "because"}}
}

func fullMetadata() *Metadata {
	sum := uint64(1 << 63)
	return &Metadata{
		Kind:          Structured,
		AgentMetadata: []byte("nixlSerDes|"),
		Groups: []Group{
			{"DRAM", []Region{{Tensor: 0, Addr: 0x7f0000000000, Bytes: 3}}},
			{"VRAM", []Region{{Tensor: 2, Addr: 1 << 63, Bytes: 8, Device: 1}}},
		},
		Specs: []Spec{
			{DType: tensor.Uint8, Shape: tensor.Shape{3}, Size: 3},
			{DType: tensor.Float32, Shape: tensor.Shape{2, 0}},
			{DType: tensor.BFloat16, Shape: tensor.Shape{2, 2}, Device: tensor.Device{Kind: "cuda", Index: 1}, Size: 8},
		},
		Size: 11, SenderHost: "10.0.0.2", SenderPort: 50051, Generation: TextID("g"), Claim: TextID("c1"),
		Ferry: &FerryMetadata{V: 1, Try: 9, Node: "n", Epoch: 7, Local: "tensorferry-0f", LeaseMS: 1000, Slot: 3, Gen: 1 << 40, Offsets: []int64{4096, 1 << 40}, Sum: &sum,
			Inline: []byte("0123456789a"), Planes: []PlaneOffer{{"mapped", []byte{1}, []byte{2}}, {Name: "tcp"}}},
	}
}

func TestExtensionComesBackWhole(t *testing.T) {
	for op := Get; op <= Stat; op++ {
		q := fullRequest()
		q.Op = op
		got, err := DecodeRequest(AppendRequest(nil, q))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(q, got, ids); d != "" {
			t.Error(d)
		}
	}
	m := fullMetadata()
	a, err := DecodeReply(AppendReply(nil, &Reply{Status: Found, Metadata: m}, true))
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(&Reply{Status: Found, Try: 9, Metadata: m}, a, ids); d != "" {
		t.Error(d)
	}
	for s := NotFound; s <= Closing; s++ {
		want := &Reply{Status: s, Try: 3, Reason: "r"}
		got, err := DecodeReply(AppendReply(nil, want, true))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	}
}

func TestAPlainPeerIsToldOnlyWhatItKnows(t *testing.T) {
	for s := NotFound; s <= Closing; s++ {
		want := map[Status]string{Acked: bareAck, GeometryMismatch: bareGeometry}[s]
		if want == "" {
			want = bareNotFound
		}
		if got := string(AppendReply(nil, &Reply{Status: s, Try: 1, Reason: "r"}, false)); got != want {
			t.Errorf("%v: %q, want %q", s, got, want)
		}
	}
}

func TestAnEmptyExtensionIsAnExtension(t *testing.T) {
	q := &Request{Op: Done, Key: "k", Claim: TextID("c"), Ferry: &FerryRequest{}}
	got, err := DecodeRequest(AppendRequest(nil, q))
	if err != nil || got.Ferry == nil || got.Ferry.V != ExtensionVersion {
		t.Errorf("%+v, %v", got, err)
	}
}

// replaceFerry gives a message in which the extension is the msgpack value v.
func requestWithFerry(v func([]byte) []byte) []byte {
	b := append([]byte(prefixGet), 0x83)
	b = msgpack.AppendStr(b, fieldKey, "k")
	b = msgpack.AppendStr(b, fieldClaim, "c")
	return v(msgp.AppendString(b, fieldFerry))
}

func TestExtensionsOfOthersDoNotCount(t *testing.T) {
	for name, v := range map[string]func([]byte) []byte{
		"nil":                 msgp.AppendNil,
		"text":                func(b []byte) []byte { return msgp.AppendString(b, "x") },
		"no version":          func(b []byte) []byte { return msgpack.AppendStr(msgp.AppendMapHeader(b, 1), fieldNode, "n") },
		"another version":     func(b []byte) []byte { return appendV(msgp.AppendMapHeader(b, 1), 2) },
		"version as text":     func(b []byte) []byte { return msgpack.AppendStr(msgp.AppendMapHeader(b, 1), fieldV, "1") },
		"names of other kind": func(b []byte) []byte { return msgp.AppendInt(msgp.AppendInt(msgp.AppendMapHeader(b, 1), 1), 1) },
	} {
		q, err := DecodeRequest(requestWithFerry(v))
		if err != nil || q.Ferry != nil || q.Claim != TextID("c") {
			t.Errorf("%s: %+v, %v", name, q, err)
		}
	}
}

func TestUnknownFieldsAreIgnoredEverywhere(t *testing.T) {
	q, err := DecodeRequest(requestWithFerry(func(b []byte) []byte {
		b = appendV(msgp.AppendMapHeader(b, 3), 1)
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "later"), 1)
		b = msgp.AppendMapHeader(b, 0)
		return msgpack.OptionalUint(b, fieldTry, 5)
	}))
	if err != nil || q.Ferry == nil || q.Ferry.Try != 5 {
		t.Errorf("%+v, %v", q, err)
	}
	// A later version of the peers: page_claim_ids and page_geometry beside the fields of today.
	m := fullMetadata()
	m.Ferry = nil
	b := AppendMetadata(nil, m)
	b[0] += 2
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "page_claim_ids"), 1)
	b = msgp.AppendString(b, "x")
	b = msgp.AppendMapHeader(msgp.AppendString(b, "page_geometry"), 0)
	got, err := DecodeMetadata(b)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(m, got, ids); d != "" {
		t.Error(d)
	}
}

func TestExtensionOverALimitIsRefused(t *testing.T) {
	long := string(make([]byte, 2000))
	for name, change := range map[string]func(*FerryRequest){
		"node":       func(f *FerryRequest) { f.Node = long },
		"plane name": func(f *FerryRequest) { f.Planes = []string{long} },
		"planes":     func(f *FerryRequest) { f.Planes = make([]string, MaxPlanes+1) },
		"reason":     func(f *FerryRequest) { f.Reason = long },
	} {
		q := fullRequest()
		change(q.Ferry)
		if _, err := DecodeRequest(AppendRequest(nil, q)); !errors.Is(err, ErrLimit) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, change := range map[string]func(*FerryMetadata){
		"inline":         func(f *FerryMetadata) { f.Inline = make([]byte, MaxInline+1) },
		"token":          func(f *FerryMetadata) { f.Planes[0].Token = []byte(long) },
		"local":          func(f *FerryMetadata) { f.Local = long[:MaxLocal+1] },
		"plane metadata": func(f *FerryMetadata) { f.Planes[0].Metadata = make([]byte, MaxPlaneMetadata+1) },
		"planes":         func(f *FerryMetadata) { f.Planes = make([]PlaneOffer, MaxPlanes+1) },
	} {
		m := fullMetadata()
		change(m.Ferry)
		if _, err := DecodeMetadata(AppendMetadata(nil, m)); !errors.Is(err, ErrLimit) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOwnEndsCanDoWithoutGroups(t *testing.T) {
	m := fullMetadata()
	m.Groups, m.AgentMetadata = nil, nil
	for name, c := range map[string]struct {
		change func(*FerryMetadata)
		ok     bool
	}{
		"inline and offsets": {func(*FerryMetadata) {}, true},
		"inline":             {func(f *FerryMetadata) { f.Offsets = nil }, true},
		"offsets":            {func(f *FerryMetadata) { f.Inline = nil }, true},
		"neither":            {func(f *FerryMetadata) { f.Inline, f.Offsets = nil, nil }, false},
		"inline too short":   {func(f *FerryMetadata) { f.Inline = f.Inline[1:] }, false},
		"inline but empty":   {func(f *FerryMetadata) { f.Inline = []byte{} }, false},
		"an offset missing":  {func(f *FerryMetadata) { f.Offsets = f.Offsets[1:] }, false},
		"an offset too far":  {func(f *FerryMetadata) { f.Offsets = []int64{0, 1<<63 - 8} }, false},
		"top of an object":   {func(f *FerryMetadata) { f.Top = TopList }, false},
	} {
		x, f := *m, *m.Ferry
		x.Ferry = &f
		c.change(&f)
		got, err := DecodeMetadata(AppendMetadata(nil, &x))
		if (err == nil) != c.ok || err != nil && !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
		if checked := x.Check(); (checked == nil) != c.ok {
			t.Errorf("%s: Check says %v", name, checked)
		}
		if c.ok {
			if d := cmp.Diff(&x, got, ids); d != "" {
				t.Error(d)
			}
		}
	}
}

func TestAnEmptyPayloadCanBeInline(t *testing.T) {
	m := &Metadata{Kind: Tensors, Specs: []Spec{{DType: tensor.Float64, Shape: tensor.Shape{0}}}, Generation: TextID("g"),
		Ferry: &FerryMetadata{Inline: []byte{}}}
	got, err := DecodeMetadata(AppendMetadata(nil, m))
	if err != nil || got.Ferry.Inline == nil {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestIDsAreTextOrIntegersAndAreToldApart(t *testing.T) {
	all := []ID{{}, TextID(""), TextID("5"), {num: 5, kind: idUint}, {num: 1 << 63, kind: idUint}, {num: 1 << 63, kind: idBelowZero}, NewID()}
	for i, a := range all {
		q := &Request{Op: Done, Key: "k", Generation: a, Claim: TextID("c")}
		got, err := DecodeRequest(AppendRequest(nil, q))
		if err != nil || got.Generation != a {
			t.Errorf("%v comes back as %v (%v)", a, got, err)
		}
		for j, b := range all {
			if (a == b) != (i == j) {
				t.Errorf("%v and %v", a, b)
			}
		}
		if a.IsZero() != (i == 0) {
			t.Error(a)
		}
	}
	if NewID() == NewID() || len(NewID().String()) != 32 {
		t.Error(NewID())
	}
}
