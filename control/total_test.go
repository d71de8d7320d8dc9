package control

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"
)

// Peers that ask for much and do not read are held to one bound together, others are answered meanwhile, and the room comes back when
// a peer reads or leaves.
func TestUnreadAcksOfManyPeersAreBoundedTogether(t *testing.T) {
	const peers, size = 40, 1 << 20
	r, h := listen(t, Options{
		QueueBytes: 8 << 20, TotalBytes: 16 << 20,
		HeartbeatInterval: time.Hour, // the peers are no more than bytes on a connection, and answer none
	})
	other := newRecorder()
	d, err := newTestLoop(t, Options{}).Dial(t.Context(), hostPort(r), other)
	if err != nil {
		t.Fatal(err)
	}
	other.next(t, "up")
	if err := d.Send([]byte("ask")); err != nil {
		t.Fatal(err)
	}
	id := h.next(t, "message").from.ID

	lazy, ids := make([]zmtp, peers), make([]string, peers)
	for i := range lazy {
		lazy[i] = dialZMTPFrom(t, fmt.Sprint("127.0.1.", 1+i%8), hostPort(r))
		lazy[i].write(append(frame(1, nil), frame(0, []byte("ask"))...))
		ids[i] = h.next(t, "message").from.ID
	}
	body := make([]byte, size)
	refused := uint64(0)
	offer := func(id string) bool {
		err := r.Send(id, body)
		// All that libzmq holds was accepted; what is queued besides may count twice for a moment.
		if held := r.l.total.flow.held(); held > r.l.opts.TotalBytes {
			t.Fatalf("libzmq holds %d bytes, want at most %d", held, r.l.opts.TotalBytes)
		}
		if errors.Is(err, ErrQueueFull) {
			refused++
			return false
		}
		if err != nil {
			t.Fatal(err)
		}
		return true
	}
	eventually(t, "no room for anybody, once the kernel's buffers are full too", func() bool {
		took := false
		for _, id := range ids {
			for offer(id) {
				took = true
			}
		}
		return !took && !offer(id)
	})
	if _, full, _ := r.Dropped(); full != refused {
		t.Errorf("%d counted as refused, want %d", full, refused)
	}

	if err := r.Send(id, []byte("later")); err != nil {
		t.Fatalf("a small body: %v", err)
	}
	got := other.next(t, "message")
	for len(got.body) == size { // accepted before all was full
		got = other.next(t, "message")
	}
	if got.body != "later" {
		t.Fatalf("got %v", got)
	}

	for _, z := range lazy[:peers/2] {
		go io.Copy(io.Discard, z)
	}
	eventually(t, "room when peers read", func() bool { return offer(id) })
	if got := other.next(t, "message"); len(got.body) != size {
		t.Fatalf("got %v", got)
	}
	for _, z := range lazy {
		z.Close()
	}
	eventually(t, "nothing held when peers have left", func() bool {
		r.l.mu.Lock()
		defer r.l.mu.Unlock()
		return r.l.total.waiting() == 0
	})
}
