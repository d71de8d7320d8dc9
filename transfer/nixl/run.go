package nixl

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/fields"
)

// AgentSocket is the descriptor that an agent process finds its socket at.
const AgentSocket = 3

// RunAgent is the main function of an agent process, see Options.Command: it does what the plane asks for over socket, and returns
// when the plane is gone (see also Options.Outlive), or when what it said makes no sense. The process must end then, and without libc's exit handlers: NIXL's can
// crash (os.Exit does not run them).
func RunAgent(socket *os.File) error {
	w, err := newWire(socket)
	if err != nil {
		return err
	}
	h := newHost()
	for w != nil {
		h.wire.Store(w)
		err = h.serve(w)
		_ = w.conn.Close()
		if errors.Is(err, errToldToEnd) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("agent process: %w", err)
		}
		w = nil
		if o := h.outlives(); o != nil {
			h.alone.Store(true)
			w = o.await()
		}
	}
	return nil
}

var errToldToEnd = errors.New("told to end")

// relieveBytes is a READ that another goroutine is woken for if it is not posted in relieveAfter, so that the wire is read on.
// Smaller ones need none while the library does nothing else that takes long.
const (
	relieveBytes = 4 << 20
	relieveAfter = 20 * time.Millisecond
	maxQueued    = 64 << 20 // of READs that wait for one that is being posted; each counts what it has on the wire
)

// serving is a wire that is served. One goroutine reads it, and posts the READs, since a hand-over would cost a wake-up. Posting can take
// long (over shared memory the library copies inside of that call, and it does one thing at a time): then another goroutine goes on
// reading, and the first one posts what that finds, and ends.
type serving struct {
	h     *host
	w     *wire
	ended chan error // by the goroutine that reads last; capacity 1

	mu     sync.Mutex
	busy   bool // a goroutine posts
	queue  []queued
	queued int // what queue has on the wire
}

type queued struct {
	op   readOp
	id   uint64
	size int
}

// serve does what comes over a wire until its other end is gone.
func (h *host) serve(w *wire) error {
	s := &serving{h: h, w: w, ended: make(chan error, 1)}
	go s.read()
	return <-s.ended
}

// read is one goroutine's turn at reading.
func (s *serving) read() {
	for {
		f, err := s.w.next()
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			s.ended <- nil
			return
		}
		if err == nil && f.kind == frameRead && s.h.engine != nil {
			var op readOp
			if op, err = parseRead(f.body); err == nil {
				if relieved := s.post(queued{op, f.id, len(f.body)}); relieved {
					return
				}
				continue
			}
		}
		if err == nil {
			err = s.h.handle(s.w, f)
		}
		if err != nil {
			s.ended <- err
			return
		}
	}
}

// post starts a READ, or leaves it to the goroutine that does one. It says whether another goroutine reads the wire now.
func (s *serving) post(q queued) (relieved bool) {
	s.mu.Lock()
	if s.busy {
		defer s.mu.Unlock()
		if s.queued+q.size > maxQueued {
			s.h.reply(q.id, fmt.Errorf("%w: nixl: %d READs wait for the agent that reads", transfer.ErrPeerLost, len(s.queue)), nil)
			return false
		}
		s.queue = append(s.queue, q)
		s.queued += q.size
		return false
	}
	s.busy = true
	s.mu.Unlock()
	if s.h.slow.Load() == 0 && q.op.bytes() < relieveBytes {
		s.h.post(q)
	} else {
		relief := time.AfterFunc(relieveAfter, s.read)
		s.h.post(q)
		relieved = !relief.Stop()
	}
	for {
		s.mu.Lock()
		if len(s.queue) == 0 {
			s.busy, s.queue = false, nil
			s.mu.Unlock()
			return relieved
		}
		q, s.queue = s.queue[0], s.queue[1:]
		s.queued -= q.size
		s.mu.Unlock()
		s.h.post(q)
	}
}

func (h *host) post(q queued) {
	h.engine.post(q.op, func(err error) { h.reply(q.id, err, nil) })
}

func (r *readOp) bytes() (n uint64) {
	for _, p := range r.pieces {
		n += p.length
	}
	return n
}

// host is an engine on a wire.
type host struct {
	wire    atomic.Pointer[wire]
	alone   atomic.Bool // the plane that started it is gone
	library *binding.Library
	engine  *engine
	slow    atomic.Int32 // calls under way that take long, and that READs may wait for

	missed atomic.Uint64 // notifications that found too many before them

	mu        sync.Mutex
	mappings  map[uint32]mapping
	outliving *outliving // nil: it ends with its plane
}

func newHost() *host { return &host{mappings: map[uint32]mapping{}} }

// aside does what may take long, on a goroutine of its own.
func (h *host) aside(do func()) {
	h.slow.Add(1)
	go func() {
		defer h.slow.Add(-1)
		do()
	}()
}

// mapping is a file that is attached.
type mapping struct {
	bytes []byte
	file  *os.File // open for its lock, where it may be written or is served for a restart; else nil
}

