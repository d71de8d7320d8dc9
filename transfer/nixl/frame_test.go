package nixl

import (
	"errors"
	"io"
	"os"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
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
	must(t, a.conn.Close())
	if _, err := b.next(); err == nil {
		t.Error("a frame after the end")
	}
}

// An end that is stopped loses nothing, however long that takes, and holds nobody up.
func TestWhatAnEndDoesNotReadWaitsForIt(t *testing.T) {
	a, b := wirePair(t)
	const frames = 2000
	size := func(i int) int { return i * 7919 % 3000 }
	for i := range frames {
		var f *os.File
		if i%100 == 99 {
			var err error
			f, err = os.Open(os.DevNull)
			must(t, err)
		}
		must(t, a.send(frameReply, uint64(i), f, func(b []byte) []byte { return append(b, make([]byte, size(i))...) }))
		if f != nil {
			must(t, f.Close()) // send has what it needs
		}
	}
	for i := range frames {
		f, err := b.next()
		must(t, err)
		if f.id != uint64(i) || len(f.body) != size(i) {
			t.Fatalf("frame %d of %d bytes, want %d of %d", f.id, len(f.body), i, size(i))
		}
		if i%100 == 99 {
			file, err := b.file()
			must(t, err)
			must(t, file.Close())
		}
	}
	transfertest.Eventually(t, "the writer to rest", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return !a.writing && a.waiting == 0
	})
	must(t, a.send(frameReply, frames, nil, nil))
	if f, err := b.next(); err != nil || f.id != frames {
		t.Errorf("frame %d after the backlog, error %v", f.id, err)
	}
}

func TestTooMuchThatWaitsIsRefusedAndTheWireGoesOn(t *testing.T) {
	a, b := wirePair(t)
	part := make([]byte, maxFrame-frameHeader)
	send := func(kind frameKind) error {
		return a.send(kind, 0, nil, func(b []byte) []byte { return append(b, part...) })
	}
	sent := 0
	for ; sent < 2*maxBacklog/maxFrame; sent++ {
		if err := send(frameRead); err != nil {
			wantErr(t, "READ", err, errBacklog)
			break
		}
	}
	if at := maxBacklog / maxFrame; sent < at || sent > at+2 {
		t.Errorf("refused after %d frames of %d MiB", sent, maxFrame>>20)
	}
	wantErr(t, "notification", send(frameNotification), errBacklog)
	must(t, send(frameReply))
	for range sent + 1 {
		_, err := b.next()
		must(t, err)
	}
}

func TestAnEndThatReadsNothingForTooLongEndsTheWireAtBothEnds(t *testing.T) {
	a, b := wirePair(t)
	a.stall = 20 * time.Millisecond
	for range 3 {
		must(t, a.send(frameRead, 0, nil, func(b []byte) []byte { return append(b, make([]byte, 1<<20)...) }))
	}
	if _, err := a.next(); !errors.Is(err, io.EOF) {
		t.Errorf("reading at this end: %v", err)
	}
	wantErr(t, "failure", a.failure(), os.ErrDeadlineExceeded)
	wantErr(t, "send", a.send(frameAttend, 0, nil, nil), os.ErrDeadlineExceeded)
	for { // what has come
		if _, err := b.next(); err != nil {
			wantErr(t, "reading at the other end", err, io.EOF)
			return
		}
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
