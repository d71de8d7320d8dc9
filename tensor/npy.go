package tensor

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
)

const (
	npyMagic     = "\x93NUMPY"
	npyAlign     = 64       // of the data from the start of the file (numpy.lib.format)
	maxNPYHeader = 64 << 10 // a header of 64 dimensions has about 1,400 bytes
)

// NPY is what the header of a .npy file says.
type NPY struct {
	DType   string // numpy's array protocol type string
	Shape   Shape
	Fortran bool  // column-major
	Offset  int64 // of the data from the start of the file
	Bytes   int64 // of the data
}

// ParseNPY reads a .npy file of version 1, 2 or 3 that is in memory, such as a mapped file. The result's Storage is a view over b:
// of a file as numpy writes it for this machine, its View is the tensor without a copy. Column-major and big-endian files need
// Contiguous. Errors wrap ErrFile, ErrDType, ErrShape or ErrLimit; bytes after the array are an error.
//
// numpy has no bfloat16 and no float8: arrays of those are saved as raw bytes (dtype V2, V1), and what they were is not in the
// file. Such files are refused here; ParseNPYAs reads them.
func ParseNPY(b []byte) (Strided, error) { return parseNPY(b, Invalid) }

// ParseNPYAs reads a .npy file whose elements are raw bytes (numpy's V1, V2, ..) of the size of d's.
func ParseNPYAs(b []byte, d DType) (Strided, error) {
	if !d.valid() {
		return Strided{}, fmt.Errorf("%w: number %d is none", ErrDType, d)
	}
	return parseNPY(b, d)
}

func parseNPY(b []byte, raw DType) (Strided, error) {
	h, err := ReadNPYHeader(bytes.NewReader(b), int64(len(b)))
	if err != nil {
		return Strided{}, err
	}
	s := Strided{DType: raw, Shape: h.Shape, Storage: b[h.Offset : h.Offset+h.Bytes : h.Offset+h.Bytes]}
	switch kind := h.DType[1]; {
	case kind == 'V' && raw == Invalid:
		return Strided{}, fmt.Errorf("%w: elements of %s raw bytes (bfloat16 and float8 are saved so): say which dtype they are", ErrDType, h.DType[2:])
	case kind == 'V' && h.DType[2:] == strconv.FormatInt(raw.Size(), 10):
	case raw != Invalid:
		return Strided{}, fmt.Errorf("%w: elements of numpy's %q asked as %v", ErrDType, h.DType, raw)
	default:
		if s.DType, s.BigEndian, err = numpyDType(h.DType); err != nil {
			return Strided{}, err
		}
	}
	s.Strides = h.Shape.Strides()
	if h.Fortran {
		n := int64(1)
		for i, d := range h.Shape {
			s.Strides[i] = n
			n *= max(d, 1)
		}
	}
	return s, nil
}

// ReadNPYHeader reads a file's header and checks that the file of size bytes ends with the array's last byte. The array itself is
// not read. Errors are those of ParseNPY, and those of r.
func ReadNPYHeader(r io.ReaderAt, size int64) (NPY, error) {
	var head [12]byte
	if size < 10 {
		return NPY{}, fmt.Errorf("%w: .npy: %d bytes are no header", ErrFile, size)
	}
	if err := readAt(r, head[:min(size, 12)], 0); err != nil {
		return NPY{}, err
	}
	if string(head[:6]) != npyMagic {
		return NPY{}, fmt.Errorf("%w: .npy: it begins with %q, not with %q", ErrFile, head[:6], npyMagic)
	}
	var start, length int64
	switch major := head[6]; major {
	case 1:
		start, length = 10, int64(binary.LittleEndian.Uint16(head[8:]))
	case 2, 3:
		start, length = 12, int64(binary.LittleEndian.Uint32(head[8:]))
	default:
		return NPY{}, fmt.Errorf("%w: .npy: version %d.%d, want 1, 2 or 3", ErrFile, major, head[7])
	}
	if length > maxNPYHeader {
		return NPY{}, fmt.Errorf("%w: .npy: a header of %d bytes, limit %d", ErrLimit, length, maxNPYHeader)
	}
	if length > size-start {
		return NPY{}, fmt.Errorf("%w: .npy: a header of %d bytes in a file of %d", ErrFile, length, size)
	}
	text := make([]byte, length)
	if err := readAt(r, text, start); err != nil {
		return NPY{}, err
	}
	p := literal{text: string(text)}
	h, err := p.header()
	if err != nil {
		return NPY{}, err
	}
	h.Offset = start + length
	item, err := numpyItem(h.DType)
	if err != nil {
		return NPY{}, err
	}
	if h.Bytes, err = h.Shape.bytes(item); err != nil {
		return NPY{}, err
	}
	if h.Bytes != size-h.Offset {
		return NPY{}, fmt.Errorf("%w: .npy: %d bytes of data, %v of %q has %d", ErrFile, size-h.Offset, h.Shape, h.DType, h.Bytes)
	}
	return h, nil
}

// readAt fills b; a file that ends earlier is ErrFile.
func readAt(r io.ReaderAt, b []byte, off int64) error {
	n, err := r.ReadAt(b, off)
	switch {
	case n == len(b):
		return nil
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%w: it ends at byte %d", ErrFile, off+int64(n))
	}
	return fmt.Errorf("tensor: reading at byte %d: %w", off+int64(n), err)
}

