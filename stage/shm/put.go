package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"golang.org/x/sys/unix"
)

// entry is a payload that was put and is unread.
type entry struct {
	key      string
	inode    inode
	slot     int   // of the record
	bytes    int64 // of room
	end      time.Time
	claimed  func()
	released func(stage.Outcome)

	lock inode // the lock file's; guarded by Connector.mu
}

// Put implements stage.Connector. It returns when the payload can be read. Published.Size is that of the segment; Generation is none.
//
// Errors, besides those of stage.Connector: ErrKey; ErrTaken; ErrForeign if the key's names are taken by something that is no segment;
// stage.ErrOptions for more than one reader, and for Pack.Exact with a tuple, which this wire cannot carry; stage.ErrFull if the
// directory has no room now, or never will have under MaxBytes. With unread payloads of MaxBytes it waits for readers, and while
// another holds the key's lock, for that: until ctx is done, 30 s if it has no deadline.
func (c *Connector) Put(ctx context.Context, key string, root tensor.Node, o stage.PutOptions) (*stage.Published, error) {
	if err := c.checkPut(key, root, o); err != nil {
		return nil, err
	}
	if !c.begin() {
		return nil, stage.ErrClosing
	}
	defer c.work.Done()
	ctx, end := c.live(ctx, putPatience)
	defer end()
	parts, size, err := wire.ObjectParts(root, o.Pack.ObjectOptions)
	if err != nil {
		return nil, err
	}
	metadata, err := appendMetadata(key, size)
	if err != nil {
		return nil, err
	}
	r, err := c.recording()
	if err != nil {
		return nil, err
	}
	lease := min(cmp.Or(o.Lease, c.o.Lease), maxLease)
	e := &entry{key: key, bytes: footprint(size), end: time.Now().Add(lease)}
	if err := c.reserve(ctx, key, e.bytes); err != nil {
		return nil, err
	}
	p, claimed, released := stage.NewPublished(stage.Published{Key: key, Size: size, Metadata: metadata})
	e.claimed, e.released = claimed, released
	if err := c.publish(ctx, r, e, parts, size, lease); err != nil {
		c.room.Release(e.bytes)
		return nil, err
	}
	return p, nil
}

func (c *Connector) checkPut(key string, root tensor.Node, o stage.PutOptions) error {
	if err := checkKey(key); err != nil {
		return err
	}
	switch {
	case o.Lease < 0:
		return fmt.Errorf("%w: lease %v", stage.ErrOptions, o.Lease)
	case o.Readers < 0 || o.Readers > 1:
		return fmt.Errorf("%w: %d readers; a segment has one, who removes it: put it under as many keys", stage.ErrOptions, o.Readers)
	case o.Pack.Exact && tensor.HasTuple(root):
		return fmt.Errorf("%w: a tuple would arrive as a list, and Exact was asked for", stage.ErrOptions)
	}
	return nil
}

// reserve waits for room under MaxBytes. An unread payload of the key makes way for it first.
func (c *Connector) reserve(ctx context.Context, key string, n int64) error {
	if n > c.o.MaxBytes {
		return fmt.Errorf("%w: a payload of %d bytes, all unread ones together may have %d", stage.ErrFull, n, c.o.MaxBytes)
	}
	if c.room.TryAcquire(n) {
		return nil
	}
	c.mu.Lock()
	old := c.entries[key]
	c.mu.Unlock()
	if old != nil {
		_ = c.drop(old, stage.Replaced) // if it is being read, its reader makes room
	}
	if err := c.room.Acquire(ctx, n); err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, stage.ErrClosing) {
			return cause
		}
		return fmt.Errorf("%w: %d bytes of room were waited for, unread payloads may have %d: %w", stage.ErrFull, n, c.o.MaxBytes, context.Cause(ctx))
	}
	return nil
}

// publish makes the segment of an entry. On an error nothing of it is left, and its room is the caller's.
func (c *Connector) publish(ctx context.Context, r *record, e *entry, parts [][]byte, size int64, lease time.Duration) error {
	t, err := c.dir.write(ctx, parts, size)
	if err != nil {
		return err
	}
	defer unix.Close(t.fd)
	e.inode = t.inode
	// Before it has its name, so that no instant is without either.
	if e.slot, err = r.add(e.key, t.status, lease); err != nil {
		return err
	}
	l, err := c.lock(ctx, e.key)
	if err == nil {
		e.lock = l.inode
		err = c.name(t, e)
		if err == nil {
			l.close()
			c.check(e) // somebody may have removed the lock file meanwhile, without a lock
			return nil
		}
		c.dir.free(e.key, l)
	}
	return errors.Join(err, r.remove(e.slot))
}

