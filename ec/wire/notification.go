package wire

import (
	"bytes"
	"unicode/utf8"
)

// Notification is "SESSION:MM_HASH".
func Notification(session, key string) []byte {
	b := make([]byte, 0, len(session)+1+len(key))
	b = append(b, session...)
	b = append(b, ':')
	return append(b, key...)
}

// ParseNotification is its inverse (session ids hold no colon; keys may). Both parts must be there, in UTF-8 and within their
// limits. Errors are *FrameError.
func ParseNotification(b []byte) (session, key string, err error) {
	r := newReader(b)
	r.At([]byte("notification"))
	s, k, found := bytes.Cut(b, []byte{':'})
	switch limit := MaxSession + 1 + MaxKey; {
	case len(b) > limit:
		r.Fail(ErrLimit, "%d bytes, limit %d", len(b), limit)
	case !found:
		r.Fail(ErrMalformed, "no colon between session and key")
	case len(s) == 0 || len(k) == 0:
		r.Fail(ErrMalformed, "an empty session or key")
	case len(s) > MaxSession || len(k) > MaxKey:
		r.Fail(ErrLimit, "a session of %d and a key of %d bytes, limits %d and %d", len(s), len(k), MaxSession, MaxKey)
	case !utf8.Valid(b):
		r.Fail(ErrMalformed, "not UTF-8")
	}
	if err := r.err(); err != nil {
		return "", "", err
	}
	return string(s), string(k), nil
}
