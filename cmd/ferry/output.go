package main

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// printJSON writes one object on one line, in a single write.
func printJSON(w io.Writer, v any) error {
	var b strings.Builder
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return err
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Lengths of file names in bytes.
const (
	maxName   = 255 // NAME_MAX of Linux's file systems
	shortName = 180 // what is kept of a name that is longer
)

// fileName makes a key a file's name, which ends in ext: letters, digits, '-', '_' and inner '.' stand for themselves, other bytes are escaped as
// %XX. Of a name that is too long the first bytes are kept, up to a whole escape, then "-" and 16 hex digits of the key's SHA-256.
// No two keys share a name unless one was made to look like what another was cut to, and no name leaves its directory.
func fileName(key, ext string) string {
	const hexDigits = "0123456789ABCDEF"
	var b strings.Builder
	cut := 0
	for i := range len(key) {
		c := key[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_', c == '.' && i > 0:
			b.WriteByte(c)
		default:
			b.WriteByte('%')
			b.WriteByte(hexDigits[c>>4])
			b.WriteByte(hexDigits[c&15])
		}
		if b.Len() <= shortName {
			cut = b.Len()
		}
	}
	name := b.String()
	if len(name)+len(ext) > maxName {
		sum := sha256.Sum256([]byte(key))
		name = name[:cut] + "-" + hex.EncodeToString(sum[:8])
	}
	return name + ext
}

// writeFile makes a file whole or not at all: it is written under another name in the same directory and then renamed.
func writeFile(dir, name string, parts [][]byte) (err error) {
	f, err := os.CreateTemp(dir, ".ferry-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
		}
	}()
	for _, p := range parts {
		if _, err := f.Write(p); err != nil {
			return err
		}
	}
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), filepath.Join(dir, name))
}
