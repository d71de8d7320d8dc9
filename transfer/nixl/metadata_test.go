package nixl

import (
	"bytes"
	"testing"
)

func FuzzMetadata(f *testing.F) {
	m := registrationMetadata{base: 4096, length: 1 << 20, version: "1.3.2", agent: []byte("nixlSerDes|")}
	f.Add(m.append(nil))
	f.Add([]byte{})
	f.Add([]byte{metadataVersion})
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseMetadata(b)
		if err == nil && !bytes.Equal(m.append(nil), b) && len(m.version) <= maxVersionText {
			t.Errorf("%x is parsed as %+v, which is other bytes", b, m)
		}
	})
}

func TestMetadataSurvivesARoundTrip(t *testing.T) {
	for _, m := range []registrationMetadata{
		{base: 1, length: 1, agent: []byte{}},
		{base: 1 << 47, length: 1 << 40, version: "1.5.1", agent: bytes.Repeat([]byte("a"), maxAgentMetadata)},
	} {
		got, err := parseMetadata(m.append(nil))
		must(t, err)
		if got.base != m.base || got.length != m.length || got.version != m.version || !bytes.Equal(got.agent, m.agent) {
			t.Errorf("%+v came back as %+v", m, got)
		}
	}
}
