package shorten

import "testing"

func TestTextIsCutBeforeARune(t *testing.T) {
	for _, c := range []struct {
		s    string
		most int
		want string
	}{
		{"", 4, ""},
		{"abcd", 4, "abcd"},
		{"abcde", 4, "abcd..."},
		{"abcé", 4, "abc..."},
		{"ab€", 4, "ab..."},
		{"a\U0001F600", 4, "a..."},
		{"a\U0001F600b", 5, "a\U0001F600..."},
		{"\x80\x80\x80\x80\x80\x80", 5, "\x80..."}, // no rune begins here: cut anyhow
		{"éé", 0, "..."},
	} {
		if got := Text(c.s, c.most); got != c.want {
			t.Errorf("%q at %d: %q, want %q", c.s, c.most, got, c.want)
		}
		if got := Text([]byte(c.s), c.most); got != c.want {
			t.Errorf("bytes %q at %d: %q, want %q", c.s, c.most, got, c.want)
		}
	}
}
