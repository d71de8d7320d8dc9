package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func parseParams(t *testing.T, in string) Params {
	t.Helper()
	var p Params
	if err := p.UnmarshalJSON([]byte(in)); err != nil {
		t.Fatal(err)
	}
	return p
}

func encodeParams(t *testing.T, p Params) string {
	t.Helper()
	b, err := p.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestGoldenParamsComeBackAsTheyWere(t *testing.T) {
	g := readGolden(t)
	docs := []string{string(g.Params)}
	for _, e := range g.ParamsExamples {
		docs = append(docs, string(e.Returned[1]))
	}
	for _, doc := range docs {
		p := parseParams(t, doc)
		if out := encodeParams(t, p); out != doc {
			t.Errorf("%s, want %s", out, doc)
		}
		// The same map built anew is the compact text: the same fields in the same order.
		var again Params
		for _, k := range p.Keys() {
			if err := p.Err(k); err != nil {
				t.Fatal(err)
			}
			a, _ := p.Get(k)
			if servable := a.Servable(); servable != strings.Contains(doc, `"peer_port"`) {
				t.Errorf("servable: %v", servable)
			}
			again.Set(k, &Announcement{ItemIndices: a.ItemIndices, Metadata: a.Metadata, PeerHost: a.PeerHost, PeerPort: a.PeerPort, SizeBytes: a.SizeBytes, Shape: a.Shape})
		}
		var compact bytes.Buffer
		if err := json.Compact(&compact, []byte(doc)); err != nil {
			t.Fatal(err)
		}
		if out := encodeParams(t, again); out != compact.String() {
			t.Errorf("%s, want %s", out, compact.String())
		}
	}
	p := parseParams(t, string(g.Params))
	a, ok := p.Get(p.Keys()[1])
	want := &Announcement{ItemIndices: []int{0}, Metadata: json.RawMessage("{}"), PeerHost: "127.0.0.1", PeerPort: 58249, SizeBytes: 4096, Shape: []int{2, 1024}}
	if d := cmp.Diff(want, a, ignoreText); !ok || d != "" {
		t.Error(d)
	}
}

const good = `{"metadata":{},"peer_host":"h","peer_port":1,"size_bytes":1}`

func TestOneBadEntryDoesNotLoseTheOthers(t *testing.T) {
	in := `{"a":` + good + `,"bad":{"metadata":{},"peer_host":"h","peer_port":70000,"size_bytes":1},"n":null,"l":[],"z":` + good + `}`
	p := parseParams(t, in)
	if d := cmp.Diff([]string{"a", "bad", "n", "l", "z"}, p.Keys()); d != "" {
		t.Error(d)
	}
	for _, k := range p.Keys() {
		_, ok := p.Get(k)
		if wantOK := k == "a" || k == "z"; ok != wantOK || (p.Err(k) == nil) != wantOK {
			t.Errorf("%s: %v, %v", k, ok, p.Err(k))
		}
	}
	want := &FieldError{Key: "bad", Field: "peer_port", Value: "70000", Reason: wantPort, kind: ErrMalformed}
	var f *FieldError
	if err := p.Err("bad"); !errors.As(err, &f) || *f != *want {
		t.Errorf("%v, want %v", err, want)
	}
	if got := p.Err("bad").Error(); got != `wire: malformed message: announcement "bad": peer_port 70000: want an integer from 1 to 65535` {
		t.Error(got)
	}
	if err := p.Err("absent"); !errors.Is(err, ErrNoEntry) {
		t.Error(err)
	}
	if out := encodeParams(t, p); out != in {
		t.Errorf("passed on as %s", out)
	}
	a, _ := p.Get("a")
	a.PeerPort = 2
	p.Set("bad", a)
	want2 := strings.Replace(in, "70000", "2", 1)
	if out := encodeParams(t, p); out != want2 || p.Err("bad") != nil {
		t.Errorf("%s, want %s", out, want2)
	}
}

func TestBadKeysAreBadEntries(t *testing.T) {
	long := strings.Repeat("k", MaxKey+1)
	p := parseParams(t, `{"":`+good+`,"`+long+`":`+good+`,"\ud800":`+good+`,"`+long[1:]+`":`+good+`,"\u00fc:/..":`+good+`}`)
	for key, want := range map[string]error{"": ErrMalformed, long: ErrLimit, "\ufffd": ErrMalformed, long[1:]: nil, "\u00fc:/..": nil} {
		if err := p.Err(key); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", clip(key), err, want)
		}
	}
	for _, key := range []string{"", long, "\xff"} {
		var p Params
		p.Set(key, &Announcement{})
		if out, err := p.MarshalJSON(); err == nil {
			t.Errorf("a bad key was encoded: %s", out)
		}
	}
}

func TestLongKeysThatSharePrefixesAreDifferentEntries(t *testing.T) {
	a, b := strings.Repeat("0", 63)+"a", strings.Repeat("0", 63)+"b"
	var p Params
	p.Set(a, &Announcement{PeerHost: "h", PeerPort: 1, SizeBytes: 1})
	p.Set(b, &Announcement{PeerHost: "h", PeerPort: 2, SizeBytes: 1})
	if got, _ := p.Get(a); got.PeerPort != 1 || p.Len() != 2 {
		t.Errorf("%+v of %d", got, p.Len())
	}
}

