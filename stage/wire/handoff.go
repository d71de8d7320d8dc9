package wire

import (
	"math"

	"github.com/tinylib/msgp/msgp"
)

// Handoff is what a get is told about its payload: the metadata that put returned, or just where to ask for the key.
type Handoff struct {
	// Host and Port of the sender, from sender_host and sender_zmq_port, else source_host and source_port. "" and 0 if neither is
	// there: the configured sender counts.
	Host string
	Port int
	// Generation to claim; the zero ID is any.
	Generation ID
	// Legacy is metadata without a generation: it is read without a claim. Nil otherwise.
	Legacy *Metadata
	// Ferry says who an own producer is: its Node and Local count. Nil from a plain one.
	Ferry *FerryMetadata
}

// DecodeHandoff decodes the metadata of a get as the peers take it: only metadata of this schema names a generation, all other maps
// are looked at for an endpoint. Errors are *FrameError.
func DecodeHandoff(b []byte) (*Handoff, error) {
	r := newReader(b)
	if len(b) > MaxReply {
		return nil, r.fail(ErrLimit, "metadata of %d bytes, limit %d", len(b), MaxReply)
	}
	n, err := r.fields()
	if err != nil {
		return nil, err
	}
	h := &Handoff{}
	var sender, source struct {
		host string
		port int
	}
	direct, named := false, false
	var ferry reader
	for range n {
		name, err := r.next()
		if err != nil {
			return nil, err
		}
		switch string(name) {
		case fieldSchema:
			direct, err = r.thisSchema()
		case fieldGeneration:
			h.Generation, err = r.id()
			named = true
		case fieldHost:
			sender.host, err = r.host()
		case fieldPort:
			sender.port, err = r.port()
		case fieldSourceHost:
			source.host, err = r.host()
		case fieldSourcePort:
			source.port, err = r.port()
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
	if ferry.ours() {
		if h.Ferry, err = ferry.ferryMetadata(); err != nil {
			return nil, err
		}
	}
	if sender.host == "" || sender.port == 0 {
		sender = source
	}
	if sender.host != "" && sender.port != 0 {
		h.Host, h.Port = sender.host, sender.port
	}
	if direct && !named {
		h.Legacy, err = DecodeMetadata(b)
		return h, err
	}
	if !direct {
		h.Generation = ID{}
	}
	return h, nil
}

// thisSchema reads a schema's version of any kind.
func (r *reader) thisSchema() (bool, error) {
	if t := msgp.NextType(r.rest); t != msgp.IntType && t != msgp.UintType {
		return false, r.skip()
	}
	if u, rest, err := msgp.ReadUint64Bytes(r.rest); err == nil {
		r.rest = rest
		return u == SchemaVersion, nil
	}
	_, err := r.int(math.MinInt64, math.MaxInt64)
	return false, err
}
