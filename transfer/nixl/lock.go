package nixl

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/transfer"
)

// An agent process that may write a file holds a lock on its first byte for as long as it lives: a read lock of its open file
// description (fcntl's, which flock does not see). It goes with the process, however that ends, and after the last page that a
// network card could still write through it. A node that takes a region over from one that was killed waits for that.
func writerLock(kind int16) *unix.Flock_t {
	return &unix.Flock_t{Type: kind, Whence: io.SeekStart, Start: 0, Len: 1}
}

// lockAsWriter says that this process may write f from now on. f must stay open.
func lockAsWriter(f *os.File) error {
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, writerLock(unix.F_RDLCK)); err != nil {
		return fmt.Errorf("nixl: lock a file that is to be written: %w", err)
	}
	return nil
}

const writerPoll = time.Millisecond

// waitForWriters returns when no agent process may write f.
func waitForWriters(ctx context.Context, f *os.File) error {
	timer := time.NewTimer(writerPoll)
	defer timer.Stop()
	for {
		l := writerLock(unix.F_WRLCK)
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, l); err != nil {
			return fmt.Errorf("%w: nixl: ask who writes the memory: %w", transfer.ErrBadRequest, err)
		}
		if l.Type == unix.F_UNLCK {
			return nil
		}
		timer.Reset(writerPoll)
		select {
		case <-timer.C:
		case <-ctx.Done():
			return fmt.Errorf("nixl: a fetch agent of another process still writes the memory (of a node that was killed, or that runs beside this one): %w", ctx.Err())
		}
	}
}
