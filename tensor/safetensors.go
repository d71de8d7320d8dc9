package tensor

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"unicode/utf8"
)

// Limits of .safetensors files.
const (
	maxSafetensorsHeader = 100_000_000 // bytes; the format's own limit
	maxSafetensorsText   = 4096        // bytes of a tensor's name
	safetensorsLength    = 8           // bytes of the header's length, which begin the file
	safetensorsAlign     = 8           // of the data from the start of the file, as written
	safetensorsMetadata  = "__metadata__"
)

// Placed says where a tensor is in a file.
type Placed struct {
	Name   string
	DType  DType
	Shape  Shape
	Offset int64 // from the start of the file, bytes
	Bytes  int64
}

// Text is one pair of a file's own metadata.
type Text struct{ Key, Value string }

// SafetensorsLayout is what the header of a .safetensors file says.
type SafetensorsLayout struct {
	Tensors  []Placed // in the order of their bytes: they follow one another without a gap, from DataOffset to the end
	Metadata []Text   // sorted by key; nil if there is none
	// DataOffset is where the data begins, from the start of the file.
	DataOffset int64
}

// Named is a tensor and its name.
type Named struct {
	Name   string
	Tensor Tensor
}

// ParseSafetensors reads a .safetensors file that is in memory, such as a mapped one. The tensors are views over b, in the order
// of their bytes. Errors wrap ErrFile, ErrDType, ErrShape or ErrLimit.
func ParseSafetensors(b []byte) ([]Named, []Text, error) {
	l, err := ReadSafetensorsLayout(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return nil, nil, err
	}
	named := make([]Named, len(l.Tensors))
	for i, p := range l.Tensors {
		t, err := New(p.DType, p.Shape, b[p.Offset:p.Offset+p.Bytes])
		if err != nil {
			return nil, nil, err
		}
		named[i] = Named{p.Name, t}
	}
	return named, l.Metadata, nil
}

// ReadSafetensorsLayout reads the header of a file of size bytes; the data is not read, so that a caller can read it straight to
// where it goes. The rules are the format's: the tensors' bytes cover the data exactly, in some order, without gap or overlap.
// Refused here although readers differ on them: a name given twice, and dtypes without a torch one of whole bytes (F4, F6).
// Errors are those of ParseSafetensors, and those of r.
func ReadSafetensorsLayout(r io.ReaderAt, size int64) (*SafetensorsLayout, error) {
	var head [safetensorsLength]byte
	if size < safetensorsLength {
		return nil, fmt.Errorf("%w: .safetensors: %d bytes are no header", ErrFile, size)
	}
	if err := readAt(r, head[:], 0); err != nil {
		return nil, err
	}
	n := binary.LittleEndian.Uint64(head[:])
	if n > maxSafetensorsHeader {
		return nil, fmt.Errorf("%w: .safetensors: a header of %d bytes, limit %d", ErrLimit, n, maxSafetensorsHeader)
	}
	if n > uint64(size-safetensorsLength) {
		return nil, fmt.Errorf("%w: .safetensors: a header of %d bytes in a file of %d", ErrFile, n, size)
	}
	text := make([]byte, n)
	if err := readAt(r, text, safetensorsLength); err != nil {
		return nil, err
	}
	if !utf8.Valid(text) {
		return nil, fmt.Errorf("%w: .safetensors: the header is not UTF-8", ErrFile)
	}
	l := &SafetensorsLayout{DataOffset: safetensorsLength + int64(n)}
	h := header{dec: json.NewDecoder(bytes.NewReader(text))}
	h.dec.UseNumber()
	if err := h.read(l); err != nil {
		return nil, err
	}
	return l, l.place(size)
}

// place sorts the tensors by their bytes, checks that these cover the data, and turns offsets in the data into those in the file.
func (l *SafetensorsLayout) place(size int64) error {
	slices.SortStableFunc(l.Tensors, func(a, b Placed) int {
		return cmp.Or(cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.Bytes, b.Bytes))
	})
	at := int64(0)
	for i := range l.Tensors {
		p := &l.Tensors[i]
		if p.Offset != at {
			return fmt.Errorf("%w: .safetensors: tensor %.64q begins at byte %d of the data, want %d", ErrFile, p.Name, p.Offset, at)
		}
		at += p.Bytes
		p.Offset += l.DataOffset
	}
	if at != size-l.DataOffset {
		return fmt.Errorf("%w: .safetensors: %d bytes of data, the tensors have %d", ErrFile, size-l.DataOffset, at)
	}
	return nil
}

// header reads the JSON of a .safetensors file.
type header struct{ dec *json.Decoder }

func (h *header) fail(format string, args ...any) error {
	return fmt.Errorf("%w: .safetensors header: %s (byte %d)", ErrFile, fmt.Sprintf(format, args...), safetensorsLength+h.dec.InputOffset())
}

func (h *header) token() (json.Token, error) {
	t, err := h.dec.Token()
	if err != nil {
		return nil, h.fail("%v", err)
	}
	return t, nil
}

