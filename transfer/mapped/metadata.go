package mapped

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"syscall"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/fields"
)

const (
	metadataMagic   = "FMAP"
	metadataVersion = 1
	maxPath         = 4096 // PATH_MAX of Linux
)

// file names one file of one boot of one machine.
type file struct{ dev, ino uint64 }

// location is what a registration's metadata says.
type location struct {
	boot     string // random at each boot: two machines never share it
	file     file
	path     string
	offset   int64 // of the memory in the file
	length   int64
	isRegion bool
	identity region.Identity // of a region
	epoch    uint64          // of a region
}

func (l location) encode() []byte {
	b := []byte(metadataMagic)
	b = binary.LittleEndian.AppendUint16(b, metadataVersion)
	b = fields.AppendString(b, l.boot)
	b = binary.LittleEndian.AppendUint64(b, l.file.dev)
	b = binary.LittleEndian.AppendUint64(b, l.file.ino)
	b = fields.AppendString(b, l.path)
	b = binary.LittleEndian.AppendUint64(b, uint64(l.offset))
	b = binary.LittleEndian.AppendUint64(b, uint64(l.length))
	if !l.isRegion {
		return binary.LittleEndian.AppendUint16(b, 0)
	}
	b = binary.LittleEndian.AppendUint16(b, 1)
	b = fields.AppendString(b, l.identity.Instance)
	b = fields.AppendString(b, l.identity.Group)
	b = binary.LittleEndian.AppendUint32(b, uint32(l.identity.Rank))
	return binary.LittleEndian.AppendUint64(b, l.epoch)
}

func decodeLocation(b []byte) (location, error) {
	bad := func(what string) (location, error) {
		return location{}, fmt.Errorf("%w: mapped: metadata: %s", transfer.ErrBadRequest, what)
	}
	r, err := fields.Open(b, metadataMagic, metadataVersion)
	if err != nil {
		return bad(err.Error())
	}
	l := location{boot: r.Str()}
	l.file = file{dev: r.Uint64(), ino: r.Uint64()}
	l.path = r.Str()
	l.offset, l.length = int64(r.Uint64()), int64(r.Uint64())
	l.isRegion = r.Uint16() == 1
	if l.isRegion {
		l.identity = region.Identity{Instance: r.Str(), Group: r.Str(), Rank: int(r.Uint32())}
		l.epoch = r.Uint64()
	}
	if !r.OK() || r.Len() != 0 {
		return bad("cut short or too long")
	}
	if l.offset < 0 || l.length <= 0 || l.offset > 1<<62-l.length {
		return bad(fmt.Sprintf("%d bytes at offset %d", l.length, l.offset))
	}
	if len(l.path) > maxPath || strings.ContainsRune(l.path, 0) {
		return bad("impossible path")
	}
	return l, nil
}

func fileOf(st os.FileInfo) file {
	s := st.Sys().(*syscall.Stat_t)
	return file{dev: s.Dev, ino: s.Ino}
}
