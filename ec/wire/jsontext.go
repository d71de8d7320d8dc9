package wire

import (
	"bytes"
	"encoding/json"
	"strings"
)

// member is one name and value of a JSON object, as they stand in its text.
type member struct {
	name    string // decoded
	rawName []byte // with its quotes
	value   []byte
}

// members calls f for each member of a JSON object, in order, until f gives an error. The text must be valid JSON (json.Valid); it
// is false if the text is no object. Slices point into it.
func members(text []byte, f func(member) error) (bool, error) {
	i := space(text, 0)
	if i == len(text) || text[i] != '{' {
		return false, nil
	}
	for i = space(text, i+1); text[i] != '}'; i = space(text, i) {
		if text[i] == ',' {
			i = space(text, i+1)
		}
		nameEnd, _ := value(text, i)
		m := member{rawName: text[i:nameEnd]}
		m.name = decodeName(m.rawName)
		start := space(text, nameEnd)
		start = space(text, start+1) // past the colon
		i, _ = value(text, start)
		m.value = text[start:i]
		if err := f(m); err != nil {
			return true, err
		}
	}
	return true, nil
}

func decodeName(quoted []byte) string {
	if bytes.IndexByte(quoted, '\\') < 0 {
		return string(quoted[1 : len(quoted)-1])
	}
	var s string
	if err := json.Unmarshal(quoted, &s); err != nil {
		return "" // not reached: the text is valid
	}
	return s
}

// encodeName quotes a name, without the escapes for HTML.
func encodeName(name string) []byte {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(name); err != nil {
		return []byte(`""`) // not reached: a string always encodes
	}
	return []byte(strings.TrimSuffix(b.String(), "\n"))
}

func space(text []byte, i int) int {
	for i < len(text) && (text[i] == ' ' || text[i] == '\t' || text[i] == '\n' || text[i] == '\r') {
		i++
	}
	return i
}

// value gives the end of the value that begins at i, and how deep its objects and arrays are nested.
func value(text []byte, i int) (end, depth int) {
	open := 0
	for ; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
			if open == 0 {
				return i + 1, depth
			}
		case '{', '[':
			open++
			depth = max(depth, open)
		case '}', ']':
			if open == 0 {
				return i, depth // the end of what holds a number or a word
			}
			if open--; open == 0 {
				return i + 1, depth
			}
		case ',', ' ', '\t', '\n', '\r':
			if open == 0 {
				return i, depth
			}
		}
	}
	return i, depth
}

// object writes a JSON object member by member.
type object struct{ b []byte }

func (o *object) add(rawName, value []byte) {
	if len(o.b) == 0 {
		o.b = append(o.b, '{')
	} else {
		o.b = append(o.b, ',')
	}
	o.b = append(o.b, rawName...)
	o.b = append(o.b, ':')
	o.b = append(o.b, value...)
}

func (o *object) end() []byte {
	if len(o.b) == 0 {
		return []byte("{}")
	}
	return append(o.b, '}')
}
