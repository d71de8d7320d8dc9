package control

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"
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

// rawLocal is a peer that writes what it likes to a router's local socket. It has read the router's sign.
func rawLocal(t testing.TB, name string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", "@"+name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	if got := readWord(t, c); got != signReady {
		t.Fatalf("first word %#x, want %#x", got, uint32(signReady))
	}
	return c
}

func readWord(t testing.TB, c net.Conn) uint32 {
	t.Helper()
	var b [wordSize]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		t.Fatal(err)
	}
	return binary.LittleEndian.Uint32(b[:])
}

func word(w uint32) []byte { return binary.LittleEndian.AppendUint32(nil, w) }

func localMessage(body string) []byte { return append(word(uint32(len(body))), body...) }

func TestLocalMessagesOfAllSizesArriveWhole(t *testing.T) {
	r, h, name := listenLocal(t, Options{MaxMessage: 32 << 20})
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	for _, size := range []int{0, 1, large - 1, large, readSize - wordSize - 1, readSize - wordSize, readSize, readSize + 1, 20 << 20} {
		body := random(size)
		if err := d.Send(body); err != nil {
			t.Fatal(err)
		}
		m := h.next(t, "message")
		if m.body != string(body) {
			t.Fatalf("%d bytes arrived as %d, or changed", size, len(m.body))
		}
		if err := r.Send(m.from.ID, body); err != nil {
			t.Fatal(err)
		}
		if m := dh.next(t, "message"); m.body != string(body) {
			t.Fatalf("%d bytes came back as %d, or changed", size, len(m.body))
		}
	}
	if n := waiting(r.l) + waiting(d.s.l); n != 0 {
		t.Errorf("%d bytes count as waiting, want none", n)
	}
}

// However the bytes of messages are cut, and however many come at once.
func TestLocalMessagesMayComeInPieces(t *testing.T) {
	_, h, name := listenLocal(t, Options{})
	rapid.Check(t, func(t *rapid.T) {
		bodies := rapid.SliceOfN(rapid.StringN(0, 300, 300), 1, 600).Draw(t, "bodies")
		var all []byte
		for _, b := range bodies {
			all = append(all, localMessage(b)...)
			if rapid.IntRange(0, 9).Draw(t, "sign") == 0 {
				all = append(all, word(signPong)...)
			}
		}
		c, err := net.Dial("unix", "@"+name)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for len(all) > 0 {
			n := min(len(all), rapid.SampledFrom([]int{1, 3, 5, 100, 70_000}).Draw(t, "piece"))
			if _, err := c.Write(all[:n]); err != nil {
				t.Fatal(err)
			}
			all = all[n:]
		}
		for i, want := range bodies {
			if got := <-h.c; got.what != "message" || got.body != want {
				t.Fatalf("message %d: got %v, want %q", i, got, want)
			}
		}
		c.Close()
		if got := <-h.c; got.what != "left" {
			t.Fatalf("got %v, want left", got)
		}
	})
}

// What no peer of ours writes ends its connection, is counted, and takes no memory; others go on.
func TestHostileLocalPeersLoseTheirConnection(t *testing.T) {
	r, h, name := listenLocal(t, Options{})
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	for _, tc := range []struct {
		name  string
		write []byte
	}{
		{"a message over the limit", word(DefaultRouterMessage + 1)},
		{"a length of 2 GiB", word(1 << 31)},
		{"the largest length", word(firstSign - 1)},
		{"an unknown sign", word(firstSign)},
		{"the router's sign", word(signReady)},
		{"text", []byte("GET / HTTP/1.1\r\n\r\n")},
		{"a message, then garbage", append(localMessage("hello"), 0xff, 0xff, 0xff, 0xff)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before, _, _ := r.Dropped()
			c := rawLocal(t, name)
			if _, err := c.Write(tc.write); err != nil {
				t.Fatal(err)
			}
			if n, err := io.Copy(io.Discard, c); n != 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
				t.Fatalf("read %d bytes, %v: want the end", n, err)
			}
			eventually(t, "it is counted", func() bool { after, _, _ := r.Dropped(); return after == before+1 })
		})
	}
	if m := h.next(t, "message"); m.body != "hello" {
		t.Errorf("got %v, want what came before the garbage", m)
	}
	h.next(t, "left")
	if err := d.Send([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	if m := h.next(t, "message"); m.body != "still here" {
		t.Errorf("got %v", m)
	}
}

// A peer that stops in the middle of a message, or says nothing at all, goes by the heartbeat.
func TestSilentLocalPeersLoseTheirConnection(t *testing.T) {
	_, _, name := listenLocal(t, lively())
	half, silent := rawLocal(t, name), rawLocal(t, name)
	half.Write(localMessage("half")[:6])
	for _, c := range []net.Conn{half, silent} {
		if w := readWord(t, c); w != signPing {
			t.Fatalf("got %#x, want a PING", w)
		}
		if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Fatal(err)
		}
	}
}

