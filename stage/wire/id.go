package wire

import (
	"crypto/rand"
	"encoding/hex"
	"strconv"

	"github.com/tinylib/msgp/msgp"
)

// ID is a generation or a claim's name: opaque, compared as a whole. It is text in practice, and may be an integer, as the peers
// take anything. The zero ID is none.
type ID struct {
	text string
	num  uint64 // of a number; the two's complement of one below 0
	kind uint8
}

const (
	idText = iota + 1
	idUint
	idBelowZero
)

// TextID makes an ID of text, also of "".
func TextID(s string) ID { return ID{text: s, kind: idText} }

// NewID makes a random ID as the peers do, 32 hex digits.
func NewID() ID {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the process instead
	return TextID(hex.EncodeToString(b[:]))
}

// IsZero is true for the zero ID only.
func (id ID) IsZero() bool { return id.kind == 0 }

// empty is true for what Python takes for false.
func (id ID) empty() bool { return id.text == "" && id.num == 0 }

// String is the ID for a log.
func (id ID) String() string {
	switch id.kind {
	case idText:
		return clip(id.text)
	case idUint:
		return strconv.FormatUint(id.num, 10)
	case idBelowZero:
		return strconv.FormatInt(int64(id.num), 10)
	}
	return "none"
}

func appendID(b []byte, name string, id ID) []byte {
	b = msgp.AppendString(b, name)
	switch id.kind {
	case idText:
		return msgp.AppendString(b, id.text)
	case idUint:
		return msgp.AppendUint64(b, id.num)
	case idBelowZero:
		return msgp.AppendInt64(b, int64(id.num))
	}
	return msgp.AppendNil(b)
}

// id reads text, an integer, or nil, which is the zero ID.
func (r *reader) id() (id ID) {
	switch r.Type() {
	case msgp.NilType:
		r.Null()
	case msgp.IntType, msgp.UintType:
		id.kind = idUint
		var below bool
		if id.num, below = r.Integer(); below {
			id.kind = idBelowZero
		}
	default:
		id = TextID(r.Text(MaxID))
	}
	if !r.OK() {
		return ID{}
	}
	return id
}
