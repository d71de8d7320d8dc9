package region

import (
	"fmt"
	"sync/atomic"
	"unsafe"
)

// MaxClients is the number of clients that a file can name.
const MaxClients = 1024

// Client is a process that the owner has let at the pool, as the next owner needs to know it: what a client was filling or had
// pinned stays as it is until the client has come back, or is proven dead.
type Client struct {
	ID        uint64 // never 0; unique in the life of the file
	Process   uint64 // meaning given by the node: tells the process from every other of its namespace, also from later ones
	Namespace uint64 // the namespace that Process counts in
}

// A client is 4 words: ID, process, namespace, one that is zero. ID 0: the row is free.
const (
	clientWords = 4
	clientBytes = clientWords * 8
)

// ClientTable is the list of clients of a mapped region. The rules of SlotTable hold for it too.
//
// A row is stored before its client can have anything, and cleared after it has nothing any more; the ID is stored last and
// cleared first. So a row with an ID is whole at whatever instruction the owner was killed.
type ClientTable struct {
	words    []uint64
	writable bool
}

func newClientTable(mem []byte, writable bool) *ClientTable {
	return &ClientTable{unsafe.Slice((*uint64)(unsafe.Pointer(&mem[headerBytes])), MaxClients*clientWords), writable}
}

// Len is MaxClients.
func (t *ClientTable) Len() int { return len(t.words) / clientWords }

func (t *ClientTable) row(i int) *[clientWords]uint64 {
	return (*[clientWords]uint64)(t.words[i*clientWords:])
}

// Set fills a free row. ErrSlot: it is not free, or c has no ID.
func (t *ClientTable) Set(i int, c Client) error {
	w := t.writableRow(i)
	if c.ID == 0 || atomic.LoadUint64(&w[0]) != 0 {
		return fmt.Errorf("%w: client row %d is taken, or the client has no ID", ErrSlot, i)
	}
	atomic.StoreUint64(&w[1], c.Process)
	atomic.StoreUint64(&w[2], c.Namespace)
	atomic.StoreUint64(&w[0], c.ID)
	return nil
}

// Clear frees a row.
func (t *ClientTable) Clear(i int) { atomic.StoreUint64(&t.writableRow(i)[0], 0) }

func (t *ClientTable) writableRow(i int) *[clientWords]uint64 {
	if !t.writable {
		panic("region: write to an attached client table, which only its owner may write")
	}
	return t.row(i)
}

// Load reads a row, false if it is free, or is not there any more since the file was cut. Beside a live owner the answer may be out
// of date.
func (t *ClientTable) Load(i int) (c Client, ok bool) {
	if t.writable {
		return t.load(i)
	}
	if !guarded(func() { c, ok = t.load(i) }) {
		return Client{}, false
	}
	return c, ok
}

func (t *ClientTable) load(i int) (Client, bool) {
	w := t.row(i)
	id := atomic.LoadUint64(&w[0])
	return Client{ID: id, Process: atomic.LoadUint64(&w[1]), Namespace: atomic.LoadUint64(&w[2])}, id != 0
}
