package demo

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"image"
	_ "image/jpeg" // decoders of what is shown
	_ "image/png"
	"io/fs"
	"os"
	"path"
	"strings"
)

// photographs are in the public domain; images/SOURCES.md says where they come from.
//
//go:embed images/*.jpg images/*.png
var photographs embed.FS

// maxFile bounds one image file; the engines take requests of 64 MiB, and base64 adds a third.
const maxFile = 40 << 20

// picture is one image file.
type picture struct {
	name          string
	data          []byte
	width, height int
	broken        string // why it cannot be used
}

// load reads the JPEG and PNG files of a directory, or the photographs that the binary carries. A file that is no image is in the
// list with the reason. No file at all is an error.
func load(dir string) ([]picture, error) {
	fsys, err := fs.Sub(photographs, "images")
	if dir != "" {
		fsys, err = os.DirFS(dir), nil
	}
	if err != nil {
		return nil, err
	}
	entries, err := fs.ReadDir(fsys, ".")
	if err != nil {
		return nil, fmt.Errorf("images: %s: %w", dir, err)
	}
	var out []picture
	for _, e := range entries {
		switch strings.ToLower(path.Ext(e.Name())) {
		case ".jpg", ".jpeg", ".png":
			p := picture{name: e.Name()}
			if err := p.read(fsys); err != nil {
				p.broken = err.Error()
			}
			out = append(out, p)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("images: no .jpg, .jpeg or .png file in %s", dir)
	}
	return out, nil
}

func (p *picture) read(fsys fs.FS) error {
	st, err := fs.Stat(fsys, p.name)
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return errors.New("not a regular file")
	}
	if st.Size() > maxFile {
		return fmt.Errorf("%d bytes; at most %d are sent", st.Size(), maxFile)
	}
	if p.data, err = fs.ReadFile(fsys, p.name); err != nil {
		return err
	}
	c, _, err := image.DecodeConfig(bytes.NewReader(p.data))
	if err != nil {
		return fmt.Errorf("not a JPEG or PNG image: %w", err)
	}
	p.width, p.height = c.Width, c.Height
	return nil
}
