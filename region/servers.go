package region

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A process that serves a region to peers may outlive the owner that started it, so that peers that were told of it are not cut
// off: nobody else changes ready entries meanwhile. It asks Waiting, and ends when the region waits no more. The next owner ends it,
// or goes on with it, before it changes any entry.

// Servers is the number of processes that can serve a region for a restart. Number i holds a read lock on byte 1 + i of the file
// (F_OFD_SETLK, of the description that it maps) for as long as it lives, so who wants its end can wait for it.
const Servers = 8

// ServerLock is the lock of server number i, or of what stands in its way.
func ServerLock(i int, kind int16) *unix.Flock_t {
	return &unix.Flock_t{Type: kind, Start: 1 + int64(i), Len: 1}
}

// Waiting says how many owners the region in f has had, and how much longer it waits for the restart of the last one. 0: it does not:
// it has no name any more, or is from before the machine booted, or nobody wants it to wait, or the time is over. A living owner moves that
// time on. The error is of files that are no regions.
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
		return h.epoch, 0, nil
	}
	return h.epoch, h.waitsFor(), nil
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
		l := unix.Flock_t{Type: unix.F_WRLCK, Start: 1, Len: Servers}
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &l); err != nil || l.Type == unix.F_UNLCK {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
