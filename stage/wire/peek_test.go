package wire

import (
	"bytes"
	"testing"
)

func TestTheClaimOfMetadataThatIsRefusedIsStillFound(t *testing.T) {
	m := fullMetadata()
	good := AppendMetadata(nil, m)
	other := bytes.Replace(good, append([]byte("\xaeschema_version"), 1), append([]byte("\xaeschema_version"), 2), 1)
	if bytes.Equal(good, other) {
		t.Fatal("the schema was not changed")
	}
	if _, err := DecodeReply(other); err == nil {
		t.Fatal("schema 2 was decoded")
	}
	wrong := *m
	wrong.Size++
	for name, b := range map[string][]byte{"schema 2": other, "a wrong size": AppendMetadata(nil, &wrong), "good": good} {
		if generation, claim := PeekClaim(b); generation != m.Generation || claim != m.Claim {
			t.Errorf("%s: generation %v and claim %v, want %v and %v", name, generation, claim, m.Generation, m.Claim)
		}
	}
	for n := range good {
		PeekClaim(good[:n]) // must not panic
	}
	for _, b := range [][]byte{nil, {0xc0}, []byte(bareNotFound), {0x81, 0xa1}} {
		if generation, claim := PeekClaim(b); !generation.IsZero() || !claim.IsZero() {
			t.Errorf("%q: generation %v and claim %v", b, generation, claim)
		}
	}
}
