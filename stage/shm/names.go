package shm

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// The name of a key's lock file, as the peers have it.
const (
	lockPrefix = "shm_"
	lockSuffix = "_lockfile.lock"
)

// MaxKey is the longest key in bytes: the lock file's name has 18 more, and a file's name at most 255.
const MaxKey = 255 - len(lockPrefix) - len(lockSuffix)

func lockName(key string) string { return lockPrefix + key + lockSuffix }

// keyOf gives the key that a file belongs to.
func keyOf(name string) (key string, lock bool) {
	if len(name) > len(lockPrefix)+len(lockSuffix) && strings.HasPrefix(name, lockPrefix) && strings.HasSuffix(name, lockSuffix) {
		return name[len(lockPrefix) : len(name)-len(lockSuffix)], true
	}
	return name, false
}

// checkKey is about the key as the name of a file. The peers refuse less, but a key with a slash fails there too.
func checkKey(key string) error {
	why := ""
	_, lock := keyOf(key)
	switch {
	case key == "" || len(key) > MaxKey:
		why = fmt.Sprintf("it has %d bytes, 1 to %d are possible", len(key), MaxKey)
	case strings.ContainsAny(key, "/\x00") || key == "." || key == "..":
		why = "it is no name of a file"
	case !utf8.ValidString(key):
		why = "it is not UTF-8"
	case lock:
		why = "it is the name of another key's lock file"
	case strings.HasPrefix(key, "ferry_") || strings.HasPrefix(key, ".ferry_"):
		why = "names that begin so are files of ours"
	default:
		return nil
	}
	return fmt.Errorf("%w: %.64q: %s", ErrKey, key, why)
}

// Fields of what put returns.
const (
	fieldSHM  = "shm"
	fieldName = "name"
	fieldSize = "size"
)

func appendMetadata(key string, size int64) ([]byte, error) {
	return wire.AppendObject(nil, tensor.Map{
		tensor.Field(fieldSHM, tensor.Map{tensor.Field(fieldName, tensor.String(key)), tensor.Field(fieldSize, tensor.Int(size))}),
		tensor.Field(fieldSize, tensor.Int(size)),
	}, wire.ObjectOptions{})
}

// anySize is what metadata says that says no size.
const anySize = -1

// sizeIn gives the size that a get's metadata names. As with the peers, the metadata may be a map of several keys' metadata, and what
// is no metadata of this connector says nothing: the key alone counts. Other than there, it may not name another segment.
func sizeIn(metadata []byte, key string) (int64, error) {
	if len(metadata) == 0 {
		return anySize, nil
	}
	if len(metadata) > wire.MaxReply {
		return 0, fmt.Errorf("%w: metadata of %d bytes, limit %d", ErrKey, len(metadata), wire.MaxReply)
	}
	n, err := wire.DecodeObject(metadata)
	if err != nil {
		return 0, fmt.Errorf("stage/shm: metadata of key %.64q: %w", key, err)
	}
	m, _ := n.(tensor.Map)
	if of := m.Get(key); of != nil {
		m, _ = of.(tensor.Map)
	}
	handle := m.Get(fieldSHM)
	if handle == nil {
		return anySize, nil
	}
	h, _ := handle.(tensor.Map)
	name, ok := h.Get(fieldName).(tensor.String)
	size, ok2 := h.Get(fieldSize).(tensor.Int)
	switch {
	case !ok || !ok2 || size < 0:
		return 0, fmt.Errorf("%w: metadata of key %.64q without the name and size of a segment", ErrKey, key)
	case string(name) != key:
		return 0, fmt.Errorf("%w: metadata of key %.64q names the segment %.64q; a get reads its own key only", ErrKey, key, string(name))
	}
	return int64(size), nil
}
