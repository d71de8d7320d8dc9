package control

import (
	"net/netip"
	"strings"
	"testing"
)

func TestAddressesAreWrittenAsLibzmqReadsThem(t *testing.T) {
	for _, c := range []struct {
		host, want string
	}{
		{"127.0.0.1", "tcp://127.0.0.1:5601"},
		{"::ffff:127.0.0.1", "tcp://127.0.0.1:5601"},
		{"::1", "tcp://[::1]:5601"},
		{"[::1]", "tcp://[::1]:5601"},
		{"fe80::1%eth0", "tcp://[fe80::1%eth0]:5601"},
		{"*", "tcp://*:5601"},
	} {
		at, err := bindAddress(t.Context(), c.host, 5601)
		if err != nil || at.String() != c.want || at.v6() != strings.Contains(c.want, "[") {
			t.Errorf("%q: %v, IPv6 %v, %v: want %s", c.host, at, at.v6(), err, c.want)
		}
	}
}

func FuzzAddressOfAPeer(f *testing.F) {
	for _, s := range []string{"localhost:5601", "127.0.0.1:1", "[::1]:65535", ":1", "h:0", "[::1", "a:b:c", "\x00:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		host, port, err := splitAddr(s)
		if err != nil {
			return
		}
		if host == "" || port < 1 || port > 65535 {
			t.Fatalf("%q: host %q, port %d", s, host, port)
		}
		if ip, ok := literal(host); ok {
			at := address{ip: ip, port: port}
			if _, err := netip.ParseAddrPort(strings.TrimPrefix(at.String(), "tcp://")); err != nil {
				t.Fatalf("%q: %v: %v", s, at, err)
			}
		}
	})
}