// lock waits for the key's lock.
func (c *Connector) lock(ctx context.Context, key string) (*keyLock, error) {
	l, err := c.dir.openLock(key, unix.O_RDWR|unix.O_CREAT)
	if err == nil {
		if err = l.take(); err == nil {
			return l, nil
		}
	}
	w := c.watch(key)
	defer w.close()
	for err == errBusy {
		if !w.wait(ctx) {
			err = fmt.Errorf("stage/shm: key %.64q: %s is held by a process: %w", key, c.dir.path(lockName(key)), context.Cause(ctx))
			break
		}
		// The same descriptor is tried again: a close of it would look like the end of somebody's lock.
		if l == nil {
			l, err = c.dir.openLock(key, unix.O_RDWR|unix.O_CREAT)
		}
		if l != nil {
			if err = l.take(); err == nil {
				return l, nil
			}
		}
	}
	if l != nil {
		if l.take() == nil { // after all, but too late
			c.dir.free(key, l)
		}
		l.close()
	}
	return nil, err
}

// name gives a draft its name. The caller has the key's lock.
func (c *Connector) name(t *draft, e *entry) error {
	for range raceTries {
		err := c.link(t, e)
		if err != unix.EEXIST {
			if err != nil {
				return c.dir.full(c.dir.failed("link", e.key, err), e.bytes)
			}
			return nil
		}
		if err := c.makeWay(e.key); err != nil {
			return err
		}
	}
	return fmt.Errorf("%w: %s is made again and again, without its lock", ErrTaken, c.dir.path(e.key))
}

// link makes the segment and its entry one act for those who watch.
func (c *Connector) link(t *draft, e *entry) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries[e.key] != nil {
		return unix.EEXIST
	}
	if err := c.dir.link(t, e.key); err != nil {
		return err
	}
	c.entries[e.key] = e
	delete(c.failures, e.key)
	c.watcher.arm(e.end)
	return nil
}

// makeWay removes what is under a key if a put may take its place. The caller has the key's lock.
func (c *Connector) makeWay(key string) error {
	c.mu.Lock()
	old := c.entries[key]
	c.mu.Unlock()
	if old != nil {
		return c.unlinkEntry(old, stage.Replaced)
	}
	fd, st, err := c.dir.open(key, unix.O_RDONLY)
	if gone(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	age := time.Since(time.Unix(0, st.mtime))
	s := segment{fd: fd, status: st}
	unused, _ := lease(fd, unix.F_RDLCK)
	switch {
	case unused && (st.size == 0 || !s.whole()):
		c.o.Log.Info("a segment that was never finished makes way for a put", "key", key, "bytes", st.size)
	case age >= c.o.Lease:
		c.o.Log.Warn("an unread payload of another makes way for a put", "key", key, "age", age)
	default:
		dead, err := unlinkOfDead(c.dir, key, st)
		if dead || err != nil {
			return err
		}
		return fmt.Errorf("%w: %s has an unread payload of another connector, %v old; it can be replaced when it is %v old",
			ErrTaken, c.dir.path(key), age.Round(time.Second), c.o.Lease)
	}
	_, err = c.dir.unlink(key, st.inode)
	return err
}

// drop removes an entry. stage.ErrClaimed: it is being read.
func (c *Connector) drop(e *entry, why stage.Outcome) error {
	l, err := c.dir.tryLock(e.key)
	if err == errBusy {
		return fmt.Errorf("%w: key %.64q: %w", stage.ErrClaimed, e.key, err)
	}
	if err != nil {
		return err
	}
	defer c.dir.free(e.key, l)
	return c.unlinkEntry(e, why)
}

// unlinkEntry is drop for who has the key's lock.
func (c *Connector) unlinkEntry(e *entry, why stage.Outcome) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries[e.key] != e {
		return nil
	}
	ours, err := c.dir.unlink(e.key, e.inode)
	if err != nil {
		return err
	}
	if !ours { // a reader was faster
		why = stage.Read
	}
	c.forget(e, why)
	return nil
}

// forget ends an entry whose segment is gone. The caller holds mu.
func (c *Connector) forget(e *entry, why stage.Outcome) {
	delete(c.entries, e.key)
	if err := c.record.remove(e.slot); err != nil {
		c.o.Log.Warn("a record of what was put could not be written", "error", err)
	}
	c.room.Release(e.bytes)
	close(c.idle)
	c.idle = make(chan struct{})
	if why == stage.Read {
		e.claimed()
	}
	e.released(why)
	c.watcher.linger(e.key, e.lock)
}

// check looks what became of an entry: its reader may have taken it; while it is unread it has to have a lock file.
func (c *Connector) check(e *entry) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.entries[e.key] != e {
		return
	}
	st, err := c.dir.stat(e.key)
	if gone(err) || err == nil && st.inode != e.inode {
		c.forget(e, stage.Read)
		return
	}
	if err != nil {
		return
	}
	if _, err := c.dir.stat(lockName(e.key)); gone(err) {
		// A plain reader of the payload before has deleted it late, by its name.
		if e.lock, err = c.dir.giveLock(e.key); err != nil {
			c.o.Log.Warn("a payload has lost its lock file", "key", e.key, "error", err)
		}
	}
}

// recording gives the record of what this connector put, made at the first put.
func (c *Connector) recording() (*record, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.record == nil {
		r, err := newRecord(c.dir)
		if err != nil {
			return nil, err
		}
		c.record = r
	}
	c.startWatching()
	return c.record, nil
}
