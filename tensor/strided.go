package tensor

import (
	"encoding/binary"
	"fmt"
	"slices"
)

// Strided is a tensor as an engine or a file may have it: any strides, either byte order, with torch's lazy bits. It describes
// memory that somebody else owns; View and Contiguous make a Tensor of it.
type Strided struct {
	DType     DType
	Shape     Shape
	Strides   []int64 // in elements, from 0 up
	Offset    int64   // of the first element in Storage, in elements
	Storage   []byte
	Conj      bool // the elements are meant conjugated; the bytes are not yet (torch's is_conj). Complex dtypes only
	Neg       bool // they are meant negated (torch's is_neg). Floating and complex dtypes only
	BigEndian bool
}

// check gives the bytes of the tensor. All elements are in Storage if there is no error.
func (s *Strided) check() (int64, error) {
	n, err := s.DType.Bytes(s.Shape)
	if err != nil {
		return 0, err
	}
	if len(s.Strides) != len(s.Shape) {
		return 0, fmt.Errorf("%w: %d strides for %d dimensions", ErrStrides, len(s.Strides), len(s.Shape))
	}
	if s.Conj && !s.DType.Complex() {
		return 0, fmt.Errorf("%w: %v cannot be conjugated", ErrDType, s.DType)
	}
	if s.Neg && !s.DType.floating() {
		return 0, fmt.Errorf("%w: %v cannot be negated lazily", ErrDType, s.DType)
	}
	last, ok := s.Offset, s.Offset >= 0
	for i, d := range s.Shape {
		if s.Strides[i] < 0 {
			return 0, fmt.Errorf("%w: stride %d; torch has none below 0", ErrStrides, s.Strides[i])
		}
		step, fits := mul(max(d-1, 0), s.Strides[i])
		last += step
		ok = ok && fits && last >= 0
	}
	if n > 0 && (!ok || last >= int64(len(s.Storage))/s.DType.Size()) {
		return 0, fmt.Errorf("%w: offset %d, strides %v and shape %v leave a storage of %d bytes", ErrStrides, s.Offset, s.Strides, s.Shape, len(s.Storage))
	}
	return n, nil
}

// contiguous is true if the elements lie one after the other in row-major order.
func (s *Strided) contiguous() bool {
	n := int64(1)
	for i := len(s.Shape) - 1; i >= 0; i-- {
		if s.Shape[i] == 0 {
			return true
		}
		if s.Shape[i] != 1 && s.Strides[i] != n {
			return false
		}
		n *= s.Shape[i]
	}
	return true
}

// why says what stands between the bytes and a view of them, "" if nothing does.
func (s *Strided) why() string {
	switch {
	case !s.contiguous():
		return fmt.Sprintf("strides %v of shape %v are not contiguous", s.Strides, s.Shape)
	case s.Conj:
		return "its conjugation is not done yet"
	case s.Neg:
		return "its negation is not done yet"
	case s.BigEndian && dtypeTable[s.DType].part > 1:
		return "it is big-endian"
	}
	return ""
}

// View gives the tensor over the same bytes, no copy. It is refused with ErrStrides if only a copy could be right: use Contiguous.
func (s *Strided) View() (Tensor, error) {
	n, err := s.check()
	if err != nil {
		return Tensor{}, err
	}
	if n == 0 {
		return New(s.DType, s.Shape, nil)
	}
	if why := s.why(); why != "" {
		return Tensor{}, fmt.Errorf("%w: a view would be wrong, %s; make a copy", ErrStrides, why)
	}
	at := s.Offset * s.DType.Size()
	return New(s.DType, s.Shape, s.Storage[at:at+n])
}

// Contiguous gives a tensor with the values meant: a view where that is possible, else a copy in memory of its own.
func (s *Strided) Contiguous() (Tensor, error) {
	n, err := s.check()
	if err != nil {
		return Tensor{}, err
	}
	if n == 0 || s.why() == "" {
		return s.View()
	}
	if int64(int(n)) != n || n > maxCopy {
		return Tensor{}, fmt.Errorf("%w: a copy of %d bytes out of a storage of %d", ErrLimit, n, len(s.Storage))
	}
	b := aligned(int(n))
	s.copyTo(b)
	return New(s.DType, s.Shape, b)
}

// maxCopy is the largest copy made on our own: strides of 0 can make any size out of one element.
const maxCopy = 1 << 40

// CopyTo writes the values meant into dst, contiguous and little-endian. dst must have exactly the tensor's bytes, and must not
// overlap Storage.
func (s *Strided) CopyTo(dst []byte) error {
	n, err := s.check()
	if err != nil {
		return err
	}
	if int64(len(dst)) != n {
		return fmt.Errorf("%w: a destination of %d bytes for %d", ErrShape, len(dst), n)
	}
	s.copyTo(dst)
	return nil
}

// copyTo fills dst, which has the tensor's bytes.
func (s *Strided) copyTo(dst []byte) {
	if len(dst) == 0 {
		return
	}
	size := s.DType.Size()
	if s.contiguous() {
		at := s.Offset * size
		copy(dst, s.Storage[at:])
	} else {
		s.gather(dst, size)
	}
	part := dtypeTable[s.DType].part
	if s.BigEndian {
		swap(dst, part)
	}
	// A number is conjugated by its imaginary part's sign, negated by the sign of each part; both leave the imaginary one.
	if s.Conj != s.Neg && s.DType.Complex() {
		flipSigns(dst[part:], part, size)
	}
	if s.Neg {
		flipSigns(dst, part, size)
	}
}

// gather copies element by element, rows of equal stride at once.
func (s *Strided) gather(dst []byte, size int64) {
	// The innermost dimension is a loop of its own; the others count like the digits of a number.
	inner := len(s.Shape) - 1
	n, step := s.Shape[inner], s.Strides[inner]*size
	index := make([]int64, inner)
	at := s.Offset * size
	for {
		dst = gatherRow(dst, s.Storage[at:], n, step, size)
		d := inner - 1
		for ; d >= 0; d-- {
			at += s.Strides[d] * size
			if index[d]++; index[d] < s.Shape[d] {
				break
			}
			at -= index[d] * s.Strides[d] * size
			index[d] = 0
		}
		if d < 0 {
			return
		}
	}
}

// gatherRow copies n elements, step bytes apart in src, and gives what is left of dst.
func gatherRow(dst, src []byte, n, step, size int64) []byte {
	if step == size {
		copy(dst[:n*size], src)
		return dst[n*size:]
	}
	for i := range n {
		e := src[i*step:]
		switch size {
		case 1:
			dst[0] = e[0]
		case 2:
			binary.NativeEndian.PutUint16(dst, binary.NativeEndian.Uint16(e))
		case 4:
			binary.NativeEndian.PutUint32(dst, binary.NativeEndian.Uint32(e))
		case 8:
			binary.NativeEndian.PutUint64(dst, binary.NativeEndian.Uint64(e))
		default:
			copy(dst[:size], e)
		}
		dst = dst[size:]
	}
	return dst
}

// swap turns the byte order of every part.
func swap(b []byte, part int64) {
	if part == 1 {
		return
	}
	for p := range slices.Chunk(b, int(part)) {
		slices.Reverse(p)
	}
}

// flipSigns flips the highest bit of the little-endian part at the start of every size bytes.
func flipSigns(b []byte, part, size int64) {
	for at := part - 1; at < int64(len(b)); at += size {
		b[at] ^= 0x80
	}
}
