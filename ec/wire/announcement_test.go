package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var ignoreText = cmpopts.IgnoreUnexported(Announcement{})

func TestAnnouncementFormsOfThePeersAreTaken(t *testing.T) {
	for _, c := range []struct {
		name, in string
		want     Announcement
	}{
		{"generation 2", `{"item_indices":[0,1],"metadata":{"image_grid_thw":[1,2,3]},"peer_host":"10.0.0.7","peer_port":5601,"size_bytes":8192,"shape":[4,1024]}`,
			Announcement{ItemIndices: []int{0, 1}, Metadata: json.RawMessage(`{"image_grid_thw":[1,2,3]}`), PeerHost: "10.0.0.7", PeerPort: 5601, SizeBytes: 8192, Shape: []int{4, 1024}}},
		{"generation 1", `{"metadata":{},"peer_host":"node-1.example","peer_port":65535,"size_bytes":1}`,
			Announcement{Metadata: json.RawMessage(`{}`), PeerHost: "node-1.example", PeerPort: 65535, SizeBytes: 1}},
		{"older, with the agent's metadata", `{"metadata":{},"nixl_agent_metadata_b64":"AAEC","peer_host":"h","peer_port":1,"size_bytes":7}`,
			Announcement{Metadata: json.RawMessage(`{}`), PeerHost: "h", PeerPort: 1, SizeBytes: 7}},
		{"not servable", `{"metadata":{}}`, Announcement{Metadata: json.RawMessage(`{}`)}},
		{"not servable, generation 2", `{"item_indices":[0],"metadata":{}}`, Announcement{ItemIndices: []int{0}, Metadata: json.RawMessage(`{}`)}},
		{"no items", `{"item_indices":[],"metadata":{}}`, Announcement{ItemIndices: []int{}, Metadata: json.RawMessage(`{}`)}},
		{"nothing at all", `{}`, Announcement{}},
		{"escapes and white space", " {\n \"peer\\u005fhost\" : \"\\u0061\" , \"peer_port\" : 9 ,\t\"size_bytes\":1, \"shape\" : [ 3 ,\n4 ] } ",
			Announcement{PeerHost: "a", PeerPort: 9, SizeBytes: 1, Shape: []int{3, 4}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var a Announcement
			if err := json.Unmarshal([]byte(c.in), &a); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(c.want, a, ignoreText); d != "" {
				t.Error(d)
			}
			if a.Servable() != (c.want.PeerPort != 0) {
				t.Errorf("servable: %v", a.Servable())
			}
			out, err := a.MarshalJSON()
			if err != nil || string(out) != strings.TrimSpace(c.in) {
				t.Errorf("encodes to %s (%v)", out, err)
			}
		})
	}
}

