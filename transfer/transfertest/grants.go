package transfertest

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

func testMetadata(t *testing.T, w *world) {
	o := w.offer(4096)
	before := bytes.Clone(o.reg.Metadata())
	if len(before) == 0 || len(before) > transfer.MaxMetadata {
		t.Fatalf("metadata of %d bytes", len(before))
	}
	w.grant(o, "a", o.whole()...)
	w.wantBytes("metadata after a grant", o.reg.Metadata(), before)
	other := w.offer(4096)
	if bytes.Equal(other.reg.Metadata(), before) {
		t.Error("two registrations have the same metadata")
	}
}

func testWrongMetadata(t *testing.T, w *world) {
	o := w.offer(4096)
	good := o.reg.Metadata()
	try := func(what string, b []byte, must bool) {
		p, err := w.consumer.AddPeer(t.Context(), b)
		if err == nil {
			_ = p.Close()
			if must {
				t.Errorf("%s: accepted", what)
			}
		} else if !known(err) {
			t.Errorf("%s: %v is none of the contract's errors", what, err)
		}
	}
	for i := range good {
		try(fmt.Sprintf("first %d bytes", i), good[:i], true)
		flipped := bytes.Clone(good)
		flipped[i] ^= 0x55
		try(fmt.Sprintf("byte %d changed", i), flipped, false)
	}
	try("empty", nil, true)
	try("one byte more", append(bytes.Clone(good), 0), true)
	try("garbage", bytes.Repeat([]byte{0xff}, 200), true)
	try("too long", bytes.Repeat(good, transfer.MaxMetadata/len(good)+1), true)
}

func testNoFile(t *testing.T, w *world) {
	mem := make([]byte, 3<<20)
	Fill(mem, 3)
	reg, err := w.producer.Register(t.Context(), transfer.Memory{Bytes: mem}, nil)
	if err != nil {
		w.wantErr("register", err, transfer.ErrBadRequest)
		return
	}
	w.closers = append(w.closers, func() { _ = reg.Close() })
	o := &offer{memory: transfer.Memory{Bytes: mem}, reg: reg, peer: w.peer(reg)}
	token := w.grant(o, "all", o.whole()...)
	dst := make([]byte, len(mem))
	if err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}}); err != nil {
		t.Fatal(err)
	}
	w.wantBytes("READ", dst, mem)
}

func testOverlap(t *testing.T, w *world) {
	o := w.offer(8192)
	m := o.memory
	m.Bytes, m.FileOffset = m.Bytes[4096:], m.FileOffset+4096
	_, err := w.producer.Register(t.Context(), m, nil)
	w.wantErr("register of a part of registered memory", err, transfer.ErrBadRequest)
	_, err = w.producer.Register(t.Context(), transfer.Memory{}, nil)
	w.wantErr("register of nothing", err, transfer.ErrBadRequest)
	m.FileOffset += 1 << 30
	_, err = w.producer.Register(t.Context(), m, nil)
	w.wantErr("register of more than the file has", err, transfer.ErrBadRequest)
}

func testGrantNames(t *testing.T, w *world) {
	o := w.offer(8192)
	first := w.grant(o, "a", o.whole()...)
	_, err := o.reg.Grant("a", o.whole())
	w.wantErr("a second grant of a live name", err, transfer.ErrBadRequest)
	o.reg.Revoke("a")
	o.reg.Revoke("a")
	o.reg.Revoke("never granted")
	second := w.grant(o, "a", o.whole()...)
	if w.caps.Tokens && bytes.Equal(first, second) {
		t.Error("two grants have the same token")
	}
	if err := o.reg.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = o.reg.Grant("b", o.whole())
	w.wantErr("a grant on a closed registration", err, transfer.ErrClosed)
	o.reg.Revoke("a")
	if err := o.reg.Close(); err != nil {
		t.Errorf("closing a registration again: %v", err)
	}
}

