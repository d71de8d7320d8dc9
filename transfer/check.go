package transfer

import (
	"fmt"
	"math"
	"unsafe"

	"github.com/tensorferry/tensorferry/region"
)

// Limits of the contract. A plane refuses more before it allocates anything for it.
const (
	MaxMetadata     = 64 << 10 // bytes of a registration's metadata
	MaxNotification = 4 << 10  // bytes of a notification's message
	MaxSpans        = 16 << 10 // spans of one READ or grant; a READ of more is posted as several
	MaxGrantID      = 1 << 10  // bytes of a grant's id
)

// Check validates r against a registration of memBytes bytes and returns the bytes that it moves. It refuses what every plane
// refuses: no bytes at all, an empty or negative span, an empty local slice, a span outside the memory, lengths that differ, a
// notification or span list beyond the limits. Errors wrap ErrBadRequest.
func (r ReadRequest) Check(memBytes int64) (int64, error) {
	remote, err := CheckSpans(r.Remote, memBytes)
	if err != nil {
		return 0, err
	}
	var local int64
	for i, b := range r.Local {
		if len(b) == 0 {
			return 0, fmt.Errorf("%w: local slice %d is empty", ErrBadRequest, i)
		}
		local += int64(len(b))
	}
	if local != remote {
		return 0, fmt.Errorf("%w: %d remote bytes for %d local bytes", ErrBadRequest, remote, local)
	}
	if len(r.Notification) > MaxNotification {
		return 0, fmt.Errorf("%w: a notification of %d bytes, at most %d", ErrBadRequest, len(r.Notification), MaxNotification)
	}
	return remote, nil
}

// CheckSpans validates spans against memory of memBytes bytes and returns the sum of their lengths. Errors wrap ErrBadRequest.
func CheckSpans(spans []region.Span, memBytes int64) (int64, error) {
	if len(spans) == 0 || len(spans) > MaxSpans {
		return 0, fmt.Errorf("%w: %d spans, 1 to %d are possible", ErrBadRequest, len(spans), MaxSpans)
	}
	var sum int64
	for i, s := range spans {
		if s.Length <= 0 || s.Offset < 0 || s.Offset > memBytes-s.Length {
			return 0, fmt.Errorf("%w: span %d [%d +%d] is not in the memory of %d bytes", ErrBadRequest, i, s.Offset, s.Length, memBytes)
		}
		if sum > math.MaxInt64-s.Length {
			return 0, fmt.Errorf("%w: the spans' lengths overflow", ErrBadRequest)
		}
		sum += s.Length
	}
	return sum, nil
}

// CheckGrant validates the arguments of Registration.Grant. Errors wrap ErrBadRequest.
func CheckGrant(id string, spans []region.Span, memBytes int64) error {
	if id == "" || len(id) > MaxGrantID {
		return fmt.Errorf("%w: a grant id of %d bytes, 1 to %d are possible", ErrBadRequest, len(id), MaxGrantID)
	}
	_, err := CheckSpans(spans, memBytes)
	return err
}

// Check validates m as an argument of Plane.Register. Errors wrap ErrBadRequest.
func (m Memory) Check() error {
	if len(m.Bytes) == 0 {
		return fmt.Errorf("%w: memory of 0 bytes", ErrBadRequest)
	}
	if m.File == nil {
		return nil
	}
	st, err := m.File.Stat()
	if err != nil {
		return fmt.Errorf("%w: file of the memory: %w", ErrBadRequest, err)
	}
	if m.FileOffset < 0 || m.FileOffset > st.Size()-int64(len(m.Bytes)) {
		return fmt.Errorf("%w: %d bytes at offset %d are not in %s of %d bytes", ErrBadRequest, len(m.Bytes), m.FileOffset, m.Path, st.Size())
	}
	return nil
}

// Overlaps says whether two memories share a byte of this process's address space. Planes refuse to register one byte twice: two
// registrations would be two owners of its lifetime.
func (m Memory) Overlaps(o Memory) bool {
	if len(m.Bytes) == 0 || len(o.Bytes) == 0 {
		return false
	}
	a, b := uintptr(unsafe.Pointer(&m.Bytes[0])), uintptr(unsafe.Pointer(&o.Bytes[0]))
	return a < b+uintptr(len(o.Bytes)) && b < a+uintptr(len(m.Bytes))
}
