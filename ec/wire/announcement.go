package wire

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Limits of announcements.
const (
	MaxParams    = 16 << 20 // bytes of one ec_transfer_params
	MaxEntries   = 10_000   // keys in one
	MaxHost      = 255      // bytes of a peer_host
	MaxItems     = 1 << 16  // item_indices of one key
	MaxJSONDepth = 64       // objects and arrays in one another in one entry
)

// Announcement is one entry of ec_transfer_params: what an orchestrator carries from producer to consumer for one key.
// Fields that this package does not know survive decode and encode byte for byte, in their order.
//
// An Announcement is a value: decoding, Params.Get and Params.Set copy everything in it.
type Announcement struct {
	ItemIndices []int           // nil: left out (generation 1)
	Metadata    json.RawMessage // a JSON object; {} where nothing is published
	PeerHost    string          // "" with PeerPort 0: no address, the producer cannot serve it
	PeerPort    int
	SizeBytes   int64 // whole blocks, padding included; 0: left out, which goes only without an address
	Shape       []int // rows, width; nil: left out (generation 1)

	// Slot is the entry's place in the slot table of the producer's pool, nil if it is not said. Only our own nodes say and read
	// it, in the `ferry` extension: {"v": 1, "slot": 7}. It is a hint: whoever uses it looks at what the slot holds.
	Slot *uint32

	raw []byte // the text it was decoded from; never changed
}

// The fields of an announcement, in the order in which the peers write them.
const (
	annItems = iota
	annMetadata
	annHost
	annPort
	annSize
	annShape
	annFerry
)

var announcementFields = [...]string{"item_indices", "metadata", "peer_host", "peer_port", "size_bytes", "shape", fieldFerry}

// Servable is true if the announcement has an address. A nil one, as Params.Get gives for a bad entry, has none.
func (a *Announcement) Servable() bool { return a != nil && a.PeerHost != "" && a.PeerPort != 0 }

// UnmarshalJSON decodes one entry. Errors are *FieldError. A field given twice is an error: readers differ in which one they take.
// On an error a is unchanged.
func (a *Announcement) UnmarshalJSON(b []byte) error {
	if len(b) > MaxParams {
		return &FieldError{Value: clip(b), Reason: fmt.Sprintf("%d bytes, limit %d", len(b), MaxParams), kind: ErrLimit}
	}
	if !utf8.Valid(b) || !json.Valid(b) {
		return &FieldError{Value: clip(b), Reason: "not valid JSON", kind: ErrMalformed}
	}
	d, err := parseAnnouncement(bytes.Clone(bytes.TrimSpace(b)))
	if err != nil {
		return err
	}
	*a = d
	return nil
}

