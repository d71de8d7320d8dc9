package control

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
)

func TestAMessageThatMayWaitIsSentWithoutAnother(t *testing.T) {
	_, h, name := listenLocal(t, Options{})
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	for i := range 100 {
		var err error
		if i%2 == 0 { // on the owner goroutine, which does not sleep
			err = d.s.l.call(t.Context(), func() error { return d.SendSoon(fmt.Append(nil, i)) })
		} else {
			err = d.SendSoon(fmt.Append(nil, i))
		}
		if err != nil {
			t.Fatal(err)
		}
		if m := h.next(t, "message"); m.body != fmt.Sprint(i) {
			t.Fatalf("got %v, want %d", m, i)
		}
	}
}

// sendBack answers each message with three that have its head.
type sendBack struct{ r *Router }

func (h *sendBack) Serve(r *Router) { h.r = r }
func (h *sendBack) Message(from Source, body []byte) {
	for i := range 3 {
		_ = h.r.Send(from.ID, fmt.Appendf(nil, "%s%d", body[:bytes.LastIndexByte(body, ':')+1], i))
	}
}

func TestMessagesStayInOrderWhetherTheyMayWaitOrNot(t *testing.T) {
	h := &sendBack{}
	r, err := newTestLoop(t, Options{}).Listen(t.Context(), "127.0.0.1", 0, h)
	if err != nil {
		t.Fatal(err)
	}
	name, err := r.ListenLocal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	const senders, each = 4, 300
	large := make([]byte, 60<<10) // so that the kernel has no room now and then
	var all sync.WaitGroup
	for s := range senders {
		all.Go(func() {
			for i := range each {
				send := d.Send
				if i%3 != 0 {
					send = d.SendSoon
				}
				body := fmt.Appendf(nil, "%d:%d:", s, i)
				if i%50 == 0 {
					body = append(body, large...)
				}
				err := send(body)
				for ; errors.Is(err, ErrQueueFull); err = send(body) {
					runtime.Gosched()
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var next [senders][2]int // message and answer
	for range senders * each * 3 {
		var s, i, k int
		m := dh.next(t, "message").body
		_, err := fmt.Sscanf(m, "%d:%d:%d", &s, &i, &k)
		if err != nil || next[s] != [2]int{i, k} {
			t.Fatalf("got %q (%v), want %v of sender %d", m, err, next[s], s)
		}
		if next[s][1]++; next[s][1] == 3 {
			next[s] = [2]int{i + 1, 0}
		}
	}
	all.Wait()
}

func TestWhatWaitsIsLetGoOfWhenItWasSent(t *testing.T) {
	_, h, name := listenLocal(t, Options{})
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	const n = 20
	err := d.s.l.call(t.Context(), func() error {
		for range n {
			if err := d.SendSoon(make([]byte, 1000)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		h.next(t, "message")
	}
	d.s.mu.Lock()
	defer d.s.mu.Unlock()
	for _, f := range d.s.few {
		if f.body != nil {
			t.Error("a message that was sent is kept")
		}
	}
	if d.s.out != nil || d.s.queued != 0 || d.s.full {
		t.Errorf("%d messages wait, %d bytes", len(d.s.out), d.s.queued)
	}
}
