package tcp

import (
	"encoding/binary"
	"fmt"
	"net"
	"strconv"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/fields"
)

const (
	metadataMagic   = "FTCM"
	metadataVersion = 1
	maxHost         = 253 // characters of a DNS name
)

// location is what a registration's metadata says.
type location struct {
	host   string
	port   uint16
	id     endpointID
	length int64 // bytes of the memory
}

func (l location) address() string { return net.JoinHostPort(l.host, strconv.Itoa(int(l.port))) }

func (l location) encode() []byte {
	b := []byte(metadataMagic)
	b = binary.LittleEndian.AppendUint16(b, metadataVersion)
	b = fields.AppendString(b, l.host)
	b = binary.LittleEndian.AppendUint16(b, l.port)
	b = l.id.append(b)
	return binary.LittleEndian.AppendUint64(b, uint64(l.length))
}

func decodeLocation(b []byte) (location, error) {
	bad := func(what string) (location, error) {
		return location{}, fmt.Errorf("%w: tcp: metadata: %s", transfer.ErrBadRequest, what)
	}
	r, err := fields.Open(b, metadataMagic, metadataVersion)
	if err != nil {
		return bad(err.Error())
	}
	l := location{host: r.Str(), port: r.Uint16()}
	copy(l.id.instance[:], r.Bytes(16))
	l.id.registration = r.Uint64()
	l.length = int64(r.Uint64())
	if !r.OK() || r.Len() != 0 {
		return bad("cut short or too long")
	}
	if l.host == "" || len(l.host) > maxHost || l.port == 0 || l.length <= 0 {
		return bad(fmt.Sprintf("address %q port %d, %d bytes", l.host, l.port, l.length))
	}
	return l, nil
}
