package nixl

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"math/bits"
)

// NIXL's serializer (seen in 1.3.2 and 1.5.1) writes a mark, then fields: a tag of ASCII letters (which may be empty), the value's length as
// 8 bytes little endian, the value, a bar. An agent's metadata is
//
//	Agent, Conns=n, n x (t, c), ""="MemSection", nixlSecElms=m, m x (bknd, nixlDList, t, n=k, k x "")
//
// each of the last being a range (address, length, device) and what the backend needs to reach it. The library reads foreign bytes with
// little care, and a failure half way through takes away what it knew of that agent before. So what is cut short is refused here, and, where
// the library's own metadata keeps to this layout, what departs from it.
const metadataMark = "nixlSerDes|"

var (
	errCutShort = errors.New("cut short")
	errOtherTag = errors.New("another field than expected")
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

// agentMetadata is what metadata says, as far as its layout is known.
type agentMetadata struct {
	name        string
	odd         error             // it departs from the layout: nothing after that point is known
	connections map[string]string // by backend
	memory      map[memoryKey]uint64
	badKey      error // a memory's key is not one of UCX's
	keys        int   // of UCX's
}

// memoryKey is registered memory; the map gives the hash of what a backend needs to reach it.
type memoryKey struct {
	backend           string
	kind              uint32
	addr, len, device uint64
}

var memorySeed = maphash.MakeSeed()

const (
	sectionMark    = "MemSection"
	sectionList    = "nixlSDList"
	descriptorSize = 24 // address, length, device: 8 bytes each
)

// body walks what follows the agent's name. errCutShort: it ends too early.
func (m *agentMetadata) body(f *fields) error {
	connections, err := f.count("Conns")
	if err != nil {
		return err
	}
	for range connections {
		backend, err := f.next("t")
		if err != nil {
			return err
		}
		address, err := f.next("c")
		if err != nil {
			return err
		}
		if len(backend) == 0 || len(address) == 0 {
			return errors.New("a connection without a backend or an address")
		}
		m.connections[string(backend)] = string(address)
	}
	mark, err := f.next("")
	if err != nil {
		return err
	}
	if string(mark) != sectionMark {
		return fmt.Errorf("%.20q where %s should be", mark, sectionMark)
	}
	sections, err := f.count("nixlSecElms")
	if err != nil {
		return err
	}
	for range sections {
		if err := m.section(f); err != nil {
			return err
		}
	}
	if len(f.rest) > 0 {
		return fmt.Errorf("%d bytes after the end", len(f.rest))
	}
	return nil
}

func (m *agentMetadata) section(f *fields) error {
	backend, err := f.next("bknd")
	if err != nil {
		return err
	}
	list, err := f.next("nixlDList")
	if err != nil {
		return err
	}
	kind, err := f.next("t")
	if err != nil {
		return err
	}
	n, err := f.count("n")
	if err != nil {
		return err
	}
	if len(backend) == 0 || string(list) != sectionList || len(kind) != 4 || n == 0 {
		return fmt.Errorf("a list of %d ranges of kind %.20q, memory type of %d bytes, backend %.20q", n, list, len(kind), backend)
	}
	if k := binary.LittleEndian.Uint32(kind); k > uint32(File) {
		return fmt.Errorf("memory type %d, not 0 to %d", k, File) // the library would use it as an index
	}
	for range n {
		d, err := f.next("")
		if err != nil {
			return err
		}
		if len(d) < descriptorSize {
			return fmt.Errorf("a range in %d bytes, not %d", len(d), descriptorSize)
		}
		word := func(i int) uint64 { return binary.LittleEndian.Uint64(d[8*i:]) }
		key := memoryKey{string(backend), binary.LittleEndian.Uint32(kind), word(0), word(1), word(2)}
		m.memory[key] = maphash.Bytes(memorySeed, d[descriptorSize:])
		if string(backend) == "UCX" {
			m.keys++
			if err := checkUCXKey(d[descriptorSize:]); err != nil && m.badKey == nil {
				m.badKey = fmt.Errorf("range %#x + %d: %w", key.addr, key.len, err)
			}
		}
	}
	return nil
}

// maxUCXMemoryTypes is above what any UCX has (about ten).
const maxUCXMemoryTypes = 16

// checkUCXKey refuses a packed remote key that UCX, which is not told its length, would read past the end of: a map of memory domains in 8
// bytes, the memory type in one, then for each domain in the map a length in one byte and so many bytes. What follows is left alone.
func checkUCXKey(key []byte) error {
	if len(key) < 9 {
		return fmt.Errorf("a key of %d bytes", len(key))
	}
	if key[8] >= maxUCXMemoryTypes {
		return fmt.Errorf("a key of UCX's memory type %d", key[8]) // used as an index
	}
	rest := key[9:]
	for range bits.OnesCount64(binary.LittleEndian.Uint64(key)) {
		if len(rest) == 0 || len(rest) < 1+int(rest[0]) {
			return fmt.Errorf("a key of %d bytes that would be longer", len(key))
		}
		rest = rest[1+int(rest[0]):]
	}
	return nil
}

// agrees tells whether the library would add what m says to what it knows: the same connections, and no other keys for the same memory.
func (m *agentMetadata) agrees(with *agentMetadata) bool {
	for backend, address := range m.connections {
		if known, ok := with.connections[backend]; ok && known != address {
			return false
		}
	}
	for memory, key := range m.memory {
		if known, ok := with.memory[memory]; ok && known != key {
			return false
		}
	}
	return true
}

// add takes what the library knows after loading m too.
func (m *agentMetadata) add(more *agentMetadata) {
	maps.Copy(m.connections, more.connections)
	maps.Copy(m.memory, more.memory)
}

// renamed is metadata with another agent's name in it.
func renamed(metadata []byte, name, to string) []byte {
	out := appendField([]byte(metadataMark), "Agent", []byte(to))
	return append(out, metadata[len(appendField([]byte(metadataMark), "Agent", []byte(name))):]...)
}

func appendField(b []byte, tag string, value []byte) []byte {
	b = append(b, tag...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(value)))
	return append(append(b, value...), '|')
}

