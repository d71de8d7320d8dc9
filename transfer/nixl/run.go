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
	h := &host{mappings: map[uint32]mapping{}}
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
		if h.outliving != nil {
			h.alone.Store(true)
			w = h.outliving.await()
		}
	}
	return nil
}

var errToldToEnd = errors.New("told to end")

// serve does what comes over a wire until its other end is gone.
func (h *host) serve(w *wire) error {
	for {
		f, err := w.next()
		if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) {
			return nil
		}
		if err == nil {
			err = h.handle(w, f)
		}
		if err != nil {
			return err
		}
	}
}

// host is an engine on a wire.
type host struct {
	wire    atomic.Pointer[wire]
	alone   atomic.Bool // the plane that started it is gone
	library *binding.Library
	engine  *engine

	outliving *outliving // nil: it ends with its plane

	mu       sync.Mutex
	mappings map[uint32]mapping
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
		h.detach(r.Uint32())
	case frameAddPeer:
		metadata := append([]byte(nil), f.body...)
		go func() { // it may wait for the network
			peer, err := h.engine.peers.add(metadata)
			h.reply(f.id, err, func(b []byte) []byte { return binary.LittleEndian.AppendUint64(b, peer) })
		}()
	case frameDropPeer:
		peer := r.Uint64()
		go h.engine.dropPeer(peer)
	case frameRead:
		op, err := parseRead(f.body)
		if err != nil {
			return err
		}
		// On this goroutine: the library does one at a time anyway, and a hand-over would cost a wake-up.
		h.engine.post(op, func(err error) { h.reply(f.id, err, nil) })
	case frameAttend:
		h.engine.attend()
	case frameEnd:
		return errToldToEnd
	default:
		return fmt.Errorf("%w: kind %d", errBadFrame, f.kind)
	}
	return nil
}

// reply that cannot be sent is nobody's any more: the plane is gone, and the reading side sees that.
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
	var opts []binding.Option
	if m.Library != "" {
		opts = append(opts, binding.WithPath(m.Library))
	}
	var err error
	if h.library, err = binding.Load(opts...); err == nil {
		h.engine, err = newEngine(h.library, m.Engine, func(message []byte) {
			if !h.alone.Load() { // else it is about an ack that nobody knows any more
				_ = h.wire.Load().send(frameNotification, 0, nil, func(b []byte) []byte { return append(b, message...) }) // as with reply
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
	b, m, err := mapFile(file, offset, length, how[0])
	var p place
	if err == nil {
		p, err = h.engine.register(id, PlaceOf(b))
		if err == nil && how[0] == attachOutlive {
			if h.outliving, err = outlive(m.file, epoch); err != nil {
				h.engine.detach(id)
			}
		}
		if err != nil {
			h.unmap(m)
		} else {
			h.mu.Lock()
			h.mappings[id] = m
			h.mu.Unlock()
		}
	}
	h.reply(f.id, err, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint64(b, p.base)
		return append(b, p.metadata...)
	})
	return nil
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
