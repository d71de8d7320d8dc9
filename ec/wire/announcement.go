package wire

import "encoding/json"

// Announcement is one entry of ec_transfer_params: what an orchestrator carries from producer to consumer for one key.
// Fields that this package does not know survive decode and encode byte for byte, in their order.
type Announcement struct {
	ItemIndices []int           // nil: left out (generation 1)
	Metadata    json.RawMessage // a JSON object; {} where nothing is published
	PeerHost    string          // "" with PeerPort 0: no address, the producer cannot serve it
	PeerPort    int
	SizeBytes   int64 // whole blocks, padding included
	Shape       []int // rows, width; nil: left out (generation 1)
}

// Servable is true if the announcement has an address.
func (a *Announcement) Servable() bool { return a.PeerHost != "" && a.PeerPort != 0 }

// Params is the ec_transfer_params map, in the order of its keys.
type Params struct{}

func (p *Params) Keys() []string                       { return nil }
func (p *Params) Get(key string) (*Announcement, bool) { return nil, false }
func (p *Params) Set(key string, a *Announcement)      {}
func (p *Params) Len() int                             { return 0 }
func (p *Params) UnmarshalJSON(b []byte) error         { return ErrMalformed }
func (p Params) MarshalJSON() ([]byte, error)          { return nil, ErrMalformed }
