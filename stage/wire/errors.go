package wire

import (
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/internal/shorten"
)

var (
	// ErrMalformed: what came is not a message, or not a value, of this protocol.
	ErrMalformed = errors.New("stage/wire: malformed")
	// ErrLimit: it may be well formed, but it is over a limit of this package and was not looked at further.
	ErrLimit = errors.New("stage/wire: over a limit")
	// ErrSchema: metadata of a schema or kind that this package does not know. Whoever claimed for it still has to send Done.
	ErrSchema = errors.New("stage/wire: unknown schema")
	// ErrMarker: a value that a reader would take for something else: the peers mark tensors, tuples and their own objects by the
	// keys of maps, and nothing on the wire tells such a map from a user's. Rename the keys, or see the error for the option.
	ErrMarker = errors.New("stage/wire: looks like a marker of the protocol")
)

// FrameError says what is wrong with a message or a serialized value, and where. It wraps one of the errors above, and also one
// of package tensor's where the value is at fault.
type FrameError struct {
	Field  string // the field being read, e.g. "ferry.planes"; "" for the message itself
	Offset int    // of the offending value from the start of the frame, in bytes
	Reason string
	kind   error
	cause  error // of package tensor, or nil
}

func (e *FrameError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("%v: %s (byte %d)", e.kind, e.Reason, e.Offset)
	}
	return fmt.Sprintf("%v: %s: %s (byte %d)", e.kind, e.Field, e.Reason, e.Offset)
}

func (e *FrameError) Unwrap() []error {
	if e.cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.cause}
}

// clip shortens a stranger's text for an error.
func clip[T ~string | ~[]byte](s T) string { return shorten.Text(s, 64) }