// Other processes' sockets are not spoken to: a name may come from a peer.
func TestDialLocalTakesNoOtherNames(t *testing.T) {
	l := newTestLoop(t, Options{})
	for _, name := range []string{"", "/run/x", "@/tmp/.X11-unix/X0", "tensorferry-", "tensorferry-" + strings.Repeat("g", 32), "tensorferry-" + strings.Repeat("0", 33)} {
		if _, err := l.DialLocal(t.Context(), name, newRecorder()); err == nil || errors.Is(err, ErrGone) {
			t.Errorf("%q: %v, want an error about the name", name, err)
		}
	}
	_, err := l.DialLocal(t.Context(), "tensorferry-"+strings.Repeat("0", 32), newRecorder())
	wantGone(t, err)
}

// A server that is no router of ours: it accepts and says something else, or nothing.
func TestLocalServerThatIsNoRouterIsDown(t *testing.T) {
	for _, tc := range []struct {
		name  string
		write []byte
	}{{"silent", nil}, {"a message", localMessage("hello")}, {"a huge message", word(firstSign - 1)}, {"a PING", word(signPing)}} {
		t.Run(tc.name, func(t *testing.T) {
			name := localPrefix + randomHex()
			ln, err := net.Listen("unix", "@"+name)
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			d, h := dialLocal(t, Options{ConnectTimeout: 100 * time.Millisecond}, name)
			c, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.Write(tc.write)
			wantGone(t, h.next(t, "down").err)
			wantGone(t, d.Send(nil))
		})
	}
}

// A peer that does not read is held to the limits, together with the others, and costs nobody else anything.
func TestLocalPeersThatDoNotReadAreBounded(t *testing.T) {
	r, h, name := listenLocal(t, Options{Queue: 50, QueueBytes: 8 << 20, TotalBytes: 12 << 20, HeartbeatInterval: time.Hour})
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	if err := d.Send([]byte("ask")); err != nil {
		t.Fatal(err)
	}
	id := h.next(t, "message").from.ID
	lazy := func() (net.Conn, string) {
		c := rawLocal(t, name)
		c.Write(localMessage("ask"))
		return c, h.next(t, "message").from.ID
	}
	fill := func(id string, size int) (n int) {
		for ; ; n++ {
			if err := r.Send(id, make([]byte, size)); errors.Is(err, ErrQueueFull) {
				return n
			} else if err != nil {
				t.Fatal(err)
			}
		}
	}
	small, smallID := lazy()
	if n := fill(smallID, 1000); n < 50 {
		t.Errorf("%d messages accepted, want 50 and what the kernel takes", n)
	}
	one, oneID := lazy()
	fill(oneID, 1<<20)
	two, twoID := lazy()
	fill(twoID, 1<<20)
	if n := waiting(r.l); n > r.l.opts.TotalBytes+50*1000 || n < 10<<20 {
		t.Errorf("%d bytes wait", n)
	}
	if err := r.Send(twoID, make([]byte, 9<<20)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a body over QueueBytes: %v", err)
	}
	if err := r.Send(id, []byte("small")); err != nil {
		t.Fatalf("another peer: %v", err)
	}
	if m := dh.next(t, "message"); m.body != "small" {
		t.Errorf("got %v", m)
	}
	go io.Copy(io.Discard, one)
	eventually(t, "room when one reads", func() bool { return r.Send(oneID, make([]byte, 1<<20)) == nil })
	for _, c := range []net.Conn{small, one, two} {
		c.Close()
	}
	eventually(t, "nothing held when they have left", func() bool { return waiting(r.l) == 0 })
}

