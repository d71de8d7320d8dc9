package nixl

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
)

// NIXL's serializer (seen in 1.3.2 and 1.5.1) writes a mark, then fields: a tag of ASCII letters (which may be empty), the value's length as
// 8 bytes little endian, the value, a bar. An agent's metadata is
//
//	Agent, Conns=n, n x (t, c), ""="MemSection", nixlSecElms=m, m x (bknd, nixlDList, t, n=k, k x "")
//
// The library reads foreign bytes with little care, so what is cut short is refused here. What goes by other tags may be a newer
// version's and is left to the library.
const metadataMark = "nixlSerDes|"

var (
	errCutShort = errors.New("cut short")
	errOtherTag = errors.New("other tag")
)

// fields walks serialized fields.
type fields struct{ rest []byte }

// next takes the value of the field with that tag.
func (f *fields) next(tag string) ([]byte, error) {
	rest, ok := bytes.CutPrefix(f.rest, []byte(tag))
	if !ok {
		if bytes.HasPrefix([]byte(tag), f.rest) {
			return nil, errCutShort
		}
		return nil, errOtherTag
	}
	if len(rest) < 8 {
		return nil, errCutShort
	}
	n := binary.LittleEndian.Uint64(rest)
	rest = rest[8:]
	if n >= uint64(len(rest)) {
		return nil, errCutShort
	}
	if rest[n] != '|' {
		return nil, errOtherTag
	}
	f.rest = rest[n+1:]
	return rest[:n], nil
}

// count takes a field whose value is a number of things, each of at least one byte.
func (f *fields) count(tag string) (uint64, error) {
	value, err := f.next(tag)
	if err != nil {
		return 0, err
	}
	if len(value) != 8 {
		return 0, errOtherTag
	}
	n := binary.LittleEndian.Uint64(value)
	if n > uint64(len(f.rest)) {
		return 0, errCutShort
	}
	return n, nil
}

// each takes n times the fields with those tags.
func (f *fields) each(n uint64, tags ...string) error {
	for range n {
		for _, tag := range tags {
			if _, err := f.next(tag); err != nil {
				return err
			}
		}
	}
	return nil
}

// body walks what follows the agent's name.
func (f *fields) body() error {
	connections, err := f.count("Conns")
	if err != nil {
		return err
	}
	if err := f.each(connections, "t", "c"); err != nil {
		return err
	}
	if _, err := f.next(""); err != nil {
		return err
	}
	sections, err := f.count("nixlSecElms")
	if err != nil {
		return err
	}
	for range sections {
		if err := f.each(1, "bknd", "nixlDList", "t"); err != nil {
			return err
		}
		descriptors, err := f.count("n")
		if err != nil {
			return err
		}
		if err := f.each(descriptors, ""); err != nil {
			return err
		}
	}
	return nil
}

// AgentName is the name of the agent that metadata is of. ErrBadArgument: it is not NIXL's, or cut short.
func AgentName(metadata []byte) (string, error) { return peekName(metadata) }

// peekName reads the agent's name off metadata, and refuses what is not NIXL's or is cut short, before the library sees it.
func peekName(metadata []byte) (string, error) {
	rest, ok := bytes.CutPrefix(metadata, []byte(metadataMark))
	if !ok {
		return "", fmt.Errorf("%w: %d bytes that are not a NIXL agent's metadata", ErrBadArgument, len(metadata))
	}
	f := fields{rest}
	name, err := f.next("Agent")
	if err != nil || len(name) == 0 || len(name) > maxName || bytes.IndexByte(name, 0) >= 0 {
		return "", fmt.Errorf("%w: metadata of %d bytes without an agent's name of 1 to %d bytes", ErrBadArgument, len(metadata), maxName)
	}
	if err := f.body(); errors.Is(err, errCutShort) {
		return "", fmt.Errorf("%w: metadata of agent %q is cut short at %d bytes", ErrBadArgument, name, len(metadata))
	}
	return string(name), nil
}
