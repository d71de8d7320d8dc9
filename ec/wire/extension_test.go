package wire

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tinylib/msgp/msgp"
)

func fullRequest() *Request {
	return &Request{
		Key: "k", CompatHash: "c", Session: "s", Version: Generation2,
		Ferry: &FerryRequest{
			V: 1, Node: "n", Epoch: 3, Planes: []string{"mapped", "tcp"}, Sum: true, Try: 9,
			Compat: Compat{VLLMVersion: "0.32.0", Model: "tiny-mm", Dtype: "torch.bfloat16", BlockBytes: 2048},
		},
	}
}

func fullAck() *Ack {
	sum := uint64(math.MaxUint64)
	return &Ack{
		Key: "k", Session: "s", Blocks: []uint32{0, 127, 128, 65536, MaxBlock}, AgentMetadata: []byte("meta"), MemDescriptor: []byte{0x90},
		Ferry: &FerryAck{
			V: 1, Try: 9, Node: "n", Epoch: 3, Gen: 1 << 40, Slot: 17, Grant: "g", Extents: [][2]uint32{{0, 1}, {MaxBlock, 1}, {0, 1 << 31}},
			Bytes: 1 << 33, LeaseMS: 30_000, Sum: &sum,
			Planes: []PlaneOffer{{Name: "mapped", Metadata: []byte("m"), Token: []byte("t")}, {Name: "tcp"}},
			Local:  "tensorferry-00",
		},
	}
}

func fullPulled() *Pulled {
	return &Pulled{CompatHash: "c", Entries: []PulledEntry{{"k", 1 << 40}, {strings.Repeat("x", MaxKey), math.MaxUint64}}}
}

func TestAReportOfPullsComesBackAsItWasSentAndIsBounded(t *testing.T) {
	most := &Pulled{CompatHash: strings.Repeat("c", MaxHash)}
	for range MaxPulled {
		most.Entries = append(most.Entries, fullPulled().Entries[1])
	}
	for _, want := range []*Pulled{fullPulled(), most, {CompatHash: "c", Entries: []PulledEntry{}}} {
		got, err := DecodeAtProducer(AppendPulled(nil, want), Generation2)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(Message(want), got); d != "" {
			t.Error(d)
		}
	}
	most.Entries = append(most.Entries, PulledEntry{"k", 1})
	if _, err := DecodeAtProducer(AppendPulled(nil, most), Generation2); !errors.Is(err, ErrLimit) {
		t.Errorf("one more than the limit: %v", err)
	}
	for name, entries := range map[string][]byte{
		"a key alone":     array(array(str("k"))),
		"turned round":    array(array(num(1), str("k"))),
		"no array":        num(1),
		"more than comes": {0xdc, 0, 100},
	} {
		frame := message(pair{"type", str(tagPulled)}, pair{"compatibility_hash", str("c")}, pair{"entries", entries})
		if m, err := DecodeAtProducer(frame, Generation2); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, %v", name, m, err)
		}
	}
}

func TestExtensionComesBackAsItWasSent(t *testing.T) {
	zero := uint64(0)
	for _, want := range []*Request{fullRequest(), {Key: "k", CompatHash: "c", Version: 2, Ferry: &FerryRequest{V: 1}}} {
		got, err := DecodeAtProducer(AppendRequest(nil, want, Generation2), Generation2)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(Message(want), got); d != "" {
			t.Error(d)
		}
	}
	for _, want := range []*Ack{
		fullAck(), {Key: "k", Ferry: &FerryAck{V: 1, Sum: &zero}}, // a checksum that is 0 is not a missing one
		{Key: "k", Status: NackMissing, Ferry: &FerryAck{V: 1, Try: 4, Node: "n", Epoch: 1}},
	} {
		got, err := DecodeAtConsumer(AppendAck(nil, want))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(Message(want), got); d != "" {
			t.Error(d)
		}
	}
	for _, want := range []*Verify{{Key: "k"}, {Key: "k", Session: "s", Grant: "g", Gen: math.MaxUint64, Failed: true}} {
		got, err := DecodeAtProducer(AppendVerify(nil, want), Generation1)
		if d := cmp.Diff(Message(want), got); err != nil || d != "" {
			t.Error(err, d)
		}
	}
	for _, want := range []*Verified{{Key: "k"}, {Key: "k", Session: "s", Grant: "g", Gen: 7, OK: true}} {
		got, err := DecodeAtConsumer(AppendVerified(nil, want))
		if d := cmp.Diff(Message(want), got); err != nil || d != "" {
			t.Error(err, d)
		}
	}
}