func TestBadAnnouncementIsRefusedWithTheFieldAndItsValue(t *testing.T) {
	with := func(field, value string) string {
		all := map[string]string{"peer_host": `"h"`, "peer_port": "1", "size_bytes": "1"}
		all[field] = value
		var parts []string
		for k, v := range all {
			if v != "" {
				parts = append(parts, fmt.Sprintf("%q:%s", k, v))
			}
		}
		return "{" + strings.Join(parts, ",") + "}"
	}
	deep := strings.Repeat("[", MaxJSONDepth) + strings.Repeat("]", MaxJSONDepth)
	for _, c := range []struct {
		field, value string
		limit        bool
	}{
		{"peer_port", "0", false}, {"peer_port", "65536", false}, {"peer_port", "70000", false}, {"peer_port", "-1", false},
		{"peer_port", "1.0", false}, {"peer_port", "1e3", false}, {"peer_port", `"5601"`, false}, {"peer_port", "null", false},
		{"peer_port", "true", false}, {"peer_port", "[1]", false}, {"peer_port", "99999999999999999999", false}, {"peer_port", "", false},
		{"peer_host", "127", false}, {"peer_host", "null", false}, {"peer_host", `""`, false}, {"peer_host", `["h"]`, false}, {"peer_host", "", false},
		{"peer_host", `"a b"`, false}, {"peer_host", `" h"`, false}, {"peer_host", `"h\n"`, false}, {"peer_host", `"h\u0000"`, false},
		{"peer_host", `"tcp://h"`, false}, {"peer_host", `"h/x"`, false}, {"peer_host", `"u@h"`, false}, {"peer_host", `"h?x"`, false},
		{"peer_host", `"h#x"`, false}, {"peer_host", `"h;x"`, false}, {"peer_host", `"*"`, false}, {"peer_host", `"h:5601"`, false},
		{"peer_host", `"[h]"`, false}, {"peer_host", `"[::1"`, false}, {"peer_host", `"::1]"`, false}, {"peer_host", `"[10.0.0.1]"`, false},
		{"peer_host", `"1::2::3"`, false}, {"peer_host", `"a%b"`, false}, {"peer_host", `"h\u00fc"`, false},
		{"peer_host", `"` + strings.Repeat("h", MaxHost+1) + `"`, false},
		{"size_bytes", "0", false}, {"size_bytes", "-8192", false}, {"size_bytes", "8192.0", false}, {"size_bytes", `"8192"`, false},
		{"size_bytes", "9223372036854775808", false}, {"size_bytes", "null", false}, {"size_bytes", "", false},
		{"shape", "[]", false}, {"shape", "[4]", false}, {"shape", "[1,2,3]", false}, {"shape", "[0,4]", false}, {"shape", "[4,0]", false},
		{"shape", "[-4,4]", false}, {"shape", "[4.0,4]", false}, {"shape", `["4",4]`, false}, {"shape", "null", false}, {"shape", "16", false},
		{"shape", "[4294967296,4294967296]", false}, {"shape", "[[1],2]", false},
		{"item_indices", "[-1]", false}, {"item_indices", "[0.5]", false}, {"item_indices", `["0"]`, false}, {"item_indices", "0", false},
		{"item_indices", "null", false}, {"item_indices", "[" + strings.Repeat("0,", MaxItems) + "0]", false},
		{"metadata", "null", false}, {"metadata", "[]", false}, {"metadata", `"x"`, false},
		{"metadata", `{"a":` + deep + "}", true},
	} {
		var a Announcement
		err := a.UnmarshalJSON([]byte(with(c.field, c.value)))
		var f *FieldError
		if !errors.As(err, &f) {
			t.Errorf("%s %s: error %v", c.field, clip(c.value), err)
			continue
		}
		if c.limit {
			if !errors.Is(err, ErrLimit) {
				t.Errorf("%s %s: %v", c.field, clip(c.value), err)
			}
			continue
		}
		if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrLimit) || f.Field != c.field {
			t.Errorf("%s %s: %v", c.field, clip(c.value), err)
		}
		want := clip(c.value)
		switch {
		case c.value == "":
			want = "missing"
		case c.field == "peer_host" && c.value[0] == '"':
			want = f.Value // quoted by other rules than JSON's
		}
		if f.Value != want {
			t.Errorf("%s %s: shown as %s", c.field, c.value, f.Value)
		}
		if d := cmp.Diff(Announcement{}, a, ignoreText); d != "" {
			t.Errorf("%s %s: the announcement was changed: %s", c.field, c.value, d)
		}
	}
	for _, in := range []string{"", "{", `{"a":1} x`, "[]", "null x", "\"\xff\"", "7", `{"peer_port":1,"peer_port":1}`} {
		if err := new(Announcement).UnmarshalJSON([]byte(in)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestHostsOfEveryUsualFormAreTaken(t *testing.T) {
	for _, h := range []string{"localhost", "10.1.2.3", "node-1.rack_2.example.com", "::1", "[::1]", "fe80::1%eth0", "[2001:db8::7]", "vllm-0", "7"} {
		a := Announcement{PeerHost: h, PeerPort: 1, SizeBytes: 1}
		if err := a.Validate(); err != nil {
			t.Error(err)
		}
	}
}

func TestUntouchedAnnouncementKeepsItsTextByteForByte(t *testing.T) {
	in := `{ "zeta" : [1, {"b":null,"a":1e2}], "size_bytes":8192, "metadata":{"k" : "<\u00fc>"} ,"peer_port":5601,"nixl_agent_metadata_b64":"AA==","shape":[ 4,1024 ],"peer_host":"h","item_indices":[0] }`
	var a Announcement
	if err := json.Unmarshal([]byte(in), &a); err != nil {
		t.Fatal(err)
	}
	if out, err := a.MarshalJSON(); err != nil || string(out) != in {
		t.Errorf("%s (%v)", out, err)
	}
	a.PeerHost, a.Shape[0] = "other", 8
	want := `{"zeta":[1, {"b":null,"a":1e2}],"size_bytes":8192,"metadata":{"k" : "<\u00fc>"},"peer_port":5601,"nixl_agent_metadata_b64":"AA==","shape":[8,1024],"peer_host":"other","item_indices":[0]}`
	if out, err := a.MarshalJSON(); err != nil || string(out) != want {
		t.Errorf("%s (%v), want %s", out, err, want)
	}
	a.PeerHost, a.PeerPort, a.ItemIndices, a.Shape, a.SizeBytes, a.Metadata = "", 0, nil, nil, 0, nil
	want = `{"zeta":[1, {"b":null,"a":1e2}],"metadata":{},"nixl_agent_metadata_b64":"AA=="}`
	if out, err := a.MarshalJSON(); err != nil || string(out) != want {
		t.Errorf("%s (%v), want %s", out, err, want)
	}
}

func TestFieldsAddedToAnAnnouncementComeLastInThePeersOrder(t *testing.T) {
	var a Announcement
	if err := json.Unmarshal([]byte(`{"x":1,"item_indices":[2]}`), &a); err != nil {
		t.Fatal(err)
	}
	a.Shape, a.PeerHost, a.PeerPort, a.SizeBytes = []int{1, 2}, "h", 3, 4
	want := `{"x":1,"item_indices":[2],"peer_host":"h","peer_port":3,"size_bytes":4,"shape":[1,2]}`
	if out, err := a.MarshalJSON(); err != nil || string(out) != want {
		t.Errorf("%s (%v), want %s", out, err, want)
	}
}

func TestTheSlotOfAnAnnouncementIsOurOwnExtension(t *testing.T) {
	slot := func(n uint32) *uint32 { return &n }
	for in, want := range map[string]*uint32{
		`{"v":1,"slot":7}`:             slot(7),
		`{"slot":0,"later":[1],"v":1}`: slot(0),
		`{"v":1,"slot":4294967295}`:    slot(math.MaxUint32),
		`{"v":1}`:                      nil,
		`{"slot":7}`:                   nil,
		`{"v":2,"slot":7}`:             nil,
		`{"v":"1","slot":7}`:           nil,
		`{"v":1,"slot":4294967296}`:    nil,
		`{"v":1,"slot":-1}`:            nil,
		`{"v":1,"slot":1.0}`:           nil,
		`{"v":1,"slot":"7"}`:           nil,
		`{"v":1,"slot":7,"slot":null}`: nil,
		`7`:                            nil,
		`null`:                         nil,
		`"\u0066"`:                     nil,
		`[{"v":1,"slot":7}]`:           nil,
	} {
		text := `{"metadata":{},"ferry":` + in + `,"peer_host":"h","peer_port":1,"size_bytes":1}`
		var a Announcement
		if err := a.UnmarshalJSON([]byte(text)); err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if d := cmp.Diff(want, a.Slot); d != "" {
			t.Errorf("%s: %s", in, d)
		}
		if out, err := a.MarshalJSON(); err != nil || string(out) != text {
			t.Errorf("%s became %s (%v)", text, out, err)
		}
	}

	a := Announcement{PeerHost: "h", PeerPort: 1, SizeBytes: 1, Slot: slot(9)}
	want := `{"metadata":{},"peer_host":"h","peer_port":1,"size_bytes":1,"ferry":{"v":1,"slot":9}}`
	if out, err := a.MarshalJSON(); err != nil || string(out) != want {
		t.Errorf("%s (%v), want %s", out, err, want)
	}
	var p Params
	p.Set("k", &a)
	*a.Slot = 10
	if b, _ := p.Get("k"); *b.Slot != 9 {
		t.Error("Params share the slot with what was Set")
	}
}

func TestInvalidAnnouncementIsNotEncoded(t *testing.T) {
	good := Announcement{Metadata: json.RawMessage("{}"), PeerHost: "h", PeerPort: 1, SizeBytes: 1}
	for field, spoil := range map[string]func(*Announcement){
		"peer_port":    func(a *Announcement) { a.PeerPort = 65536 },
		"peer_host":    func(a *Announcement) { a.PeerHost = "a b" },
		"size_bytes":   func(a *Announcement) { a.SizeBytes = 0 },
		"shape":        func(a *Announcement) { a.Shape = []int{math.MaxInt, 2} },
		"item_indices": func(a *Announcement) { a.ItemIndices = []int{0, -1} },
		"metadata":     func(a *Announcement) { a.Metadata = json.RawMessage("{} {}") },
	} {
		a := good
		spoil(&a)
		_, err := a.MarshalJSON()
		var f *FieldError
		if !errors.As(err, &f) || f.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	for _, spoil := range []func(*Announcement){
		func(a *Announcement) { a.PeerHost = "" },
		func(a *Announcement) { a.PeerPort = 0 },
		func(a *Announcement) { a.Metadata = json.RawMessage{} },
		func(a *Announcement) { a.ItemIndices = make([]int, MaxItems+1) },
		func(a *Announcement) { a.Metadata = json.RawMessage("\"\xff\"") },
	} {
		a := good
		spoil(&a)
		if _, err := a.MarshalJSON(); err == nil {
			t.Errorf("%+v was encoded", a)
		}
	}
}
