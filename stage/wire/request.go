package wire

import (
	"bytes"
	"math"
	"slices"
	"time"

	"github.com/tinylib/msgp/msgp"
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
	b = msgp.AppendMapHeader(b, 3+count(q.Ferry != nil))
	b = appendStr(b, fieldKey, q.Key)
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
		r := newReader(b)
		return nil, r.fail(ErrLimit, "a request of %d bytes, limit %d", len(b), MaxRequest)
	}
	for op := Get; int(op) < len(opPrefixes); op++ {
		if body, ok := bytes.CutPrefix(b, []byte(opPrefixes[op])); ok {
			r := reader{buf: body, rest: body, base: len(opPrefixes[op])}
			return r.request(op)
		}
	}
	return &Request{Op: Unknown}, nil
}

func (r *reader) request(op Op) (*Request, error) {
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	q := &Request{Op: op}
	var ferry reader
	named := false
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldKey:
			q.Key, named, err = r.key()
		case fieldGeneration:
			q.Generation, err = r.id()
		case fieldClaim:
			q.Claim, err = r.claim()
		case fieldFerry:
			ferry, err = r.raw()
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	if !named {
		q.Claim = ID{}
	}
	if ferry.ours() {
		q.Ferry, err = ferry.ferryRequest()
	}
	return q, err
}

// key reads a key. One that is no string, but could be the key of a Python dict, names nothing: not named, no error.
func (r *reader) key() (key string, named bool, err error) {
	switch msgp.NextType(r.rest) {
	case msgp.ArrayType, msgp.MapType:
		return "", false, r.fail(ErrMalformed, "a key that is no string")
	case msgp.StrType:
		key, err = r.text(MaxKey)
		return key, true, err
	}
	return "", false, r.skip()
}

// claim reads a claim's id. What Python takes for false is none.
func (r *reader) claim() (ID, error) {
	if msgp.NextType(r.rest) == msgp.BoolType {
		at := *r
		if yes, err := r.bool(); err != nil || yes {
			return ID{}, at.fail(ErrMalformed, "a claim's id that is a boolean")
		}
		return ID{}, nil
	}
	id, err := r.id()
	if id.empty() {
		id = ID{}
	}
	return id, err
}

func (r *reader) ferryRequest() (*FerryRequest, error) {
	f := &FerryRequest{V: ExtensionVersion}
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldV:
			err = r.version()
		case fieldTry:
			f.Try, err = r.uint(math.MaxUint64)
		case fieldNode:
			f.Node, err = r.text(MaxNode)
		case fieldEpoch:
			f.Epoch, err = r.uint(math.MaxUint64)
		case fieldPlanes:
			f.Planes, err = r.planeNames()
		case fieldInline:
			f.Inline, err = r.size(math.MaxInt64)
		case fieldSum:
			f.Sum, err = r.bool()
		case fieldWait:
			f.WaitMS, err = r.milliseconds()
		case fieldReason:
			f.Reason, err = r.text(MaxReason)
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	return f, nil
}

func (r *reader) planeNames() ([]string, error) {
	n, err := r.array(MaxPlanes, 1)
	if err != nil || n == 0 {
		return nil, err
	}
	names := make([]string, n)
	for i := range names {
		if names[i], err = r.text(MaxPlaneName); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// milliseconds reads a time that fits a time.Duration.
func (r *reader) milliseconds() (int64, error) {
	return r.size(math.MaxInt64 / int64(time.Millisecond))
}

func appendFerryRequest(b []byte, f *FerryRequest) []byte {
	b = msgp.AppendMapHeader(b, 1+count(f.Try != 0, f.Node != "", f.Epoch != 0, len(f.Planes) > 0, f.Inline != 0, f.Sum, f.WaitMS != 0, f.Reason != ""))
	b = appendV(b, f.V)
	b = optionalUint(b, fieldTry, f.Try)
	b = optionalStr(b, fieldNode, f.Node)
	b = optionalUint(b, fieldEpoch, f.Epoch)
	if len(f.Planes) > 0 {
		b = msgp.AppendString(b, fieldPlanes)
		b = msgp.AppendArrayHeader(b, uint32(len(f.Planes)))
		for _, p := range f.Planes {
			b = msgp.AppendString(b, p)
		}
	}
	b = optionalInt(b, fieldInline, f.Inline)
	if f.Sum {
		b = msgp.AppendString(b, fieldSum)
		b = msgp.AppendBool(b, true)
	}
	b = optionalInt(b, fieldWait, f.WaitMS)
	return optionalStr(b, fieldReason, f.Reason)
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

// ours is true for a `ferry` value that is a map of our version. Anything else there is a plain peer's, or a newer node's, and
// does not count.
func (r reader) ours() bool {
	if len(r.buf) == 0 || msgp.NextType(r.buf) != msgp.MapType {
		return false
	}
	n, err := r.fields()
	if err != nil {
		return false
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return false
		}
		if string(name) == fieldV {
			v, err := r.int(math.MinInt64, math.MaxInt64)
			return err == nil && v == ExtensionVersion
		}
		if r.skip() != nil {
			return false
		}
	}
	return false
}

func count(present ...bool) (n uint32) {
	for _, p := range present {
		if p {
			n++
		}
	}
	return n
}

func appendV(b []byte, v int) []byte {
	if v == 0 {
		v = ExtensionVersion
	}
	return appendInt(msgp.AppendString(b, fieldV), int64(v))
}

func appendStr(b []byte, name, v string) []byte {
	return msgp.AppendString(msgp.AppendString(b, name), v)
}

// appendInt writes the shortest form as the peers do: unsigned where it can be (msgp.AppendInt64 would write 128 as an int16).
func appendInt(b []byte, v int64) []byte {
	if v >= 0 {
		return msgp.AppendUint64(b, uint64(v))
	}
	return msgp.AppendInt64(b, v)
}

func optionalStr(b []byte, name, v string) []byte {
	if v == "" {
		return b
	}
	return appendStr(b, name, v)
}

func optionalUint(b []byte, name string, v uint64) []byte {
	if v == 0 {
		return b
	}
	return msgp.AppendUint64(msgp.AppendString(b, name), v)
}

func optionalInt(b []byte, name string, v int64) []byte {
	if v == 0 {
		return b
	}
	return appendInt(msgp.AppendString(b, name), v)
}

func optionalBin(b []byte, name string, v []byte) []byte {
	if len(v) == 0 {
		return b
	}
	return msgp.AppendBytes(msgp.AppendString(b, name), v)
}
