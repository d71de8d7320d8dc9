package wire

import (
	"bytes"
	"math"
	"slices"

	"github.com/tinylib/msgp/msgp"

	"github.com/tensorferry/tensorferry/internal/msgpack"
)

// Append* append the encoding to b and return the extended slice; they allocate only if b has too little capacity.

var opPrefixes = [...]string{Get: prefixGet, Done: prefixDone, Verify: prefixVerify, Fail: prefixFail, Stat: prefixStat}

// AppendRequest encodes q. Of an op that is none of those nothing is appended.
func AppendRequest(b []byte, q *Request) []byte {
	if q.Op == Unknown || int(q.Op) >= len(opPrefixes) {
		return b
	}
	b = slices.Grow(b, 128+len(q.Key)+len(q.Generation.text)+len(q.Claim.text)+q.Ferry.room())
	b = append(b, opPrefixes[q.Op]...)
	b = msgp.AppendMapHeader(b, 3+msgpack.Count(q.Ferry != nil))
	b = msgpack.AppendStr(b, fieldKey, q.Key)
	b = appendID(b, fieldGeneration, q.Generation)
	b = appendID(b, fieldClaim, q.Claim)
	if q.Ferry != nil {
		b = msgp.AppendString(b, fieldFerry)
		b = appendFerryRequest(b, q.Ferry)
	}
	return b
}

// DecodeRequest decodes what a ROUTER receives after the peer's identity and the empty delimiter. A message that begins like none
// is a Request with Op Unknown, no error: it is answered with NotFound. What is malformed gets no answer. Errors are *FrameError.
func DecodeRequest(b []byte) (*Request, error) {
	if len(b) > MaxRequest {
		r := newReader(b, 0)
		r.Fail(ErrLimit, "a request of %d bytes, limit %d", len(b), MaxRequest)
		return nil, r.err()
	}
	for op := Get; int(op) < len(opPrefixes); op++ {
		if body, ok := bytes.CutPrefix(b, []byte(opPrefixes[op])); ok {
			r := newReader(body, len(opPrefixes[op]))
			return r.request(op)
		}
	}
	return &Request{Op: Unknown}, nil
}

func (r *reader) request(op Op) (*Request, error) {
	q := &Request{Op: op}
	var ferry reader
	named := false
	for name := range r.Fields() {
		switch string(name) {
		case fieldKey:
			q.Key, named = r.key()
		case fieldGeneration:
			q.Generation = r.id()
		case fieldClaim:
			q.Claim = r.claim()
		case fieldFerry:
			ferry = r.ferry()
		default:
			r.Skip()
		}
	}
	r.End()
	if err := r.err(); err != nil {
		return nil, err
	}
	if !named {
		q.Claim = ID{}
	}
	if ferry.ours() {
		q.Ferry = ferry.ferryRequest()
	}
	if err := ferry.err(); err != nil {
		return nil, err
	}
	return q, nil
}

// key reads a key. One that is no string, but could be the key of a Python dict, names nothing: not named, no fault.
func (r *reader) key() (key string, named bool) {
	switch r.Type() {
	case msgp.ArrayType, msgp.MapType:
		r.Fail(ErrMalformed, "a key that is no string")
	case msgp.StrType:
		return r.Text(MaxKey), true
	}
	r.Skip()
	return "", false
}

// claim reads a claim's id. What Python takes for false is none.
func (r *reader) claim() ID {
	if at := r.Offset(); r.Type() == msgp.BoolType {
		if r.Bool() {
			r.FailAt(at, ErrMalformed, "a claim's id that is a boolean")
		}
		return ID{}
	}
	id := r.id()
	if id.empty() {
		return ID{}
	}
	return id
}

// ferry takes the value of a `ferry` field aside, which is read if it is ours.
func (r *reader) ferry() reader { return reader{r.Raw(fieldFerry + ".")} }

// ours is true for a `ferry` value that is a map of our version. Anything else there is a plain peer's, or a newer node's, and
// does not count.
func (r reader) ours() bool {
	if r.Type() != msgp.MapType {
		return false
	}
	for name := range r.Fields() {
		if string(name) == fieldV {
			return r.Int(math.MinInt64, math.MaxInt64) == ExtensionVersion
		}
		r.Skip()
	}
	return false
}

func (r *reader) ferryRequest() *FerryRequest {
	f := &FerryRequest{V: ExtensionVersion}
	for name := range r.Fields() {
		switch string(name) {
		case fieldV:
			r.version()
		case fieldTry:
			f.Try = r.Uint(math.MaxUint64)
		case fieldNode:
			f.Node = r.Text(MaxNode)
		case fieldEpoch:
			f.Epoch = r.Uint(math.MaxUint64)
		case fieldPlanes:
			f.Planes = r.planeNames()
		case fieldInline:
			f.Inline = r.Size(math.MaxInt64)
		case fieldSum:
			f.Sum = r.Bool()
		case fieldWait:
			f.WaitMS = r.milliseconds()
		case fieldReason:
			f.Reason = r.Text(MaxReason)
		default:
			r.Skip()
		}
	}
	return f
}

func (r *reader) planeNames() []string {
	n := r.Array(MaxPlanes, 1)
	if n == 0 {
		return nil
	}
	names := make([]string, n)
	for i := range names {
		names[i] = r.Text(MaxPlaneName)
	}
	return names
}

func appendFerryRequest(b []byte, f *FerryRequest) []byte {
	b = msgp.AppendMapHeader(b, 1+msgpack.Count(f.Try != 0, f.Node != "", f.Epoch != 0, len(f.Planes) > 0, f.Inline != 0, f.Sum, f.WaitMS != 0, f.Reason != ""))
	b = appendV(b, f.V)
	b = msgpack.OptionalUint(b, fieldTry, f.Try)
	b = msgpack.OptionalStr(b, fieldNode, f.Node)
	b = msgpack.OptionalUint(b, fieldEpoch, f.Epoch)
	if len(f.Planes) > 0 {
		b = msgp.AppendString(b, fieldPlanes)
		b = msgp.AppendArrayHeader(b, uint32(len(f.Planes)))
		for _, p := range f.Planes {
			b = msgp.AppendString(b, p)
		}
	}
	b = msgpack.OptionalInt(b, fieldInline, f.Inline)
	b = msgpack.OptionalTrue(b, fieldSum, f.Sum)
	b = msgpack.OptionalInt(b, fieldWait, f.WaitMS)
	return msgpack.OptionalStr(b, fieldReason, f.Reason)
}

// room is at least the encoded size, names included.
func (f *FerryRequest) room() int {
	if f == nil {
		return 0
	}
	n := 160 + len(f.Node) + len(f.Reason)
	for _, p := range f.Planes {
		n += 5 + len(p)
	}
	return n
}

func appendV(b []byte, v int) []byte {
	if v == 0 {
		v = ExtensionVersion
	}
	return msgpack.AppendInt(msgp.AppendString(b, fieldV), int64(v))
}