func testTokens(t *testing.T, w *world) {
	if !w.caps.Tokens {
		t.Skip("the plane has no tokens")
	}
	o, foreign := w.offer(64<<10), w.offer(64<<10)
	low := w.grant(o, "low", region.Span{Offset: 0, Length: 4096}, region.Span{Offset: 4096, Length: 4096})
	high := w.grant(o, "high", region.Span{Offset: 32 << 10, Length: 4096}, region.Span{Offset: 48 << 10, Length: 4096})
	over := w.grant(o, "over", o.whole()...)
	o.reg.Revoke("over")
	elsewhere := w.grant(foreign, "low", foreign.whole()...)
	changed := bytes.Clone(low)
	changed[len(changed)-1] ^= 1
	sp := func(off, length int64) []region.Span { return []region.Span{{Offset: off, Length: length}} }
	for _, c := range []struct {
		name  string
		token []byte
		spans []region.Span
		ok    bool
	}{
		{"its own span", low, sp(0, 4096), true},
		{"across two spans that touch", low, sp(100, 8000), true},
		{"its other span", high, sp(48<<10, 4096), true},
		{"both spans", high, []region.Span{{Offset: 48 << 10, Length: 10}, {Offset: 32 << 10, Length: 10}}, true},
		{"no token", nil, sp(0, 10), false},
		{"short token", low[:8], sp(0, 10), false},
		{"long token", append(bytes.Clone(low), 0), sp(0, 10), false},
		{"changed token", changed, sp(0, 10), false},
		{"ended grant", over, sp(0, 10), false},
		{"another registration's grant", elsewhere, sp(0, 10), false},
		{"another grant's span", low, sp(32<<10, 10), false},
		{"one byte more than granted", low, sp(0, 8193), false},
		{"one byte before", high, sp(32<<10-1, 10), false},
		{"between two spans", high, sp(40<<10, 10), false},
		{"over a gap", high, sp(32<<10, 17<<10), false},
		{"one good span and one bad", low, []region.Span{{Offset: 0, Length: 10}, {Offset: 9000, Length: 10}}, false},
	} {
		var n int64
		for _, s := range c.spans {
			n += s.Length
		}
		dst := make([]byte, n)
		err := w.read(o.peer, transfer.ReadRequest{Token: c.token, Remote: c.spans, Local: [][]byte{dst}})
		switch {
		case c.ok && err != nil:
			t.Errorf("%s: %v", c.name, err)
		case !c.ok:
			w.wantErr(c.name, err, transfer.ErrDenied)
			w.wantBytes(c.name, dst, make([]byte, n))
		}
	}
}

// testRevoke ends grants while READs are under way and reuses the memory at once. A READ may fail; one that succeeds has none of
// the new bytes. A slow network is where this would go wrong, so the READs are large and several.
func testRevoke(t *testing.T, w *world) {
	if !w.caps.Tokens {
		t.Skip("the plane has no tokens")
	}
	const n, readers = 5 << 20, 4
	o := w.offer(n)
	dsts := make([][]byte, readers)
	for i := range dsts {
		dsts[i] = make([]byte, n)
	}
	old, next := make([]byte, n), make([]byte, n)
	took := w.duration(o, w.grant(o, "first", o.whole()...), dsts[0])
	const rounds = 16
	failed := 0
	for round := range rounds {
		Fill(next, uint64(100+round))
		copy(old, o.memory.Bytes)
		id := fmt.Sprintf("grant %d", round)
		token := w.grant(o, id, o.whole()...)
		var reads []transfer.Read
		for _, dst := range dsts {
			rd, err := o.peer.Read(t.Context(), transfer.ReadRequest{Token: token, Remote: o.whole(), Local: cut3(dst)})
			if err != nil {
				t.Fatal(err)
			}
			reads = append(reads, rd)
		}
		pause(readers * took * time.Duration(round) / rounds)
		o.reg.Revoke(id)
		copy(o.memory.Bytes, next)
		for i, rd := range reads {
			if err := w.wait(rd); err == nil {
				w.wantBytes(fmt.Sprintf("round %d, READ %d", round, i), dsts[i], old)
			} else {
				failed++
				if !errors.Is(err, transfer.ErrDenied) && !errors.Is(err, transfer.ErrPeerLost) {
					t.Fatalf("round %d: a revoked READ ended with %v", round, err)
				}
			}
		}
	}
	if failed == 0 {
		t.Error("no READ was ever caught by Revoke: the test shows nothing")
	}
	token := w.grant(o, "afterwards", o.whole()...)
	if err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dsts[0]}}); err != nil {
		t.Fatalf("a READ after all that: %v", err)
	}
	w.wantBytes("a READ after all that", dsts[0], o.memory.Bytes)
}

