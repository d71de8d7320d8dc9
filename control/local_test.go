package control

import (
	"fmt"
	"testing"
)

// listenLocal and dialLocal are listen and dial for the local path.
func listenLocal(t testing.TB, o Options) (r *Router, h recorder, name string) {
	t.Helper()
	h = newRecorder()
	r, err := newTestLoop(t, o).Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	if name, err = r.ListenLocal(t.Context()); err != nil {
		t.Fatal(err)
	}
	return r, h, name
}

func dialLocal(t testing.TB, o Options, name string) (*LocalDealer, recorder) {
	t.Helper()
	h := newRecorder()
	d, err := newTestLoop(t, o).DialLocal(t.Context(), name, h)
	if err != nil {
		t.Fatal(err)
	}
	return d, h
}

func TestLocalPeersExchangeMessagesInOrder(t *testing.T) {
	r, h, name := listenLocal(t, Options{})
	d, dh := dialLocal(t, Options{}, name)
	for i := range 1000 {
		if err := d.Send(fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
	dh.next(t, "up")
	for i := range 1000 {
		m := h.next(t, "message")
		if m.body != fmt.Sprint(i) || !m.from.Local || m.from.Addr != "" {
			t.Fatalf("got %v, want %d", m, i)
		}
		if err := r.Send(m.from.ID, []byte(m.body)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 1000 {
		if m := dh.next(t, "message"); m.body != fmt.Sprint(i) {
			t.Fatalf("got %v, want %d", m, i)
		}
	}
	d.Close()
	h.next(t, "left")
}
