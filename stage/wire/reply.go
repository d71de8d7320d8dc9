package wire

import (
	"bytes"
	"math"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/internal/msgpack"
)

// AppendReply encodes a. own says that the request had the extension; a plain peer knows Found, NotFound, Acked and
// GeometryMismatch only, and is told NotFound for everything else.
func AppendReply(b []byte, a *Reply, own bool) []byte {
	if a.Status == Found && a.Metadata != nil {
		return AppendMetadata(b, a.Metadata)
	}
	if own {
		b = append(b, prefixAnswer...)
		b = msgp.AppendMapHeader(b, 2+msgpack.Count(a.Try != 0, a.Reason != ""))
		b = appendV(b, ExtensionVersion)
		b = msgpack.OptionalUint(b, fieldTry, a.Try)
		b = msgpack.AppendInt(msgp.AppendString(b, fieldStatus), int64(a.Status))
		return msgpack.OptionalStr(b, fieldReason, a.Reason)
	}
	switch a.Status {
	case Acked:
		return append(b, bareAck...)
	case GeometryMismatch:
		return append(b, bareGeometry...)
	}
	return append(b, bareNotFound...)
}

// DecodeReply decodes what a claim, done, verify or fail is answered with. Strings and byte slices are copies, except
// Metadata.Ferry.Inline. Errors are *FrameError; ErrSchema is metadata that this end cannot read, although its claim was granted.
func DecodeReply(b []byte) (*Reply, error) {
	switch string(b) {
	case bareNotFound:
		return &Reply{Status: NotFound}, nil
	case bareAck:
		return &Reply{Status: Acked}, nil
	case bareGeometry:
		return &Reply{Status: GeometryMismatch}, nil
	}
	if body, ok := bytes.CutPrefix(b, []byte(prefixAnswer)); ok {
		r := newReader(body, len(prefixAnswer))
		return r.answer()
	}
	m, err := DecodeMetadata(b)
	if err != nil {
		return nil, err
	}
	a := &Reply{Status: Found, Metadata: m}
	if m.Ferry != nil {
		a.Try = m.Ferry.Try
	}
	return a, nil
}

func (r *reader) answer() (*Reply, error) {
	if r.Left() > MaxRequest {
		r.Fail(ErrLimit, "an answer of %d bytes, limit %d", r.Left(), MaxRequest)
	}
	a := &Reply{}
	for name := range r.Fields() {
		switch string(name) {
		case fieldV:
			r.version()
		case fieldTry:
			a.Try = r.Uint(math.MaxUint64)
		case fieldStatus:
			a.Status = Status(r.Int(int64(NotFound), int64(Closing)))
		case fieldReason:
			a.Reason = r.Text(MaxReason)
		default:
			r.Skip()
		}
	}
	r.End()
	if a.Status == 0 {
		r.Missing(fieldStatus)
	}
	if err := r.err(); err != nil {
		return nil, err
	}
	return a, nil
}