func TestPeersReadTheirOwnFieldsBesideTheExtension(t *testing.T) {
	with := AppendRequest(nil, fullRequest(), Generation2)
	plain := fullRequest()
	plain.Ferry = nil
	without := AppendRequest(nil, plain, Generation2)
	if with[0] != without[0]+1 || !bytes.HasPrefix(with[1:], without[1:]) {
		t.Error("the extension is not one more field after the peers' own")
	}
}

func TestForeignFerryFieldIsThatOfAPlainPeer(t *testing.T) {
	for name, value := range map[string][]byte{
		"nil": {0xc0}, "a string": str("yes"), "an array": {0x90}, "an empty map": {0x80},
		"no version":         message(pair{"node", str("n")}),
		"version 2":          message(pair{"v", num(2)}, pair{"node", num(5)}),
		"version 2, last":    message(pair{"node", num(5)}, pair{"v", num(2)}),
		"version 0":          message(pair{"v", num(0)}),
		"version as text":    message(pair{"v", str("1")}),
		"integers for names": bytesOf("810101"),
	} {
		m, err := DecodeAtProducer(message(pair{"mm_hash", str("k")}, pair{"compatibility_hash", str("c")}, pair{"ferry", value}), 2)
		if err != nil {
			t.Errorf("request, %s: %v", name, err)
		} else if q := m.(*Request); q.Ferry != nil {
			t.Errorf("request, %s: taken for ours: %+v", name, q.Ferry)
		}
		m, err = DecodeAtConsumer(message(pair{"mm_hash", str("k")}, pair{"status", num(0)}, pair{"ferry", value}))
		if err != nil {
			t.Errorf("ack, %s: %v", name, err)
		} else if a := m.(*Ack); a.Ferry != nil {
			t.Errorf("ack, %s: taken for ours: %+v", name, a.Ferry)
		}
	}
}

// array encodes values that are encoded already.
func array(values ...[]byte) []byte {
	return append(msgp.AppendArrayHeader(nil, uint32(len(values))), bytes.Join(values, nil)...)
}

func repeated(n int, value []byte) (v [][]byte) {
	for range n {
		v = append(v, value)
	}
	return v
}

