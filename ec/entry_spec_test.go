package ec

import (
	"errors"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"
)

func TestKeysAreUTF8WithoutControlCharacters(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := []byte(rapid.StringMatching(`[ -~]{1,40}`).Draw(t, "key"))
		for range rapid.IntRange(0, 2).Draw(t, "odd bytes") {
			b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
		}
		key := string(b)
		want := utf8.ValidString(key) && !strings.ContainsFunc(key, unicode.IsControl)
		if err := checkKey(key); (err == nil) != want || err != nil && !errors.Is(err, ErrKey) {
			t.Fatalf("%q: %v", key, err)
		}
	})
}
