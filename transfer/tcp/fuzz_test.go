package tcp

import (
	"bytes"
	"testing"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

func FuzzMetadata(f *testing.F) {
	good := location{host: "node-1.example", port: 4000, id: endpointID{registration: 3}, length: 1 << 30}.encode()
	f.Add(good)
	f.Add(good[:20])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := decodeLocation(b)
		if err == nil && !bytes.Equal(l.encode(), b) {
			t.Errorf("%x is taken for %+v", b, l)
		}
	})
}

func FuzzFrames(f *testing.F) {
	f.Add(header{kind: kindHello, length: helloBytes}.append(nil), endpointID{registration: 1}.append(nil))
	read := request{readID: 5, spans: []region.Span{{Offset: 1, Length: 2}, {Offset: 1 << 40, Length: 7}}}.append(kindRead, nil)
	f.Add(read[:headerBytes], read[headerBytes:])
	commit := request{message: []byte("hi")}.append(kindCommit, nil)
	f.Add(commit[:headerBytes], commit[headerBytes:])
	f.Add(commit[:3], commit[headerBytes:headerBytes+5])
	f.Fuzz(func(t *testing.T, head, body []byte) {
		h, err := readHeader(bytes.NewReader(head))
		if err != nil {
			return
		}
		b, err := readBody(bytes.NewReader(body), nil, h.length, maxBody)
		if err != nil {
			return
		}
		if int64(len(b)) != h.length {
			t.Fatalf("%d bytes of %d", len(b), h.length)
		}
		switch h.kind {
		case kindHello:
			if id, err := parseHello(b); err == nil && !bytes.Equal(id.append(nil), b) {
				t.Errorf("hello %x is taken for %+v", b, id)
			}
		case kindRead, kindCommit:
			q, err := parseRequest(h.kind, b)
			if err != nil {
				return
			}
			if again := q.append(h.kind, nil); !bytes.Equal(again[headerBytes:], b) {
				t.Errorf("request %x is taken for %+v", b, q)
			}
			if len(q.spans) > transfer.MaxSpans {
				t.Errorf("%d spans", len(q.spans))
			}
		}
	})
}
