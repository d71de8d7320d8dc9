package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// seedFrames gives a fuzz target every message of the golden files, those of the extension, and the hostile ones.
func seedFrames(f *testing.F) {
	g := readGolden(f)
	for _, m := range g.Messages {
		f.Add([]byte(m.Hex))
	}
	for _, table := range []map[string]tolerance{g.ToleranceReq, g.ToleranceAck} {
		for _, c := range table {
			f.Add([]byte(c.Hex))
		}
	}
	for _, c := range g.Capture {
		for _, b := range append(c.ToProducer.payloads(), c.ToConsumer.payloads()...) {
			f.Add(b)
		}
	}
	for _, c := range hostile {
		f.Add(c.frame)
	}
	f.Add(AppendRequest(nil, fullRequest(), Generation1))
	f.Add(AppendAck(nil, fullAck()))
	f.Add(AppendVerify(nil, &Verify{Key: "k", Session: "s", Grant: "g", Gen: 1, Failed: true}))
	f.Add(AppendPulled(nil, fullPulled()))
	f.Add(AppendVerified(nil, &Verified{Key: "k", Session: "s", Grant: "g", Gen: 1, OK: true}))
}

// checkFuzzError fails if an error of a decoder is none of the two that callers tell apart.
func checkFuzzError(t *testing.T, err error) {
	t.Helper()
	if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrLimit) {
		t.Fatalf("an error of another kind: %v", err)
	}
}

func FuzzDecodeAtProducer(f *testing.F) {
	seedFrames(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeAtProducer(b, Generation2)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		var again []byte
		switch m := m.(type) {
		case *Request:
			if m.Version == 0 {
				return // cannot be sent: it means the sender's own
			}
			again = AppendRequest(nil, m, Generation2)
		case *Verify:
			again = AppendVerify(nil, m)
		case *Pulled:
			again = AppendPulled(nil, m)
		}
		got, err := DecodeAtProducer(again, Generation2)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(emptyIsNil(m), emptyIsNil(got)); d != "" {
			t.Fatal(d)
		}
	})
}

func FuzzDecodeAtConsumer(f *testing.F) {
	seedFrames(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := DecodeAtConsumer(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		var again []byte
		switch m := m.(type) {
		case *Ack:
			again = AppendAck(nil, m)
		case *Verified:
			again = AppendVerified(nil, m)
		}
		got, err := DecodeAtConsumer(again)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(emptyIsNil(m), emptyIsNil(got)); d != "" {
			t.Fatal(d)
		}
	})
}

// emptyIsNil evens out lists that were there but empty: they are left out when encoded.
func emptyIsNil(m Message) Message {
	switch m := m.(type) {
	case *Request:
		if f := m.Ferry; f != nil && len(f.Planes) == 0 {
			f.Planes = nil
		}
	case *Pulled:
		if len(m.Entries) == 0 {
			m.Entries = nil
		}
	case *Ack:
		if len(m.Blocks) == 0 {
			m.Blocks = nil
		}
		if f := m.Ferry; f != nil {
			if len(f.Planes) == 0 {
				f.Planes = nil
			}
			if len(f.Extents) == 0 {
				f.Extents = nil
			}
		}
	}
	return m
}

func FuzzDecodeMemDescriptor(f *testing.F) {
	for _, c := range readGolden(f).MemDescriptor {
		f.Add([]byte(c.Hex))
	}
	f.Add(header32(0xdd))
	f.Fuzz(func(t *testing.T, b []byte) {
		d, err := DecodeMemDescriptor(b, 1000)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		if len(d) > 1000 || len(d) > len(b)/4 {
			t.Fatalf("%d triples in %d bytes", len(d), len(b))
		}
		for _, x := range d {
			if x.Addr+x.Size < x.Addr {
				t.Fatalf("%+v is past the address space", x)
			}
		}
	})
}

func FuzzParseNotification(f *testing.F) {
	f.Add([]byte(readGolden(f).Notif.Hex))
	f.Add([]byte("s:k:l"))
	f.Fuzz(func(t *testing.T, b []byte) {
		session, key, err := ParseNotification(b)
		if err != nil {
			checkFuzzError(t, err)
			return
		}
		if !bytes.Equal(Notification(session, key), b) {
			t.Fatalf("%q and %q out of %q", session, key, b)
		}
	})
}

func FuzzParams(f *testing.F) {
	g := readGolden(f)
	f.Add([]byte(g.Params))
	for _, e := range g.ParamsExamples {
		f.Add([]byte(e.Returned[1]))
	}
	f.Add([]byte(`{"a":{"x":[1,{"y":"\"}"}],"shape":[1,2]},"a":null,"\u00fc":{"peer_port":70000}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var p Params
		if err := p.UnmarshalJSON(b); err != nil {
			checkFuzzError(t, err)
			return
		}
		out, err := p.MarshalJSON()
		if err != nil || !json.Valid(out) {
			t.Fatalf("%q encodes to %q (%v)", b, out, err)
		}
		if len(p.Duplicates()) == 0 && p.Len() > 0 && !bytes.Equal(out, bytes.TrimSpace(b)) {
			t.Fatalf("%q was changed to %q", b, out)
		}
		touched := false
		for _, k := range p.Keys() {
			a, ok := p.Get(k)
			if ok != (p.Err(k) == nil) {
				t.Fatalf("%q: %v, %v", k, ok, p.Err(k))
			}
			if !ok {
				checkFuzzError(t, p.Err(k))
				continue
			}
			p.Set(k, a)
			touched = true
		}
		if !touched {
			return
		}
		again, err := p.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		var back Params
		if err := back.UnmarshalJSON(again); err != nil || back.Len() != p.Len() {
			t.Fatalf("%q from %q: %v", again, b, err)
		}
	})
}

func FuzzPlacement(f *testing.F) {
	f.Add([]byte(`{"ec_transfer_params":{"k":{}},"x":[1]}`))
	f.Add([]byte(`{"sampling_params":{"extra_args":{"ec_transfer_params":{}}}}`))
	f.Add([]byte(`{"extra_args":{"ec_transfer_params":null}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		if _, _, err := FindParams(body); err != nil {
			checkFuzzError(t, err)
			return
		}
		for place := TopLevel; place <= SamplingExtraArgs; place++ {
			out, err := SetParams(body, place, json.RawMessage(`{"k":{}}`))
			if err != nil {
				checkFuzzError(t, err)
				continue
			}
			if got := find(out, placePaths[place]); !json.Valid(out) || string(got) != `{"k":{}}` {
				t.Fatalf("%q in %q", got, out)
			}
			if out, err = SetParams(out, place, nil); err != nil || !json.Valid(out) || find(out, placePaths[place]) != nil {
				t.Fatalf("not taken out: %q (%v)", out, err)
			}
		}
	})
}
