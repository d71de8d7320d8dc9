package wire

import (
	"errors"
	"math"
)

// DecodeAtProducer decodes what a ROUTER receives: *Request, *Verify or *Pulled. generation is the receiver's configured one. Errors are
// *FrameError.
func DecodeAtProducer(b []byte, generation int) (Message, error) {
	r := newReader(b)
	if len(b) > MaxRequest {
		r.Fail(ErrLimit, "a request of %d bytes, limit %d", len(b), MaxRequest)
		return nil, r.err()
	}
	tag, err := findTag(*r)
	if err != nil {
		return nil, err
	}
	var m Message
	switch string(tag) {
	case tagVerify:
		var c checked
		c, err = r.check(tagVerify, fieldFailed)
		m = &Verify{Key: string(c.key), Session: string(c.session), Grant: string(c.grant), Gen: c.gen, Failed: c.flag}
	case tagPulled:
		m, err = r.pulled()
	default:
		m, err = r.request(generation)
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

// DecodeAtConsumer decodes what a DEALER receives: *Ack or *Verified. Strings and byte slices are copies. Errors are *FrameError.
func DecodeAtConsumer(b []byte) (Message, error) {
	r := newReader(b)
	if len(b) > MaxFrame {
		r.Fail(ErrLimit, "an ack of %d bytes, limit %d", len(b), MaxFrame)
		return nil, r.err()
	}
	tag, err := findTag(*r)
	if err != nil {
		return nil, err
	}
	var m Message
	switch string(tag) {
	case tagVerified:
		var c checked
		c, err = r.check(tagVerified, fieldOK)
		m = &Verified{Key: string(c.key), Session: string(c.session), Grant: string(c.grant), Gen: c.gen, OK: c.flag}
	default:
		m, err = r.ack()
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

// findTag gives the message's first type field wherever it is, nil if there is none. Its reader is a copy: the caller's stays at
// the start.
func findTag(r reader) ([]byte, error) {
	for name := range r.Fields() {
		if string(name) == fieldType {
			return r.Str(MaxKey), r.err()
		}
		r.Skip()
	}
	return nil, r.err()
}

func (r *reader) request(generation int) (*Request, error) {
	var key, compat, session []byte
	var ferry reader
	version := generation
	for name := range r.Fields() {
		switch string(name) {
		case fieldType:
			r.tag(tagRequest)
		case fieldKey:
			key = r.Str(MaxKey)
		case fieldCompat:
			compat = r.Str(MaxHash)
		case fieldSession:
			session = r.Str(MaxSession)
		case fieldVersion:
			version = r.integer()
		case fieldFerry:
			ferry = r.ferry()
		default:
			r.Skip()
		}
	}
	r.end(required{fieldKey, key != nil}, required{fieldCompat, compat != nil})
	if err := r.err(); err != nil {
		return nil, err
	}
	q := &Request{Version: version}
	if ferry.ours() {
		q.Ferry = ferry.ferryRequest()
		if err := ferry.err(); err != nil {
			return nil, err
		}
	}
	q.Key, q.CompatHash, q.Session = string(key), string(compat), string(session)
	return q, nil
}

func (r *reader) ack() (a *Ack, err error) {
	var key, session, agent, mem []byte
	defer func() {
		var frame *FrameError
		if errors.As(err, &frame) {
			frame.Key = string(key)
		}
	}()
	var ferry reader
	var status uint64
	var haveStatus bool
	var blocks []uint32
	for name := range r.Fields() {
		switch string(name) {
		case fieldType:
			r.tag(tagAck)
		case fieldKey:
			key = r.Str(MaxKey)
		case fieldStatus:
			status = r.Uint(uint64(NackNotReady))
			haveStatus = true
		case fieldSession:
			session = r.Str(MaxSession)
		case fieldBlocks:
			blocks = r.blocks(blocks)
		case fieldAgent:
			agent = r.Bin(MaxFrame)
		case fieldMem:
			mem = r.Bin(MaxFrame)
		case fieldFerry:
			ferry = r.ferry()
		default:
			r.Skip()
		}
	}
	r.end(required{fieldKey, key != nil}, required{fieldStatus, haveStatus})
	if err := r.err(); err != nil {
		return nil, err
	}
	a = &Ack{Status: Status(status)}
	if ferry.ours() {
		a.Ferry = ferry.ferryAck()
		if err := ferry.err(); err != nil {
			return nil, err
		}
	}
	a.Key, a.Session, a.Blocks = string(key), string(session), blocks
	a.AgentMetadata, a.MemDescriptor = copied(agent), copied(mem)
	return a, nil
}

// blocks reads block numbers into the memory of b, those of an earlier field of the same name.
func (r *reader) blocks(b []uint32) []uint32 {
	n := r.Array(MaxBlocksAck, 1)
	b = b[:0]
	if n > cap(b) {
		b = make([]uint32, 0, n)
	}
	for range n {
		b = append(b, uint32(r.Uint(MaxBlock)))
	}
	return b
}

// checked has the fields of Verify and Verified.
type checked struct {
	key, session, grant []byte
	gen                 uint64
	flag                bool
}

func (r *reader) check(tag, flag string) (c checked, err error) {
	if r.Left() > MaxRequest {
		r.Fail(ErrLimit, "a %s of %d bytes, limit %d", tag, r.Left(), MaxRequest)
	}
	for name := range r.Fields() {
		switch string(name) {
		case fieldType:
			r.tag(tag)
		case fieldV:
			r.version()
		case fieldKey:
			c.key = r.Str(MaxKey)
		case fieldSession:
			c.session = r.Str(MaxSession)
		case fieldGrant:
			c.grant = r.Str(MaxGrant)
		case fieldGen:
			c.gen = r.Uint(math.MaxUint64)
		case flag:
			c.flag = r.Bool()
		default:
			r.Skip()
		}
	}
	r.end(required{fieldKey, c.key != nil})
	return c, r.err()
}

func (r *reader) pulled() (*Pulled, error) {
	p := &Pulled{}
	var compat []byte
	for name := range r.Fields() {
		switch string(name) {
		case fieldType:
			r.tag(tagPulled)
		case fieldV:
			r.version()
		case fieldCompat:
			compat = r.Str(MaxHash)
		case fieldEntries:
			p.Entries = r.pulledEntries()
		default:
			r.Skip()
		}
	}
	p.CompatHash = string(compat)
	r.end(required{fieldCompat, compat != nil})
	return p, r.err()
}

func (r *reader) pulledEntries() []PulledEntry {
	entries := make([]PulledEntry, r.Array(MaxPulled, 3))
	for i := range entries {
		r.tuple(2, "an entry of %d values, want key and generation")
		entries[i] = PulledEntry{Key: r.Text(MaxKey), Gen: r.Uint(math.MaxUint64)}
	}
	return entries
}
