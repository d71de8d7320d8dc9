package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// zmtp is a peer that speaks ZMTP 3.1 by hand (rfc.zeromq.org/spec/37), to send what libzmq never would.
type zmtp struct {
	net.Conn
	t testing.TB
}

func dialZMTP(t testing.TB, addr string) zmtp { return dialZMTPFrom(t, "127.0.0.1", addr) }

// dialZMTPFrom connects from an address of this machine, 127.0.0.0/8 for loopback.
func dialZMTPFrom(t testing.TB, src, addr string) zmtp {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(src)}}
	c, err := d.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return shakeHands(t, c, "DEALER")
}

// shakeHands makes c a connection of a socket of that type.
func shakeHands(t testing.TB, c net.Conn, kind string) zmtp {
	t.Helper()
	t.Cleanup(func() { c.Close() })
	z := zmtp{c, t}
	greeting := make([]byte, 64) // signature, version 3.1, mechanism NULL, not a server
	greeting[0], greeting[9], greeting[10], greeting[11] = 0xff, 0x7f, 3, 1
	copy(greeting[12:], "NULL")
	z.write(greeting)
	if _, err := io.ReadFull(c, make([]byte, 64)); err != nil {
		t.Fatal(err)
	}
	ready := []byte("\x05READY\x0bSocket-Type")
	ready = append(binary.BigEndian.AppendUint32(ready, uint32(len(kind))), kind...)
	z.write(frame(4, ready))
	return z
}

func (z zmtp) write(b []byte) {
	z.t.Helper()
	if _, err := z.Write(b); err != nil {
		z.t.Fatal(err)
	}
}

// frame makes a short frame; flags are 1 for more to come, 4 for a command.
func frame(flags byte, body []byte) []byte {
	return append([]byte{flags, byte(len(body))}, body...)
}

// held is a handler that waits in its first message.
type held struct {
	recorder
	in, out chan struct{}
	first   bool
}

func (h *held) Message(from Source, body []byte) {
	if !h.first {
		h.first = true
		close(h.in)
		<-h.out
	}
	routerRecorder{h.recorder}.Message(from, body)
}

func (h *held) Left(from Source) { routerRecorder{h.recorder}.Left(from) }

// With a limit to what libzmq may hold for us (ZMQ_RCVHWM), this ends the process in an assertion of libzmq 4.3: a connection that is
// reset while its input is stopped at that limit, with a PING among what was read already.
func TestPeerThatFloodsAndResetsWhileTheOwnerIsBusyDoesNoHarm(t *testing.T) {
	const messages = 20_000
	h := &held{recorder: newRecorder(), in: make(chan struct{}), out: make(chan struct{})}
	r, err := newTestLoop(t, Options{}).Listen(t.Context(), "127.0.0.1", 0, h)
	if err != nil {
		t.Fatal(err)
	}
	z := dialZMTP(t, hostPort(r))
	message := append(frame(1, nil), frame(0, []byte("flood"))...)
	z.write(message)
	<-h.in
	ping := frame(4, []byte("\x04PING\x00\x50"))
	z.write(bytes.Repeat(append(message, ping...), messages-1))
	if err := z.Conn.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	z.Close() // RST

	// Another peer comes by the same thread of libzmq, so that it has seen the reset by now.
	other := newRecorder()
	if _, err := newTestLoop(t, Options{}).Dial(t.Context(), hostPort(r), other); err != nil {
		t.Fatal(err)
	}
	other.next(t, "up")
	close(h.out)
	for {
		if e := <-h.c; e.what == "left" {
			break
		}
	}
}

