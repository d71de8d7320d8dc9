package tcp

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// offer is a plane with registered memory, and one grant of all of it.
type offer struct {
	*Plane
	memory transfer.Memory
	reg    transfer.Registration
	token  []byte
}

func newOffer(t *testing.T, o Options, n int) *offer {
	t.Helper()
	f := &offer{Plane: newPlane(t, o)}
	m, free := transfertest.NewMemory(t, transfertest.Dir(t), n)
	f.memory = m
	var err error
	if f.reg, err = f.Register(t.Context(), m, nil); err != nil {
		t.Fatal(err)
	}
	if f.token, err = f.reg.Grant("all", f.whole()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.Close()
		free()
	})
	return f
}

func (f *offer) whole() []region.Span { return []region.Span{{Length: int64(len(f.memory.Bytes))}} }

// dialRaw connects as a stranger would.
func (f *offer) dialRaw(t *testing.T) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", f.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(transfertest.Patience)); err != nil {
		t.Fatal(err)
	}
	return c
}

// hello is the greeting for f's registration.
func (f *offer) hello(t *testing.T) []byte {
	t.Helper()
	l, err := decodeLocation(f.reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	return l.id.append(header{kind: kindHello, length: helloBytes}.append(nil))
}

func TestGarbageOnThePortIsDroppedAndCounted(t *testing.T) {
	f := newOffer(t, Options{DialTimeout: 200 * time.Millisecond}, 4096)
	hello := f.hello(t)
	request := request{spans: []region.Span{{Length: 10}}}
	long := header{kind: kindRead, length: maxBody + 1}.append(nil)
	cases := map[string][]byte{
		"HTTP":              []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
		"TLS":               append([]byte{0x16, 3, 1, 2, 0, 1}, make([]byte, 300)...),
		"half a header":     hello[:7],
		"half a hello":      hello[:headerBytes+3],
		"a huge hello":      header{kind: kindHello, length: 1 << 62}.append(nil),
		"a negative length": header{kind: kindHello, length: -1}.append(nil),
		"a read at first":   request.append(kindRead, nil),
		"a second hello":    append(bytes.Clone(hello), hello...),
		"unknown kind":      append(bytes.Clone(hello), header{kind: 77}.append(nil)...),
		"a long body":       append(bytes.Clone(hello), long...),
		"odd spans":         append(append(bytes.Clone(hello), header{kind: kindRead, length: requestBytes + 3}.append(nil)...), make([]byte, requestBytes+3)...),
		"a short request":   append(append(bytes.Clone(hello), header{kind: kindCommit, length: 3}.append(nil)...), 1, 2, 3),
		"a long message":    request4k(hello),
	}
	for name, b := range cases {
		before := f.Stats().Garbage
		c := f.dialRaw(t)
		if _, err := c.Write(b); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := io.Copy(io.Discard, c); err != nil && !broken(err) {
			t.Errorf("%s: the connection was kept: %v", name, err)
		}
		transfertest.Eventually(t, name+" to be counted", func() bool { return f.Stats().Garbage == before+1 })
	}
	transfertest.Eventually(t, "the connections to be gone", func() bool { return f.Stats().Conns == 0 })
	if got := readAll(t, f, newPlane(t, Options{})); got != nil {
		t.Errorf("a READ after all that: %v", got)
	}
}

func request4k(hello []byte) []byte {
	return request{message: make([]byte, transfer.MaxNotification+1)}.append(kindCommit, bytes.Clone(hello))
}

// readAll READs the whole of f by consumer, which it closes.
func readAll(t *testing.T, f *offer, consumer *Plane) error {
	t.Helper()
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), f.reg.Metadata())
	if err != nil {
		return err
	}
	defer p.Close()
	dst := make([]byte, len(f.memory.Bytes))
	if err := outcome(t, p, transfer.ReadRequest{Token: f.token, Remote: f.whole(), Local: [][]byte{dst}}); err != nil {
		return err
	}
	if !bytes.Equal(dst, f.memory.Bytes) {
		t.Error("wrong bytes")
	}
	return nil
}

// outcome does a READ.
func outcome(t *testing.T, p transfer.Peer, r transfer.ReadRequest) error {
	t.Helper()
	rd, err := p.Read(t.Context(), r)
	if err != nil {
		return err
	}
	return ended(t, rd)
}

func ended(t *testing.T, rd transfer.Read) error {
	t.Helper()
	select {
	case <-rd.Done():
		return rd.Err()
	case <-time.After(transfertest.Patience):
		t.Fatal("the READ did not end")
		return nil
	}
}

func TestAnotherVersionIsToldOurs(t *testing.T) {
	f := newOffer(t, Options{}, 4096)
	c := f.dialRaw(t)
	hello := f.hello(t)
	hello[4]++
	if _, err := c.Write(hello); err != nil {
		t.Fatal(err)
	}
	h, err := readHeader(c)
	if err != nil || h.kind != kindWelcome || h.status != statusBadRequest {
		t.Fatalf("answer %+v, %v", h, err)
	}
	text, err := io.ReadAll(io.LimitReader(c, h.length))
	if err != nil || !strings.Contains(string(text), "version 1") {
		t.Errorf("text %q, %v", text, err)
	}
}

