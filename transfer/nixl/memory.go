package nixl

import (
	"fmt"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/transfer"
)

// memory is a pool, the bounce buffer, or memory of a device, as the plane knows it.
type memory struct {
	id       uint32
	place    Place
	bytes    []byte   // nil: of a device
	file     *os.File // for reading; nil: none
	writable *os.File // for writing; nil: a destination in it is filled through the bounce buffer, where agents are processes
	offset   int64
	bounce   bool
	slots    chan []byte // bounce buffer: free parts of it
	unmap    func([]byte) error
}

// attachment for an agent: for reading or, a destination, for writing.
func (m *memory) attachment(write bool) attachment {
	a := attachment{id: m.id, place: m.place, bytes: m.bytes, file: m.file, offset: m.offset, writable: write}
	if write {
		a.file = m.writable
	}
	return a
}

// destination says whether an agent can write it where it is.
func (p *Plane) destination(m *memory) bool { return len(p.o.Command) == 0 || m.writable != nil }

// addMemory books m and opens its file anew, so that agents share no open file description with the caller, who may hold a lock on it.
func (p *Plane) addMemory(m transfer.Memory) (*memory, error) {
	mem := &memory{place: PlaceOf(m.Bytes), bytes: m.Bytes, offset: m.FileOffset}
	if m.File != nil && len(p.o.Command) > 0 {
		var err error
		if mem.file, err = reopen(m.File, unix.O_RDONLY); err != nil {
			return nil, fmt.Errorf("%w: nixl: file of the memory: %w", transfer.ErrBadRequest, err)
		}
		mem.writable, _ = reopen(m.File, unix.O_RDWR) // nil: see memory.writable
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	err := p.book(mem)
	if err != nil {
		mem.close()
		return nil, err
	}
	return mem, nil
}

// book gives it an id. With the lock.
func (p *Plane) book(mem *memory) error {
	if p.closed {
		return fmt.Errorf("nixl: register: %w", transfer.ErrClosed)
	}
	for _, o := range p.memories {
		if mem.place.overlaps(o.place) {
			return fmt.Errorf("%w: nixl: overlaps memory that is registered", transfer.ErrBadRequest)
		}
	}
	p.nextID++
	mem.id = p.nextID
	p.memories = append(p.memories, mem)
	return nil
}

// removeMemory takes it from the fetch agent and closes its files.
func (p *Plane) removeMemory(m *memory) {
	p.mu.Lock()
	for i, o := range p.memories {
		if o == m {
			p.memories = append(p.memories[:i:i], p.memories[i+1:]...)
			break
		}
	}
	p.mu.Unlock()
	attaching := p.fetch.detach(m)
	release := func() {
		for _, done := range attaching {
			<-done
		}
		m.close()
	}
	if len(attaching) > 0 && len(p.o.Command) > 0 {
		go release() // a process has a mapping of its own, and nobody READs into this memory any more
		return
	}
	release()
}

// Unmap ends a mapping, all of it, that was registered on this plane, after its registration was closed. With agents in this process it
// must be this or the binding's Unmap, not a plain system call (unix.Munmap makes one): UCX keeps what it knows of memory until it sees
// libc's munmap, and would take another mapping at the same address for this one.
func (p *Plane) Unmap(b []byte) error {
	if p.library != nil {
		return p.library.Unmap(b)
	}
	return unmap(b)
}

func unmap(b []byte) error {
	return unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
}

func (m *memory) close() {
	for _, f := range []*os.File{m.file, m.writable} {
		if f != nil {
			_ = f.Close() // nothing was written through it
		}
	}
	if m.bounce {
		_ = m.unmap(m.bytes) // fails only on a mapping that is not there
	}
}

// reopen makes a new open file description.
func reopen(f *os.File, flags int) (*os.File, error) {
	fd, err := unix.Open("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// local is a part of attached memory.
type local struct {
	memory uint32
	offset uint64
	length uint64
}

// locate finds local slices in memory that the fetch agent writes; false if one is elsewhere.
func (p *Plane) locate(slices [][]byte) ([]local, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]local, len(slices))
	for i, b := range slices {
		var found bool
		if out[i], found = p.find(PlaceOf(b)); !found {
			return nil, false
		}
	}
	return out, true
}

// find gives where a place is in memory that the fetch agent writes. With the lock.
func (p *Plane) find(at Place) (local, bool) {
	for _, m := range p.memories {
		if p.destination(m) && m.place.Contains(at) {
			return local{m.id, at.Addr - m.place.Addr, at.Bytes}, true
		}
	}
	return local{}, false
}

// The bounce buffer: a READ into memory that is not registered goes through it, a slot at a time.
const (
	bounceSlot  = 4 << 20
	bounceSlots = 4
)

// bounceBuffer makes it at the first use.
func (p *Plane) bounceBuffer() (*memory, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, m := range p.memories {
		if m.bounce {
			return m, nil
		}
	}
	fd, err := unix.MemfdCreate("ferry-nixl-bounce", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("nixl: bounce buffer: %w", err)
	}
	m := &memory{writable: os.NewFile(uintptr(fd), "ferry-nixl-bounce"), slots: make(chan []byte, bounceSlots), unmap: p.Unmap}
	const size = bounceSlot * bounceSlots
	if err = unix.Ftruncate(fd, size); err == nil {
		m.bytes, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		m.close()
		return nil, fmt.Errorf("nixl: bounce buffer of %d bytes: %w", size, err)
	}
	m.bounce = true
	m.place = PlaceOf(m.bytes)
	if err := p.book(m); err != nil {
		m.close()
		return nil, err
	}
	for i := range bounceSlots {
		m.slots <- m.bytes[i*bounceSlot : (i+1)*bounceSlot : (i+1)*bounceSlot]
	}
	return m, nil
}

// offsetOf gives where b, a part of the memory, starts in it.
func (m *memory) offsetOf(b []byte) uint64 {
	return PlaceOf(b).Addr - m.place.Addr
}
