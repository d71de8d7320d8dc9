package tcp

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// impostor is a listener that greets well and then does what serve says with each connection.
func impostor(t *testing.T, serve func(c net.Conn)) (metadata []byte) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				if _, err := io.ReadFull(c, make([]byte, headerBytes+helloBytes)); err != nil {
					return
				}
				if _, err := c.Write(header{kind: kindWelcome}.append(nil)); err != nil {
					return
				}
				serve(c)
			}()
		}
	}()
	at := l.Addr().(*net.TCPAddr)
	return location{host: "127.0.0.1", port: uint16(at.Port), length: 1 << 30}.encode()
}

func TestAPeerThatMisbehavesFailsTheRead(t *testing.T) {
	const n = 1 << 20
	ask := func(c net.Conn) { _, _ = io.ReadFull(c, make([]byte, headerBytes+requestBytes+spanBytes)) }
	hang := func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }
	data := func(c net.Conn, length int64, bytes int) {
		_, _ = c.Write(append(header{kind: kindData, length: length}.append(nil), make([]byte, bytes)...))
	}
	for name, serve := range map[string]func(c net.Conn){
		"says nothing":      hang,
		"closes":            func(net.Conn) {},
		"closes when asked": ask,
		"stops in between":  func(c net.Conn) { ask(c); data(c, n, n/2); hang(c) },
		"closes in between": func(c net.Conn) { ask(c); data(c, n, n/2) },
		"sends too few":     func(c net.Conn) { ask(c); data(c, n-1, n-1); hang(c) },
		"sends too many":    func(c net.Conn) { ask(c); data(c, n+1, n+1); hang(c) },
		"sends garbage":     func(c net.Conn) { ask(c); _, _ = c.Write(make([]byte, 100)); hang(c) },
		"answers other":     func(c net.Conn) { ask(c); _, _ = c.Write(header{kind: kindDone}.append(nil)); hang(c) },
		"refuses at length": func(c net.Conn) {
			ask(c)
			_, _ = c.Write(header{kind: kindData, status: 9, length: 1 << 40}.append(nil))
			hang(c)
		},
		"never commits":    func(c net.Conn) { ask(c); data(c, n, n); hang(c) },
		"closes at commit": func(c net.Conn) { ask(c); data(c, n, n); ask(c) },
		"sends after commit": func(c net.Conn) {
			ask(c)
			data(c, n, n)
			_, _ = c.Write(header{kind: kindDone, length: 5}.append(nil))
			hang(c)
		},
	} {
		t.Run(name, func(t *testing.T) {
			consumer := newPlane(t, Options{ProgressTimeout: 300 * time.Millisecond})
			defer consumer.Close()
			p, err := consumer.AddPeer(t.Context(), impostor(t, serve))
			if err != nil {
				t.Fatal(err)
			}
			err = outcome(t, p, transfer.ReadRequest{Token: make([]byte, tokenBytes), Remote: []region.Span{{Length: n}}, Local: [][]byte{make([]byte, n)}})
			if !errors.Is(err, transfer.ErrPeerLost) {
				t.Errorf("READ: %v", err)
			}
		})
	}
}

func TestCancelEndsAReadOfAFrozenPeer(t *testing.T) {
	consumer := newPlane(t, Options{ProgressTimeout: time.Hour})
	defer consumer.Close()
	asked := make(chan struct{}, 10)
	p, err := consumer.AddPeer(t.Context(), impostor(t, func(c net.Conn) {
		_, _ = io.ReadFull(c, make([]byte, headerBytes))
		asked <- struct{}{}
		_, _ = io.Copy(io.Discard, c)
	}))
	if err != nil {
		t.Fatal(err)
	}
	const n = 20 << 20
	post := func() transfer.Read {
		rd, err := p.Read(t.Context(), transfer.ReadRequest{Token: make([]byte, tokenBytes), Remote: []region.Span{{Length: n}}, Local: [][]byte{make([]byte, n)}})
		if err != nil {
			t.Fatal(err)
		}
		return rd
	}
	first := post()
	<-asked
	queued := post() // all connections are taken
	queued.Cancel()
	if err := ended(t, queued); !errors.Is(err, transfer.ErrCanceled) {
		t.Errorf("queued READ: %v", err)
	}
	first.Cancel()
	if err := ended(t, first); !errors.Is(err, transfer.ErrCanceled) {
		t.Errorf("READ: %v", err)
	}
}

func TestAReadWaitsForAConnectionOnlySoLong(t *testing.T) {
	consumer := newPlane(t, Options{ProgressTimeout: time.Hour, QueueTimeout: 50 * time.Millisecond, Streams: 1})
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), impostor(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }))
	if err != nil {
		t.Fatal(err)
	}
	r := transfer.ReadRequest{Token: make([]byte, tokenBytes), Remote: []region.Span{{Length: 10}}, Local: [][]byte{make([]byte, 10)}}
	rd, err := p.Read(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	transfertest.Eventually(t, "the first READ to take the connection", func() bool { return len(p.(*peer).slots) == 1 })
	if err := outcome(t, p, r); !errors.Is(err, transfer.ErrPeerLost) {
		t.Errorf("the second READ: %v", err)
	}
	rd.Cancel()
}

// restart replaces f's plane by a new one on the same port, with the same memory.
func (f *offer) restart(t *testing.T) {
	t.Helper()
	at := f.Addr()
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	f.Plane = newPlane(t, Options{Port: int(at.Port())})
	t.Cleanup(func() { _ = f.Close() })
	var err error
	if f.reg, err = f.Register(t.Context(), f.memory, nil); err != nil {
		t.Fatal(err)
	}
	if f.token, err = f.reg.Grant("all", f.whole()); err != nil {
		t.Fatal(err)
	}
}

