package region

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/boottime"
)

// A process that serves a region to peers may outlive the owner that started it, so that peers that were told of it are not cut
// off: nobody else changes ready entries meanwhile. It asks Waiting, and ends when the region waits no more. The next owner ends it,
// or goes on with it, before it changes any entry; or makes another file, and lets it go on with the one that has no name any more.

// Servers is the number of processes that can serve a region for a restart. Number i holds a read lock on byte 1 + i of the file
// (F_OFD_SETLK, of the description that it maps) for as long as it lives, so who wants its end can wait for it.
const Servers = 8

// ServerLock is the lock of server number i, or of what stands in its way.
func ServerLock(i int, kind int16) *unix.Flock_t {
	return &unix.Flock_t{Type: kind, Start: 1 + int64(i), Len: 1}
}

// Waiting says how many owners the region in f has had, and how much longer it waits for the restart of the last one. 0: it does not:
// it is from before the machine booted, or nobody wants it to wait, or the time is over. A living owner moves that time on. Of a file that
// has no name any more it is the time that whoever took the name away has left its servers, 0 if none. The error is of files that are no
// regions.
func Waiting(f *os.File) (epoch uint64, left time.Duration, err error) {
	h, err := readHeader(f)
	if err != nil {
		return 0, 0, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, 0, fmt.Errorf("region: stat: %w", err)
	}
	if st.Nlink == 0 {
		return h.epoch, h.servedFor(), nil
	}
	return h.epoch, h.waitsFor(), nil
}

// servedFor is how much longer servers go on with the file once it has no name.
func (h *header) servedFor() time.Duration {
	if h.bootID == "" || h.bootID != bootID() {
		return 0
	}
	return max(0, time.Duration(h.serveUntil-boottime.Now()))
}

// NameOf is the name of the file that the region in f is made under, whether it still has it. The error is of files that are no regions.
func NameOf(f *os.File) (name string, err error) {
	h, err := readHeader(f)
	if err != nil {
		return "", err
	}
	return h.identity.FileName()
}

// served says whether anybody serves the file.
func served(f *os.File) bool {
	l := unix.Flock_t{Type: unix.F_WRLCK, Start: 1, Len: Servers}
	return unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l) == nil && l.Type != unix.F_UNLCK
}

// granted says whether peers may still READ entries of a dead owner's file.
func granted(f *os.File, h *header) (yes bool) {
	mem, err := unix.Mmap(int(f.Fd()), 0, int(h.geometry.fileBytes()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return true // nobody knows
	}
	defer func() { _ = unix.Munmap(mem) }()
	t := newSlotTable(mem, h.geometry, false)
	for i := range t.Len() {
		if s, err := t.Load(i); err != nil || s.Granted {
			return true
		}
	}
	return false
}

// leaveServers lets those who serve a dead owner's file go on once it has no name until then, by boottime.Now; 0: they end.
func leaveServers(f *os.File, until int64) error {
	var word [8]byte
	order.PutUint64(word[:], uint64(until))
	_, err := f.WriteAt(word[:], offServeUntil)
	return err
}

const (
	serversTimeout = 5 * time.Second // they look for the file's name ten times a second
	serversPoll    = 2 * time.Millisecond
)

// awaitServers returns when nobody serves a file that has lost its name, so that its memory is free. One that does not end only keeps
// the memory, and if that is missed, an error will say so.
func awaitServers(ctx context.Context, f *os.File) {
	ctx, cancel := context.WithTimeout(ctx, serversTimeout)
	defer cancel()
	tick := time.NewTicker(serversPoll)
	defer tick.Stop()
	for {
		if !served(f) {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