// object reads an object and calls field, which reads the value, for each name. A name given twice is an error.
func (h *header) object(what string, field func(name string) error) error {
	t, err := h.token()
	if err != nil {
		return err
	}
	return h.members(t, what, field)
}

// members reads the rest of an object that begins with token t.
func (h *header) members(t json.Token, what string, field func(name string) error) error {
	if t != json.Delim('{') {
		return h.fail("%s is no object", what)
	}
	seen := make(map[string]struct{})
	for h.dec.More() {
		t, err := h.token()
		if err != nil {
			return err
		}
		name := t.(string) // encoding/json lets nothing else be a name
		if _, again := seen[name]; again {
			return h.fail("%.64q twice in %s", name, what)
		}
		if len(name) > maxSafetensorsText {
			return fmt.Errorf("%w: .safetensors: a name of %d bytes, limit %d", ErrLimit, len(name), maxSafetensorsText)
		}
		seen[name] = struct{}{}
		if err := field(name); err != nil {
			return err
		}
	}
	_, err := h.token() // the closing brace
	return err
}

func (h *header) read(l *SafetensorsLayout) error {
	err := h.object("it", func(name string) error {
		if name == safetensorsMetadata {
			return h.metadata(l)
		}
		p, err := h.tensor(name)
		l.Tensors = append(l.Tensors, p)
		return err
	})
	if err != nil {
		return err
	}
	if _, err := h.dec.Token(); !errors.Is(err, io.EOF) {
		return h.fail("more than one value")
	}
	return nil
}

func (h *header) metadata(l *SafetensorsLayout) error {
	t, err := h.token()
	if err != nil || t == nil { // null is as good as none
		return err
	}
	if err := h.members(t, safetensorsMetadata, func(key string) error {
		t, err := h.token()
		if err != nil {
			return err
		}
		value, ok := t.(string)
		if !ok {
			return h.fail("%s.%.64q is no string", safetensorsMetadata, key)
		}
		l.Metadata = append(l.Metadata, Text{key, value})
		return nil
	}); err != nil {
		return err
	}
	slices.SortFunc(l.Metadata, func(a, b Text) int { return cmp.Compare(a.Key, b.Key) })
	return nil
}

// tensor reads one tensor's value. Its Offset is in the data.
func (h *header) tensor(name string) (Placed, error) {
	p := Placed{Name: name}
	var haveDType, haveShape bool
	var offsets []int64
	err := h.object(fmt.Sprintf("%.64q", name), func(field string) (err error) {
		switch field {
		case "dtype":
			t, err := h.token()
			if err != nil {
				return err
			}
			code, _ := t.(string)
			if p.DType, haveDType = dtypeBySafetensors[code]; !haveDType {
				return fmt.Errorf("%w: .safetensors: tensor %.64q has %.20q, which is none of torch's of whole bytes", ErrDType, name, fmt.Sprint(t))
			}
			return nil
		case "shape":
			p.Shape, err = h.numbers(name, field, MaxRank)
			haveShape = true
			return err
		case "data_offsets":
			offsets, err = h.numbers(name, field, 2)
			return err
		}
		var unknown json.RawMessage
		if err := h.dec.Decode(&unknown); err != nil {
			return h.fail("%v", err)
		}
		return nil
	})
	if err != nil {
		return p, err
	}
	if !haveDType || !haveShape || len(offsets) != 2 {
		return p, h.fail("tensor %.64q needs dtype, shape and two data_offsets", name)
	}
	n, err := p.DType.Bytes(p.Shape)
	if err != nil {
		return p, fmt.Errorf("%w, tensor %.64q", err, name)
	}
	if offsets[1]-offsets[0] != n { // both are from 0 up
		return p, h.fail("tensor %.64q has bytes %d to %d, shape %v of %v has %d", name, offsets[0], offsets[1], p.Shape, p.DType, n)
	}
	p.Offset, p.Bytes = offsets[0], n
	return p, nil
}

// numbers reads an array of at most limit integers from 0 up.
func (h *header) numbers(name, field string, limit int) ([]int64, error) {
	t, err := h.token()
	if err != nil {
		return nil, err
	}
	if t != json.Delim('[') {
		return nil, h.fail("%s of tensor %.64q is no array", field, name)
	}
	v := []int64{}
	for h.dec.More() {
		t, err := h.token()
		if err != nil {
			return nil, err
		}
		text, _ := t.(json.Number)
		n, err := strconv.ParseInt(string(text), 10, 64)
		if err != nil || n < 0 {
			return nil, h.fail("%s of tensor %.64q has %.20q, want integers from 0 to 2^63-1", field, name, fmt.Sprint(t))
		}
		if len(v) == limit {
			return nil, fmt.Errorf("%w: .safetensors: %s of tensor %.64q has more than %d numbers", ErrLimit, field, name, limit)
		}
		v = append(v, n)
	}
	_, err = h.token() // the closing bracket
	return v, err
}

