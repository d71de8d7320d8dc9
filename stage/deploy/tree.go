package deploy

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
)

// node is a piece of YAML that remembers its file, since an overlay mixes several. Nodes are never changed: a merge makes new ones.
type node struct {
	file   string
	fields map[string]*node // of a mapping, else nil
	items  []*node          // of a list
	list   bool
	scalar any // as the YAML library gives it; nil for mappings, lists and null
}

func newNode(file string, raw any) *node {
	n := &node{file: file}
	switch v := raw.(type) {
	case map[string]any:
		n.fields = make(map[string]*node, len(v))
		for k, x := range v {
			n.fields[k] = newNode(file, x)
		}
	case map[any]any: // keys that are no text, as engine settings have them
		n.fields = make(map[string]*node, len(v))
		for k, x := range v {
			n.fields[fmt.Sprint(k)] = newNode(file, x)
		}
	case []any:
		n.list = true
		for _, x := range v {
			n.items = append(n.items, newNode(file, x))
		}
	default:
		n.scalar = raw
	}
	return n
}

func (n *node) mapping() bool { return n.fields != nil }
func (n *node) null() bool    { return !n.mapping() && !n.list && n.scalar == nil }

// show is the value for a message.
func (n *node) show() string {
	switch v := n.scalar.(type) {
	case nil:
		return clip(fmt.Sprint(n.plain()))
	case string:
		return strconv.Quote(clip(v))
	default:
		return clip(fmt.Sprint(v))
	}
}

// plain is the value without its files: for comparisons and messages.
func (n *node) plain() any {
	switch {
	case n.mapping():
		m := make(map[string]any, len(n.fields))
		for k, v := range n.fields {
			m[k] = v.plain()
		}
		return m
	case n.list:
		l := make([]any, len(n.items))
		for i, v := range n.items {
			l[i] = v.plain()
		}
		return l
	case n.scalar == nil:
		return "nothing"
	}
	return n.scalar
}

func same(a, b *node) bool { return reflect.DeepEqual(a.plain(), b.plain()) }

// at is a node, the path of keys to it, and the last of them.
type at struct {
	*node
	key, name string
}

func (a at) field(name string) (at, bool) {
	n, ok := a.fields[name]
	if !ok {
		return at{}, false
	}
	return at{n, join(a.key, name), name}, true
}

// each are the fields in the order of their names.
func (a at) each() []at {
	var all []at
	for _, name := range slices.Sorted(maps.Keys(a.fields)) {
		f, _ := a.field(name)
		all = append(all, f)
	}
	return all
}

func join(key, name string) string {
	if key == "" {
		return name
	}
	return key + "." + name
}

// bad is an error about the value.
func (a at) bad(format string, args ...any) *Error {
	return a.fail(ErrConfig, format, args...)
}

func (a at) fail(err error, format string, args ...any) *Error {
	return &Error{Err: err, File: a.file, Key: a.key, Value: a.show(), Text: fmt.Sprintf(format, args...)}
}
