package nixl

import (
	"errors"
	"os"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/transfer"
)

func wirePair(t testing.TB) (a, b *wire) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	var ws []*wire
	for _, fd := range fds {
		f := os.NewFile(uintptr(fd), "end")
		w, err := newWire(f)
		must(t, err)
		must(t, f.Close())
		t.Cleanup(func() { _ = w.conn.Close() })
		ws = append(ws, w)
	}
	return ws[0], ws[1]
}

func TestFramesOfAnySizeArriveInOrderWithTheirFiles(t *testing.T) {
	a, b := wirePair(t)
	sizes := []int{0, 1, 100, 64 << 10, 3 << 20, 5, 300 << 10, 0}
	go func() {
		for i, n := range sizes {
			var f *os.File
			if i%2 == 1 {
				f = os.Stderr
			}
			if err := a.send(frameKind(i+1), uint64(n), f, func(b []byte) []byte { return append(b, make([]byte, n)...) }); err != nil {
				t.Error(err)
			}
		}
		_ = a.conn.Close()
	}()
	for i, n := range sizes {
		f, err := b.next()
		must(t, err)
		if f.kind != frameKind(i+1) || f.id != uint64(n) || len(f.body) != n {
			t.Fatalf("frame %d: kind %d, id %d, %d bytes", i, f.kind, f.id, len(f.body))
		}
		if i%2 == 1 {
			file, err := b.file()
			must(t, err)
			must(t, file.Close())
		}
	}
	if _, err := b.next(); err == nil {
		t.Error("a frame after the end")
	}
}

func TestAFrameThatIsTooLongIsRefusedAndTheWireGoesOn(t *testing.T) {
	a, b := wirePair(t)
	wantErr(t, "send", a.send(frameRead, 1, nil, func(b []byte) []byte { return append(b, make([]byte, maxFrame)...) }), transfer.ErrBadRequest)
	must(t, a.send(frameAttend, 2, nil, nil))
	f, err := b.next()
	must(t, err)
	if f.id != 2 {
		t.Errorf("frame %d", f.id)
	}
	_, err = a.conn.Write([]byte{0xff, 0xff, 0xff, 0x7f})
	must(t, err)
	if _, err := b.next(); !errors.Is(err, errBadFrame) {
		t.Errorf("a length of 2 GiB: %v", err)
	}
}

func TestErrorsKeepTheirKindOverTheWire(t *testing.T) {
	for _, want := range replyErrors[1:] {
		_, err := parseReply(appendReply(nil, want))
		wantErr(t, "reply", err, want)
	}
	_, err := parseReply(appendReply(nil, errors.New("something else")))
	wantErr(t, "reply", err, transfer.ErrPeerLost)
	if r, err := parseReply(append(appendReply(nil, nil), 7)); err != nil || r.Len() != 1 {
		t.Errorf("a good reply: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	f.Add(appendRead(nil, readOp{peer: 3, notify: true, note: []byte("a:b"), far: 1, pieces: []piece{{1, 2, 3, 4, 0}, {5, 6, 7, 8, 9}}}))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		op, err := parseRead(b)
		if err != nil {
			return
		}
		again, err := parseRead(appendRead(nil, op))
		if err != nil || !reflect.DeepEqual(op, again) {
			t.Errorf("%+v came back as %+v, error %v", op, again, err)
		}
	})
}
