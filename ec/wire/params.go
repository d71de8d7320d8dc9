package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Params is the ec_transfer_params map, in the order of its keys. The zero value is empty and ready for use. Like a Go map it is a
// reference: copies share their entries, and it is not safe for concurrent use while one goroutine calls Set or UnmarshalJSON.
//
// One bad entry does not lose the others: it has no Announcement, Err says why, and encoding passes it on as it came.
type Params struct{ m *paramsMap }

type paramsMap struct {
	entries []paramsEntry
	index   map[string]int // position in entries
	twice   []string       // keys that came more than once
	text    []byte         // the whole document as it came; nil once it has changed, or if a key came twice
}

type paramsEntry struct {
	key     string
	rawName []byte
	value   []byte // as it came; nil if it was Set
	a       *Announcement
	err     error // why a is nil
}

// Keys are all keys, of bad entries too.
func (p *Params) Keys() []string {
	if p.m == nil {
		return nil
	}
	keys := make([]string, len(p.m.entries))
	for i := range p.m.entries {
		keys[i] = p.m.entries[i].key
	}
	return keys
}

// Get gives a copy of the key's announcement. It is false if there is none or if it is bad; Err tells which.
func (p *Params) Get(key string) (*Announcement, bool) {
	e := p.entry(key)
	if e == nil || e.err != nil {
		return nil, false
	}
	return e.a.clone(), true
}

// Err is nil exactly if Get has an announcement: otherwise ErrNoEntry, or a *FieldError that names what is wrong with the entry.
func (p *Params) Err(key string) error {
	e := p.entry(key)
	if e == nil {
		return ErrNoEntry
	}
	return e.err
}

// Set stores a copy of a, which is not nil, under the key, in the place of an entry that is there (a bad one too), else as the last. What it holds is
// checked when it is encoded.
func (p *Params) Set(key string, a *Announcement) {
	e := paramsEntry{key: key, rawName: encodeName(key), a: a.clone()}
	if p.m == nil {
		p.m = &paramsMap{index: map[string]int{}}
	}
	p.m.text = nil
	if old := p.entry(key); old != nil {
		*old = e
		return
	}
	p.m.add(e)
}

// Len is the number of keys, those of bad entries too.
func (p *Params) Len() int {
	if p.m == nil {
		return 0
	}
	return len(p.m.entries)
}

// Duplicates are the keys that the document had more than once. The last entry is the one kept, in the place of the first, and
// encoding leaves the others out: readers behind us may differ in which one they take.
func (p *Params) Duplicates() []string {
	if p.m == nil {
		return nil
	}
	return slices.Clone(p.m.twice)
}

// UnmarshalJSON decodes a whole map; null is an empty one. It fails only if the document itself is no JSON object in UTF-8
// (ErrMalformed) or over a limit (ErrLimit), and p is unchanged then. What is wrong with one entry is in Err.
func (p *Params) UnmarshalJSON(b []byte) error {
	if len(b) > MaxParams {
		return fmt.Errorf("%w: ec_transfer_params of %d bytes, limit %d", ErrLimit, len(b), MaxParams)
	}
	if !utf8.Valid(b) || !json.Valid(b) {
		return fmt.Errorf("%w: ec_transfer_params are not valid JSON", ErrMalformed)
	}
	if b = bytes.TrimSpace(b); string(b) == "null" {
		*p = Params{}
		return nil
	}
	m := &paramsMap{index: map[string]int{}, text: bytes.Clone(b)}
	isObject, err := members(m.text, m.parse)
	if err != nil {
		return err
	}
	if !isObject {
		return fmt.Errorf("%w: ec_transfer_params are %s, want a JSON object", ErrMalformed, clip(b))
	}
	if m.twice != nil {
		m.text = nil
	}
	p.m = m
	return nil
}

// MarshalJSON gives the document that p was decoded from, byte for byte if nothing was Set. It fails if an entry that was Set is
// not valid; bad entries that came in are passed on. Note that json.Marshal strips white space and escapes <, > and &.
func (p Params) MarshalJSON() ([]byte, error) {
	if p.m == nil {
		return []byte("{}"), nil
	}
	if p.m.text != nil {
		return bytes.Clone(p.m.text), nil
	}
	var o object
	for i := range p.m.entries {
		e := &p.m.entries[i]
		value := e.value
		if value == nil {
			err := checkKey(e.key)
			if err == nil {
				value, err = e.a.MarshalJSON()
			}
			if err != nil {
				return nil, withKey(err, e.key)
			}
		}
		o.add(e.rawName, value)
	}
	return o.end(), nil
}

func (p *Params) entry(key string) *paramsEntry {
	if p.m == nil {
		return nil
	}
	i, ok := p.m.index[key]
	if !ok {
		return nil
	}
	return &p.m.entries[i]
}

func (m *paramsMap) add(e paramsEntry) {
	m.index[e.key] = len(m.entries)
	m.entries = append(m.entries, e)
}

// parse takes in one member of the document. Its error is for the whole document.
func (m *paramsMap) parse(in member) error {
	e := paramsEntry{key: in.name, rawName: in.rawName, value: in.value}
	if e.err = checkKey(in.name); e.err == nil {
		a, err := parseAnnouncement(in.value)
		if e.err = err; err == nil {
			e.a = &a
		}
	}
	e.err = withKey(e.err, in.name)
	if i, ok := m.index[in.name]; ok {
		if !slices.Contains(m.twice, in.name) {
			m.twice = append(m.twice, in.name)
		}
		m.entries[i] = e
		return nil
	}
	if len(m.entries) == MaxEntries {
		return fmt.Errorf("%w: ec_transfer_params of more than %d keys", ErrLimit, MaxEntries)
	}
	m.add(e)
	return nil
}

func checkKey(key string) error {
	switch {
	case key == "":
		return &FieldError{Value: `""`, Reason: "want a key", kind: ErrMalformed}
	case len(key) > MaxKey:
		return &FieldError{Value: clip(key), Reason: fmt.Sprintf("a key of %d bytes, limit %d", len(key), MaxKey), kind: ErrLimit}
	case !utf8.ValidString(key) || strings.ContainsRune(key, utf8.RuneError): // what half a surrogate pair decodes to
		return &FieldError{Value: clip(key), Reason: "want a key in Unicode", kind: ErrMalformed}
	}
	return nil
}

// withKey names the key in an error of its entry.
func withKey(err error, key string) error {
	var f *FieldError
	if errors.As(err, &f) {
		f.Key = clip(key)
	}
	return err
}
