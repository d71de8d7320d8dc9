package nixl

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/fields"
)

// Metadata of a registration, for own peers: a version byte, the CRC-32C of what follows (the library reads damaged metadata with
// little care), base and length of the memory, the library's version, the agent's metadata.
const (
	metadataVersion  = 2
	maxVersionText   = 64
	maxAgentMetadata = transfer.MaxMetadata - 512
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

type registrationMetadata struct {
	base, length uint64
	version      string // of the library
	agent        []byte
}

func (m *registrationMetadata) append(b []byte) []byte {
	b = append(b, metadataVersion, 0, 0, 0, 0)
	start := len(b)
	b = binary.LittleEndian.AppendUint64(b, m.base)
	b = binary.LittleEndian.AppendUint64(b, m.length)
	b = fields.AppendString(b, m.version[:min(len(m.version), maxVersionText)])
	b = binary.LittleEndian.AppendUint32(b, uint32(len(m.agent)))
	b = append(b, m.agent...)
	binary.LittleEndian.PutUint32(b[start-4:], crc32.Checksum(b[start:], castagnoli))
	return b
}

func parseMetadata(b []byte) (*registrationMetadata, error) {
	bad := func(format string, a ...any) (*registrationMetadata, error) {
		return nil, fmt.Errorf("%w: nixl: metadata: %s", transfer.ErrBadRequest, fmt.Sprintf(format, a...))
	}
	if len(b) > transfer.MaxMetadata {
		return bad("%d bytes, at most %d", len(b), transfer.MaxMetadata)
	}
	r := fields.NewReader(b)
	if v := r.Bytes(1); !r.OK() || v[0] != metadataVersion {
		return bad("%d bytes that are not of version %d", len(b), metadataVersion)
	}
	if sum := r.Uint32(); !r.OK() || sum != crc32.Checksum(b[5:], castagnoli) {
		return bad("%d bytes, damaged", len(b))
	}
	m := &registrationMetadata{base: r.Uint64(), length: r.Uint64(), version: r.Str()}
	m.agent = r.Bytes(int(r.Uint32()))
	switch {
	case !r.OK() || r.Len() != 0:
		return bad("%d bytes, malformed", len(b))
	case m.length == 0 || m.length > math.MaxInt64 || m.base > math.MaxUint64-m.length:
		return bad("memory of %d bytes at %#x", m.length, m.base)
	}
	return m, nil
}
