package wire

import (
	"bytes"
	"errors"
	"math"
)

// DecodeAtProducer decodes what a ROUTER receives: *Request, *Verify or *Pulled. generation is the receiver's configured one. Errors are
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
	if string(tag) == tagPulled {
		p, err := r.pulled()
		if err != nil {
			return nil, err
		}
		return p, nil
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

func (r *reader) ack() (a *Ack, err error) {
	var key []byte
	defer func() {
		var frame *FrameError
		if errors.As(err, &frame) {
			frame.Key = string(key)
		}
	}()
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	var session, agent, mem, ferry []byte
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
	a = &Ack{Status: Status(status)}
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

func (r *reader) pulled() (*Pulled, error) {
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	p := &Pulled{}
	var compat []byte
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldType:
			err = r.tag(tagPulled)
		case fieldV:
			err = r.version()
		case fieldCompat:
			compat, err = r.str(MaxHash)
		case fieldEntries:
			p.Entries, err = r.pulledEntries()
		default:
			err = r.skip()
		}
		if err != nil {
			return nil, err
		}
	}
	p.CompatHash = string(compat)
	return p, r.end(required{fieldCompat, compat})
}

func (r *reader) pulledEntries() ([]PulledEntry, error) {
	n, err := r.array(MaxPulled, 3)
	if err != nil {
		return nil, err
	}
	entries := make([]PulledEntry, n)
	for i := range entries {
		at := *r
		two, err := r.array(2, 1)
		if err != nil {
			return nil, err
		}
		if two != 2 {
			return nil, at.fail(ErrMalformed, "an entry of %d values, want key and generation", two)
		}
		if entries[i].Key, err = r.text(MaxKey); err != nil {
			return nil, err
		}
		if entries[i].Gen, err = r.uint(math.MaxUint64); err != nil {
			return nil, err
		}
	}
	return entries, nil
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