func TestConnectionsAreLimitedBySourceAndInAll(t *testing.T) {
	for _, o := range []Options{{MaxConns: 3}, {MaxConnsSource: 3}} {
		f := newOffer(t, o, 4096)
		for range 3 {
			c := f.dialRaw(t)
			if _, err := c.Write(f.hello(t)); err != nil {
				t.Fatal(err)
			}
			if _, err := readHeader(c); err != nil {
				t.Fatalf("a connection below the limit: %v", err)
			}
		}
		c, err := net.DialTimeout("tcp", f.Addr().String(), transfertest.Patience)
		if err == nil { // else it was reset before the dialling was over
			_, err = io.ReadAll(c)
			_ = c.Close()
		}
		if err != nil && !broken(err) {
			t.Errorf("a connection over the limit: %v", err)
		}
		if s := f.Stats(); s.Refused != 1 || s.Conns != 3 {
			t.Errorf("%+v: stats %+v", o, s)
		}
	}
}

// stalledReader asks for all of f and takes none of it.
func stalledReader(t *testing.T, f *offer) net.Conn {
	t.Helper()
	c := f.dialRaw(t)
	b := request{token: token(f.token), readID: 1, spans: f.whole()}.append(kindRead, f.hello(t))
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	if _, err := readHeader(c); err != nil { // welcome
		t.Fatal(err)
	}
	if h, err := readHeader(c); err != nil || h.status != statusOK {
		t.Fatalf("%+v %v", h, err)
	}
	return c
}

func TestAReaderThatTakesNothingIsDropped(t *testing.T) {
	f := newOffer(t, Options{ProgressTimeout: 300 * time.Millisecond}, 64<<20)
	stalledReader(t, f)
	transfertest.Eventually(t, "the connection to be dropped", func() bool { return f.Stats().Conns == 0 })
}

func TestRevokeDoesNotWaitForAReaderThatTakesNothing(t *testing.T) {
	for _, withFile := range []bool{true, false} {
		f := newOffer(t, Options{ProgressTimeout: time.Hour}, 64<<20)
		if !withFile {
			mem := make([]byte, 64<<20)
			reg, err := f.Register(t.Context(), transfer.Memory{Bytes: mem}, nil)
			if err != nil {
				t.Fatal(err)
			}
			f.reg, f.memory = reg, transfer.Memory{Bytes: mem}
			if f.token, err = reg.Grant("all", f.whole()); err != nil {
				t.Fatal(err)
			}
		}
		c := stalledReader(t, f)
		f.reg.Revoke("all") // the test's own timeout is the assertion
		n, err := io.Copy(io.Discard, c)
		if n >= int64(len(f.memory.Bytes)) || err == nil {
			t.Errorf("the reader got %d bytes after Revoke, and %v", n, err)
		}
		if s := f.Stats(); s.Aborted != 1 {
			t.Errorf("stats %+v", s)
		}
	}
}

func TestAFileThatWasCutShortFailsTheRead(t *testing.T) {
	f := newOffer(t, Options{}, 32<<20)
	if err := os.Truncate(f.memory.Path, 8<<20); err != nil {
		t.Fatal(err)
	}
	consumer := newPlane(t, Options{})
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), f.reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	err = outcome(t, p, transfer.ReadRequest{Token: f.token, Remote: f.whole(), Local: [][]byte{make([]byte, 32<<20)}})
	if !errors.Is(err, transfer.ErrPeerLost) {
		t.Errorf("READ: %v", err)
	}
}

func TestOneNotificationMayRevokeItsGrant(t *testing.T) {
	f := newOffer(t, Options{}, 4096)
	m, free := transfertest.NewMemory(t, transfertest.Dir(t), 20<<20)
	t.Cleanup(free)
	var reg transfer.Registration
	revoked := make(chan string, 1)
	reg, err := f.Register(t.Context(), m, func(n transfer.Notification) {
		reg.Revoke(n.Grant)
		revoked <- n.Grant
	})
	if err != nil {
		t.Fatal(err)
	}
	consumer := newPlane(t, Options{})
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	dst := make([]byte, len(m.Bytes))
	for range 3 {
		token, err := reg.Grant("g", []region.Span{{Length: int64(len(dst))}})
		if err != nil {
			t.Fatal(err)
		}
		if err := outcome(t, p, transfer.ReadRequest{Token: token, Remote: []region.Span{{Length: int64(len(dst))}}, Local: [][]byte{dst}}); err != nil {
			t.Fatal(err)
		}
		if g := <-revoked; g != "g" {
			t.Errorf("notified of %q", g)
		}
	}
	if s := f.Stats(); s.Aborted != 0 {
		t.Errorf("Revoke of READs that were complete reset %d connections", s.Aborted)
	}
}

func TestAWildcardAddressIsNotAdvertised(t *testing.T) {
	for _, host := range []string{"0.0.0.0", "::"} {
		if p, err := New(t.Context(), Options{Host: host}); !errors.Is(err, transfer.ErrBadRequest) {
			_ = p.Close()
			t.Errorf("%s: %v", host, err)
		}
	}
	p := newPlane(t, Options{Host: "0.0.0.0", Advertise: "127.0.0.1"})
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Errorf("closing again: %v", err)
	}
}

func TestTheDeathOfTheListenerIsSeen(t *testing.T) {
	p := newPlane(t, Options{})
	select {
	case <-p.Done():
		t.Fatal("done, and nothing has happened")
	default:
	}
	raw, err := p.listener.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if err := raw.Control(func(fd uintptr) { err = unix.Shutdown(int(fd), unix.SHUT_RDWR) }); err != nil {
		t.Fatal(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	case <-time.After(20 * time.Second):
		t.Error("still said to listen")
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}
