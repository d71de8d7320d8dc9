package control

import (
	"errors"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"
)

var askFrame = append(frame(1, nil), frame(0, []byte("ask"))...)

// Peers at one address that take nothing have their share, and no more; they are cut, and all that waited for them is gone.
func TestPeersThatTakeNothingAreCutAndOthersGetLargeAnswersMeanwhile(t *testing.T) {
	const peers, size = 20, 16 << 20
	var log logBuffer
	r, h := listen(t, Options{QueueBytes: 1 << 20, TotalBytes: 4 << 20, HeartbeatInterval: time.Hour, stall: time.Second,
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	shared := share(t, random(size))
	var stuck []zmtp
	var ids []string
	for range peers {
		z := dialZMTPFrom(t, "127.0.0.5", hostPort(r))
		z.write(askFrame)
		stuck, ids = append(stuck, z), append(ids, h.next(t, "message").from.ID)
	}
	eventually(t, "no room for that address", func() bool {
		full := 0
		for _, id := range ids {
			if err := r.SendShared(id, []byte("head"), shared); errors.Is(err, errBudget) {
				full++
			} else if err != nil && !errors.Is(err, ErrQueueFull) {
				t.Fatal(err)
			}
		}
		return full == peers
	})
	if n := waiting(r.l); n > r.l.opts.TotalBytes/2 {
		t.Errorf("%d bytes wait for one address: want about a quarter of %d", n, r.l.opts.TotalBytes)
	}
	s := connect(t, r)
	say(t, s, "", "ask")
	if err := r.SendShared(h.next(t, "message").from.ID, []byte("head"), shared); err != nil {
		t.Fatalf("a peer at another address: %v", err)
	}
	if m, err := s.RecvMessageBytes(0); err != nil || len(m) != 2 || len(m[1]) != size+4 {
		t.Fatalf("a peer at another address: %v", err)
	}
	for range peers {
		if got := h.next(t, "left"); got.from.Addr != "127.0.0.5" {
			t.Fatalf("cut: %v", got.from)
		}
	}
	if n := r.Stalled(); n != peers {
		t.Errorf("%d counted, want %d", n, peers)
	}
	eventually(t, "nothing held", func() bool { return waiting(r.l) == 0 })
	for _, z := range stuck {
		if n, _ := io.Copy(io.Discard, z); n > size {
			t.Errorf("a peer that was cut was given %d bytes more", n)
		}
	}
	say(t, s, "", "ask")
	h.next(t, "message") // it has kept its connection
	for _, want := range []string{"no room for large messages", "connections_waiting=20", "most_for=127.0.0.5", "took nothing", "peer=127.0.0.5"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log does not say %q:\n%s", want, log.String())
		}
	}
	r.l.call(t.Context(), func() error {
		if len(r.owing) != 0 || len(r.l.addresses) != 1 {
			t.Errorf("%d peers are still watched, %d addresses known: want 0 and 1", len(r.owing), len(r.l.addresses))
		}
		return nil
	})
}

func TestAPeerThatReadsSlowlyIsNotCut(t *testing.T) {
	const size = 64 << 20
	const stall = time.Second
	r, h := listen(t, Options{QueueBytes: 1 << 20, TotalBytes: 4 << 20, HeartbeatInterval: time.Hour, stall: stall})
	z := dialZMTP(t, hostPort(r))
	z.write(askFrame)
	id := h.next(t, "message").from.ID
	if err := r.SendShared(id, []byte("head"), share(t, make([]byte, size))); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	read := int64(0)
	for until := time.Now().Add(4 * stall); time.Now().Before(until); <-tick.C {
		n, err := io.CopyN(io.Discard, z, 256<<10)
		if read += n; err != nil {
			t.Fatalf("cut after %d bytes: %v", read, err)
		}
	}
	if n, err := io.CopyN(io.Discard, z, size-read); err != nil {
		t.Fatalf("cut after %d bytes: %v", read+n, err)
	}
	if n := r.Stalled(); n != 0 {
		t.Errorf("%d connections counted as stalled", n)
	}
	eventually(t, "nothing to look at any more", func() (ok bool) {
		r.l.call(t.Context(), func() error { ok = len(r.owing) == 0 && len(r.l.alarms) == 0; return nil })
		return ok
	})
}

// It sends, which is a sign of life.
func TestALocalPeerThatSendsAndTakesNothingIsCut(t *testing.T) {
	r, h, name := listenLocal(t, Options{HeartbeatInterval: 50 * time.Millisecond, HeartbeatTimeout: time.Hour, stall: 300 * time.Millisecond})
	c := rawLocal(t, name)
	c.Write(localMessage("ask"))
	id := h.next(t, "message").from.ID
	if err := r.Send(id, make([]byte, 8<<20)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is cut", func() bool {
		if _, err := c.Write(localMessage("ask")); err != nil {
			return true
		}
		return r.Stalled() > 0
	})
	eventually(t, "it is counted, and nothing is held", func() bool { return r.Stalled() == 1 && waiting(r.l) == 0 })
}