// A peer that sends more than can be served is cut off before it fills the memory, and the others are served.
func TestPeerThatFloodsIsCutOff(t *testing.T) {
	var log logBuffer
	h := &held{recorder: newRecorder(), in: make(chan struct{}), out: make(chan struct{})}
	l := newTestLoop(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	r, err := l.Listen(t.Context(), "127.0.0.1", 0, h)
	if err != nil {
		t.Fatal(err)
	}
	z := dialZMTP(t, hostPort(r))
	message := append(frame(1, nil), frame(0, bytes.Repeat([]byte("x"), 200))...)
	z.write(message)
	<-h.in
	z.write(bytes.Repeat(message, 3*floodBytes/len(message))) // taken in by libzmq and the kernel
	close(h.out)
	if _, err := io.Copy(io.Discard, z); err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	got := 0
	for e := h.next(t, "message"); e.what == "message"; e = <-h.c {
		got++
	}
	if got > 2*floodCheck || r.Flooded() == 0 {
		t.Errorf("%d messages handled and %d dropped: want no more than %d handled", got, r.Flooded(), 2*floodCheck)
	}
	if !strings.Contains(log.String(), "peer=127.0.0.1") {
		t.Errorf("the log does not say who it was: %s", log.String())
	}
	s := connect(t, r)
	say(t, s, "", "hello")
	for e := range h.c {
		if e.body == "hello" {
			break
		}
	}
	eventually(t, "all is forgotten", func() (ok bool) {
		r.l.call(t.Context(), func() error { ok = len(r.floods) == 0; return nil })
		return ok
	})
}

// A message that never ends is counted by nobody else: libzmq's limits are of complete messages.
func TestPeerWhoseMessageNeverEndsIsCutOff(t *testing.T) {
	var log logBuffer
	h := newRecorder()
	l := newTestLoop(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	r, err := l.Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	other := connect(t, r)
	known := dialZMTP(t, hostPort(r)) // by a first message
	known.write(append(frame(1, nil), frame(0, []byte("hello"))...))
	h.next(t, "message")
	part := append(binary.BigEndian.AppendUint64([]byte{3}, 32<<10), make([]byte, 32<<10)...) // long, more to come
	for _, z := range []zmtp{known, dialZMTP(t, hostPort(r))} {
		z.SetWriteDeadline(time.Now().Add(patience))
		go io.Copy(io.Discard, z)
		sent := 0
		for err = nil; err == nil; sent += len(part) {
			_, err = z.Write(part)
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("not cut after %d bytes", sent)
		}
	}
	h.next(t, "left")
	if n := r.Flooded(); n != 2 {
		t.Errorf("%d counted, want the two", n)
	}
	if !strings.Contains(log.String(), "peer=127.0.0.1") {
		t.Errorf("the log does not say who it was: %s", log.String())
	}
	say(t, other, "", "still here")
	if e := h.next(t, "message"); e.body != "still here" {
		t.Errorf("%v", e)
	}
}

// Frames without bytes take two bytes of the wire and far more of memory. None of these connections has as much on its way as one may.
func TestPeersWhoseSmallFramesFillTheMemoryAreCutOff(t *testing.T) {
	h := newRecorder()
	l := newTestLoop(t, Options{swell: 32 << 20})
	r, err := l.Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	parts := bytes.Repeat(frame(1, nil), 64<<10)
	var cut sync.WaitGroup
	for range 8 {
		z := dialZMTP(t, hostPort(r))
		z.SetWriteDeadline(time.Now().Add(patience))
		go io.Copy(io.Discard, z)
		cut.Go(func() {
			var err error
			for range 60 { // 7.5 MiB
				if _, err = z.Write(parts); err != nil {
					break
				}
			}
			for err == nil {
				_, err = z.Write(frame(4, append([]byte("\x04PING"), 0, 0))) // what is no part of the message
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("not cut")
			}
		})
	}
	cut.Wait()
	other := connect(t, r)
	say(t, other, "", "still here")
	if e := h.next(t, "message"); e.body != "still here" {
		t.Errorf("%v", e)
	}
}

// A dealer asks for what it gets, but whom it asks may be anybody.
func TestADealersPeerThatFloodsLosesTheConnection(t *testing.T) {
	for name, flood := range map[string][]byte{
		"a message that never ends": append(binary.BigEndian.AppendUint64([]byte{3}, 32<<10), make([]byte, 32<<10)...),
		"frames without bytes":      bytes.Repeat(frame(1, nil), 16<<10),
	} {
		t.Run(name, func(t *testing.T) {
			ln, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			h := newRecorder()
			if _, err := newTestLoop(t, Options{MaxMessage: 1 << 20}).Dial(t.Context(), ln.Addr().String(), h); err != nil {
				t.Fatal(err)
			}
			c, err := ln.Accept()
			if err != nil {
				t.Fatal(err)
			}
			z := shakeHands(t, c, "ROUTER")
			h.next(t, "up")
			z.SetWriteDeadline(time.Now().Add(patience))
			go io.Copy(io.Discard, z)
			for err == nil {
				_, err = z.Write(flood)
			}
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal("not cut")
			}
			if e := h.next(t, "down"); !strings.Contains(e.err.Error(), "more than anybody asked for") {
				t.Errorf("down because of %v", e.err)
			}
		})
	}
}

// What is large, slow or in many parts, and ends, is no flood.
func TestManyLargeMessagesInPartsAreNoFlood(t *testing.T) {
	r, h := listen(t, Options{})
	z := dialZMTP(t, hostPort(r))
	part := append(binary.BigEndian.AppendUint64([]byte{3}, 32<<10), make([]byte, 32<<10)...)
	bad := append(append(bytes.Repeat(part, 64), frame(1, nil)...), frame(0, []byte("of 66 parts"))...)
	good := append(frame(1, nil), frame(0, []byte("good"))...)
	for range 20 { // 40 MiB in all
		z.write(bad)
		z.write(good)
		if e := h.next(t, "message"); e.body != "good" {
			t.Fatalf("%v", e)
		}
	}
	err := r.l.call(t.Context(), func() error {
		for fd, c := range r.conns {
			if c.cut || c.intake.flood(fd, 0) {
				return fmt.Errorf("of %+v more is said to be on its way", c.intake)
			}
		}
		return nil
	})
	if frames, _, _ := r.Dropped(); err != nil || frames != 20 || r.Flooded() != 0 {
		t.Errorf("%v; %d of wrong parts, %d floods", err, frames, r.Flooded())
	}
}

// Garbage at any point of a connection ends that connection.
func TestGarbageEndsItsConnectionOnly(t *testing.T) {
	r, h := listen(t, Options{})
	d, dealer := dial(t, Options{}, hostPort(r))
	dealer.next(t, "up")
	for _, garbage := range [][]byte{
		bytes.Repeat([]byte{0xff}, 1000),
		bytes.Repeat([]byte{0}, 1000),
		frame(4, []byte("\x04PING")),                                   // too short
		frame(4, []byte("\x09SUBSCRIBE")),                              // not for a ROUTER
		frame(6, bytes.Repeat([]byte{0x7f}, 8)),                        // a command of 2^63 bytes
		append([]byte{2}, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0), // a message of that size
	} {
		z := dialZMTP(t, hostPort(r))
		z.Write(append(garbage, make([]byte, 64)...))
		z.Close()
	}
	if err := d.Send([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	for {
		if e := <-h.c; e.body == "still here" {
			return
		}
	}
}
