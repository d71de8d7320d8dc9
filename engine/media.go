package engine

import (
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/tensorferry/tensorferry/internal/shorten"
)

// media loads what an image_url names: a data: URL, or a file: URL inside one allowed directory. Nothing is ever fetched.
type media struct {
	root  *os.Root // nil: no files
	dir   string
	limit int64 // bytes of one image
}

func newMedia(dir string, limit int64) (*media, error) {
	m := &media{limit: limit}
	if dir == "" {
		return m, nil
	}
	abs, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	// os.Root keeps every open below the directory, whatever symbolic links say.
	if m.root, err = os.OpenRoot(abs); err != nil {
		return nil, fmt.Errorf("engine: allowed directory: %w", err)
	}
	m.dir = abs
	return m, nil
}

func (m *media) Close() error {
	if m.root == nil {
		return nil
	}
	return m.root.Close()
}

func (m *media) load(ref string) ([]byte, error) {
	scheme, rest, ok := strings.Cut(ref, ":")
	if !ok {
		return nil, errors.New("not a URL; send the image as data:image/jpeg;base64,...")
	}
	switch strings.ToLower(scheme) {
	case "data":
		return m.data(rest)
	case "file":
		return m.file(ref)
	default:
		return nil, fmt.Errorf("this engine never fetches media, so %s: URLs are refused; send the image as data:image/jpeg;base64,...", clip(scheme))
	}
}

func (m *media) data(rest string) ([]byte, error) {
	head, body, ok := strings.Cut(rest, ",")
	if !ok {
		return nil, errors.New("data: URL without a comma")
	}
	kind, params, _ := strings.Cut(head, ";")
	if kind != "" && !strings.HasPrefix(strings.ToLower(kind), "image/") && kind != "application/octet-stream" {
		return nil, fmt.Errorf("data: URL of type %q; want image/jpeg or image/png", clip(kind))
	}
	if !strings.EqualFold(params, "base64") && !strings.HasSuffix(strings.ToLower(params), ";base64") {
		return nil, errors.New("data: URL that is not base64")
	}
	if n := int64(base64.StdEncoding.DecodedLen(len(body))); n > m.limit+2 {
		return nil, fmt.Errorf("the image is about %d bytes; at most %d are taken", n, m.limit)
	}
	enc := base64.StdEncoding
	if len(body)%4 != 0 {
		enc = base64.RawStdEncoding
	}
	b, err := enc.DecodeString(body)
	if err != nil {
		return nil, fmt.Errorf("data: URL: %w", err)
	}
	return b, nil
}

func (m *media) file(ref string) ([]byte, error) {
	if m.root == nil {
		return nil, errors.New("file: URLs are refused; start the engine with --allow-files DIR to allow those of one directory")
	}
	u, err := url.Parse(ref)
	if err != nil {
		return nil, err
	}
	if u.Host != "" && u.Host != "localhost" {
		return nil, fmt.Errorf("file: URL of host %q; want file:///path", clip(u.Host))
	}
	rel, err := filepath.Rel(m.dir, u.Path)
	if err != nil || !filepath.IsLocal(rel) {
		return nil, fmt.Errorf("%s is not below the allowed directory", clip(u.Path))
	}
	f, err := m.root.Open(rel)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", clip(u.Path))
	}
	b, err := io.ReadAll(io.LimitReader(f, m.limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > m.limit {
		return nil, fmt.Errorf("%s is larger than the %d bytes that are taken", clip(u.Path), m.limit)
	}
	return b, nil
}

// clip keeps what a client sent from filling answers and logs.
func clip(s string) string { return shorten.Text(s, 80) }