func TestExtensionOfOurVersionIsReadStrictly(t *testing.T) {
	name := func(n int) []byte { return str(strings.Repeat("x", n)) }
	blob := func(n int) []byte { return msgp.AppendBytes(nil, make([]byte, n)) }
	offer := func(p ...pair) []byte { return array(message(append([]pair{{"name", str("tcp")}}, p...)...)) }
	for _, c := range []struct {
		name, field string
		value       []byte
		request     bool
		want        error
		says        string
	}{
		{"unknown field", "later", array(num(1), []byte{0xc0}), false, nil, ""},
		{"a second version", "v", num(2), false, ErrMalformed, "ferry.v: extension version 2, this end speaks 1"},
		{"node as an integer", "node", num(1), false, ErrMalformed, "ferry.node: want a string, got int"},
		{"longest node", "node", name(MaxNode), true, nil, ""},
		{"node too long", "node", name(MaxNode + 1), true, ErrLimit, "ferry.node: 65 bytes, limit 64"},
		{"epoch below 0", "epoch", []byte{0xff}, true, ErrMalformed, "ferry.epoch: want an integer from 0 up, got -1"},
		{"try as text", "try", str("1"), true, ErrMalformed, "ferry.try"},
		{"sum as an integer", "sum", num(1), true, ErrMalformed, "ferry.sum: want a boolean, got int"},
		{"most planes asked for", "planes", array(repeated(MaxPlanes, str("p"))...), true, nil, ""},
		{"too many planes asked for", "planes", array(repeated(MaxPlanes+1, str("p"))...), true, ErrLimit, "ferry.planes: 9 elements, limit 8"},
		{"plane asked for by a long name", "planes", array(name(MaxPlaneName + 1)), true, ErrLimit, "ferry.planes"},
		{"planes as text", "planes", str("tcp"), true, ErrMalformed, "want an array"},
		{"compat as text", "compat", str("x"), true, ErrMalformed, "want a map"},
		{"longest model", "compat", message(pair{"model", name(MaxCompatText)}), true, nil, ""},
		{"model too long", "compat", message(pair{"model", name(MaxCompatText + 1)}), true, ErrLimit, "ferry.compat.model"},
		{"block bytes below 0", "compat", message(pair{"block_size_bytes", []byte{0xff}}), true, ErrMalformed, "ferry.compat.block_size_bytes"},
		{"an unknown part", "compat", message(pair{"revision", str("r")}), true, nil, ""},
		{"gen as text", "gen", str("1"), false, ErrMalformed, "ferry.gen"},
		{"slot over 32 bits", "slot", num(1 << 32), false, ErrMalformed, "ferry.slot: 4294967296"},
		{"grant too long", "grant", name(MaxGrant + 1), false, ErrLimit, "ferry.grant"},
		{"bytes over 63 bits", "bytes", num(1 << 63), false, ErrMalformed, "ferry.bytes"},
		{"lease that no duration holds", "lease_ms", num(math.MaxInt64), false, ErrMalformed, "ferry.lease_ms"},
		{"sum of an ack as a boolean", "sum", []byte{0xc3}, false, ErrMalformed, "ferry.sum"},
		{"most extents", "extents", array(repeated(MaxExtents, array(num(0), num(1)))...), false, nil, ""},
		{"too many extents", "extents", array(repeated(MaxExtents+1, array(num(0), num(1)))...), false, ErrLimit, "65 elements, limit 64"},
		{"an extent of one number", "extents", array(array(num(0)), str("more")), false, ErrMalformed, "an extent of 1 numbers"},
		{"an extent of three numbers", "extents", array(array(num(0), num(1), num(2))), false, ErrLimit, "3 elements, limit 2"},
		{"an extent of no blocks", "extents", array(array(num(5), num(0))), false, ErrMalformed, "an extent of no blocks"},
		{"an extent past the last block", "extents", array(array(num(1), num(1<<31))), false, ErrMalformed, "2147483648, at most 2147483647"},
		{"a plane with no name", "planes", array(message(pair{"token", blob(1)})), false, ErrMalformed, "ferry.planes.token: name is missing"},
		{"largest metadata", "planes", offer(pair{"metadata", blob(MaxPlaneMetadata)}), false, nil, ""},
		{"metadata too large", "planes", offer(pair{"metadata", blob(MaxPlaneMetadata + 1)}), false, ErrLimit, "ferry.planes.metadata: 65537 bytes"},
		{"token too large", "planes", offer(pair{"token", blob(MaxToken + 1)}), false, ErrLimit, "ferry.planes.token"},
		{"token as text", "planes", offer(pair{"token", str("t")}), false, ErrMalformed, "ferry.planes.token: want bytes, got str"},
		{"too many planes", "planes", array(repeated(MaxPlanes+1, message(pair{"name", str("p")}))...), false, ErrLimit, "9 elements"},
		{"nested to the depth limit", "later", append(bytes.Repeat([]byte{0x91}, MaxDepth-2), 0xc0), true, nil, ""},
		{"nested over the depth limit", "later", append(bytes.Repeat([]byte{0x91}, MaxDepth-1), 0xc0), true, ErrLimit, "nested deeper than 16"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ferry := message(pair{"v", num(1)}, pair{c.field, c.value})
			var err error
			if c.request {
				_, err = DecodeAtProducer(message(pair{"mm_hash", str("k")}, pair{"compatibility_hash", str("c")}, pair{"ferry", ferry}), 2)
			} else {
				_, err = DecodeAtConsumer(message(pair{"mm_hash", str("k")}, pair{"status", num(0)}, pair{"ferry", ferry}))
			}
			checkError(t, err, c.want, c.says)
		})
	}
}

func TestVerifyOfAnotherVersionOrFormIsRefused(t *testing.T) {
	tag, key := pair{"type", str("ferry_verify")}, pair{"mm_hash", str("k")}
	for _, c := range []struct {
		name  string
		frame []byte
		want  error
		says  string
	}{
		{"no version", message(tag, key), nil, ""},
		{"the tag last, an unknown field", message(key, pair{"later", []byte{0xc0}}, tag), nil, ""},
		{"version 2", message(tag, pair{"v", num(2)}, key), ErrMalformed, "v: extension version 2"},
		{"no key", message(tag), ErrMalformed, "mm_hash is missing"},
		{"failed as an integer", message(tag, key, pair{"failed", num(1)}), ErrMalformed, "failed: want a boolean"},
		{"a trailing byte", append(message(tag, key), 0), ErrMalformed, "1 bytes after the message"},
		{"a verified", AppendVerified(nil, &Verified{Key: "k"}), ErrMalformed, `"ferry_verified", want "req"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := DecodeAtProducer(c.frame, 2)
			checkError(t, err, c.want, c.says)
		})
	}
	_, err := DecodeAtConsumer(AppendVerify(nil, &Verify{Key: "k"}))
	checkError(t, err, ErrMalformed, `"ferry_verify", want "ack"`)
}
