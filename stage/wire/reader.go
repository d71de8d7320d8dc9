package wire

import (
	"bytes"
	"errors"
	"math"
	"time"

	"github.com/tensorferry/tensorferry/internal/msgpack"
	"github.com/tensorferry/tensorferry/tensor"
)

// reader reads a message of this protocol. Its faults become *FrameError in err.
type reader struct{ msgpack.Reader }

// newReader reads b, which is at offset base of its frame. As for the peers, a key that is no string is nobody's here.
func newReader(b []byte, base int) reader {
	r := reader{msgpack.New(b, base)}
	r.AnyKey = true
	return r
}

// err is the first fault, nil if there was none.
func (r *reader) err() error {
	f := r.Fault()
	if f == nil {
		return nil
	}
	return &FrameError{Field: f.Field, Offset: f.Offset, Reason: f.Reason, kind: f.KindIn(ErrMalformed, ErrLimit), cause: f.Cause}
}

// refuse makes a fault of an error of package tensor, about the value at an offset.
func (r *reader) refuse(at int, cause error) {
	kind := ErrMalformed
	if errors.Is(cause, tensor.ErrLimit) {
		kind = ErrLimit
	}
	r.Refuse(at, kind, cause)
}

// in is Enter for the maps in a field: what is wrong with such a map as a whole is put down to no field of it.
func (r *reader) in(field string) msgpack.Place {
	outer := r.Enter(field + ".")
	r.At(nil)
	return outer
}

// version reads an extension version, which must be ours.
func (r *reader) version() {
	at := r.Offset()
	if v := r.Int(math.MinInt64, math.MaxInt64); v != ExtensionVersion {
		r.FailAt(at, ErrMalformed, "extension version %d, this end speaks %d", v, ExtensionVersion)
	}
}

// milliseconds reads a time that fits a time.Duration.
func (r *reader) milliseconds() int64 { return r.Size(math.MaxInt64 / int64(time.Millisecond)) }

// copied is nil for nothing: a field that is left out and an empty one are the same.
func copied(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return bytes.Clone(b)
}