// literal reads the one kind of Python literal that a .npy header is: a dict of a string, a bool and a tuple of integers.
type literal struct {
	text string
	at   int
}

func (p *literal) fail(format string, args ...any) error {
	return fmt.Errorf("%w: .npy header: %s (byte %d)", ErrFile, fmt.Sprintf(format, args...), p.at)
}

func (p *literal) space() {
	for p.at < len(p.text) && strings.IndexByte(" \t\r\n", p.text[p.at]) >= 0 {
		p.at++
	}
}

// take passes over a token if it comes next.
func (p *literal) take(token string) bool {
	p.space()
	if !strings.HasPrefix(p.text[p.at:], token) {
		return false
	}
	p.at += len(token)
	return true
}

func (p *literal) str() (string, error) {
	p.space()
	for _, quote := range []string{"'", `"`} {
		if rest, ok := strings.CutPrefix(p.text[p.at:], quote); ok {
			s, _, closed := strings.Cut(rest, quote)
			if !closed || strings.ContainsAny(s, "\\\n") {
				break
			}
			p.at += len(s) + 2
			return s, nil
		}
	}
	return "", p.fail("want a string")
}

func (p *literal) header() (h NPY, err error) {
	const descr, order, shape = "descr", "fortran_order", "shape"
	if !p.take("{") {
		return h, p.fail("want {")
	}
	seen := make(map[string]bool, 3)
	for !p.take("}") {
		key, err := p.str()
		if err != nil {
			return h, err
		}
		if seen[key] || !p.take(":") {
			return h, p.fail("want a colon after %.20q, given once", key)
		}
		seen[key] = true
		switch key {
		case descr:
			if p.take("[") {
				return h, fmt.Errorf("%w: .npy: records of several fields; save each field by itself", ErrDType)
			}
			h.DType, err = p.str()
		case order:
			h.Fortran, err = p.bool()
		case shape:
			h.Shape, err = p.shape()
		default:
			err = p.fail("unknown key %.20q", key)
		}
		if err != nil {
			return h, err
		}
		if !p.take(",") {
			if !p.take("}") {
				return h, p.fail("want a comma or }")
			}
			break
		}
	}
	p.space()
	if p.at < len(p.text) {
		return h, p.fail("%d bytes after it", len(p.text)-p.at)
	}
	if len(seen) != 3 {
		return h, p.fail("want %s, %s and %s", descr, order, shape)
	}
	return h, nil
}

func (p *literal) bool() (bool, error) {
	switch {
	case p.take("True"):
		return true, nil
	case p.take("False"):
		return false, nil
	}
	return false, p.fail("want True or False")
}

func (p *literal) shape() (Shape, error) {
	if !p.take("(") {
		return nil, p.fail("want a tuple")
	}
	s := Shape{}
	for comma := true; !p.take(")"); {
		if !comma {
			return nil, p.fail("want a comma or )")
		}
		p.space()
		end := p.at
		for end < len(p.text) && p.text[end] >= '0' && p.text[end] <= '9' {
			end++
		}
		d, err := strconv.ParseInt(p.text[p.at:end], 10, 64)
		if err != nil {
			return nil, p.fail("want a dimension from 0 to 2^63-1")
		}
		if len(s) == MaxRank {
			return nil, fmt.Errorf("%w: .npy: more than %d dimensions", ErrLimit, MaxRank)
		}
		p.at = end
		if p.take("L") { // Python 2 wrote so
			p.space()
		}
		s = append(s, d)
		comma = p.take(",")
		if !comma && len(s) == 1 {
			return nil, p.fail("want a tuple, not a number in brackets")
		}
	}
	return s, nil
}

// AppendNPYHeader appends the header of t's .npy file as numpy writes it (version 1); t's bytes follow it in the file. The error
// wraps ErrDType for dtypes that numpy does not have: save those as .safetensors.
func AppendNPYHeader(b []byte, t Tensor) ([]byte, error) {
	a, err := t.NumPy()
	if err != nil {
		return b, err
	}
	dims := make([]string, len(a.Shape))
	for i, d := range a.Shape {
		dims[i] = strconv.FormatInt(d, 10)
	}
	shape := strings.Join(dims, ", ")
	if len(dims) == 1 {
		shape += ","
	}
	dict := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", a.DType, shape)
	// numpy leaves room so that the outermost dimension can grow in place to 21 digits, then pads to the alignment.
	const grown = 21
	if len(dims) > 0 {
		dict += strings.Repeat(" ", grown-len(dims[0]))
	}
	const head = len(npyMagic) + 4
	pad := npyAlign - (head+len(dict)+1)%npyAlign
	b = append(b, npyMagic...)
	b = append(b, 1, 0)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(dict)+pad+1))
	b = append(b, dict...)
	for range pad {
		b = append(b, ' ')
	}
	return append(b, '\n'), nil
}

// WriteNPY writes t as a .npy file. Errors are those of AppendNPYHeader and w.
func WriteNPY(w io.Writer, t Tensor) error {
	h, err := AppendNPYHeader(nil, t)
	if err != nil {
		return err
	}
	if _, err := w.Write(h); err != nil {
		return err
	}
	_, err = w.Write(t.data)
	return err
}
