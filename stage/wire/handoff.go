package wire

import "github.com/tinylib/msgp/msgp"

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
	r := newReader(b, 0)
	if len(b) > MaxReply {
		r.Fail(ErrLimit, "metadata of %d bytes, limit %d", len(b), MaxReply)
	}
	h := &Handoff{}
	var sender, source struct {
		host string
		port int
	}
	direct, named := false, false
	var ferry reader
	for name := range r.Fields() {
		switch string(name) {
		case fieldSchema:
			direct = r.thisSchema()
		case fieldGeneration:
			h.Generation = r.id()
			named = true
		case fieldHost:
			sender.host = r.host()
		case fieldPort:
			sender.port = r.port()
		case fieldSourceHost:
			source.host = r.host()
		case fieldSourcePort:
			source.port = r.port()
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
	if ferry.ours() {
		h.Ferry = ferry.ferryMetadata()
		if err := ferry.err(); err != nil {
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
		var err error
		h.Legacy, err = DecodeMetadata(b)
		return h, err
	}
	if !direct {
		h.Generation = ID{}
	}
	return h, nil
}

// thisSchema reads a schema's version of any kind.
func (r *reader) thisSchema() bool {
	if t := r.Type(); t != msgp.IntType && t != msgp.UintType {
		r.Skip()
		return false
	}
	v, below := r.Integer()
	return v == SchemaVersion && !below
}
