package wire

import (
	"bytes"
	"math"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// DecodeAtProducer decodes what a ROUTER receives: *Request or *Verify. generation is the receiver's configured one. Errors are
// *FrameError.
func DecodeAtProducer(b []byte, generation int) (Message, error) {
	r := reader{buf: b, rest: b}
	if len(b) > MaxRequest {
		return nil, r.fail(ErrLimit, "a request of %d bytes, limit %d", len(b), MaxRequest)
	}
	tag, err := findTag(r)
	if err != nil {
		return nil, err
	}
	if string(tag) == tagVerify {
		c, err := r.check(tagVerify, fieldFailed)
		if err != nil {
			return nil, err
		}
		return &Verify{Key: string(c.key), Session: string(c.session), Grant: string(c.grant), Gen: c.gen, Failed: c.flag}, nil
	}
	q, err := r.request(generation)
	if err != nil {
		return nil, err
	}
	return q, nil
}

// DecodeAtConsumer decodes what a DEALER receives: *Ack or *Verified. Strings and byte slices are copies. Errors are *FrameError.
func DecodeAtConsumer(b []byte) (Message, error) {
	r := reader{buf: b, rest: b}
	if len(b) > MaxFrame {
		return nil, r.fail(ErrLimit, "an ack of %d bytes, limit %d", len(b), MaxFrame)
	}
	tag, err := findTag(r)
	if err != nil {
		return nil, err
	}
	if string(tag) == tagVerified {
		c, err := r.check(tagVerified, fieldOK)
		if err != nil {
			return nil, err
		}
		return &Verified{Key: string(c.key), Session: string(c.session), Grant: string(c.grant), Gen: c.gen, OK: c.flag}, nil
	}
	a, err := r.ack()
	if err != nil {
		return nil, err
	}
	return a, nil
}

// findTag gives the message's first type field wherever it is, nil if there is none. Its reader is a copy: the caller's stays at
// the start.
func findTag(r reader) ([]byte, error) {
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		if string(name) == fieldType {
			return r.str(MaxKey)
		}
		if err := r.skip(); err != nil {
			return nil, err
		}
	}
	return nil, nil
}

func (r *reader) request(generation int) (*Request, error) {
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	var key, compat, session, ferry []byte
	var ferryBase int
	version := generation
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldType:
			err = r.tag(tagRequest)
		case fieldKey:
			key, err = r.str(MaxKey)
		case fieldCompat:
			compat, err = r.str(MaxHash)
		case fieldSession:
			session, err = r.str(MaxSession)
		case fieldVersion:
			version, err = r.int()
		case fieldFerry:
			ferry, ferryBase, err = r.raw()
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	if err := r.end(required{fieldKey, key}, required{fieldCompat, compat}); err != nil {
		return nil, err
	}
	q := &Request{Version: version}
	if ours(ferry) {
		sub := reader{buf: ferry, rest: ferry, base: ferryBase, path: "ferry."}
		if q.Ferry, err = sub.ferryRequest(); err != nil {
			return nil, err
		}
	}
	q.Key, q.CompatHash, q.Session = string(key), string(compat), string(session)
	return q, nil
}

func (r *reader) ack() (*Ack, error) {
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	var key, session, agent, mem, ferry []byte
	var ferryBase int
	var status uint64
	var haveStatus bool
	var blocks []uint32
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldType:
			err = r.tag(tagAck)
		case fieldKey:
			key, err = r.str(MaxKey)
		case fieldStatus:
			status, err = r.uint(uint64(NackNotReady))
			haveStatus = true
		case fieldSession:
			session, err = r.str(MaxSession)
		case fieldBlocks:
			blocks, err = r.blocks(blocks)
		case fieldAgent:
			agent, err = r.bin(MaxFrame)
		case fieldMem:
			mem, err = r.bin(MaxFrame)
		case fieldFerry:
			ferry, ferryBase, err = r.raw()
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	if err := r.end(required{fieldKey, key}); err != nil {
		return nil, err
	}
	if !haveStatus {
		return nil, r.fail(ErrMalformed, "%s is missing", fieldStatus)
	}
	a := &Ack{Status: Status(status)}
	if ours(ferry) {
		sub := reader{buf: ferry, rest: ferry, base: ferryBase, path: "ferry."}
		if a.Ferry, err = sub.ferryAck(); err != nil {
			return nil, err
		}
	}
	a.Key, a.Session, a.Blocks = string(key), string(session), blocks
	a.AgentMetadata, a.MemDescriptor = copied(agent), copied(mem)
	return a, nil
}

