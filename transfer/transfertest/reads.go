package transfertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

func testSizes(t *testing.T, w *world) {
	const largest = 64 << 20
	o := w.offer(largest + 4096)
	token := w.grant(o, "all", o.whole()...)
	dst := make([]byte, largest)
	for _, n := range []int{1, 2, 4095, 4096, 4097, 64 << 10, 64<<10 + 1, 1<<20 - 1, 1 << 20, 2<<20 + 1, 4<<20 + 3, 16 << 20, 16<<20 + 5, largest} {
		for _, offset := range []int{0, 4095} {
			clear(dst)
			err := w.read(o.peer, transfer.ReadRequest{
				Token: token, Remote: []region.Span{{Offset: int64(offset), Length: int64(n)}}, Local: [][]byte{dst[:n]},
			})
			if err != nil {
				t.Fatalf("READ of %d bytes at %d: %v", n, offset, err)
			}
			w.wantBytes(fmt.Sprintf("READ of %d bytes at %d", n, offset), dst[:n], o.memory.Bytes[offset:offset+n])
			if n < len(dst) && dst[n] != 0 {
				t.Fatalf("READ of %d bytes wrote beyond its end", n)
			}
		}
	}
}

// cutUp cuts b into slices of random lengths.
func cutUp(rng *rand.Rand, b []byte, mean int) [][]byte {
	var out [][]byte
	for len(b) > 0 {
		n := min(len(b), 1+rng.IntN(2*mean))
		out = append(out, b[:n])
		b = b[n:]
	}
	return out
}

func testCuts(t *testing.T, w *world) {
	const pool = 24 << 20
	o := w.offer(pool)
	token := w.grant(o, "all", o.whole()...)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, shape := range []struct{ spans, spanMean, sliceMean int }{
		{1, 100, 10}, {7, 100, 33}, {200, 7168, 7168}, {1000, 500, 1 << 20}, {3, 6 << 20, 1 << 20}, {64, 200 << 10, 5 << 20}, {2, 10 << 20, 4 << 20},
	} {
		var spans []region.Span
		var want []byte
		for range shape.spans {
			n := min(1+rng.IntN(2*shape.spanMean), pool)
			at := rng.IntN(pool - n + 1)
			spans = append(spans, region.Span{Offset: int64(at), Length: int64(n)})
			want = append(want, o.memory.Bytes[at:at+n]...)
		}
		got := make([]byte, len(want))
		err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: spans, Local: cutUp(rng, got, shape.sliceMean)})
		if err != nil {
			t.Fatalf("%+v: %v", shape, err)
		}
		w.wantBytes(fmt.Sprintf("%+v", shape), got, want)
	}
}

func testRefusals(t *testing.T, w *world) {
	const n = 64 << 10
	o := w.offer(n)
	token := w.grant(o, "all", o.whole()...)
	dst := bytes.Repeat([]byte{7}, n)
	one := func(off, length int64) []region.Span { return []region.Span{{Offset: off, Length: length}} }
	for _, c := range []struct {
		name   string
		remote []region.Span
		local  [][]byte
		note   int
	}{
		{"nothing", nil, nil, 0},
		{"no local", one(0, 10), nil, 0},
		{"no remote", nil, [][]byte{dst[:10]}, 0},
		{"empty span", []region.Span{{Offset: 0, Length: 10}, {Offset: 10, Length: 0}}, [][]byte{dst[:10]}, 0},
		{"empty slice", one(0, 10), [][]byte{dst[:10], dst[10:10]}, 0},
		{"negative length", []region.Span{{Offset: 10, Length: -5}, {Offset: 0, Length: 15}}, [][]byte{dst[:10]}, 0},
		{"negative offset", one(-1, 10), [][]byte{dst[:10]}, 0},
		{"past the end", one(n-9, 10), [][]byte{dst[:10]}, 0},
		{"overflow", one(1<<63-5, 10), [][]byte{dst[:10]}, 0},
		{"sum overflow", []region.Span{{Offset: 0, Length: 1<<63 - 1}, {Offset: 0, Length: 1<<63 - 1}}, [][]byte{dst[:10]}, 0},
		{"local longer", one(0, 10), [][]byte{dst[:11]}, 0},
		{"local shorter", one(0, 10), [][]byte{dst[:9]}, 0},
		{"notification too long", one(0, 10), [][]byte{dst[:10]}, transfer.MaxNotification + 1},
		{"too many spans", make([]region.Span, transfer.MaxSpans+1), [][]byte{dst[:10]}, 0},
	} {
		w.wantErr(c.name, w.read(o.peer, transfer.ReadRequest{Token: token, Remote: c.remote, Local: c.local, Notification: make([]byte, c.note)}), transfer.ErrBadRequest)
	}
	w.wantBytes("destination of refused READs", dst, bytes.Repeat([]byte{7}, n))
	for _, spans := range [][]region.Span{nil, one(0, 0), one(-1, 2), one(0, n+1)} {
		_, err := o.reg.Grant("bad", spans)
		w.wantErr(fmt.Sprintf("grant of %v", spans), err, transfer.ErrBadRequest)
	}
	_, err := o.reg.Grant("", o.whole())
	w.wantErr("grant without an id", err, transfer.ErrBadRequest)
}