// AgentName is the name of the agent that metadata is of. ErrBadArgument: it is not NIXL's, or cut short.
func AgentName(metadata []byte) (string, error) {
	m, err := parseMetadata(metadata)
	if err != nil {
		return "", err
	}
	return m.name, nil
}

// parseMetadata refuses what is not NIXL's or is cut short, before the library sees it.
func parseMetadata(metadata []byte) (*agentMetadata, error) {
	rest, ok := bytes.CutPrefix(metadata, []byte(metadataMark))
	if !ok {
		return nil, fmt.Errorf("%w: %d bytes that are not a NIXL agent's metadata", ErrBadArgument, len(metadata))
	}
	f := &fields{rest}
	name, err := f.next("Agent")
	if err != nil || len(name) == 0 || len(name) > maxName || bytes.IndexByte(name, 0) >= 0 {
		return nil, fmt.Errorf("%w: metadata of %d bytes without an agent's name of 1 to %d bytes", ErrBadArgument, len(metadata), maxName)
	}
	m := &agentMetadata{name: string(name), connections: map[string]string{}, memory: map[memoryKey]uint64{}}
	m.odd = m.body(f)
	if errors.Is(m.odd, errCutShort) {
		return nil, fmt.Errorf("%w: metadata of agent %q is cut short at %d bytes", ErrBadArgument, name, len(metadata))
	}
	return m, nil
}

// layout is what the library's own metadata shows of how it writes it. What it does not write so is not asked of others.
type layout struct {
	known bool // there was a key to look at
	plain bool // its own follows the layout
	keys  bool // and its keys UCX's
}

func layoutOf(own []byte) layout {
	m, err := parseMetadata(own)
	if err != nil || m.odd != nil {
		return layout{}
	}
	return layout{known: m.keys > 0, plain: true, keys: m.keys > 0 && m.badKey == nil}
}

// check refuses what departs from the layout that the library itself keeps to.
func (l layout) check(m *agentMetadata) error {
	if l.plain && m.odd != nil {
		return fmt.Errorf("%w: metadata of agent %q: %w", ErrBadArgument, m.name, m.odd)
	}
	if l.keys && m.badKey != nil {
		return fmt.Errorf("%w: metadata of agent %q: %w", ErrBadArgument, m.name, m.badKey)
	}
	return nil
}
