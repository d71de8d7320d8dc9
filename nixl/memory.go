package nixl

import (
	"fmt"
	"math"
	"unsafe"
)

// MemoryType is where memory lies (nixl_capi_mem_type_t).
type MemoryType int32

const (
	DRAM   MemoryType = 0
	VRAM   MemoryType = 1
	Block  MemoryType = 2
	Object MemoryType = 3
	File   MemoryType = 4
)

// String gives NIXL's name.
func (t MemoryType) String() string {
	names := [...]string{"DRAM", "VRAM", "BLOCK", "OBJECT", "FILE"}
	if t < 0 || int(t) >= len(names) {
		return fmt.Sprintf("memory type %d", int32(t))
	}
	return names[t]
}

// ParseMemoryType takes NIXL's name, such as "DRAM". ErrBadArgument: it is none.
func ParseMemoryType(name string) (MemoryType, error) {
	for t := DRAM; t <= File; t++ {
		if t.String() == name {
			return t, nil
		}
	}
	return 0, fmt.Errorf("%w: memory type %.40q", ErrBadArgument, name)
}

// Range is a piece of memory by address.
type Range struct {
	Addr   uintptr
	Len    uint64 // bytes, > 0
	Device uint64 // device number; 0 for DRAM
}

// RangeOf names the bytes of b, which must lie outside the Go heap (an mmap, C memory) and stay there.
func RangeOf(b []byte) Range {
	return Range{Addr: uintptr(unsafe.Pointer(unsafe.SliceData(b))), Len: uint64(len(b))}
}

// check refuses a type that the library does not have: it indexes a table by it, unchecked.
func (t MemoryType) check(what string) error {
	if t < DRAM || t > File {
		return fmt.Errorf("%w: %s: %s: it is one of DRAM (%d) to File (%d)", ErrBadArgument, what, t, DRAM, File)
	}
	return nil
}

func checkRanges(what string, t MemoryType, ranges []Range) (total uint64, err error) {
	if err := t.check(what); err != nil {
		return 0, err
	}
	if len(ranges) == 0 {
		return 0, fmt.Errorf("%w: %s: no ranges", ErrBadArgument, what)
	}
	for i, r := range ranges {
		if r.Addr == 0 || r.Len == 0 || uint64(r.Addr) > math.MaxUint64-r.Len {
			return 0, fmt.Errorf("%w: %s: range %d is address %#x, %d bytes", ErrBadArgument, what, i, r.Addr, r.Len)
		}
		if total > math.MaxUint64-r.Len {
			return 0, fmt.Errorf("%w: %s: total length overflows", ErrBadArgument, what)
		}
		total += r.Len
	}
	return total, nil
}

// Registration is memory that peers may READ and WRITE, and that own requests may name.
type Registration struct {
	agent  *Agent
	h      handle
	typ    MemoryType
	ranges []Range
	epoch  uint64 // of the agent
}

// Register offers ranges to peers, for the given backends (none: all of the agent's). The memory must stay mapped until Close.
// The ranges of live registrations of one agent must not overlap. ErrBadArgument: they do, one is of address or length 0, none is given, or the type is none;
// a Status: no backend takes such memory, or not so much of it (RDMA: RLIMIT_MEMLOCK).
func (a *Agent) Register(t MemoryType, ranges []Range, backends ...*Backend) (*Registration, error) {
	if _, err := checkRanges("register", t, ranges); err != nil {
		return nil, err
	}
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	handles, err := a.backendHandles(backends)
	if err != nil {
		return nil, err
	}
	r := &Registration{agent: a, typ: t, ranges: append([]Range(nil), ranges...), epoch: a.epoch.Add(1)}
	if err := a.addRegistration(r); err != nil {
		return nil, err
	}
	h, s := a.c.register(a.h, t, ranges, handles)
	if s != StatusSuccess {
		a.dropRegistration(r)
		return nil, s.err(fmt.Sprintf("register %d ranges of %s", len(ranges), t))
	}
	r.h = h
	return r, nil
}

// Close withdraws the memory: new READs of peers fail, one under way may still touch it (see the package's rules). Own requests and lists
// that name it cannot be posted any more: ErrClosed. Closing twice, or after the agent, is no error.
func (r *Registration) Close() error {
	if err := r.agent.enterAlone(); err != nil {
		return nil
	}
	defer r.agent.gate.Unlock()
	if !r.agent.dropRegistration(r) {
		return nil
	}
	r.agent.closes++
	return r.agent.c.deregister(r.agent.h, r.h).err("deregister")
}

// Unmap ends a mapping, all of it, that was registered once, by libc's munmap: UCX watches that function for what it may have cached of
// the memory, and does not see a plain system call. A second mapping at the same address would be taken for this one. ErrBadArgument: no
// bytes; else the system's error.
func (l *Library) Unmap(b []byte) error {
	if len(b) == 0 {
		return fmt.Errorf("%w: unmap of nothing", ErrBadArgument)
	}
	if err := l.c.unmap(b); err != nil {
		return fmt.Errorf("nixl: unmap %d bytes: %w", len(b), err)
	}
	return nil
}
