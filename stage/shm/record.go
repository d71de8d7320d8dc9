package shm

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/internal/boottime"
	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

// A connector that puts keeps a record of what is unread in a file beside the segments, so that after its death others can tell which
// are its own, and until when they are wanted. It is alive as long as it holds the file's flock, whatever process has its pid. A file is
// slots of 512 bytes: the first a head, each other one of a segment, or free. All numbers are little-endian.
//
//	head: magic [8]
//	slot: sum u64 (xxh3 of what follows to the key's end; wrong: free) · inode u64 · size u64 · mtime i64 ns ·
//	      end i64, when the lease is over, ns of boottime.Now · length of the key u16 · key
const (
	slotBytes   = 512
	recordMagic = "FERRYP01"

	slotInode = 8
	slotSize  = 16
	slotMtime = 24
	slotEnd   = 32
	slotKey   = 40
)

// recordName makes the name of a new record.
func recordName() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return "ferry_stage_" + hex.EncodeToString(b[:]) + ".puts"
}

// record is the record of a live connector.
type record struct {
	d    *folder
	f    *os.File
	name string
	inode

	mu   sync.Mutex
	free []int
	len  int // slots
}

// newRecord makes a record that has its lock from the first instant on.
func newRecord(d *folder) (_ *record, err error) {
	fd, err := unix.Openat(d.fd, ".", unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, d.full(d.failed("make a record", ".", err), slotBytes)
	}
	r := &record{d: d, name: recordName(), len: 1}
	r.f = os.NewFile(uintptr(fd), d.path(r.name))
	defer func() {
		if err != nil {
			r.f.Close()
		}
	}()
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, d.failed("lock", r.name, err)
	}
	head := make([]byte, slotBytes)
	copy(head, recordMagic)
	if _, err := r.f.WriteAt(head, 0); err != nil {
		return nil, d.full(err, slotBytes)
	}
	st, err := d.statFD(fd, r.name)
	if err != nil {
		return nil, err
	}
	r.inode = st.inode
	if err := d.link(&draft{fd: fd}, r.name); err != nil {
		return nil, d.full(d.failed("link", r.name, err), slotBytes)
	}
	return r, nil
}

// add records a segment that gets its name now, and gives its slot.
func (r *record) add(key string, st status, lease time.Duration) (slot int, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.free); n > 0 {
		slot, r.free = r.free[n-1], r.free[:n-1]
	} else {
		slot = r.len
		r.len++
	}
	var b [slotBytes]byte
	binary.LittleEndian.PutUint64(b[slotInode:], st.ino)
	binary.LittleEndian.PutUint64(b[slotSize:], uint64(st.size))
	binary.LittleEndian.PutUint64(b[slotMtime:], uint64(st.mtime))
	binary.LittleEndian.PutUint64(b[slotEnd:], uint64(boottime.Now()+int64(lease)))
	binary.LittleEndian.PutUint16(b[slotKey:], uint16(len(key)))
	copy(b[slotKey+2:], key)
	binary.LittleEndian.PutUint64(b[:], xxh3.Hash(b[slotInode:slotKey+2+len(key)]))
	if _, err := r.f.WriteAt(b[:], int64(slot)*slotBytes); err != nil {
		r.free = append(r.free, slot)
		return 0, r.d.full(err, slotBytes)
	}
	return slot, nil
}

// remove frees a slot.
func (r *record) remove(slot int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free = append(r.free, slot)
	_, err := r.f.WriteAt(make([]byte, 8), int64(slot)*slotBytes)
	return err
}

// close ends the record: others take what is in it for a dead connector's. With empty its file goes too.
func (r *record) close(empty bool) (err error) {
	if empty {
		_, err = r.d.unlink(r.name, r.inode)
	}
	return errors.Join(err, r.f.Close())
}

// put is one slot.
type put struct {
	key         string
	ino         uint64
	size, mtime int64
	end         int64 // boottime.Now
}

// is says whether the file is the one that was recorded.
func (p put) is(st status) bool { return st.ino == p.ino && st.size == p.size && st.mtime == p.mtime }

// readRecord reads a record's slots.
func readRecord(r io.ReaderAt, size int64) ([]put, error) {
	var b [slotBytes]byte
	if _, err := r.ReadAt(b[:], 0); err != nil || string(b[:len(recordMagic)]) != recordMagic {
		return nil, errors.New("it is no record of this version")
	}
	var all []put
	for off := int64(slotBytes); off+slotBytes <= size; off += slotBytes {
		if _, err := r.ReadAt(b[:], off); err != nil {
			return nil, err
		}
		if p, ok := parsePut(b[:]); ok {
			all = append(all, p)
		}
	}
	return all, nil
}

func parsePut(b []byte) (put, bool) {
	end := slotKey + 2 + int(binary.LittleEndian.Uint16(b[slotKey:]))
	if end > slotBytes || binary.LittleEndian.Uint64(b) != xxh3.Hash(b[slotInode:end]) {
		return put{}, false
	}
	p := put{string(b[slotKey+2 : end]), binary.LittleEndian.Uint64(b[slotInode:]), int64(binary.LittleEndian.Uint64(b[slotSize:])),
		int64(binary.LittleEndian.Uint64(b[slotMtime:])), int64(binary.LittleEndian.Uint64(b[slotEnd:]))}
	return p, checkKey(p.key) == nil
}
