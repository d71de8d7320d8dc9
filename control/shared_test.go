package control

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"
)

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{}).Read(b)
	return b
}

func share(t testing.TB, body []byte) *Shared {
	t.Helper()
	s, err := NewShared(body)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Sizes around a page and around libzmq's own limits; heads that fill their pages, and that do not.
func TestSharedBodiesArriveWhole(t *testing.T) {
	r, h, name := listenLocal(t, Options{})
	s := connect(t, r)
	local, lh := dialLocal(t, Options{}, name)
	lh.next(t, "up")
	for _, tail := range []int{0, 1, 4095, 4096, 4097, 8192, 7_300_000} {
		shared := share(t, random(tail))
		for _, head := range []int{0, 1, 200, 4096, 5000} {
			want := string(random(head)) + string(random(tail))
			say(t, s, "", "ask")
			if err := r.SendShared(h.next(t, "message").from.ID, random(head), shared); err != nil {
				t.Fatal(err)
			}
			if m, err := s.RecvMessageBytes(0); err != nil || len(m) != 2 || string(m[1]) != want {
				t.Fatalf("head %d, tail %d: got another message, or %v", head, tail, err)
			}
			if err := local.Send([]byte("ask")); err != nil {
				t.Fatal(err)
			}
			if err := r.SendShared(h.next(t, "message").from.ID, random(head), shared); err != nil {
				t.Fatal(err)
			}
			if m := lh.next(t, "message"); m.body != want {
				t.Fatalf("head %d, tail %d: a local peer got another message", head, tail)
			}
		}
	}
	eventually(t, "nothing held", func() bool { return waiting(r.l) == 0 })
}

// waiting is what counts for the limits of a loop.
func waiting(l *Loop) int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.total.waiting()
}

// What cannot be mapped is copied, and counted as such: here a file that can only be read.
func TestSharedBodyThatCannotBeMappedIsCopied(t *testing.T) {
	const path = "/proc/kallsyms"
	f, err := os.Open(path)
	if err != nil {
		t.Skip(err)
	}
	want := make([]byte, 64<<10)
	if _, err := io.ReadFull(io.NewSectionReader(f, 0, int64(len(want))), want); err != nil {
		t.Skipf("%s is too short: %v", path, err)
	}
	r, h := listen(t, Options{})
	s := connect(t, r)
	say(t, s, "", "ask")
	if err := r.SendShared(h.next(t, "message").from.ID, []byte("head"), &Shared{file: f, fd: int(f.Fd()), size: len(want)}); err != nil {
		t.Fatal(err)
	}
	if m, err := s.RecvMessageBytes(0); err != nil || string(m[1]) != "head"+string(want) {
		t.Fatalf("got another message, or %v", err)
	}
	eventually(t, "nothing held", func() bool { return waiting(r.l) == 0 })
}

// Peers that do not read hold mappings, not copies: far more than Options.TotalBytes of messages may wait, and a limit there still is.
func TestSharedBodiesThatWaitCountAsTheMemoryTheyTake(t *testing.T) {
	const size = 8 << 20
	o := Options{QueueBytes: 1 << 20, TotalBytes: 2 << 20, HeartbeatInterval: time.Hour}
	r, h := listen(t, o)
	shared := share(t, make([]byte, size))
	z := dialZMTP(t, hostPort(r))
	z.write(append(frame(1, nil), frame(0, []byte("ask"))...))
	id := h.next(t, "message").from.ID
	if err := r.Send(id, make([]byte, size)); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("a copy of it: %v, want ErrTooLarge", err)
	}
	sent := 0
	for sent < 20 {
		if err := r.SendShared(id, []byte("head"), shared); err != nil {
			t.Fatal(err)
		}
		sent++
	}
	eventually(t, "the limit", func() bool {
		err := r.SendShared(id, []byte("head"), shared)
		if err == nil {
			sent++
			return false
		}
		if !errors.Is(err, ErrQueueFull) {
			t.Fatal(err)
		}
		return true
	})
	if most := int(o.QueueBytes/(parcel{tail: shared}).cost()) + 2; sent > most {
		t.Errorf("%d messages accepted, want at most %d", sent, most)
	}
	shared = nil
	z.Close()
	eventually(t, "nothing held", func() bool { return waiting(r.l) == 0 })
}