// blocks reads block numbers into the memory of b, those of an earlier field of the same name.
func (r *reader) blocks(b []uint32) ([]uint32, error) {
	n, err := r.array(MaxBlocksAck, 1)
	if err != nil {
		return nil, err
	}
	b = b[:0]
	if n > cap(b) {
		b = make([]uint32, 0, n)
	}
	for range n {
		u, err := r.uint(MaxBlock)
		if err != nil {
			return nil, err
		}
		b = append(b, uint32(u))
	}
	return b, nil
}

// checked has the fields of Verify and Verified.
type checked struct {
	key, session, grant []byte
	gen                 uint64
	flag                bool
}

func (r *reader) check(tag, flag string) (c checked, err error) {
	if len(r.buf) > MaxRequest {
		return c, r.fail(ErrLimit, "a %s of %d bytes, limit %d", tag, len(r.buf), MaxRequest)
	}
	n, err := r.fields()
	if err != nil {
		return c, err
	}
	for range n {
		name, err := r.next()
		if err != nil {
			return c, err
		}
		switch string(name) {
		case fieldType:
			err = r.tag(tag)
		case fieldV:
			err = r.version()
		case fieldKey:
			c.key, err = r.str(MaxKey)
		case fieldSession:
			c.session, err = r.str(MaxSession)
		case fieldGrant:
			c.grant, err = r.str(MaxGrant)
		case fieldGen:
			c.gen, err = r.uint(math.MaxUint64)
		case flag:
			c.flag, err = r.bool()
		default:
			err = r.skip()
		}
		if err != nil {
			return c, err
		}
	}
	return c, r.end(required{fieldKey, c.key})
}

// version reads an extension version, which must be ours.
func (r *reader) version() error {
	at := *r
	v, err := r.int()
	if err == nil && v != ExtensionVersion {
		return at.fail(ErrMalformed, "extension version %d, this end speaks %d", v, ExtensionVersion)
	}
	return err
}

// required is a field that must be there: its value is not nil then.
type required struct {
	name  string
	value []byte
}

// end checks that nothing comes after the message and nothing is missing in it.
func (r *reader) end(fields ...required) error {
	r.name = nil
	if len(r.rest) > 0 {
		return r.fail(ErrMalformed, "%d bytes after the message", len(r.rest))
	}
	for _, f := range fields {
		if f.value == nil {
			return r.fail(ErrMalformed, "%s is missing", f.name)
		}
	}
	return nil
}

