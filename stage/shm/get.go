package shm

import (
	"context"
	"errors"
	"fmt"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
	"golang.org/x/sys/unix"
)

// notYet is why a segment cannot be read for the moment.
type notYet string

func (e notYet) Error() string { return string(e) }

// Get implements stage.Connector. The payload is taken off the directory when all of it was read and decoded, and not before: a get
// that fails, is too late or is killed leaves it. What others see of a get is a lock, for microseconds.
//
// A payload of 64 KiB and more is mapped: no bytes are copied, and its memory counts against the directory until Got.Release. With
// InPlace it is read-only, else it can be written, and what is written is copied then. Smaller ones are copies. From is of no use here,
// and Metadata says nothing but the size; a size that is wrong is ErrForeign, and another key's metadata ErrKey. Without Wait a payload
// that is being written, or being read by another, is ErrNotFound. Without a deadline ctx ends after stage.DefaultTransfer.
//
// Other errors: ErrForeign for what no connector of this user made, those of wire.DecodeObject for a payload that is none: it is left
// where it is, for its writer to clean up.
func (c *Connector) Get(ctx context.Context, r stage.Request) (*stage.Got, error) {
	if err := checkKey(r.Key); err != nil {
		return nil, err
	}
	size, err := sizeIn(r.Metadata, r.Key)
	if err != nil {
		return nil, err
	}
	if !c.begin() {
		return nil, stage.ErrClosing
	}
	defer c.work.Done()
	ctx, end := c.live(ctx, stage.DefaultTransfer)
	defer end()
	g, err := c.take(ctx, r, size)
	if !r.Wait || !errors.As(err, new(notYet)) {
		return g, c.getError(r.Key, err)
	}
	w := c.watch(r.Key)
	defer w.close()
	for {
		if g, err = c.take(ctx, r, size); !errors.As(err, new(notYet)) {
			return g, c.getError(r.Key, err)
		}
		if err := c.failed(r.Key); err != nil {
			return nil, err
		}
		if !w.wait(ctx) {
			if cause := context.Cause(ctx); errors.Is(cause, stage.ErrClosing) || errors.Is(cause, context.Canceled) {
				return nil, cause
			}
			return nil, fmt.Errorf("%w: %w", c.getError(r.Key, err), context.Cause(ctx))
		}
	}
}

func (c *Connector) getError(key string, err error) error {
	if why := notYet(""); errors.As(err, &why) {
		if err := c.failed(key); err != nil {
			return err
		}
		return fmt.Errorf("%w: key %.64q: %s", stage.ErrNotFound, key, why)
	}
	return err
}

// take reads the segment of a key and takes it off the directory. The error is notYet while there is none that can be read.
func (c *Connector) take(ctx context.Context, r stage.Request, want int64) (*stage.Got, error) {
	s, err := c.dir.openSegment(r.Key)
	if err != nil {
		return nil, err
	}
	defer s.close()
	switch {
	case s.size > c.o.MaxPayload:
		return nil, fmt.Errorf("%w: key %.64q has %d bytes, limit %d", ErrForeign, r.Key, s.size, c.o.MaxPayload)
	case want != anySize && want != s.size:
		return nil, fmt.Errorf("%w: key %.64q has %d bytes, its metadata says %d", ErrForeign, r.Key, s.size, want)
	}
	data, free, err := s.load(ctx, r.InPlace)
	if err != nil {
		return nil, err
	}
	g, err := c.decode(ctx, r.Key, s, data)
	if err != nil {
		if free != nil {
			err = errors.Join(err, free())
		}
		return nil, err
	}
	if free == nil {
		free = func() error { return nil }
	}
	return stage.NewGot(g, free), nil
}

// decode makes a value of a segment's bytes and takes the segment off the directory. That is what makes it this reader's: of two that
// could read it, one takes it off.
func (c *Connector) decode(ctx context.Context, key string, s *lockedSegment, data []byte) (stage.Got, error) {
	root, err := wire.DecodeObject(data)
	if err != nil {
		return stage.Got{}, fmt.Errorf("stage/shm: key %.64q, which is left as it is: %w", key, err)
	}
	if ctx.Err() != nil {
		return stage.Got{}, context.Cause(ctx)
	}
	ours, err := c.dir.unlink(key, s.inode)
	if err != nil {
		return stage.Got{}, err
	}
	c.dir.free(key, s.lock)
	if !ours {
		return stage.Got{}, notYet("another took it, or deleted it, meanwhile")
	}
	return stage.Got{Key: key, Root: root, Kind: wire.Object, Size: s.size, Plane: "shm"}, nil
}

// lockedSegment is a segment with its key's lock.
type lockedSegment struct {
	segment
	lock *keyLock
}

func (s *lockedSegment) close() {
	s.lock.close()
	unix.Close(s.fd)
}

// openSegment opens the segment of a key that is whole, locks its key, and sees to it that nobody writes to it meanwhile. The error is
// notYet if that is not possible now. The caller closes it.
func (d *folder) openSegment(key string) (_ *lockedSegment, err error) {
	fd, st, err := d.open(key, unix.O_RDONLY)
	switch {
	case gone(err):
		return nil, notYet("nothing is there")
	case errors.Is(err, unix.EAGAIN):
		return nil, notYet("it is just being opened")
	case err != nil:
		return nil, err
	}
	s := &lockedSegment{segment: segment{fd: fd, status: st}}
	defer func() {
		if err != nil {
			unix.Close(fd)
		}
	}()
	if s.size == 0 {
		return nil, notYet("it is being made")
	}
	s.lock, err = d.openLock(key, unix.O_RDONLY)
	if gone(err) {
		// A plain reader of the segment before took the lock file away from a plain writer that waited for it: that one wrote with a
		// lock that nobody can see. Its segment is read once nobody has it open for writing.
		if s.sealed, _ = lease(fd, unix.F_RDLCK); !s.sealed {
			return nil, notYet("it has no lock file, and is open for writing")
		}
		s.lock, err = d.openLock(key, unix.O_RDONLY|unix.O_CREAT)
	}
	if err == nil {
		if err = s.lock.take(); err != nil {
			s.lock.close()
		}
	}
	switch {
	case err == errBusy:
		return nil, notYet("it is being written, or read by another")
	case gone(err):
		return nil, notYet("it has just been read")
	case err != nil:
		return nil, err
	}
	defer func() {
		if err != nil {
			d.free(key, s.lock)
		}
	}()
	// Until here it could be another's; now only who does not know of locks can change it.
	now, err := d.stat(key)
	if err != nil && !gone(err) {
		return nil, err
	}
	if err != nil || now.inode != s.inode {
		return nil, notYet("it has just been read")
	}
	if s.status, err = d.statFD(fd, key); err != nil {
		return nil, err
	}
	if !s.sealed {
		s.sealed, _ = lease(fd, unix.F_RDLCK)
	}
	if !s.whole() {
		return nil, notYet("a part was never written: its writer was killed over it")
	}
	return s, nil
}
