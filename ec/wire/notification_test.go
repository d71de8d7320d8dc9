package wire

import (
	"bytes"
	"strings"
	"testing"
)

func TestNotificationIsByteEqualToThePeersBothWays(t *testing.T) {
	n := readGolden(t).Notif
	if got := Notification(n.Session, n.Key); !bytes.Equal(got, n.Hex) {
		t.Errorf("%q, want %q", got, n.Hex)
	}
	session, key, err := ParseNotification(n.Hex)
	if err != nil || session != n.Session || key != n.Key {
		t.Errorf("%q %q %v", session, key, err)
	}
}

func TestNotificationIsSplitAtTheFirstColon(t *testing.T) {
	for _, c := range []struct {
		in, session, key string
		want             error
		says             string
	}{
		{in: "s:k", session: "s", key: "k"},
		{in: "s:k:l", session: "s", key: "k:l"},
		{in: "s::", session: "s", key: ":"},
		{in: strings.Repeat("s", MaxSession) + ":" + strings.Repeat("k", MaxKey), session: strings.Repeat("s", MaxSession), key: strings.Repeat("k", MaxKey)},
		{in: strings.Repeat("s", MaxSession+1) + ":k", want: ErrLimit, says: "a session of 257"},
		{in: "s:" + strings.Repeat("k", MaxKey+1), want: ErrLimit, says: "a key of 257"},
		{in: strings.Repeat("x", 1000), want: ErrLimit, says: "1000 bytes"},
		{in: "", want: ErrMalformed, says: "no colon"},
		{in: "k", want: ErrMalformed, says: "no colon"},
		{in: ":k", want: ErrMalformed, says: "empty"},
		{in: "s:", want: ErrMalformed, says: "empty"},
		{in: "s:\xff", want: ErrMalformed, says: "not UTF-8"},
	} {
		session, key, err := ParseNotification([]byte(c.in))
		checkError(t, err, c.want, c.says)
		if session != c.session || key != c.key {
			t.Errorf("%q: %q and %q", c.in, session, key)
		}
	}
}