func TestARestartedPeerIsLostUntilAddedAnew(t *testing.T) {
	f := newOffer(t, Options{}, 20<<20)
	consumer := newPlane(t, Options{})
	defer consumer.Close()
	stale := f.reg.Metadata()
	p, err := consumer.AddPeer(t.Context(), stale)
	if err != nil {
		t.Fatal(err)
	}
	r := transfer.ReadRequest{Token: f.token, Remote: f.whole(), Local: [][]byte{make([]byte, 20<<20)}}
	if err := outcome(t, p, r); err != nil {
		t.Fatal(err)
	}
	f.restart(t)
	before := consumer.Stats().Dials
	for range 20 {
		if err := outcome(t, p, r); !errors.Is(err, transfer.ErrPeerLost) {
			t.Fatalf("READ of a restarted peer: %v", err)
		}
	}
	if n := consumer.Stats().Dials - before; n > 6 {
		t.Errorf("%d attempts to connect for 20 READs: no back-off", n)
	}
	if _, err := consumer.AddPeer(t.Context(), stale); !errors.Is(err, transfer.ErrUnreachable) {
		t.Errorf("adding it by stale metadata: %v", err)
	}
	if err := readAll(t, f, newPlane(t, Options{})); err != nil {
		t.Errorf("adding it anew: %v", err)
	}
}

func TestAConnectionThatDiedWhileIdleIsReplaced(t *testing.T) {
	f := newOffer(t, Options{}, 20<<20)
	consumer := newPlane(t, Options{})
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), f.reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	r := transfer.ReadRequest{Token: f.token, Remote: f.whole(), Local: [][]byte{make([]byte, 20<<20)}}
	for range 3 {
		if err := outcome(t, p, r); err != nil {
			t.Fatal(err)
		}
		f.Plane.mu.Lock()
		for c := range f.conns {
			abort(c.tcp)
		}
		f.Plane.mu.Unlock()
		transfertest.Eventually(t, "the server to forget them", func() bool { return f.Stats().Conns == 0 })
	}
	if err := outcome(t, p, r); err != nil {
		t.Fatal(err)
	}
}

func TestAddingAndClosingAPeerAThousandTimesLeaksNothing(t *testing.T) {
	f := newOffer(t, Options{}, 4096)
	consumer := newPlane(t, Options{})
	defer consumer.Close()
	fds := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	before, most := fds(), 0
	dst := make([]byte, 4096)
	for i := range 1000 {
		p, err := consumer.AddPeer(t.Context(), f.reg.Metadata())
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		if i%10 == 0 {
			if err := outcome(t, p, transfer.ReadRequest{Token: f.token, Remote: f.whole(), Local: [][]byte{dst}}); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		most = max(most, fds())
	}
	if most > before+64 {
		t.Errorf("%d descriptors at most, %d before", most, before)
	}
	transfertest.Eventually(t, "the connections to be gone", func() bool { return f.Stats().Conns == 0 && fds() <= before })
}

func TestConnectionsToAPeerStayWarmAndFew(t *testing.T) {
	f := newOffer(t, Options{}, 32<<20)
	consumer := newPlane(t, Options{Streams: 3})
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), f.reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []int64{10, 32 << 20, 1 << 20, 32 << 20, 5 << 20} {
		r := transfer.ReadRequest{Token: f.token, Remote: []region.Span{{Length: n}}, Local: [][]byte{make([]byte, n)}}
		if err := outcome(t, p, r); err != nil {
			t.Fatal(err)
		}
	}
	if n := consumer.Stats().Dials; n > 3 {
		t.Errorf("%d connections were made, 3 are the limit", n)
	}
}

func TestARefusedReadKeepsItsConnection(t *testing.T) {
	f := newOffer(t, Options{}, 4096)
	consumer := newPlane(t, Options{})
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), f.reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		r := transfer.ReadRequest{Token: make([]byte, tokenBytes), Remote: f.whole(), Local: [][]byte{make([]byte, 4096)}}
		if err := outcome(t, p, r); !errors.Is(err, transfer.ErrDenied) {
			t.Errorf("READ: %v", err)
		}
	}
	if n := consumer.Stats().Dials; n != 1 {
		t.Errorf("%d connections were made", n)
	}
	if s := f.Stats(); s.Denied != 5 {
		t.Errorf("stats %+v", s)
	}
}

func TestAHostThatIsNotAllowedIsNotDialled(t *testing.T) {
	f := newOffer(t, Options{}, 4096)
	var asked []string
	consumer := newPlane(t, Options{AllowHost: func(host string) error {
		asked = append(asked, host)
		return errors.New("not on the list")
	}})
	defer consumer.Close()
	if _, err := consumer.AddPeer(t.Context(), f.reg.Metadata()); !errors.Is(err, transfer.ErrUnreachable) {
		t.Errorf("add peer: %v", err)
	}
	if !slices.Equal(asked, []string{"127.0.0.1"}) || consumer.Stats().Dials != 0 {
		t.Errorf("asked %q, stats %+v", asked, consumer.Stats())
	}
}

func TestAnAddressWhereNobodyListensIsUnreachable(t *testing.T) {
	consumer := newPlane(t, Options{})
	free := newPlane(t, Options{})
	at := free.Addr()
	_ = free.Close()
	defer consumer.Close()
	l := location{host: netip.MustParseAddr("127.0.0.1").String(), port: at.Port(), length: 1}
	if _, err := consumer.AddPeer(t.Context(), l.encode()); !errors.Is(err, transfer.ErrUnreachable) {
		t.Errorf("add peer: %v", err)
	}
}
