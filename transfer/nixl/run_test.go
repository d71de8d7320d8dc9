package nixl

import (
	"encoding/binary"
	"os/exec"
	"testing"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
)

// hosted is an agent process less the process, and a peer that it READs from.
type hosted struct {
	t    *testing.T
	h    *host
	wire *wire // the plane's end
	peer uint64
	far  transfer.Memory
	next uint64
}

const hostedMemory = 1

func newHosted(t *testing.T) *hosted {
	t.Helper()
	f := binding.NewFake()
	h := newHost()
	h.library = f.Library()
	var err error
	h.engine, err = newEngine(h.library, engineOptions{Name: "reader", Backends: []Backend{{Name: "UCX"}}, IdlePeers: 8}, nil)
	must(t, err)
	t.Cleanup(h.engine.end)
	a := producer(t, f, "far")
	far := shared(t, 1<<20)
	_, err = a.Register(binding.DRAM, []binding.Range{binding.RangeOf(far.Bytes)})
	must(t, err)
	_, err = h.engine.register(hostedMemory, PlaceOf(shared(t, 1<<20).Bytes))
	must(t, err)
	peer, err := h.engine.peers.add(metadataOf(t, a))
	must(t, err)
	ours, theirs := wirePair(t)
	h.wire.Store(theirs)
	served := make(chan error, 1)
	go func() { served <- h.serve(theirs) }()
	t.Cleanup(func() {
		must(t, ours.conn.Close())
		must(t, <-served)
	})
	return &hosted{t: t, h: h, wire: ours, peer: peer, far: far}
}

// read asks for a READ in n pieces of a byte.
func (h *hosted) read(n int) (id uint64) {
	h.t.Helper()
	op := readOp{peer: h.peer, pieces: make([]piece, n)}
	for i := range op.pieces {
		op.pieces[i] = piece{memory: hostedMemory, offset: uint64(i), remote: PlaceOf(h.far.Bytes).Addr + uint64(i), length: 1}
	}
	h.next++
	must(h.t, h.wire.send(frameRead, h.next, nil, func(b []byte) []byte { return appendRead(b, op) }))
	return h.next
}

// answers gives the errors of n replies by their ids.
func (h *hosted) answers(n int) map[uint64]error {
	h.t.Helper()
	got := map[uint64]error{}
	for range n {
		f, err := h.wire.next()
		must(h.t, err)
		_, err = parseReply(f.body)
		if _, twice := got[f.id]; twice || f.kind != frameReply {
			h.t.Fatalf("frame of kind %d, id %d", f.kind, f.id)
		}
		got[f.id] = err
	}
	return got
}

// block holds up what posts READs, as the library does while it copies or registers memory.
func (h *hosted) block() (free func()) {
	h.h.slow.Add(1)
	h.h.engine.mu.Lock()
	return func() {
		h.h.engine.mu.Unlock()
		h.h.slow.Add(-1)
	}
}

// ping wants an answer to something else.
func (h *hosted) ping() {
	h.t.Helper()
	h.next++
	must(h.t, h.wire.send(frameAddPeer, h.next, nil, func(b []byte) []byte { return append(b, "garbage"...) }))
	wantErr(h.t, "ping", h.answers(1)[h.next], transfer.ErrBadRequest)
}

func TestAPlaneThatIsStoppedGetsAllRepliesWhenItGoesOn(t *testing.T) {
	h := newHosted(t)
	const reads = 20_000 // their replies fill the socket many times
	for range reads {
		h.read(1)
	}
	for id, err := range h.answers(reads) {
		if err != nil {
			t.Fatalf("READ %d: %v", id, err)
		}
	}
	h.ping()
}

func TestAnAgentThatIsBusyGoesOnReading(t *testing.T) {
	h := newHosted(t)
	free := h.block()
	const reads = 20 // of 2.3 MB each
	for range reads {
		h.read(maxPieces)
	}
	h.ping()
	free()
	for id, err := range h.answers(reads) {
		if err != nil {
			t.Errorf("READ %d: %v", id, err)
		}
	}
	h.ping()
	h.read(1)
	h.answers(1)
}

func TestReadsThatAreTooManyForABusyAgentAreRefused(t *testing.T) {
	h := newHosted(t)
	free := h.block()
	h.read(1) // is being posted, and those that follow wait
	fit := maxQueued / len(appendRead(nil, readOp{pieces: make([]piece, maxPieces)}))
	for range fit {
		h.read(maxPieces)
	}
	refused := h.read(maxPieces)
	wantErr(t, "one more", h.answers(1)[refused], transfer.ErrPeerLost)
	free()
	for id, err := range h.answers(fit + 1) {
		if err != nil {
			t.Errorf("READ %d: %v", id, err)
		}
	}
}

func TestFilesOfMemoryThatCannotBeMappedAreRefused(t *testing.T) {
	h := newHosted(t)
	m := shared(t, 4096)
	must(t, h.wire.send(frameAttach, 7, m.File, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint32(b, 2)
		b = binary.LittleEndian.AppendUint64(b, 0)
		b = binary.LittleEndian.AppendUint64(b, 1<<60)
		return binary.LittleEndian.AppendUint64(append(b, attachRead), 0)
	}))
	wantErr(t, "attach", h.answers(1)[7], transfer.ErrBadRequest)
}

// A pid is another process's when the first one has been waited for.
func TestAnAgentThatHasBeenWaitedForIsNotKilledByItsNumber(t *testing.T) {
	over, other := exec.Command("/bin/true"), exec.Command("/bin/cat")
	must(t, over.Run())
	in, err := other.StdinPipe()
	must(t, err)
	out, err := other.StdoutPipe()
	must(t, err)
	must(t, other.Start())
	c := &child{pid: other.Process.Pid, proc: over.Process, reaped: make(chan struct{})}
	c.kill()
	_, err = in.Write([]byte("x"))
	must(t, err)
	if n, err := out.Read(make([]byte, 1)); n != 1 {
		t.Errorf("the other process does not answer: %v", err)
	}
	must(t, in.Close())
	must(t, other.Wait())
}