// testCancel cancels READs at various points. Whatever a READ's outcome is, its destination is not written once Done is closed.
func testCancel(t *testing.T, w *world) {
	if !w.caps.Cancel {
		t.Skip("the plane cannot cancel")
	}
	const n = 16 << 20
	o := w.offer(n)
	token := w.grant(o, "all", o.whole()...)
	dst := make([]byte, n)
	mark := bytes.Repeat([]byte{0xa5}, n)
	took, canceled := w.duration(o, token, dst), 0
	const rounds = 8
	for i := range rounds {
		rd, err := o.peer.Read(t.Context(), transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}})
		if err != nil {
			t.Fatal(err)
		}
		pause(took * time.Duration(i) / rounds)
		rd.Cancel()
		rd.Cancel()
		err = w.wait(rd)
		if err == nil {
			w.wantBytes("a READ that was faster than Cancel", dst, o.memory.Bytes)
		} else {
			canceled++
			w.wantErr("a canceled READ", err, transfer.ErrCanceled)
		}
		copy(dst, mark)
		// Another READ over the same paths gives stray writes their time.
		other := make([]byte, 1<<20)
		if err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: []region.Span{{Length: 1 << 20}}, Local: [][]byte{other}}); err != nil {
			t.Fatalf("a READ after a canceled one: %v", err)
		}
		w.wantBytes("destination after Done", dst, mark)
	}
	if canceled == 0 {
		t.Log("no READ was slow enough to be canceled")
	}
	rd, err := o.peer.Read(t.Context(), transfer.ReadRequest{Token: token, Remote: []region.Span{{Length: 100}}, Local: [][]byte{dst[:100]}})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.wait(rd); err != nil {
		t.Fatal(err)
	}
	rd.Cancel()
	if err := rd.Err(); err != nil {
		t.Errorf("Cancel after the end changed the outcome to %v", err)
	}
}

// pause keeps the processor for about d, finer than a timer can.
func pause(d time.Duration) {
	for start := time.Now(); time.Since(start) < d; {
		runtime.Gosched()
	}
}

// duration is how long a READ of the whole of o takes here, so that a test can act in the middle of one.
func (w *world) duration(o *offer, token, dst []byte) time.Duration {
	w.t.Helper()
	start := time.Now()
	if err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}}); err != nil {
		w.t.Fatal(err)
	}
	return time.Since(start)
}

func testPeerClose(t *testing.T, w *world) {
	const n = 16 << 20
	o := w.offer(n)
	token := w.grant(o, "all", o.whole()...)
	peer, err := w.consumer.AddPeer(t.Context(), o.reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	var reads []transfer.Read
	var dsts [][]byte
	for range 6 {
		dst := make([]byte, n)
		rd, err := peer.Read(t.Context(), transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}})
		if err != nil {
			t.Fatal(err)
		}
		reads, dsts = append(reads, rd), append(dsts, dst)
	}
	if err := peer.Close(); err != nil {
		t.Fatal(err)
	}
	w.ended(o, reads, dsts)
	_, err = peer.Read(t.Context(), transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dsts[0]}})
	w.wantErr("a READ on a closed peer", err, transfer.ErrClosed)
	if err := peer.Close(); err != nil {
		t.Errorf("closing a peer again: %v", err)
	}
	if err := w.read(o.peer, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dsts[0]}}); err != nil {
		t.Errorf("a READ on the other peer: %v", err)
	}
}

// ended checks READs that were cut off: they are over, and those that succeeded have the right bytes.
func (w *world) ended(o *offer, reads []transfer.Read, dsts [][]byte) {
	w.t.Helper()
	for i, rd := range reads {
		if err := w.wait(rd); err == nil {
			w.wantBytes("a READ that was finished in time", dsts[i], o.memory.Bytes)
		} else if !known(err) {
			w.t.Errorf("a READ that was cut off ended with %v, which is none of the contract's errors", err)
		}
	}
}

