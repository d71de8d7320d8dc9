package control

import "testing"

func TestConnectedTellsOfTheOtherEndAtOnce(t *testing.T) {
	router := newTestLoop(t, Options{})
	h := newRecorder()
	r, err := router.Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	name, err := r.ListenLocal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	if !d.Connected() {
		t.Error("not connected")
	}
	other, oh := dialLocal(t, Options{}, name)
	oh.next(t, "up")
	if other.Close(); other.Connected() {
		t.Error("connected after its own Close")
	}
	router.Close()
	if d.Connected() { // whether Down has been called or not
		t.Error("connected to a router that is closed")
	}
}
