package wire

import (
	"encoding/json"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
	"pgregory.net/rapid"
)

func text(limit int) *rapid.Generator[string] { return rapid.StringN(0, -1, limit) }

// blob is nil for no bytes: that is how they are decoded.
func blob(limit int) *rapid.Generator[[]byte] {
	return rapid.Map(rapid.SliceOfN(rapid.Byte(), 0, limit), func(b []byte) []byte {
		if len(b) == 0 {
			return nil
		}
		return b
	})
}

// list is nil for no elements.
func list[T any](element *rapid.Generator[T], limit int) *rapid.Generator[[]T] {
	return rapid.Map(rapid.SliceOfN(element, 0, limit), func(v []T) []T {
		if len(v) == 0 {
			return nil
		}
		return v
	})
}

func drawRequest(t *rapid.T) *Request {
	q := &Request{
		Key: text(MaxKey).Draw(t, "key"), CompatHash: text(MaxHash).Draw(t, "hash"), Session: text(MaxSession).Draw(t, "session"),
		Version: rapid.Int().Filter(func(v int) bool { return v != 0 }).Draw(t, "version"),
	}
	if rapid.Bool().Draw(t, "own") {
		q.Ferry = &FerryRequest{
			V: ExtensionVersion, Node: text(MaxNode).Draw(t, "node"), Epoch: rapid.Uint64().Draw(t, "epoch"), Try: rapid.Uint64().Draw(t, "try"),
			Planes: list(text(MaxPlaneName), MaxPlanes).Draw(t, "planes"), Sum: rapid.Bool().Draw(t, "sum"),
			Compat: Compat{
				VLLMVersion: text(40).Draw(t, "vllm"), Model: text(300).Draw(t, "model"), Dtype: text(40).Draw(t, "dtype"),
				BlockBytes: rapid.Int64Min(0).Draw(t, "block bytes"),
			},
		}
	}
	return q
}

func drawAck(t *rapid.T) *Ack {
	a := &Ack{
		Key: text(MaxKey).Draw(t, "key"), Status: Status(rapid.IntRange(0, 5).Draw(t, "status")), Session: text(MaxSession).Draw(t, "session"),
		Blocks:        list(rapid.Uint32Max(MaxBlock), 100).Draw(t, "blocks"),
		AgentMetadata: blob(600).Draw(t, "agent"), MemDescriptor: blob(600).Draw(t, "mem"),
	}
	if rapid.Bool().Draw(t, "own") {
		extent := rapid.Custom(func(t *rapid.T) [2]uint32 {
			start := rapid.Uint32Max(MaxBlock).Draw(t, "start")
			return [2]uint32{start, rapid.Uint32Range(1, MaxBlock+1-start).Draw(t, "count")}
		})
		plane := rapid.Custom(func(t *rapid.T) PlaneOffer {
			return PlaneOffer{Name: text(MaxPlaneName).Draw(t, "plane"), Metadata: blob(400).Draw(t, "metadata"), Token: blob(MaxToken).Draw(t, "token")}
		})
		a.Ferry = &FerryAck{
			V: ExtensionVersion, Try: rapid.Uint64().Draw(t, "try"), Node: text(MaxNode).Draw(t, "node"), Epoch: rapid.Uint64().Draw(t, "epoch"),
			Gen: rapid.Uint64().Draw(t, "gen"), Slot: rapid.Uint32().Draw(t, "slot"), Grant: text(MaxGrant).Draw(t, "grant"),
			Extents: list(extent, MaxExtents).Draw(t, "extents"), Bytes: rapid.Int64Min(0).Draw(t, "bytes"),
			LeaseMS: rapid.Int64Range(0, math.MaxInt64/1_000_000).Draw(t, "lease"),
			Sum:     rapid.Ptr(rapid.Uint64(), true).Draw(t, "sum"), Planes: list(plane, MaxPlanes).Draw(t, "planes"),
			Local: text(MaxLocal).Draw(t, "local"),
		}
	}
	return a
}

func TestAnyMessageComesBackAsItWasSent(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		check := func(want, got Message, err error) {
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Fatal(d)
			}
		}
		generation := rapid.IntRange(1, 2).Draw(t, "generation")
		q := drawRequest(t)
		got, err := DecodeAtProducer(AppendRequest(nil, q, generation), generation)
		check(q, got, err)
		a := drawAck(t)
		got, err = DecodeAtConsumer(AppendAck(nil, a))
		check(a, got, err)
		v := &Verify{Key: q.Key, Session: q.Session, Grant: text(MaxGrant).Draw(t, "grant"), Gen: rapid.Uint64().Draw(t, "gen"), Failed: rapid.Bool().Draw(t, "failed")}
		got, err = DecodeAtProducer(AppendVerify(nil, v), generation)
		check(v, got, err)
		d := &Verified{Key: v.Key, Session: v.Session, Grant: v.Grant, Gen: v.Gen, OK: v.Failed}
		got, err = DecodeAtConsumer(AppendVerified(nil, d))
		check(d, got, err)
		p := &Pulled{CompatHash: q.CompatHash, Entries: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) PulledEntry {
			return PulledEntry{Key: text(MaxKey).Draw(t, "pulled key"), Gen: rapid.Uint64().Draw(t, "pulled gen")}
		}), 0, 20).Draw(t, "pulled")}
		got, err = DecodeAtProducer(AppendPulled(nil, p), generation)
		check(p, got, err)
	})
}

