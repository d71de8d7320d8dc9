package api

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/tensorferry/tensorferry/ec"
)

// EncodeEntry gives one entry of ec_transfer_params as JSON, fields that nobody here knows included.
func EncodeEntry(key string, a *ec.Announcement) ([]byte, error) {
	var p ec.Params
	p.Set(key, a)
	doc, err := p.MarshalJSON()
	if err != nil {
		return nil, err
	}
	// The entry's bytes are cut out of the map, not encoded again: that would change what it must carry unchanged.
	d := json.NewDecoder(bytes.NewReader(doc))
	var entry json.RawMessage
	for range 2 { // the brace and the key
		if _, err := d.Token(); err != nil {
			return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
		}
	}
	if err := d.Decode(&entry); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}
	return entry, nil
}

// DecodeEntry is its inverse.
func DecodeEntry(key string, entry []byte) (*ec.Announcement, error) {
	name, err := json.Marshal(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrMalformed, err)
	}
	doc := make([]byte, 0, len(name)+len(entry)+3)
	doc = append(doc, '{')
	doc = append(doc, name...)
	doc = append(doc, ':')
	doc = append(doc, entry...)
	doc = append(doc, '}')
	var p ec.Params
	if err := p.UnmarshalJSON(doc); err != nil {
		return nil, err
	}
	a, ok := p.Get(key)
	if !ok || p.Len() != 1 {
		return nil, fmt.Errorf("%w: not one entry of ec_transfer_params", ErrMalformed)
	}
	return a, nil
}
