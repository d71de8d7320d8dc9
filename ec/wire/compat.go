package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// Compat is what two ends must agree on.
type Compat struct {
	VLLMVersion string
	Model       string
	Dtype       string // as torch prints it
	BlockBytes  int64
}

// Hash is the compatibility hash: sha256, in hex, of the compact JSON array of the four fields with ASCII escapes, as Python's json
// module writes it. A byte that is not UTF-8 is escaped as \udcXX: a Python peer started with the same bytes on its command line
// holds them as such surrogates (PEP 383), so the hashes agree.
func (c Compat) Hash() string {
	sum := sha256.Sum256(c.appendJSON(nil))
	return hex.EncodeToString(sum[:])
}

// Diff names the fields in which o differs from c, with both values: "" if none does. For log lines.
func (c Compat) Diff(o Compat) string {
	var d []string
	for _, f := range [...]struct{ name, ours, theirs string }{
		{fieldVLLMVersion, strconv.Quote(c.VLLMVersion), strconv.Quote(o.VLLMVersion)},
		{fieldModel, strconv.Quote(c.Model), strconv.Quote(o.Model)},
		{fieldDtype, strconv.Quote(c.Dtype), strconv.Quote(o.Dtype)},
		{fieldBlockBytes, strconv.FormatInt(c.BlockBytes, 10), strconv.FormatInt(o.BlockBytes, 10)},
	} {
		if f.ours != f.theirs {
			d = append(d, fmt.Sprintf("%s: %s here, %s there", f.name, f.ours, f.theirs))
		}
	}
	return strings.Join(d, "; ")
}

func (c Compat) appendJSON(b []byte) []byte {
	b = append(b, '[')
	for _, s := range [...]string{c.VLLMVersion, c.Model, c.Dtype} {
		b = appendJSONString(b, s)
		b = append(b, ',')
	}
	b = strconv.AppendInt(b, c.BlockBytes, 10)
	return append(b, ']')
}

// appendJSONString quotes s as Python's json.dumps does by default: everything from 0x20 to 0x7e stands for itself but the quote
// and the backslash. encoding/json escapes other characters (not DEL, but <, > and &), so the hash would differ.
func appendJSONString(b []byte, s string) []byte {
	b = append(b, '"')
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		if r == utf8.RuneError && size == 1 {
			r = 0xdc00 + rune(s[i])
		}
		i += size
		switch r {
		case '"', '\\':
			b = append(b, '\\', byte(r))
		case '\n':
			b = append(b, `\n`...)
		case '\r':
			b = append(b, `\r`...)
		case '\t':
			b = append(b, `\t`...)
		case '\b':
			b = append(b, `\b`...)
		case '\f':
			b = append(b, `\f`...)
		default:
			switch {
			case r >= 0x20 && r <= '~':
				b = append(b, byte(r))
			case r > 0xffff:
				high, low := utf16.EncodeRune(r)
				b = fmt.Appendf(b, `\u%04x\u%04x`, high, low)
			default:
				b = fmt.Appendf(b, `\u%04x`, r)
			}
		}
	}
	return append(b, '"')
}