func cut3(b []byte) [][]byte { return [][]byte{b[:len(b)/3], b[len(b)/3 : len(b)/2], b[len(b)/2:]} }

func testRegistrationClosed(t *testing.T, w *world) {
	if !w.caps.Tokens {
		t.Skip("the plane has no tokens")
	}
	const n = 8 << 20
	o := w.offer(n)
	token := w.grant(o, "all", o.whole()...)
	want := bytes.Clone(o.memory.Bytes)
	dst := make([]byte, n)
	rd, err := o.peer.Read(t.Context(), transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}})
	if err != nil {
		t.Fatal(err)
	}
	if err := o.reg.Close(); err != nil {
		t.Fatal(err)
	}
	clear(o.memory.Bytes)
	if err := w.wait(rd); err == nil {
		w.wantBytes("a READ that was faster", dst, want)
	}
	err = w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}})
	if !errors.Is(err, transfer.ErrPeerLost) && !errors.Is(err, transfer.ErrDenied) {
		t.Errorf("a READ of withdrawn memory: %v", err)
	}
}

func testNotification(t *testing.T, w *world) {
	if !w.caps.Notify {
		t.Skip("the plane does not notify")
	}
	for _, n := range []int{10, 6 << 20, 20 << 20} {
		o := w.offer(n)
		token := w.grant(o, "the grant", o.whole()...)
		message := bytes.Repeat([]byte{1, 0, 2}, transfer.MaxNotification/3)
		dst := make([]byte, n)
		if err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}, Notification: message}); err != nil {
			t.Fatal(err)
		}
		Eventually(t, "the notification", func() bool { return len(o.notified()) > 0 })
		// A second READ's notification comes after all that the first can cause.
		if err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}, Notification: []byte{}}); err != nil {
			t.Fatal(err)
		}
		Eventually(t, "the second notification", func() bool { return len(o.notified()) > 1 })
		got := o.notified()
		if len(got) != 2 || got[0].Grant != wantGrant(w, "the grant") || !bytes.Equal(got[0].Message, message) || len(got[1].Message) != 0 {
			t.Errorf("%d bytes: notifications %d, first of grant %q with %d bytes", n, len(got), got[0].Grant, len(got[0].Message))
		}
	}
}

func wantGrant(w *world, id string) string {
	if w.caps.Tokens {
		return id
	}
	return ""
}

func testNoNotification(t *testing.T, w *world) {
	if !w.caps.Notify || !w.caps.Tokens {
		t.Skip("the plane does not notify or has no tokens")
	}
	o := w.offer(4096)
	token := w.grant(o, "a", o.whole()...)
	live := w.grant(o, "b", o.whole()...)
	o.reg.Revoke("a")
	dst := make([]byte, 4096)
	w.wantErr("READ", w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}, Notification: []byte("no")}), transfer.ErrDenied)
	if err := w.read(o.peer, transfer.ReadRequest{Token: live, Remote: o.whole(), Local: [][]byte{dst}, Notification: []byte("yes")}); err != nil {
		t.Fatal(err)
	}
	Eventually(t, "the good notification", func() bool { return len(o.notified()) > 0 })
	if got := o.notified(); len(got) != 1 || string(got[0].Message) != "yes" {
		t.Errorf("notifications %q", got)
	}
}
