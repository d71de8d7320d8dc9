package tensor

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// ParseJSON reads one JSON value: objects become maps with their keys in order, arrays lists. A number without fraction and exponent
// is an Int or Uint, any other a Float. Errors wrap ErrFile, ErrLimit, or ErrTree for a key given twice and a number that no kind
// holds.
func ParseJSON(b []byte) (Node, error) {
	if !utf8.Valid(b) {
		return nil, fmt.Errorf("%w: JSON that is not UTF-8", ErrFile)
	}
	if at := loneSurrogate(b); at >= 0 {
		return nil, fmt.Errorf("%w: JSON: byte %d: %.6s is half of a character, without the other half; no text can hold it", ErrFile, at, b[at:])
	}
	d := jsonReader{json.NewDecoder(bytes.NewReader(b))}
	d.UseNumber()
	root, err := d.value(nil, 0)
	if err == nil {
		if _, more := d.Token(); !errors.Is(more, io.EOF) {
			err = fmt.Errorf("%w: JSON: something follows the value at byte %d", ErrFile, d.InputOffset())
		}
	}
	if err != nil {
		return nil, err
	}
	return root, Check(root)
}

// loneSurrogate is where the first escape is that stands for a part of a character only, -1 if there is none. The decoder would make U+FFFD
// of it.
func loneSurrogate(b []byte) int {
	// unit is the UTF-16 of the escape at i, -1 if there is none.
	unit := func(i int) int {
		if i+6 > len(b) || b[i] != '\\' || b[i+1] != 'u' {
			return -1
		}
		u, err := strconv.ParseUint(string(b[i+2:i+6]), 16, 16)
		if err != nil {
			return -1
		}
		return int(u)
	}
	for i := 0; i < len(b); i++ {
		if b[i] != '\\' { // which is in texts only
			continue
		}
		u := unit(i)
		switch {
		case u >= 0xd800 && u < 0xdc00:
			if low := unit(i + 6); low < 0xdc00 || low >= 0xe000 {
				return i
			}
			i += 11
		case u >= 0xdc00 && u < 0xe000:
			return i
		default:
			i++ // what is escaped is no beginning of another one
		}
	}
	return -1
}

type jsonReader struct{ *json.Decoder }

func (d jsonReader) fail(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%w: JSON: byte %d: %w", ErrFile, d.InputOffset(), err)
}

func (d jsonReader) value(at *path, depth int) (Node, error) {
	t, err := d.Token()
	if err != nil {
		return nil, d.fail(err)
	}
	switch t := t.(type) {
	case json.Delim:
		if depth == MaxDepth {
			return nil, tooDeep(at)
		}
		if t == '{' {
			return d.object(at, depth)
		}
		return d.array(at, depth)
	case json.Number:
		return number(t.String(), at)
	case string:
		return String(t), nil
	case bool:
		return Flag(t), nil
	}
	return Null{}, nil
}

func (d jsonReader) object(at *path, depth int) (Node, error) {
	m := Map{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, d.fail(err)
		}
		key := String(t.(string)) // the decoder takes nothing else for a key
		v, err := d.value(&path{up: at, key: key}, depth+1)
		if err != nil {
			return nil, err
		}
		m = append(m, Entry{key, v})
	}
	if _, err := d.Token(); err != nil {
		return nil, d.fail(err)
	}
	return m, nil
}

func (d jsonReader) array(at *path, depth int) (Node, error) {
	l := List{}
	for d.More() {
		v, err := d.value(&path{up: at, i: len(l)}, depth+1)
		if err != nil {
			return nil, err
		}
		l = append(l, v)
	}
	if _, err := d.Token(); err != nil {
		return nil, d.fail(err)
	}
	return l, nil
}

func number(s string, at *path) (Node, error) {
	if !strings.ContainsAny(s, ".eE") {
		if i, err := strconv.ParseInt(s, 10, 64); err == nil {
			return Int(i), nil
		}
		if u, err := strconv.ParseUint(s, 10, 64); err == nil {
			return Uint(u), nil
		}
		return nil, fmt.Errorf("%w: %.40s at %v is over 64 bits; write it as text, or with a fraction", ErrTree, s, at)
	}
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return nil, fmt.Errorf("%w: %.40s at %v is no float64", ErrTree, s, at)
	}
	return Float(f), nil
}

// AppendJSON appends root as JSON without white space. A tuple becomes an array; a Float keeps a fraction or an exponent, so that
// ParseJSON gives a Float again. What JSON has no form for wraps ErrTree and names the place: tensors, arrays, images, bytes,
// extensions, keys that are not text, NaN and infinity. Other errors are those of Check.
func AppendJSON(b []byte, root Node) ([]byte, error) {
	if err := Check(root); err != nil {
		return b, err
	}
	out, err := appendJSON(b, root, nil)
	if err != nil {
		return b, err
	}
	return out, nil
}

func appendJSON(b []byte, n Node, at *path) ([]byte, error) {
	switch n := n.(type) {
	case Null:
		return append(b, "null"...), nil
	case Flag:
		return strconv.AppendBool(b, bool(n)), nil
	case Int:
		return strconv.AppendInt(b, int64(n), 10), nil
	case Uint:
		return strconv.AppendUint(b, uint64(n), 10), nil
	case Float:
		return appendFloat(b, float64(n), at)
	case String:
		return appendText(b, string(n)), nil
	case List:
		return appendArray(b, n, at)
	case Tuple:
		return appendArray(b, n, at)
	case Map:
		return appendMap(b, n, at)
	}
	return nil, fmt.Errorf("%w: %s at %v has no form in JSON", ErrTree, kindOf(n), at)
}

func appendArray(b []byte, nodes []Node, at *path) (_ []byte, err error) {
	b = append(b, '[')
	for i, n := range nodes {
		if i > 0 {
			b = append(b, ',')
		}
		if b, err = appendJSON(b, n, &path{up: at, i: i}); err != nil {
			return nil, err
		}
	}
	return append(b, ']'), nil
}

func appendMap(b []byte, m Map, at *path) (_ []byte, err error) {
	b = append(b, '{')
	for i, e := range m {
		key, ok := e.Key.(String)
		if !ok {
			return nil, fmt.Errorf("%w: a key that is %s, at %v, has no form in JSON", ErrTree, kindOf(e.Key), at)
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(appendText(b, string(key)), ':')
		if b, err = appendJSON(b, e.Value, &path{up: at, key: key}); err != nil {
			return nil, err
		}
	}
	return append(b, '}'), nil
}

func appendFloat(b []byte, f float64, at *path) ([]byte, error) {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return nil, fmt.Errorf("%w: %v at %v has no form in JSON", ErrTree, f, at)
	}
	start := len(b)
	b = strconv.AppendFloat(b, f, 'g', -1, 64)
	if !bytes.ContainsAny(b[start:], ".e") {
		b = append(b, ".0"...)
	}
	return b, nil
}

// kindOf names a value for people.
func kindOf(n Node) string {
	switch n.(type) {
	case Tensor:
		return "a tensor"
	case NDArray:
		return "an array"
	case Image:
		return "an image"
	case Bytes:
		return "bytes"
	case Ext:
		return "a msgpack extension"
	case Leaf:
		return "a leaf"
	case Null:
		return "None"
	case Flag:
		return "a bool"
	case Int, Uint:
		return "an int"
	case Float:
		return "a float"
	}
	return fmt.Sprintf("%T", n)
}