// MarshalJSON gives the text that a was decoded from, with only the fields replaced that have changed since; new fields come last,
// in the peers' order. It fails if a is not valid. Note that json.Marshal strips white space from this text and escapes <, > and &.
func (a Announcement) MarshalJSON() ([]byte, error) {
	if err := a.Validate(); err != nil {
		return nil, err
	}
	var was Announcement
	var o object
	var done [len(announcementFields)]bool
	changed := a.raw == nil
	if !changed {
		var err error
		if was, err = parseAnnouncement(a.raw); err != nil {
			return nil, err
		}
		_, err = members(a.raw, func(m member) error {
			i := slices.Index(announcementFields[:], m.name)
			if i >= 0 {
				done[i] = true
				now := a.field(i)
				// Values of the same meaning keep their spelling.
				if !bytes.Equal(now, was.field(i)) {
					changed = true
					if now == nil {
						return nil
					}
					m.value = now
				}
			}
			o.add(m.rawName, m.value)
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	for i, name := range announcementFields {
		if now := a.field(i); now != nil && !done[i] && !(a.raw != nil && bytes.Equal(now, was.field(i))) {
			changed = true
			o.add(encodeName(name), now)
		}
	}
	if !changed {
		return bytes.Clone(a.raw), nil
	}
	return o.end(), nil
}

// field encodes the field with the given index of announcementFields; nil if it is left out.
func (a *Announcement) field(i int) []byte {
	switch i {
	case annItems:
		return encodeInts(a.ItemIndices)
	case annMetadata:
		if a.Metadata == nil {
			return []byte("{}")
		}
		return a.Metadata
	case annHost:
		if a.PeerHost != "" {
			return encodeName(a.PeerHost)
		}
	case annPort:
		if a.PeerPort != 0 {
			return strconv.AppendInt(nil, int64(a.PeerPort), 10)
		}
	case annSize:
		if a.SizeBytes != 0 {
			return strconv.AppendInt(nil, a.SizeBytes, 10)
		}
	case annShape:
		return encodeInts(a.Shape)
	case annFerry:
		if a.Slot != nil {
			return fmt.Appendf(nil, `{"%s":%d,"%s":%d}`, fieldV, ExtensionVersion, fieldSlot, *a.Slot)
		}
	}
	return nil
}

func encodeInts(v []int) []byte {
	if v == nil {
		return nil
	}
	b := []byte{'['}
	for i, n := range v {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(n), 10)
	}
	return append(b, ']')
}

// Validate checks all fields. Errors are *FieldError.
func (a *Announcement) Validate() error {
	bad := func(field string, value any, reason string) error {
		return &FieldError{Field: field, Value: clip(fmt.Sprint(value)), Reason: reason, kind: ErrMalformed}
	}
	if len(a.ItemIndices) > MaxItems {
		return &FieldError{Field: "item_indices", Value: fmt.Sprint(len(a.ItemIndices)), Reason: fmt.Sprintf("limit %d", MaxItems), kind: ErrLimit}
	}
	for _, n := range a.ItemIndices {
		if n < 0 {
			return bad("item_indices", n, "want integers from 0 up")
		}
	}
	if m := a.Metadata; m != nil {
		if !utf8.Valid(m) || !json.Valid(m) || bytes.TrimSpace(m)[0] != '{' {
			return bad("metadata", string(m), "want a JSON object")
		}
		if _, depth := value(m, space(m, 0)); depth >= MaxJSONDepth {
			return &FieldError{Field: "metadata", Value: clip(m), Reason: fmt.Sprintf("nested deeper than %d", MaxJSONDepth), kind: ErrLimit}
		}
	}
	if a.PeerHost == "" && a.PeerPort != 0 {
		return bad("peer_host", `""`, "want a host beside peer_port")
	}
	if a.PeerHost != "" {
		if reason := checkHost(a.PeerHost); reason != "" {
			return bad("peer_host", strconv.Quote(a.PeerHost), reason)
		}
		if a.PeerPort < 1 || a.PeerPort > math.MaxUint16 {
			return bad("peer_port", a.PeerPort, wantPort)
		}
	}
	if a.SizeBytes < 0 || a.Servable() && a.SizeBytes == 0 {
		return bad("size_bytes", a.SizeBytes, wantSize)
	}
	if a.Shape != nil {
		if len(a.Shape) != 2 || a.Shape[0] < 1 || a.Shape[1] < 1 || a.Shape[0] > math.MaxInt/a.Shape[1] {
			return bad("shape", string(encodeInts(a.Shape)), wantShape)
		}
	}
	return nil
}

const (
	wantPort  = "want an integer from 1 to 65535"
	wantSize  = "want an integer from 1 up"
	wantShape = "want [rows, width], both from 1 up, whose product is a 64-bit number"
)

// checkHost says what is wrong with a host: a name, an IPv4 address, or an IPv6 address with or without brackets.
func checkHost(host string) string {
	if len(host) > MaxHost {
		return fmt.Sprintf("%d bytes, limit %d", len(host), MaxHost)
	}
	bare := host
	if inner, ok := strings.CutPrefix(host, "["); ok {
		if bare, ok = strings.CutSuffix(inner, "]"); !ok || !strings.Contains(bare, ":") {
			return "brackets go around an IPv6 address"
		}
	}
	for i := range len(bare) {
		switch c := bare[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '.', c == '-', c == '_', c == ':', c == '%':
		default:
			return "want a host name or address of letters, digits, dots, hyphens and underscores"
		}
	}
	if strings.ContainsAny(bare, ":%") {
		if _, err := netip.ParseAddr(bare); err != nil {
			return "want a host name or address without a port"
		}
	}
	return ""
}

// parseAnnouncement decodes an entry from valid JSON, which it keeps.
func parseAnnouncement(text []byte) (Announcement, error) {
	a := Announcement{raw: text}
	if _, depth := value(text, 0); depth > MaxJSONDepth {
		return a, &FieldError{Value: clip(text), Reason: fmt.Sprintf("nested deeper than %d", MaxJSONDepth), kind: ErrLimit}
	}
	var seen [len(announcementFields)]bool
	isObject, err := members(text, func(m member) error {
		i := slices.Index(announcementFields[:], m.name)
		if i < 0 {
			return nil
		}
		reason := "given twice"
		if !seen[i] {
			seen[i] = true
			reason = a.parseField(i, m.value)
		}
		if reason != "" {
			return &FieldError{Field: m.name, Value: clip(m.value), Reason: reason, kind: ErrMalformed}
		}
		return nil
	})
	if !isObject {
		return a, &FieldError{Value: clip(text), Reason: "want a JSON object", kind: ErrMalformed}
	}
	if err != nil {
		return a, err
	}
	missing := ""
	switch {
	case seen[annHost] && !seen[annPort]:
		missing = "peer_port"
	case seen[annPort] && !seen[annHost]:
		missing = "peer_host"
	case seen[annHost] && !seen[annSize]:
		missing = "size_bytes"
	}
	if missing != "" {
		return a, &FieldError{Field: missing, Value: "missing", Reason: "an address comes with peer_host, peer_port and size_bytes", kind: ErrMalformed}
	}
	return a, a.Validate()
}

// parseField sets one field from its JSON text; it returns what is wanted if the text has another type or value.
func (a *Announcement) parseField(i int, text []byte) (reason string) {
	switch i {
	case annItems:
		var ok bool
		if a.ItemIndices, ok = parseInts(text, MaxItems); !ok {
			return fmt.Sprintf("want an array of at most %d integers from 0 up", MaxItems)
		}
	case annMetadata:
		if text[0] != '{' {
			return "want a JSON object"
		}
		a.Metadata = bytes.Clone(text)
	case annHost:
		if text[0] != '"' {
			return "want a string"
		}
		if a.PeerHost = decodeName(text); a.PeerHost == "" {
			return "want a host"
		}
	case annPort:
		port, err := strconv.ParseUint(string(text), 10, 16)
		if err != nil || port == 0 {
			return wantPort
		}
		a.PeerPort = int(port)
	case annSize:
		size, err := strconv.ParseUint(string(text), 10, 63)
		if err != nil || size == 0 {
			return wantSize
		}
		a.SizeBytes = int64(size)
	case annShape:
		var ok bool
		if a.Shape, ok = parseInts(text, 2); !ok {
			return wantShape
		}
	case annFerry:
		a.Slot = parseSlot(text)
	}
	return ""
}

// parseSlot reads the slot of a `ferry` value of our version. Anything else there is another's, or a newer node's, and says nothing.
func parseSlot(text []byte) *uint32 {
	version := false
	var slot *uint32
	isObject, err := members(text, func(m member) error {
		switch m.name {
		case fieldV:
			version = string(m.value) == strconv.Itoa(ExtensionVersion)
		case fieldSlot:
			slot = nil
			if n, err := strconv.ParseUint(string(m.value), 10, 32); err == nil {
				u := uint32(n)
				slot = &u
			}
		}
		return nil
	})
	if !isObject || err != nil || !version {
		return nil
	}
	return slot
}

// parseInts reads an array of at most limit integers from 0 up. The result is not nil.
func parseInts(text []byte, limit int) ([]int, bool) {
	if text[0] != '[' {
		return nil, false
	}
	v := []int{}
	i := space(text, 1)
	for text[i] != ']' {
		end, _ := value(text, i)
		n, err := strconv.ParseUint(string(text[i:end]), 10, 63)
		if err != nil || len(v) == limit {
			return nil, false
		}
		v = append(v, int(n))
		if i = space(text, end); text[i] == ',' {
			i = space(text, i+1)
		}
	}
	return v, true
}

func (a *Announcement) clone() *Announcement {
	c := *a
	c.ItemIndices = slices.Clone(a.ItemIndices)
	c.Metadata = bytes.Clone(a.Metadata)
	c.Shape = slices.Clone(a.Shape)
	if a.Slot != nil {
		slot := *a.Slot
		c.Slot = &slot
	}
	c.raw = bytes.Clone(a.raw) // a part of a whole document otherwise, which it would keep in memory
	return &c
}