// handle does one request. Errors are those of the wire.
func (h *host) handle(w *wire, f frame) error {
	r := fields.NewReader(f.body)
	if h.engine == nil {
		if f.kind != frameHello {
			return fmt.Errorf("%w: kind %d first", errBadFrame, f.kind)
		}
		return h.hello(f)
	}
	switch f.kind {
	case frameAttach:
		return h.attach(w, f)
	case frameDetach:
		id := r.Uint32()
		h.aside(func() { h.detach(id) })
	case frameAddPeer:
		metadata := append([]byte(nil), f.body...)
		h.aside(func() { // it may wait for the network
			peer, err := h.engine.peers.add(metadata)
			h.reply(f.id, err, func(b []byte) []byte { return binary.LittleEndian.AppendUint64(b, peer) })
		})
	case frameDropPeer:
		peer := r.Uint64()
		h.aside(func() { h.engine.dropPeer(peer) })
	case frameAttend:
		h.engine.attend()
	case frameEnd:
		return errToldToEnd
	default:
		return fmt.Errorf("%w: kind %d", errBadFrame, f.kind)
	}
	return nil
}

// reply that cannot be sent is nobody's any more: the plane is gone, and the reading side sees that. Of a plane that is stopped, replies
// and notifications wait.
func (h *host) reply(id uint64, err error, body func([]byte) []byte) {
	_ = h.wire.Load().send(frameReply, id, nil, func(b []byte) []byte {
		b = appendReply(b, err)
		if err == nil && body != nil {
			b = body(b)
		}
		return b
	})
}

func (h *host) hello(f frame) error {
	var m hello
	if err := json.Unmarshal(f.body, &m); err != nil {
		return fmt.Errorf("%w: %w", errBadFrame, err)
	}
	o := Options{Library: m.Library}
	err := o.findLibrary()
	if err == nil {
		h.library, err = binding.Load(o.libraryOptions()...)
	}
	if err == nil {
		h.engine, err = newEngine(h.library, m.Engine, func(message []byte) {
			if h.alone.Load() {
				return // it is about an ack that nobody knows any more
			}
			err := h.wire.Load().send(frameNotification, 0, nil, func(b []byte) []byte { return append(b, message...) }) // as with reply
			if errors.Is(err, errBacklog) && h.missed.Add(1) == 1 {
				fmt.Fprintf(os.Stderr, "notifications are dropped: %d MiB of them wait for the plane, which does not read\n", maxBacklog>>20)
			}
		})
	}
	h.reply(f.id, err, func(b []byte) []byte {
		text, _ := json.Marshal(factsOf(h.library, h.engine.agent)) // a struct of strings
		return append(b, text...)
	})
	return err
}

// attach maps the file that came with the request and registers it.
func (h *host) attach(w *wire, f frame) error {
	r := fields.NewReader(f.body)
	id, offset, length := r.Uint32(), r.Uint64(), r.Uint64()
	how, epoch := r.Bytes(1), r.Uint64()
	file, err := w.file()
	if !r.OK() || err != nil {
		return errors.Join(err, errBadFrame)
	}
	a := attaching{id: f.id, memory: id, file: file, offset: offset, length: length, how: how[0], epoch: epoch}
	h.aside(func() { h.attachNow(a) })
	return nil
}

// attaching is a request to attach memory.
type attaching struct {
	id             uint64
	memory         uint32
	file           *os.File
	offset, length uint64
	how            byte
	epoch          uint64
}

func (h *host) attachNow(a attaching) {
	b, m, err := mapFile(a.file, a.offset, a.length, a.how)
	var p place
	if err == nil {
		p, err = h.engine.register(a.memory, PlaceOf(b))
		if err == nil && a.how == attachOutlive {
			if err = h.outlive(m.file, a.epoch); err != nil {
				h.engine.detach(a.memory)
			}
		}
		if err != nil {
			h.unmap(m)
		} else {
			h.mu.Lock()
			h.mappings[a.memory] = m
			h.mu.Unlock()
		}
	}
	h.reply(a.id, err, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint64(b, p.base)
		return append(b, p.metadata...)
	})
}

func (h *host) outlive(f *os.File, epoch uint64) error {
	o, err := outlive(f, epoch)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.outliving = o
	return nil
}

// outlives gives what the process goes on for when its plane is gone; nil: nothing.
func (h *host) outlives() *outliving {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.outliving
}

// mapFile maps length bytes at offset, and gives them and the mapping, which starts at a page. It takes f.
func mapFile(f *os.File, offset, length uint64, how byte) (b []byte, m mapping, err error) {
	prot := unix.PROT_READ
	switch how {
	case attachWrite:
		prot |= unix.PROT_WRITE
		m.file = f
		err = lockAsWriter(f)
	case attachOutlive:
		m.file = f
	}
	lead := offset % uint64(os.Getpagesize())
	if err == nil {
		m.bytes, err = unix.Mmap(int(f.Fd()), int64(offset-lead), int(length+lead), prot, unix.MAP_SHARED|unix.MAP_POPULATE)
	}
	if err != nil || m.file == nil {
		_ = f.Close() // the mapping stays
	}
	if err != nil {
		return nil, m, fmt.Errorf("%w: nixl: map %d bytes at %d: %w", transfer.ErrBadRequest, length, offset, err)
	}
	return m.bytes[lead:], m, nil
}

func (h *host) unmap(m mapping) {
	_ = h.library.Unmap(m.bytes) // fails only on a mapping that is not there
	if m.file != nil {
		_ = m.file.Close() // and with it the lock
	}
}

func (h *host) detach(id uint32) {
	h.engine.detach(id)
	h.mu.Lock()
	m, there := h.mappings[id]
	delete(h.mappings, id)
	h.mu.Unlock()
	if there {
		h.unmap(m)
	}
}
