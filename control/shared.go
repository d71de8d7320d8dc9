package control

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Shared is the end of a message that many peers are sent: it is copied once, by NewShared, and not for each of them. What libzmq is
// given for a peer is a mapping of the same pages, behind a page with the beginning of its message.
//
// It is never changed, and may be used by any goroutine. There is nothing to close: its memory is free when neither the Shared nor a
// message with it is left.
type Shared struct {
	file *os.File // closes it
	fd   int
	size int
}

// NewShared copies body. It is worth its while from about 64 KiB on.
func NewShared(body []byte) (*Shared, error) {
	fd, err := unix.MemfdCreate("tensorferry-message", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("control: share a message of %d bytes: memfd_create: %w", len(body), err)
	}
	s := &Shared{file: os.NewFile(uintptr(fd), "message"), fd: fd, size: len(body)}
	if _, err := s.file.Write(body); err != nil {
		s.file.Close()
		return nil, fmt.Errorf("control: share a message of %d bytes: %w", len(body), err)
	}
	const seals = unix.F_SEAL_SEAL | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_WRITE
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		s.file.Close()
		return nil, fmt.Errorf("control: share a message of %d bytes: seal it: %w", len(body), err)
	}
	return s, nil
}

// Len is the number of bytes.
func (s *Shared) Len() int { return s.size }

// parcel is the body of a message to send: head, then tail. Whatever takes one in counts its cost.
type parcel struct {
	head []byte
	tail *Shared // nil: none
}

// mappingCost is what a mapping counts for besides its page tables. It has one page of its own; but the kernel limits the mappings of a
// process to 65,530 (vm.max_map_count), two a message, and with this a loop of default options has no more than half of that.
const mappingCost = 16 << 10

// cost is how many bytes of memory the parcel counts for while it waits. Page tables are 8 bytes for each page of 4 KiB.
func (p parcel) cost() int64 {
	if p.tail == nil {
		return int64(len(p.head))
	}
	return int64(len(p.head)) + mappingCost + int64(p.tail.size)/512
}

// bytes gives the body in one piece.
func (p parcel) bytes() ([]byte, error) {
	if p.tail == nil {
		return p.head, nil
	}
	b := make([]byte, len(p.head)+p.tail.size)
	if _, err := p.tail.file.ReadAt(b[copy(b, p.head):], 0); err != nil && p.tail.size > 0 {
		return nil, fmt.Errorf("control: read a shared message: %w", err)
	}
	return b, nil
}
