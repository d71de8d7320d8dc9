package wire

import (
	"bytes"
	"math"

	"github.com/tensorferry/tensorferry/internal/msgpack"
)

// reader reads a message of this protocol. Its faults become *FrameError in err.
type reader struct{ msgpack.Reader }

func newReader(b []byte) *reader { return &reader{msgpack.New(b, 0)} }

// err is the first fault, nil if there was none.
func (r *reader) err() error {
	f := r.Fault()
	if f == nil {
		return nil
	}
	return &FrameError{Field: f.Field, Offset: f.Offset, Reason: f.Reason, kind: f.KindIn(ErrMalformed, ErrLimit)}
}

// integer reads any integer; one too large for an int is math.MaxInt.
func (r *reader) integer() int {
	u, below := r.Integer()
	if below {
		return int(int64(u))
	}
	return int(min(u, math.MaxInt))
}

// tag reads the value of a type field, which must be want.
func (r *reader) tag(want string) {
	at := r.Offset()
	if s := r.Str(MaxKey); string(s) != want {
		r.FailAt(at, ErrMalformed, "%q, want %q", clip(s), want)
	}
}

// version reads an extension version, which must be ours.
func (r *reader) version() {
	at := r.Offset()
	if v := r.integer(); v != ExtensionVersion {
		r.FailAt(at, ErrMalformed, "extension version %d, this end speaks %d", v, ExtensionVersion)
	}
}

// tuple reads the header of an array of just so many values; says is the fault of another number of them.
func (r *reader) tuple(values int, says string) {
	at := r.Offset()
	if n := r.Array(values, 1); n != values {
		r.FailAt(at, ErrMalformed, says, n)
	}
}

// required is a field that must be there.
type required struct {
	name string
	here bool
}

// end checks that nothing comes after the message and nothing is missing in it.
func (r *reader) end(fields ...required) {
	r.End()
	for _, f := range fields {
		if !f.here {
			r.Missing(f.name)
		}
	}
}

// copied is nil for nothing: a field that is left out and an empty one are the same.
func copied(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return bytes.Clone(b)
}
