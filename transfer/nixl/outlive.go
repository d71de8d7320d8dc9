package nixl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/boottime"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// A serve agent outlives a plane that is killed, see Options.Outlive. It listens on an abstract socket for the next owner of the
// region, and is told of it by the server's lock on the region's file. It also outlives one that leaves it on purpose (Registration.Leave). Without a plane it drops notifications: they are about acks that
// nobody knows any more.

const (
	outlivePoll = 100 * time.Millisecond
	// successorGrace is how long a region may have another owner that does not take the agent over. It may be verifying checksums,
	// or not see the agent's socket: then it waits for the agent's end.
	successorGrace = time.Minute
	claimTimeout   = 2 * time.Second // for what a successor says first
)

// outliving is the side of the agent.
type outliving struct {
	file     *os.File      // the region's, which is mapped; owned by the mapping
	epoch    uint64        // of the owner that the agent belongs to
	orphaned int64         // when the first plane's end was seen, by boottime.Now; 0: it has not ended
	told     *net.UnixConn // to end, by who sees the end of this; nil: not
	listener *net.UnixListener
	claims   chan *net.UnixConn // of this user
	quiet    bool               // prints nothing any more
}

// socketName of server number i of a region. Abstract: nothing is left of it when the process is gone.
func socketName(f *os.File, i int) (*net.UnixAddr, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("nixl: stat of the region: %w", err)
	}
	name, err := region.NameOf(f)
	if err != nil {
		return nil, err
	}
	return &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("%s%d/%d", socketPrefix(st.Dev, name), st.Ino, i)}, nil
}

// socketPrefix begins the sockets' names of all who serve a file that is, or was, called name on a device.
func socketPrefix(dev uint64, name string) string {
	return fmt.Sprintf("@ferry-nixl-serve/%d-%016x/", dev, xxh3.HashString(name))
}

// outlive makes this process a server of the region in f.
func outlive(f *os.File, epoch uint64) (*outliving, error) {
	for i := range region.Servers {
		name, err := socketName(f, i)
		if err != nil {
			return nil, err
		}
		l, err := net.ListenUnix("unix", name)
		if errors.Is(err, unix.EADDRINUSE) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("nixl: socket of a serve agent: %w", err)
		}
		if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, region.ServerLock(i, unix.F_RDLCK)); err != nil {
			_ = l.Close()
			return nil, fmt.Errorf("nixl: lock of a serve agent: %w", err)
		}
		o := &outliving{file: f, epoch: epoch, listener: l, claims: make(chan *net.UnixConn)}
		go o.accept()
		return o, nil
	}
	return nil, fmt.Errorf("%w: nixl: all %d sockets of serve agents of this region are taken", transfer.ErrBadRequest, region.Servers)
}

// accept hands on who connects, for as long as the process lives.
func (o *outliving) accept() {
	for {
		c, err := o.listener.AcceptUnix()
		if err != nil {
			return
		}
		if cred, err := peerOf(c); err != nil || int(cred.Uid) != os.Geteuid() {
			_ = c.Close()
			continue
		}
		o.claims <- c // while there is a plane, nobody takes it
	}
}

// await gives the wire of the plane that goes on, nil if there will be none.
func (o *outliving) await() *wire {
	if !o.quiet {
		o.quiet = silence() == nil
	}
	if o.orphaned == 0 {
		o.orphaned = boottime.Now()
	}
	tick := time.NewTicker(outlivePoll)
	defer tick.Stop()
	var replaced time.Time
	for {
		epoch, left, err := region.Waiting(o.file)
		switch {
		case err != nil || left <= 0:
			return nil
		case epoch == o.epoch:
			replaced = time.Time{}
		case replaced.IsZero():
			replaced = time.Now()
		case time.Since(replaced) >= successorGrace:
			return nil
		}
		select {
		case c := <-o.claims:
			if w := o.claimed(c); w != nil || o.told != nil {
				return w
			}
		case <-tick.C:
		}
	}
}

