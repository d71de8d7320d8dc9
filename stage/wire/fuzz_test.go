package wire

import (
	"bytes"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tensorferry/tensorferry/tensor"
)

// checkFuzzError fails if an error of a decoder is none of those that callers tell apart.
func checkFuzzError(t *testing.T, err error) {
	t.Helper()
	for _, e := range []error{ErrMalformed, ErrLimit, ErrSchema, ErrMarker} {
		if errors.Is(err, e) {
			return
		}
	}
	t.Fatalf("an error of another kind: %v", err)
}

func seedObjects(f *testing.F) {
	g := readGolden(f)
	for _, c := range g.Serializer {
		f.Add([]byte(c.Hex))
	}
	for _, c := range g.Put {
		f.Add([]byte(c.Header))
	}
	for _, c := range hostile {
		if len(c.b) < 1000 {
			f.Add(c.b)
		}
	}
}

func FuzzDecodeObject(f *testing.F) {
	seedObjects(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := DecodeObject(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		again, err := AppendObject(nil, n, ObjectOptions{PeerObjects: true})
		if err != nil {
			t.Fatal(err)
		}
		if len(again) > len(b)+8*bytes.Count(b, []byte{0xca}) { // a 4-byte float comes back with 8
			t.Fatalf("%d bytes became %d", len(b), len(again))
		}
		if back, err := DecodeObject(again); err != nil || !tensor.Equal(n, back) {
			t.Fatalf("%v, want %v (%v)", back, n, err)
		}
	})
}

func FuzzDecodeSkeleton(f *testing.F) {
	seedObjects(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := DecodeSkeleton(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		if tensor.HasTensor(n) {
			return // only a plain peer's own marker makes one here; it is refused when it is joined
		}
		again, err := AppendSkeleton(nil, n, ObjectOptions{PeerObjects: true})
		if err != nil {
			t.Fatal(err)
		}
		if back, err := DecodeSkeleton(again); err != nil || !tensor.Equal(n, back) {
			t.Fatalf("%v, want %v (%v)", back, n, err)
		}
	})
}

func seedMessages(f *testing.F) {
	g := readGolden(f)
	for _, c := range g.Put {
		f.Add([]byte(c.Hex))
	}
	for _, exchange := range g.Exchange {
		for _, x := range exchange {
			f.Add([]byte(x.Request))
			f.Add([]byte(x.Reply))
		}
	}
	for _, p := range g.Probes {
		f.Add([]byte(p.Frames[0]))
	}
	f.Add([]byte(g.NotFound.Reply))
	f.Add(AppendMetadata(nil, small()))
	f.Add(AppendReply(nil, &Reply{Status: Found, Metadata: fullMetadata()}, true))
	f.Add(AppendReply(nil, &Reply{Status: Failed, Try: 1, Reason: "r"}, true))
	for op := Get; op <= Stat; op++ {
		q := fullRequest()
		q.Op = op
		f.Add(AppendRequest(nil, q))
	}
}

func FuzzDecodeRequest(f *testing.F) {
	seedMessages(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		q, err := DecodeRequest(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		if q.Op == Unknown {
			return
		}
		back, err := DecodeRequest(AppendRequest(nil, q))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(q, back, ids); d != "" {
			t.Fatal(d)
		}
	})
}

func FuzzDecodeReply(f *testing.F) {
	seedMessages(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := DecodeReply(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		back, err := DecodeReply(AppendReply(nil, a, true))
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(a, back, ids); d != "" {
			t.Fatal(d)
		}
	})
}

func FuzzDecodeHandoff(f *testing.F) {
	seedMessages(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := DecodeHandoff(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		if (h.Host == "") != (h.Port == 0) || h.Port > 65535 {
			t.Fatalf("%+v", h)
		}
	})
}
