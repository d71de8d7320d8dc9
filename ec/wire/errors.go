package wire

import (
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/internal/shorten"
)

var (
	// ErrMalformed: what came is not a message of this protocol, or not a valid announcement.
	ErrMalformed = errors.New("wire: malformed message")
	// ErrLimit: it may be well formed, but it is over a limit of this package and was not looked at further.
	ErrLimit = errors.New("wire: message over a limit")
	// ErrNoEntry: Params has no entry for the key.
	ErrNoEntry = errors.New("wire: no such key in ec_transfer_params")
)

// FrameError says what is wrong with a msgpack message, and where. It wraps ErrMalformed or ErrLimit.
type FrameError struct {
	Field  string // the field being read, e.g. "ferry.planes"; "" for the message itself
	Offset int    // of the offending value from the start of the frame, in bytes
	Reason string
	// Key is the mm_hash of an ack whose later field is wrong, so that the one pull it is for can end; "" if it had not been read.
	Key  string
	kind error
}

func (e *FrameError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("%v: %s (byte %d)", e.kind, e.Reason, e.Offset)
	}
	return fmt.Sprintf("%v: %s: %s (byte %d)", e.kind, e.Field, e.Reason, e.Offset)
}

func (e *FrameError) Unwrap() error { return e.kind }

// FieldError says which field of an announcement is wrong. It wraps ErrMalformed or ErrLimit.
type FieldError struct {
	Key    string // the announcement's key, shortened; "" if it is not known
	Field  string // e.g. "peer_port"; "" for the entry itself
	Value  string // as it came, shortened
	Reason string // what is wanted
	kind   error
}

func (e *FieldError) Error() string {
	s := e.kind.Error() + ": announcement"
	if e.Key != "" {
		s += fmt.Sprintf(" %q", e.Key)
	}
	s += ":"
	if e.Field != "" {
		s += " " + e.Field
	}
	return s + " " + e.Value + ": " + e.Reason
}

func (e *FieldError) Unwrap() error { return e.kind }

// clip shortens a stranger's text for an error.
func clip[T ~string | ~[]byte](s T) string { return shorten.Text(s, 64) }