// claimed answers a connection: whoever has the same file may go on.
func (o *outliving) claimed(c *net.UnixConn) *wire {
	w := wireOf(c)
	_ = c.SetReadDeadline(time.Now().Add(claimTimeout)) // fails only on a closed connection, as the reading then does
	f, err := w.next()
	if err == nil && f.kind == frameEnd {
		if o.unnamed() && alive(c) {
			o.told = c
			return nil
		}
		_ = w.send(frameReply, f.id, nil, func(b []byte) []byte { return appendReply(b, errServesOn) }) // fails if nobody waits for it
		_ = c.Close()
		return nil
	}
	if err == nil && f.kind != frameTakeOver {
		err = fmt.Errorf("%w: kind %d first", errBadFrame, f.kind)
	}
	var epoch uint64
	if err == nil {
		epoch, err = o.sameRegion(w)
	}
	if err == nil {
		err = w.send(frameReply, f.id, nil, func(b []byte) []byte {
			return binary.LittleEndian.AppendUint64(appendReply(b, nil), uint64(o.orphaned))
		})
	}
	if err != nil {
		_ = c.Close()
		return nil
	}
	_ = c.SetReadDeadline(time.Time{})
	o.epoch = epoch
	return w
}

// errServesOn is said to who wants the memory of a region that has its name yet.
var errServesOn = fmt.Errorf("%w: nixl: the region waits for its owner", transfer.ErrBadRequest)

// unnamed says whether the file has lost its name: its memory is free then when nobody has it any more.
func (o *outliving) unnamed() bool {
	var st unix.Stat_t
	return unix.Fstat(int(o.file.Fd()), &st) == nil && st.Nlink == 0
}

func (o *outliving) sameRegion(w *wire) (epoch uint64, err error) {
	theirs, err := w.file()
	if err != nil {
		return 0, err
	}
	defer theirs.Close()
	a, err := theirs.Stat()
	if err != nil {
		return 0, err
	}
	b, err := o.file.Stat()
	if err != nil {
		return 0, err
	}
	if !os.SameFile(a, b) {
		return 0, errors.New("another region")
	}
	epoch, _, err = region.Waiting(o.file)
	return epoch, err
}

// HandBack is for an owner that gives the region in f up, so that it waits on: it leaves the serve agents of a process that died to the next
// owner. They would end successorGrace after the region got another owner than theirs. The caller still owns the region, and nothing of its own
// serves it. Agents that do not answer are left as they are; the error says so.
func HandBack(ctx context.Context, f *os.File) error {
	var errs []error
	for i := range region.Servers {
		free, err := serverGone(f, i)
		if err == nil && !free {
			err = handBack(ctx, f, i)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("serve agent %d of the node before: %w", i, err))
		}
	}
	return errors.Join(errs...)
}

func handBack(ctx context.Context, f *os.File, i int) error {
	name, err := socketName(f, i)
	if err != nil {
		return err
	}
	c, err := net.DialUnix("unix", nil, name)
	if err != nil {
		return fmt.Errorf("nixl: it cannot be reached: %w", err)
	}
	defer c.Close() // it is alone again then, and belongs to the owner of now
	if cred, err := peerOf(c); err != nil || int(cred.Uid) != os.Geteuid() {
		return errors.Join(errors.New("nixl: its socket is not this user's"), err)
	}
	return (&former{wire: wireOf(c), file: f}).claim(ctx)
}

// silence points what the process prints at nothing: the pipe of the dead plane would end it.
func silence() error {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for fd := 1; fd <= 2; fd++ {
		if err := unix.Dup3(int(null.Fd()), fd, 0); err != nil {
			return err
		}
	}
	return nil
}

// peerOf says who is at the other end, or was when it began to listen.
func peerOf(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var cred *unix.Ucred
	if e := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); e != nil {
		return nil, e
	}
	return cred, err
}

// alive says whether the other end still has the connection, or has it to accept.
func alive(c *net.UnixConn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var b [1]byte
	e := raw.Control(func(fd uintptr) { _, _, err = unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT) })
	return e == nil && errors.Is(err, unix.EAGAIN)
}
