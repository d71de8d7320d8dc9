// Package shorten keeps what a stranger sent from filling messages and logs.
package shorten

import "unicode/utf8"

// Text is s, or its first most bytes at the most, cut before a rune, and "...".
func Text[T ~string | ~[]byte](s T, most int) string {
	if len(s) <= most {
		return string(s)
	}
	n := most
	for n > 0 && n > most-utf8.UTFMax && !utf8.RuneStart(s[n]) {
		n--
	}
	return string(s[:n]) + "..."
}