// ours is true for a `ferry` value that is a map of our version. Anything else there is a plain peer's, or a newer node's, and
// does not count. The value is known to be well formed.
func ours(ferry []byte) bool {
	if len(ferry) == 0 || msgp.NextType(ferry) != msgp.MapType {
		return false
	}
	r := reader{buf: ferry, rest: ferry}
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
			v, err := r.int()
			return err == nil && v == ExtensionVersion
		}
		if r.skip() != nil {
			return false
		}
	}
	return false
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
		case fieldNode:
			f.Node, err = r.text(MaxNode)
		case fieldEpoch:
			f.Epoch, err = r.uint(math.MaxUint64)
		case fieldPlanes:
			f.Planes, err = r.planeNames()
		case fieldSum:
			f.Sum, err = r.bool()
		case fieldParts:
			f.Compat, err = r.compat()
		case fieldTry:
			f.Try, err = r.uint(math.MaxUint64)
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
	if err != nil {
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

func (r *reader) compat() (c Compat, err error) {
	in := *r
	in.path += fieldParts + "."
	n, err := in.fields()
	if err != nil {
		return Compat{}, err
	}
	for range n {
		name, err := in.next()
		if err != nil {
			return Compat{}, err
		}
		switch string(name) {
		case fieldVLLMVersion:
			c.VLLMVersion, err = in.text(MaxCompatText)
		case fieldModel:
			c.Model, err = in.text(MaxCompatText)
		case fieldDtype:
			c.Dtype, err = in.text(MaxCompatText)
		case fieldBlockBytes:
			c.BlockBytes, err = in.int64(math.MaxInt64)
		default:
			err = in.skip()
		}
		if err != nil {
			return Compat{}, err
		}
	}
	r.rest = in.rest
	return c, nil
}

func (r *reader) ferryAck() (*FerryAck, error) {
	f := &FerryAck{V: ExtensionVersion}
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
		case fieldGen:
			f.Gen, err = r.uint(math.MaxUint64)
		case fieldSlot:
			var u uint64
			u, err = r.uint(math.MaxUint32)
			f.Slot = uint32(u)
		case fieldGrant:
			f.Grant, err = r.text(MaxGrant)
		case fieldExtents:
			f.Extents, err = r.extents()
		case fieldBytes:
			f.Bytes, err = r.int64(math.MaxInt64)
		case fieldLease:
			f.LeaseMS, err = r.int64(math.MaxInt64 / int64(time.Millisecond)) // so that it fits a time.Duration
		case fieldSum:
			var u uint64
			u, err = r.uint(math.MaxUint64)
			f.Sum = &u
		case fieldPlanes:
			f.Planes, err = r.planeOffers()
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	return f, nil
}

// extents reads runs of blocks; each has at least one block, and none goes past MaxBlock.
func (r *reader) extents() ([][2]uint32, error) {
	n, err := r.array(MaxExtents, 3)
	if err != nil {
		return nil, err
	}
	runs := make([][2]uint32, n)
	for i := range runs {
		at := *r
		two, err := r.array(2, 1)
		if err != nil {
			return nil, err
		}
		if two != 2 {
			return nil, at.fail(ErrMalformed, "an extent of %d numbers, want start and count", two)
		}
		start, err := r.uint(MaxBlock)
		if err != nil {
			return nil, err
		}
		blocks, err := r.uint(MaxBlock + 1 - start)
		if err != nil {
			return nil, err
		}
		if blocks == 0 {
			return nil, at.fail(ErrMalformed, "an extent of no blocks")
		}
		runs[i] = [2]uint32{uint32(start), uint32(blocks)}
	}
	return runs, nil
}

func (r *reader) planeOffers() ([]PlaneOffer, error) {
	n, err := r.array(MaxPlanes, 1)
	if err != nil {
		return nil, err
	}
	offers := make([]PlaneOffer, n)
	for i := range offers {
		if err := r.planeOffer(&offers[i]); err != nil {
			return nil, err
		}
	}
	return offers, nil
}

func (r *reader) planeOffer(p *PlaneOffer) error {
	in := *r
	in.path += fieldPlanes + "."
	n, err := in.fields()
	if err != nil {
		return err
	}
	var name, metadata, token []byte
	for range n {
		field, err := in.next()
		if err != nil {
			return err
		}
		switch string(field) {
		case fieldName:
			name, err = in.str(MaxPlaneName)
		case fieldMetadata:
			metadata, err = in.bin(MaxPlaneMetadata)
		case fieldToken:
			token, err = in.bin(MaxToken)
		default:
			err = in.skip()
		}
		if err != nil {
			return err
		}
	}
	if name == nil {
		return in.fail(ErrMalformed, "%s is missing", fieldName)
	}
	p.Name, p.Metadata, p.Token = string(name), copied(metadata), copied(token)
	r.rest = in.rest
	return nil
}

func (r *reader) text(limit int) (string, error) {
	s, err := r.str(limit)
	return string(s), err
}

func (r *reader) int64(limit int64) (int64, error) {
	u, err := r.uint(uint64(limit))
	return int64(u), err
}

// copied is nil for nothing: a field that is left out and an empty one are the same.
func copied(b []byte) []byte {
	if len(b) == 0 {
		return nil
	}
	return bytes.Clone(b)
}
