package hostname

import (
	"strings"
	"testing"
)

func TestAHostIsToldByItsText(t *testing.T) {
	for _, c := range []struct {
		host                         string
		valid, loopback, unspecified bool
	}{
		{"", false, false, false},
		{"gpu-1.rack_2.example", true, false, false},
		{"_srv", true, false, false},
		{strings.Repeat("h", 253), true, false, false},
		{strings.Repeat("h", 254), false, false, false},
		{"-h", false, false, false},
		{".h", false, false, false},
		{"h/x", false, false, false},
		{"h:1", false, false, false},
		{"hé", false, false, false},
		{"localhost", true, true, false},
		{"LocalHost", true, true, false},
		{"localhost.example", true, false, false},
		{"127.0.0.1", true, true, false},
		{"127.9.9.9", true, true, false},
		{"::1", true, true, false},
		{"[::1]", false, true, false},
		{"::ffff:127.0.0.1", true, true, false},
		{"10.0.0.1", true, false, false},
		{"fe80::1%eth0", true, false, false},
		{"0.0.0.0", true, false, true},
		{"::", true, false, true},
		{"[::]", false, false, true},
		{"::ffff:0.0.0.0", true, false, true},
		{"*", false, false, false},
	} {
		if v, l, u := Valid(c.host), Loopback(c.host), Unspecified(c.host); v != c.valid || l != c.loopback || u != c.unspecified {
			t.Errorf("%q: valid %v, loopback %v, unspecified %v", c.host, v, l, u)
		}
	}
}