// SafetensorsOrder sorts tensors as the format's writers do: the largest alignment first, then by name, so that each is aligned.
func SafetensorsOrder(named []Named) {
	slices.SortFunc(named, func(a, b Named) int {
		return cmp.Or(
			cmp.Compare(dtypeTable[b.Tensor.dtype].rank, dtypeTable[a.Tensor.dtype].rank),
			cmp.Compare(a.Name, b.Name))
	})
}

// AppendSafetensorsHeader appends the header of a file whose data is the bytes of the tensors one after the other, in this order
// (see SafetensorsOrder). The error wraps ErrDType for complex32 and complex128, which the format does not have, ErrFile for a
// name given twice or reserved, ErrLimit.
func AppendSafetensorsHeader(b []byte, named []Named, metadata []Text) ([]byte, error) {
	start := len(b)
	b = append(b, make([]byte, safetensorsLength)...)
	b = append(b, '{')
	if len(metadata) > 0 {
		b = appendText(b, safetensorsMetadata)
		b = append(b, ":{"...)
		seen := make(map[string]struct{}, len(metadata))
		for i, t := range metadata {
			if _, again := seen[t.Key]; again || !utf8.ValidString(t.Key) || !utf8.ValidString(t.Value) {
				return b[:start], fmt.Errorf("%w: .safetensors: metadata %.64q twice, or not UTF-8", ErrFile, t.Key)
			}
			seen[t.Key] = struct{}{}
			if i > 0 {
				b = append(b, ',')
			}
			b = appendText(b, t.Key)
			b = append(b, ':')
			b = appendText(b, t.Value)
		}
		b = append(b, '}')
	}
	at := int64(0)
	seen := make(map[string]struct{}, len(named))
	for i, n := range named {
		code := dtypeTable[n.Tensor.dtype].safetensors
		if code == "" {
			return b[:start], fmt.Errorf("%w: .safetensors has none for %v, tensor %.64q", ErrDType, n.Tensor.dtype, n.Name)
		}
		if _, again := seen[n.Name]; again || n.Name == safetensorsMetadata || !utf8.ValidString(n.Name) {
			return b[:start], fmt.Errorf("%w: .safetensors: name %.64q is reserved, given twice, or not UTF-8", ErrFile, n.Name)
		}
		if len(n.Name) > maxSafetensorsText {
			return b[:start], fmt.Errorf("%w: .safetensors: a name of %d bytes, limit %d", ErrLimit, len(n.Name), maxSafetensorsText)
		}
		seen[n.Name] = struct{}{}
		if at > math.MaxInt64-n.Tensor.bytes {
			return b[:start], fmt.Errorf("%w: .safetensors: over 2^63 bytes", ErrLimit)
		}
		if i > 0 || len(metadata) > 0 {
			b = append(b, ',')
		}
		b = appendText(b, n.Name)
		b = append(b, `:{"dtype":"`...)
		b = append(b, code...)
		b = append(b, `","shape":[`...)
		for j, d := range n.Tensor.shape {
			if j > 0 {
				b = append(b, ',')
			}
			b = strconv.AppendInt(b, d, 10)
		}
		b = append(b, `],"data_offsets":[`...)
		b = strconv.AppendInt(b, at, 10)
		at += n.Tensor.bytes
		b = append(b, ',')
		b = strconv.AppendInt(b, at, 10)
		b = append(b, "]}"...)
	}
	b = append(b, '}')
	for (len(b)-start)%safetensorsAlign != 0 {
		b = append(b, ' ')
	}
	n := len(b) - start - safetensorsLength
	if n > maxSafetensorsHeader {
		return b[:start], fmt.Errorf("%w: .safetensors: a header of %d bytes, limit %d", ErrLimit, n, maxSafetensorsHeader)
	}
	binary.LittleEndian.PutUint64(b[start:], uint64(n))
	return b, nil
}

var shortEscape = [' ']byte{'\b': 'b', '\t': 't', '\n': 'n', '\f': 'f', '\r': 'r'}

// appendText appends s, which is UTF-8, as a JSON string; escaped is only what must be, in the short form where there is one.
func appendText(b []byte, s string) []byte {
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < ' ' && shortEscape[c] != 0:
			b = append(b, '\\', shortEscape[c])
		case c < ' ':
			b = fmt.Appendf(b, `\u%04x`, c)
		default:
			b = append(b, c)
		}
	}
	return append(b, '"')
}

// WriteSafetensors writes a file of the tensors in SafetensorsOrder; named is not changed. Errors are those of
// AppendSafetensorsHeader, ErrDevice for a tensor off the CPU, and those of w.
func WriteSafetensors(w io.Writer, named []Named, metadata []Text) error {
	named = slices.Clone(named)
	SafetensorsOrder(named)
	for _, n := range named {
		if !n.Tensor.device.CPU() {
			return fmt.Errorf("%w: tensor %.64q is %v: its bytes are not in this process", ErrDevice, n.Name, n.Tensor)
		}
	}
	h, err := AppendSafetensorsHeader(nil, named, metadata)
	if err != nil {
		return err
	}
	if _, err := w.Write(h); err != nil {
		return err
	}
	for _, n := range named {
		if _, err := w.Write(n.Tensor.data); err != nil {
			return err
		}
	}
	return nil
}