// respelled is the message in another encoding that means the same: fields in any order, unknown ones and earlier duplicates among
// them, lengths and integers in longer forms.
func respelled(t *rapid.T, frame []byte) []byte {
	n, rest, err := msgp.ReadMapHeaderBytes(frame)
	if err != nil {
		t.Fatal(err)
	}
	var fields []pair
	for range n {
		name, value, err := msgp.ReadStringZC(rest)
		if err != nil {
			t.Fatal(err)
		}
		if rest, err = msgp.Skip(value); err != nil {
			t.Fatal(err)
		}
		fields = append(fields, pair{string(name), longer(t, value[:len(value)-len(rest)])})
	}
	fields = rapid.Permutation(fields).Draw(t, "order")
	if rapid.Bool().Draw(t, "without type") {
		fields = slices.DeleteFunc(fields, func(p pair) bool { return p.name == fieldType })
	}
	for range rapid.IntRange(0, 3).Draw(t, "unknown") {
		at := rapid.IntRange(0, len(fields)).Draw(t, "at")
		value := rapid.SampledFrom([]string{"c0", "80", "90", "cb0000000000000000", "c403616263", "81a1789203c2", "d40501", "ff"}).Draw(t, "value")
		fields = slices.Insert(fields, at, pair{rapid.StringMatching(`x[a-z]{0,4}`).Draw(t, "name"), bytesOf(value)})
	}
	if rapid.Bool().Draw(t, "duplicate") {
		fields = slices.Insert(fields, 0, pair{fieldKey, str("an earlier key")})
	}
	b := msgp.AppendMapHeader(nil, uint32(len(fields)))
	if rapid.Bool().Draw(t, "map32") {
		b = []byte{0xdf, 0, 0, 0, byte(len(fields))}
	}
	for _, f := range fields {
		b = append(b, longer(t, str(f.name))...)
		b = append(b, f.value...)
	}
	return b
}

// longer puts a short string or a small integer into a longer form, or leaves the value as it is.
func longer(t *rapid.T, v []byte) []byte {
	pad := rapid.IntRange(0, 4).Draw(t, "form")
	switch {
	case v[0] >= 0xa0 && v[0] <= 0xbf && pad > 0:
		n := v[0] & 0x1f
		head := [][]byte{{0xd9, n}, {0xda, 0, n}, {0xdb, 0, 0, 0, n}, {0xd9, n}}[pad-1]
		return append(head, v[1:]...)
	case v[0] <= 0x7f && pad > 0:
		return [][]byte{{0xcc, v[0]}, {0xd0, v[0]}, {0xd1, 0, v[0]}, {0xcf, 0, 0, 0, 0, 0, 0, 0, v[0]}}[pad-1]
	}
	return v
}

func TestAnySpellingOfAMessageMeansTheSame(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		q := drawRequest(t)
		got, err := DecodeAtProducer(respelled(t, AppendRequest(nil, q, q.Version)), q.Version)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(Message(q), got); d != "" {
			t.Fatal(d)
		}
		a := drawAck(t)
		got, err = DecodeAtConsumer(respelled(t, AppendAck(nil, a)))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(Message(a), got); d != "" {
			t.Fatal(d)
		}
	})
}

func TestAnyParamsComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var p Params
		want := map[string]*Announcement{}
		keys := rapid.SliceOfNDistinct(rapid.StringMatching(`[0-9a-f:/ü"\\<]{1,12}`), 0, 6, rapid.ID[string]).Draw(t, "keys")
		for _, k := range keys {
			a := &Announcement{
				ItemIndices: list(rapid.IntRange(0, math.MaxInt), 4).Draw(t, "items"),
				Metadata:    rapid.SampledFrom([]json.RawMessage{json.RawMessage(`{}`), json.RawMessage(`{"a":[1,{"b":"}\"]"}]}`), json.RawMessage("{\"x\" :\t1.50}")}).Draw(t, "metadata"),
			}
			if rapid.Bool().Draw(t, "servable") {
				a.PeerHost = rapid.SampledFrom([]string{"h", "10.0.0.1", "[::1]"}).Draw(t, "host")
				a.PeerPort = rapid.IntRange(1, 65535).Draw(t, "port")
				a.SizeBytes = rapid.Int64Min(1).Draw(t, "size")
				a.Shape = []int{rapid.IntRange(1, 1<<31).Draw(t, "rows"), rapid.IntRange(1, 1<<31).Draw(t, "width")}
			}
			p.Set(k, a)
			want[k] = a
		}
		b, err := p.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		var again Params
		if err := json.Unmarshal(b, &again); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(keys, again.Keys()); d != "" && len(keys) > 0 {
			t.Fatal(d)
		}
		for k, a := range want {
			got, ok := again.Get(k)
			if d := cmp.Diff(a, got, ignoreText); !ok || d != "" {
				t.Fatal(again.Err(k), d)
			}
		}
		if c, err := again.MarshalJSON(); err != nil || string(c) != string(b) {
			t.Fatalf("%s, want %s", c, b)
		}
	})
}