func testPlaneClose(t *testing.T, w *world) {
	const n = 16 << 20
	for _, which := range []string{"consumer", "producer"} {
		o := w.offer(n)
		token := w.grant(o, "all", o.whole()...)
		var reads []transfer.Read
		var dsts [][]byte
		for range 4 {
			dst := make([]byte, n)
			rd, err := o.peer.Read(t.Context(), transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}})
			if err != nil {
				t.Fatalf("%s: %v", which, err)
			}
			reads, dsts = append(reads, rd), append(dsts, dst)
		}
		if which == "producer" || w.producer == w.consumer {
			if err := w.producer.Close(); err != nil {
				t.Fatal(err)
			}
			w.ended(o, reads, dsts)
			_, err := w.producer.Register(t.Context(), transfer.Memory{Bytes: make([]byte, 10), File: o.memory.File, Path: o.memory.Path}, nil)
			w.wantErr("register on a closed plane", err, transfer.ErrClosed)
			return
		}
		// The consumer's plane goes: a second one of the same kind is not at hand, so the producer's own takes its place.
		if err := w.consumer.Close(); err != nil {
			t.Fatal(err)
		}
		w.ended(o, reads, dsts)
		if _, err := w.consumer.AddPeer(t.Context(), o.reg.Metadata()); !errors.Is(err, transfer.ErrClosed) {
			t.Errorf("add peer on a closed plane: %v", err)
		}
		w.consumer = w.producer
	}
}

func testConcurrent(t *testing.T, w *world) {
	const pool, readers, each = 8 << 20, 16, 12
	o := w.offer(pool)
	token := w.grant(o, "all", o.whole()...)
	var wg sync.WaitGroup
	for i := range readers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(3, uint64(i)))
			for j := range each {
				n := 1 + rng.IntN(1<<rng.IntN(23))
				at := rng.IntN(pool - n + 1)
				dst := make([]byte, n)
				rd, err := o.peer.Read(context.Background(), transfer.ReadRequest{
					Token: token, Remote: []region.Span{{Offset: int64(at), Length: int64(n)}}, Local: [][]byte{dst},
					Notification: fmt.Appendf(nil, "%d/%d", i, j),
				})
				if err != nil {
					t.Errorf("READ: %v", err)
					return
				}
				<-rd.Done()
				if err := rd.Err(); err != nil || !bytes.Equal(dst, o.memory.Bytes[at:at+n]) {
					t.Errorf("READ of %d bytes at %d: error %v or wrong bytes", n, at, err)
					return
				}
			}
		})
	}
	wg.Wait()
	if !w.caps.Notify || t.Failed() {
		return
	}
	Eventually(t, "all notifications", func() bool { return len(o.notified()) >= readers*each })
	seen := map[string]int{}
	for _, n := range o.notified() {
		seen[string(n.Message)]++
	}
	if len(seen) != readers*each || len(o.notified()) != readers*each {
		t.Errorf("%d notifications, %d different, want %d", len(o.notified()), len(seen), readers*each)
	}
}

func testTwoPeers(t *testing.T, w *world) {
	o := w.offer(1 << 20)
	token := w.grant(o, "all", o.whole()...)
	second := w.peer(o.reg)
	if err := o.peer.Close(); err != nil {
		t.Fatal(err)
	}
	dst := make([]byte, 1<<20)
	if err := w.read(second, transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{dst}}); err != nil {
		t.Fatalf("READ on the second peer after the first was closed: %v", err)
	}
	w.wantBytes("READ", dst, o.memory.Bytes)
}

func testContext(t *testing.T, w *world) {
	o := w.offer(4096)
	token := w.grant(o, "all", o.whole()...)
	_, err := o.peer.Read(ended(t.Context()), transfer.ReadRequest{Token: token, Remote: o.whole(), Local: [][]byte{make([]byte, 4096)}})
	w.wantErr("READ", err, context.Canceled)
	_, err = w.producer.Register(ended(t.Context()), transfer.Memory{Bytes: make([]byte, 1)}, nil)
	w.wantErr("register", err, context.Canceled)
	_, err = w.consumer.AddPeer(ended(t.Context()), []byte(o.reg.Metadata()))
	w.wantErr("add peer", err, context.Canceled)
}

func testView(t *testing.T, w *world) {
	if !w.caps.InPlace {
		t.Skip("the plane has no views")
	}
	o := w.offer(1 << 20)
	peer, err := w.consumer.AddPeer(t.Context(), o.reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	v, ok := peer.(transfer.Viewer)
	if !ok {
		t.Fatal("InPlace is claimed and the peer is no Viewer")
	}
	token := w.grant(o, "all", o.whole()...)
	spans, release, err := v.View(token, []region.Span{{Offset: 5, Length: 100}, {Offset: 500000, Length: 5000}})
	if err != nil {
		t.Fatal(err)
	}
	if err := peer.Close(); err != nil {
		t.Fatal(err)
	}
	w.wantBytes("span 0", spans[0], o.memory.Bytes[5:105])
	w.wantBytes("span 1", spans[1], o.memory.Bytes[500000:505000])
	o.memory.Bytes[5]++
	w.wantBytes("a later change", spans[0], o.memory.Bytes[5:105])
	release()
	release()
	_, _, err = v.View(token, o.whole())
	w.wantErr("view of a closed peer", err, transfer.ErrClosed)
	_, _, err = o.peer.(transfer.Viewer).View(token, []region.Span{{Offset: 1 << 20, Length: 1}})
	w.wantErr("view beyond the memory", err, transfer.ErrBadRequest)
}