// A peer that floods is read no faster than it is served, so that others have their turn.
func TestLocalPeerThatFloodsDoesNotKeepOthersWaiting(t *testing.T) {
	h := &firstOf{}
	r, err := newTestLoop(t, Options{}).Listen(t.Context(), "127.0.0.1", 0, h)
	if err != nil {
		t.Fatal(err)
	}
	name, err := r.ListenLocal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := rawLocal(t, name)
	var flood sync.WaitGroup
	flood.Go(func() {
		for junk := make([]byte, 1<<20); ; { // messages without a body
			if _, err := c.Write(junk); err != nil {
				return
			}
		}
	})
	eventually(t, "some of the flood", func() bool { return h.junk.Load() > 0 })
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	for range 10 {
		if err := d.Send([]byte("ask")); err != nil {
			t.Fatal(err)
		}
		dh.next(t, "message")
	}
	c.Close()
	flood.Wait()
}

// firstOf answers messages that have a body.
type firstOf struct {
	echo
	junk atomic.Int64
}

func (f *firstOf) Message(from Source, body []byte) {
	if len(body) == 0 {
		f.junk.Add(1)
		return
	}
	f.echo.Message(from, body)
}

func TestLocalConnectionsLeaveNothingBehind(t *testing.T) {
	r, h, name := listenLocal(t, Options{})
	l := newTestLoop(t, Options{})
	cycle := func() {
		dh := newRecorder()
		d, err := l.DialLocal(t.Context(), name, dh)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Send([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		dh.next(t, "up")
		d.Close()
		h.next(t, "message")
		h.next(t, "left")
	}
	cycle()
	before := descriptors(t)
	for range 1000 {
		cycle()
	}
	eventually(t, "as many descriptors as before", func() bool { return descriptors(t) <= before })
	r.l.mu.Lock()
	defer r.l.mu.Unlock()
	if len(r.locals) != 0 {
		t.Errorf("%d peers are known, want none", len(r.locals))
	}
}

func TestClosedRouterIsGoneForLocalPeers(t *testing.T) {
	r, h, name := listenLocal(t, Options{})
	d, dh := dialLocal(t, Options{}, name)
	dh.next(t, "up")
	again, err := r.ListenLocal(t.Context())
	if err != nil || again != name {
		t.Fatalf("a second time: %q, %v, want %q", again, err, name)
	}
	r.Close()
	wantGone(t, dh.next(t, "down").err)
	if _, err := r.ListenLocal(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("ListenLocal after Close: %v", err)
	}
	_, err = d.s.l.DialLocal(t.Context(), name, dh)
	wantGone(t, err)
	d.Close()
	if err := d.Send(nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Send after Close: %v", err)
	}
	if len(h.c) != 0 {
		t.Errorf("the handler of a closed router got %v", <-h.c)
	}
}

// Many goroutines send by one connection while the other end answers by it from its own.
func TestManyGoroutinesMaySendByOneLocalConnection(t *testing.T) {
	const senders, each = 8, 300
	opts := Options{Queue: senders * each} // at both ends: the one that reads may be late
	r, err := newTestLoop(t, opts).Listen(t.Context(), "127.0.0.1", 0, &echo{})
	if err != nil {
		t.Fatal(err)
	}
	name, err := r.ListenLocal(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	d, h := dialLocal(t, opts, name)
	var all sync.WaitGroup
	for i := range senders {
		all.Go(func() {
			for j := range each {
				if err := d.Send(fmt.Append(random(i*1000), i, " ", j)); err != nil {
					t.Error(err)
				}
			}
		})
	}
	h.next(t, "up")
	next := make([]int, senders)
	for range senders * each {
		body := h.next(t, "message").body
		var i, j int
		if _, err := fmt.Sscan(body[max(0, strings.LastIndexByte(body, ' ')-1):], &i, &j); err != nil {
			t.Fatal(err)
		}
		if j != next[i] || body[:i*1000] != string(random(i*1000)) {
			t.Fatalf("got %d of sender %d, want %d, and its body whole", j, i, next[i])
		}
		next[i]++
	}
	all.Wait()
}
