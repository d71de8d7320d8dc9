package control

import (
	"encoding/binary"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

const beats = 20 // PINGs that a test waits for

// A consumer with vLLM's kind of heartbeats, idle: it must stay connected, and no PING may show up as a message.
func TestIdleLibzmqDealerWithHeartbeatsStaysConnectedToOurRouter(t *testing.T) {
	l, h := newTestLoop(t, Options{}), newRecorder()
	r, err := l.Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, hostPort(r))
	s := rawSocket(t, rawContext(t), zmq4.DEALER)
	s.SetHeartbeatIvl(20 * time.Millisecond)
	s.SetHeartbeatTimeout(2 * time.Second)
	s.SetHeartbeatTtl(4 * time.Second)
	if err := s.Connect("tcp://" + p.addr); err != nil {
		t.Fatal(err)
	}
	if _, err := s.SendMessage("", "one"); err != nil {
		t.Fatal(err)
	}
	one := h.next(t, "message")
	eventually(t, "PONGs from our router", func() bool { n, _ := p.count("from", "PONG"); return n >= beats })
	if _, err := s.SendMessage("", "two"); err != nil {
		t.Fatal(err)
	}
	two := h.next(t, "message")
	if one.from != two.from || two.body != "two" || p.connections() != 1 {
		t.Fatalf("%v, then %v, by %d connections: want the same one", one, two, p.connections())
	}
	if frames, _, _ := r.Dropped(); frames != 0 {
		t.Fatalf("%d frames dropped: a PING was taken for a message", frames)
	}
}

func TestIdleDealerOfOursStaysConnectedAndSendsHeartbeatsFromTheStart(t *testing.T) {
	s := rawSocket(t, rawContext(t), zmq4.ROUTER)
	if err := s.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	at, err := s.GetLastEndpoint()
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, at[len("tcp://"):])
	l, h := newTestLoop(t, Options{HeartbeatInterval: 20 * time.Millisecond}), newRecorder()
	d, err := l.Dial(t.Context(), p.addr, h)
	if err != nil {
		t.Fatal(err)
	}
	h.next(t, "up")
	eventually(t, "PINGs from our dealer, and answers", func() bool {
		pings, _ := p.count("to", "PING")
		pongs, _ := p.count("from", "PONG")
		return pings >= beats && pongs >= beats
	})
	checkTTL(t, p, "to")
	if err := d.Send([]byte("still here")); err != nil {
		t.Fatal(err)
	}
	m, err := s.RecvMessage(0)
	if err != nil || len(m) != 3 || m[2] != "still here" {
		t.Fatalf("got %q, %v: want [id, \"\", \"still here\"]", m, err)
	}
	if len(h.c) != 0 || p.connections() != 1 {
		t.Fatalf("%d events and %d connections: want none but the first", len(h.c), p.connections())
	}
}

func TestRouterSendsHeartbeatsOfItsOwn(t *testing.T) {
	l, h := newTestLoop(t, Options{HeartbeatInterval: 20 * time.Millisecond}), newRecorder()
	r, err := l.Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, hostPort(r))
	s := rawSocket(t, rawContext(t), zmq4.DEALER)
	if err := s.Connect("tcp://" + p.addr); err != nil {
		t.Fatal(err)
	}
	eventually(t, "PINGs from our router", func() bool { n, _ := p.count("from", "PING"); return n >= 2 })
	checkTTL(t, p, "from")
}

// checkTTL checks that the first PING asks for the default TTL, in tenths of a second.
func checkTTL(t *testing.T, p *proxy, way string) {
	t.Helper()
	_, rest := p.count(way, "PING")
	if len(rest) < 2 || binary.BigEndian.Uint16(rest) != 80 {
		t.Fatalf("PING is followed by % x: want a TTL of 80 tenths of a second", rest[:min(8, len(rest))])
	}
}

// The owner of an idle loop sleeps: neither heartbeats nor a timer wake it.
func TestIdleLoopDoesNotWake(t *testing.T) {
	opts := Options{HeartbeatInterval: 20 * time.Millisecond}
	server, client, h := newTestLoop(t, opts), newTestLoop(t, opts), newRecorder()
	r, err := server.Listen(t.Context(), "127.0.0.1", 0, routerRecorder{newRecorder()})
	if err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, hostPort(r))
	d, err := client.Dial(t.Context(), p.addr, h)
	if err != nil {
		t.Fatal(err)
	}
	h.next(t, "up")
	if err := d.Send([]byte("the last thing for a while")); err != nil {
		t.Fatal(err)
	}
	pings := func() int { n, _ := p.count("to", "PING"); return n }
	first := pings() + 3 // by then both have settled
	eventually(t, "PINGs", func() bool { return pings() >= first })
	before := sleeps(server) + sleeps(client)
	eventually(t, "more PINGs", func() bool { return pings() >= first+beats })
	// What a busy machine delays may wake them a few times; what each PING or PONG wakes, beats times at least.
	if after := sleeps(server) + sleeps(client); after-before > beats/2 {
		t.Fatalf("the owners slept and woke %d times while %d PINGs passed: want a few at most", after-before, beats)
	}
}

// sleeps is how often the owner went to sleep.
func sleeps(l *Loop) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sleeps
}
