package nixl

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// metadataPrefix starts the metadata of every agent: the serializer's mark, then the first field, the agent's name, with its length as
// 8 bytes little endian. Seen in 1.3.2 and 1.5.1.
var metadataPrefix = []byte("nixlSerDes|Agent")

// peekName reads the agent's name off metadata without giving it to the library, which is not robust against foreign bytes.
func peekName(metadata []byte) (string, error) {
	rest, ok := bytes.CutPrefix(metadata, metadataPrefix)
	if !ok || len(rest) < 8 {
		return "", fmt.Errorf("%w: %d bytes that are not a NIXL agent's metadata", ErrBadArgument, len(metadata))
	}
	n := binary.LittleEndian.Uint64(rest)
	rest = rest[8:]
	if n == 0 || n > maxName || uint64(len(rest)) < n+1 || rest[n] != '|' {
		return "", fmt.Errorf("%w: metadata with an agent's name of %d bytes in %d", ErrBadArgument, n, len(metadata))
	}
	return string(rest[:n]), nil
}