func TestLastOfDuplicateKeysWinsAndIsNamed(t *testing.T) {
	p := parseParams(t, `{"a":`+good+`, "b":{"metadata":{}}, "\u0061":{"metadata":{},"n":2}, "a":{"metadata":{},"n":3}}`)
	if d := cmp.Diff([]string{"a", "b"}, p.Keys()); d != "" {
		t.Error(d)
	}
	if d := cmp.Diff([]string{"a"}, p.Duplicates()); d != "" {
		t.Error(d)
	}
	if out, want := encodeParams(t, p), `{"a":{"metadata":{},"n":3},"b":{"metadata":{}}}`; out != want {
		t.Errorf("%s, want %s", out, want)
	}
	if clean := parseParams(t, `{"a":{}}`); clean.Duplicates() != nil {
		t.Error("a duplicate where there is none")
	}
}

func TestDocumentThatIsNoMapOrOverALimitIsRefusedAsAWhole(t *testing.T) {
	p := parseParams(t, `{"kept":`+good+`}`)
	var many strings.Builder
	for i := range MaxEntries + 1 {
		fmt.Fprintf(&many, `,"%d":{}`, i)
	}
	for name, c := range map[string]struct {
		in   string
		want error
	}{
		"array":         {"[]", ErrMalformed},
		"text":          {`"x"`, ErrMalformed},
		"nothing":       {"", ErrMalformed},
		"cut short":     {`{"a":` + good, ErrMalformed},
		"bad UTF-8":     {"{\"\xff\":{}}", ErrMalformed},
		"nested":        {strings.Repeat(`{"a":`, 20_000), ErrMalformed},
		"too large":     {`{"a":"` + strings.Repeat("x", MaxParams) + `"}`, ErrLimit},
		"too many keys": {"{" + many.String()[1:] + "}", ErrLimit},
	} {
		if err := p.UnmarshalJSON([]byte(c.in)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if _, ok := p.Get("kept"); !ok {
		t.Error("a refused document changed the map")
	}
	if err := json.Unmarshal([]byte("null"), &p); err != nil || p.Len() != 0 {
		t.Errorf("null: %v, %d entries", err, p.Len())
	}
}

func TestDeepEntryIsBadAndTheOthersStay(t *testing.T) {
	deep := strings.Repeat("[", 1000) + strings.Repeat("]", 1000)
	p := parseParams(t, `{"a":`+good+`,"d":{"x":`+deep+`}}`)
	if err := p.Err("d"); !errors.Is(err, ErrLimit) {
		t.Error(err)
	}
	if _, ok := p.Get("a"); !ok {
		t.Error(p.Err("a"))
	}
}

func TestZeroParamsIsAnEmptyMap(t *testing.T) {
	var p Params
	if a, ok := p.Get("k"); ok || a.Servable() || p.Duplicates() != nil || p.Len() != 0 || p.Keys() != nil || !errors.Is(p.Err("k"), ErrNoEntry) {
		t.Error("not empty")
	}
	if b, err := json.Marshal(struct{ P Params }{p}); err != nil || string(b) != `{"P":{}}` {
		t.Errorf("%s %v", b, err)
	}
}

func TestWhatGetGivesAndSetTakesIsCopied(t *testing.T) {
	in := `{"k":{"item_indices":[1],"metadata":{"a":1},"peer_host":"h","peer_port":1,"size_bytes":1,"shape":[1,2]}}`
	text := []byte(in)
	var p Params
	if err := p.UnmarshalJSON(text); err != nil {
		t.Fatal(err)
	}
	clear(text)
	spoil := func(a *Announcement) {
		a.PeerHost, a.ItemIndices[0], a.Shape[0], a.Metadata[2] = "x", 9, 9, 'z'
	}
	a, _ := p.Get("k")
	spoil(a)
	if out := encodeParams(t, p); out != in {
		t.Errorf("the map changed: %s", out)
	}
	b, _ := p.Get("k")
	p.Set("k", b)
	spoil(b)
	if out := encodeParams(t, p); out != in {
		t.Errorf("the map changed: %s", out)
	}
	spare := p
	spare.Set("new", a)
	if d := cmp.Diff(p.Keys(), spare.Keys()); d != "" {
		t.Errorf("a copy is no reference to the same map: %s", d)
	}
}

func TestFieldErrorShowsOnlyABitOfALongValue(t *testing.T) {
	p := parseParams(t, `{"k":{"peer_host":"`+strings.Repeat("\u00fc", 1<<20)+`"}}`)
	var f *FieldError
	if !errors.As(p.Err("k"), &f) || len(f.Error()) > 400 {
		t.Errorf("%d bytes", len(p.Err("k").Error()))
	}
	if !reflect.DeepEqual([]rune(f.Value), []rune(strings.ToValidUTF8(f.Value, ""))) {
		t.Errorf("cut inside a character: %q", f.Value)
	}
}
