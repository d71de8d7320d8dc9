package nixl

import (
	"encoding/hex"
	"strings"
	"testing"
)

// What NIXL 1.3.2 and 1.5.1 say of themselves on one machine, with UCX_NET_DEVICES=lo and without.
const (
	oldMetadata = "6e69786c5365724465737c4167656e7407000000000000006167656e742d307c" +
		"436f6e6e7308000000000000000100000000000000007c740300000000000000" +
		"5543587c63bc00000000000000207705 95a1c8095d240000637577cc2b320040 97" +
		"500000000000 4f03c08841437d5d1f359f1e01120102 89cc13c788c1abc2 f9ffffef00000000" +
		"cf1917b75138539e3e4bd7e037370113230082c009020889cc13c788c1ab428d53"
	newMetadata = "6e69786c5365724465737c4167656e7407000000000000006167656e742d307c" +
		"436f6e6e7308000000000000000100000000000000007c740300000000000000" +
		"5543587c63b80000000000000020aa2e2c9ce0a71d3d0000637577cc2b32004097" +
		"5000000000004f03c0884c339038724 01f50010e0102 89cc13c788c1abc2 f9ffffef" +
		"cf1917b75138539e3e4bd7e037370113230082a1dd020889cc13c788c1ab428d53"
)

func TestVersionsThatCrashEachOtherAreKeptApart(t *testing.T) {
	read := func(s string) []byte {
		b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
		must(t, err)
		return b
	}
	elsewhere := strings.NewReplacer("89cc13c788c1ab", "11cc13c788c1ab")
	for _, c := range []struct {
		what         string
		ours, theirs string
		want         bool
	}{
		{"an older one is read by a newer one", newMetadata, oldMetadata, true},
		{"on another machine", newMetadata, elsewhere.Replace(oldMetadata), false},
		{"two newer ones", newMetadata, newMetadata, false},
		{"a newer one is read by an older one", oldMetadata, newMetadata, false},
		{"two older ones", oldMetadata, oldMetadata, false},
		{"no agent of ours yet", "", oldMetadata, false},
		{"no loopback interface", newMetadata, strings.Replace(oldMetadata, "120102", "060102", 1), false},
		{"cut off", newMetadata, oldMetadata[:strings.Index(oldMetadata, "f9ffffef")], false},
	} {
		if got := clash(read(c.ours), read(c.theirs)); got != c.want {
			t.Errorf("%s: %v", c.what, got)
		}
	}
}
