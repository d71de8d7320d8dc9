package stage

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/wire"
)

// goldenMemory offers what the peers' own producer offered.
type goldenMemory struct {
	*fakeMemory
	golden *wire.Metadata
}

func (m goldenMemory) Offer(ctx context.Context, grant string, ask *wire.FerryRequest, md *wire.Metadata) error {
	err := m.fakeMemory.Offer(ctx, grant, ask, md)
	md.AgentMetadata, md.Groups = m.golden.AgentMetadata, m.golden.Groups
	return err
}

func TestPlainReadersAreAnsweredByteForByteAsByThePeers(t *testing.T) {
	g := readGolden[struct {
		Exchange map[string][]struct {
			Request hexBytes `json:"request_hex"`
			Reply   hexBytes `json:"reply_hex"`
		} `json:"exchange"`
	}](t)
	if len(g.Exchange) != 8 {
		t.Fatalf("%d exchanges", len(g.Exchange))
	}
	st, s := serve(t, Options{}, ServerOptions{})
	for name, c := range g.Exchange {
		golden, err := wire.DecodeMetadata(c[0].Reply)
		if err != nil {
			t.Fatal(name, err)
		}
		q, err := wire.DecodeRequest(c[0].Request)
		if err != nil {
			t.Fatal(name, err)
		}
		memory := goldenMemory{newMemory(t), golden}
		md := wire.Metadata{Kind: golden.Kind, Specs: golden.Specs, Size: golden.Size, SenderHost: golden.SenderHost, SenderPort: golden.SenderPort,
			Ferry: &wire.FerryMetadata{Top: wire.TopList}}
		generation, err := st.Put(Put{Key: q.Key, Metadata: md, Memory: memory})
		if err != nil {
			t.Fatal(name, err)
		}
		now := func(b []byte) []byte {
			return bytes.ReplaceAll(b, []byte(golden.Generation.String()), []byte(generation.String()))
		}
		for i, x := range c {
			got := exchange(t, newPlain(t, s).s, now(x.Request))
			if len(got) != 1 || !bytes.Equal(got[0], now(x.Reply)) {
				t.Errorf("%s, message %d: %x, want %x", name, i, got, now(x.Reply))
			}
		}
		eventually(t, "released after the done", memory.isReleased)
	}
}

func TestProbesAreAnsweredAsByThePeers(t *testing.T) {
	g := readGolden[struct {
		Probes []struct {
			Name   string          `json:"name"`
			Socket string          `json:"socket"`
			Frames []hexBytes      `json:"frames_hex"`
			Reply  json.RawMessage `json:"reply"`
		} `json:"router_probes"`
	}](t)
	if len(g.Probes) < 17 {
		t.Fatalf("%d probes", len(g.Probes))
	}
	st, s := serve(t, Options{}, ServerOptions{})
	put(t, st, "probe")
	for _, p := range g.Probes {
		kind := zmq4.REQ
		if p.Socket == "DEALER" {
			kind = zmq4.DEALER
		}
		var want []string
		if json.Unmarshal(p.Reply, &want) != nil { // "no reply (..)"
			want = nil
		}
		if p.Name == "dealer_wrong_delimiter" { // the peers do not look at it
			want = nil
		}
		sock := rawSocket(t, kind, address(s))
		if want == nil {
			if err := sock.SetRcvtimeo(silence); err != nil {
				t.Fatal(err)
			}
		}
		frames := make([][]byte, len(p.Frames))
		for i, f := range p.Frames {
			frames[i] = f
		}
		var got []string
		for _, f := range exchange(t, sock, frames...) {
			got = append(got, string(f))
		}
		if p.Name == "get_meta_ok_int_claim" {
			if a, err := wire.DecodeReply([]byte(got[0])); err != nil || a.Status != wire.Found || a.Metadata.Claim.String() != "5" {
				t.Errorf("%s: %+v, %v", p.Name, a, err)
			}
			continue
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", p.Name, got, want)
		}
	}
	if got := s.Stats().Malformed; got < 4 {
		t.Errorf("%d malformed requests were counted", got)
	}
}

func TestAPlainClaimOutlivesItsConnection(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	c := claimOf("k", g, "c")
	for range 3 { // as a consumer whose socket timed out asks again
		p := newPlain(t, s)
		if a := p.ask(wire.Get, c); a.Status != wire.Found || a.Metadata.Claim != c.ID || a.Metadata.Ferry != nil {
			t.Fatalf("%+v", a)
		}
		if err := p.s.Disconnect("tcp://" + address(s)); err != nil {
			t.Fatal(err)
		}
	}
	if st := st.Stats(); st.Claims != 1 || st.Granted != 1 {
		t.Errorf("%+v", st)
	}
	if a := newPlain(t, s).ask(wire.Done, c); a.Status != wire.Acked {
		t.Errorf("%+v", a)
	}
	eventually(t, "released", m.isReleased)
}

func TestAnOwnClaimEndsWithItsConnection(t *testing.T) {
	for name, dial := range map[string]func(testing.TB, *Server) *own{"tcp": newOwn, "local": newLocal} {
		t.Run(name, func(t *testing.T) {
			st, s := serve(t, Options{}, ServerOptions{})
			m, g := put(t, st, "k")
			o := dial(t, s)
			a := o.ask(wire.Get, claimOf("k", g, "c"), wire.FerryRequest{Try: 3})
			if a.Status != wire.Found || a.Try != 3 || a.Metadata.Ferry.Node != "producer" || a.Metadata.Ferry.LeaseMS != DefaultTransfer.Milliseconds() ||
				a.Metadata.Ferry.Top != wire.TopList || (a.Metadata.Ferry.Local == s.Local()) != (name == "tcp") {
				t.Fatalf("%+v %+v", a, a.Metadata.Ferry)
			}
			if err := o.close(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the claim lapses", func() bool { return st.Stats().Lapsed == 1 })
			if m.isReleased() {
				t.Error("a payload that nobody has read was released")
			}
			if a := dial(t, s).ask(wire.Get, claimOf("k", g, "another"), wire.FerryRequest{}); a.Status != wire.Found {
				t.Errorf("%+v", a)
			}
		})
	}
}

func TestNobodyElseCanUseOrEndAnOwnClaim(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	o, thief := newOwn(t, s), newOwn(t, s)
	c := claimOf("k", g, "c")
	if a := o.ask(wire.Get, c, wire.FerryRequest{}); a.Status != wire.Found {
		t.Fatalf("%+v", a)
	}
	for op, want := range map[wire.Op]wire.Status{wire.Get: wire.NotFound, wire.Done: wire.Acked, wire.Verify: wire.NotFound, wire.Fail: wire.Lost} {
		if a := thief.ask(op, c, wire.FerryRequest{}); a.Status != want {
			t.Errorf("op %d of another connection: %v", op, a.Status)
		}
	}
	for op, want := range map[wire.Op]wire.Status{wire.Get: wire.NotFound, wire.Done: wire.Acked, wire.Verify: wire.NotFound, wire.Fail: wire.NotFound} {
		if a := newPlain(t, s).ask(op, c); a.Status != want {
			t.Errorf("op %d of a plain peer: %v", op, a.Status)
		}
	}
	if m.isReleased() || st.Stats().Claims != 1 {
		t.Fatalf("%+v", st.Stats())
	}
	if a := o.ask(wire.Verify, c, wire.FerryRequest{Try: 8}); a.Status != wire.Held || a.Try != 8 {
		t.Errorf("%+v", a)
	}
	eventually(t, "released", m.isReleased)
	if n := s.Stats().Lost; n != 0 {
		t.Errorf("%d verifies lost", n)
	}
}

// The answer to a verify is lost if the connection is: the reader asks again by another one.
func TestAVerifyIsRepeatedOverAnotherConnection(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	o, later := newOwn(t, s), newOwn(t, s)
	c := claimOf("k", g, "c")
	o.ask(wire.Get, c, wire.FerryRequest{})
	if a := later.ask(wire.Verify, c, wire.FerryRequest{}); a.Status != wire.NotFound {
		t.Errorf("while the first connection has the claim: %v", a.Status)
	}
	for _, on := range []*own{o, later, later} {
		if a := on.ask(wire.Verify, c, wire.FerryRequest{}); a.Status != wire.Held {
			t.Errorf("%v", a.Status)
		}
	}
	eventually(t, "released", m.isReleased)
	for _, other := range []Claim{claimOf("k", g, "another"), claimOf("k", wire.NewID(), "c")} {
		if a := later.ask(wire.Verify, other, wire.FerryRequest{}); a.Status != wire.Lost {
			t.Errorf("%+v: %v", other, a.Status)
		}
	}
	if n := st.Stats().Done; n != 1 {
		t.Errorf("%d claims done", n)
	}
	if err := o.close(); err != nil {
		t.Error(err)
	}

	// A connection that is lost before the verify came ends the claim: the payload is still there.
	m, g = put(t, st, "k2")
	o = newOwn(t, s)
	c = claimOf("k2", g, "c")
	o.ask(wire.Get, c, wire.FerryRequest{})
	if err := o.close(); err != nil {
		t.Error(err)
	}
	eventually(t, "the claim is lost", func() bool { return later.ask(wire.Verify, c, wire.FerryRequest{}).Status == wire.Lost })
	if m.isReleased() {
		t.Error("released")
	}
}

func TestADoneThatNamesNoClaimChangesNothing(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	p := newPlain(t, s)
	if a := p.ask(wire.Get, claimOf("k", g, "c")); a.Status != wire.Found {
		t.Fatalf("%+v", a)
	}
	for _, c := range []Claim{claimOf("k", g, "other"), claimOf("k", wire.NewID(), "c"), claimOf("k", wire.ID{}, "c"), claimOf("z", g, "c"), {Key: "k", Generation: g}} {
		if a := p.ask(wire.Done, c); a.Status != wire.Acked {
			t.Errorf("%+v: %+v", c, a)
		}
	}
	if m.isReleased() || st.Stats().Done != 0 {
		t.Errorf("%+v", st.Stats())
	}
}

func TestAFailedGetGivesThePayloadBack(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	o := newOwn(t, s)
	for _, id := range []string{"1", "2", "3"} {
		if a := o.ask(wire.Get, claimOf("k", g, id), wire.FerryRequest{}); a.Status != wire.Found {
			t.Fatalf("%+v", a)
		}
		if a := o.ask(wire.Fail, claimOf("k", g, id), wire.FerryRequest{Reason: "cut"}); a.Status != wire.Held {
			t.Fatalf("%+v", a)
		}
	}
	if m.isReleased() || st.Stats().Failed != 3 || s.Stats().Fails != 3 {
		t.Errorf("%+v %+v", st.Stats(), s.Stats())
	}
}

func TestAVerifyAfterTheClaimsTimeIsLost(t *testing.T) {
	st, s := serve(t, Options{Transfer: time.Millisecond, Margin: time.Millisecond}, ServerOptions{})
	_, g := put(t, st, "k")
	o := newOwn(t, s)
	c := claimOf("k", g, "c")
	o.ask(wire.Get, c, wire.FerryRequest{})
	eventually(t, "the claim lapses", func() bool { return st.Stats().Lapsed == 1 })
	if a := o.ask(wire.Verify, c, wire.FerryRequest{}); a.Status != wire.Lost {
		t.Errorf("%+v", a)
	}
}

func TestAProducersFailureIsToldWithItsReason(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	st.Abort("k", "no memory"+string([]byte{0xff}))
	st.Abort("long", string(bytes.Repeat([]byte("é"), wire.MaxReason)))
	o := newOwn(t, s)
	if a := o.ask(wire.Get, claimOf("k", wire.ID{}, "c"), wire.FerryRequest{}); a.Status != wire.Failed || a.Reason != "no memory" {
		t.Errorf("%+v", a)
	}
	if a := o.ask(wire.Get, claimOf("long", wire.ID{}, "c"), wire.FerryRequest{}); a.Status != wire.Failed || len(a.Reason) != wire.MaxReason {
		t.Errorf("%v, %d bytes", a.Status, len(a.Reason))
	}
	if a := newPlain(t, s).ask(wire.Get, claimOf("k", wire.ID{}, "c")); a.Status != wire.NotFound {
		t.Errorf("%+v", a)
	}
	m, _ := put(t, st, "refused")
	m.refuse = errors.New("no plane")
	if a := o.ask(wire.Get, claimOf("refused", wire.ID{}, "c"), wire.FerryRequest{}); a.Status != wire.Failed || a.Reason != "no plane" {
		t.Errorf("%+v", a)
	}
	if st.Stats().Claims != 0 {
		t.Error("a claim without an answer stays")
	}
}

func TestAClosingProducerSaysSo(t *testing.T) {
	st, err := NewStore(Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := Serve(t.Context(), ServerOptions{Loop: newLoop(t), Store: st, Host: "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	_, g := put(t, st, "k")
	o := newOwn(t, s)
	c := claimOf("k", g, "c")
	o.ask(wire.Get, c, wire.FerryRequest{})
	closed := make(chan error)
	go func() { closed <- errors.Join(st.Close(context.Background(), patience), s.Close()) }()
	eventually(t, "closing", func() bool { return !st.Healthy() })
	for _, c := range []Claim{claimOf("k", g, "2"), claimOf("z", wire.ID{}, "2")} {
		if a := o.ask(wire.Get, c, wire.FerryRequest{WaitMS: 10_000}); a.Status != wire.Closing {
			t.Errorf("%+v", a)
		}
	}
	if a := newPlain(t, s).ask(wire.Get, claimOf("k", g, "3")); a.Status != wire.NotFound {
		t.Errorf("%+v", a)
	}
	// The last answer gets away, although the store has nothing more to wait for.
	if a := o.ask(wire.Verify, c, wire.FerryRequest{}); a.Status != wire.Held {
		t.Errorf("%+v", a)
	}
	if err := receive(t, closed); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Error("closed again:", err)
	}
}

func TestAClaimWhoseAnswerCannotLeaveEnds(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	m.entered, m.blocked = make(chan struct{}, 8), make(chan struct{})
	c := claimOf("k", g, "c")
	gone := newPlain(t, s)
	if _, err := gone.s.SendBytes(wire.AppendRequest(nil, &wire.Request{Op: wire.Get, Key: "k", Generation: g, Claim: c.ID}), 0); err != nil {
		t.Fatal(err)
	}
	receive(t, m.entered)
	if err := gone.s.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the router has noticed", func() bool { return s.Stats().Left == 1 })
	close(m.blocked)
	eventually(t, "the claim ends", func() bool { st := st.Stats(); return st.Claims == 0 && st.Failed == 1 })
	if m.isReleased() {
		t.Error("released")
	}
}

func TestAClaimThatWasAnsweredElsewhereSurvivesALostAnswer(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	c := claimOf("k", g, "c")
	late := newPlain(t, s)
	m.entered, m.blocked = make(chan struct{}, 8), make(chan struct{})
	if _, err := late.s.SendBytes(wire.AppendRequest(nil, &wire.Request{Op: wire.Get, Key: "k", Generation: g, Claim: c.ID}), 0); err != nil {
		t.Fatal(err)
	}
	receive(t, m.entered)
	if err := late.s.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the router has noticed", func() bool { return s.Stats().Left == 1 })
	again := newPlain(t, s)
	answered := make(chan *wire.Reply, 1)
	go func() { answered <- again.ask(wire.Get, c) }()
	receive(t, m.entered)
	close(m.blocked)
	if a := receive(t, answered); a.Status != wire.Found {
		t.Fatalf("%+v", a)
	}
	eventually(t, "the other answer is lost", func() bool { return s.Stats().Unsent == 1 })
	if st.Stats().Claims != 1 {
		t.Error("a claim was ended under its reader")
	}
}

func TestAServerNeedsWhatItWorksWith(t *testing.T) {
	st := newStore(t, Options{})
	defer closeStore(t, st)
	l := newLoop(t)
	for name, o := range map[string]ServerOptions{
		"no loop":       {Store: st},
		"no store":      {Loop: l},
		"waiting":       {Loop: l, Store: st, MaxWaiting: -1},
		"a long node":   {Loop: l, Store: st, Node: string(make([]byte, wire.MaxNode+1))},
		"a host nobody": {Loop: l, Store: st, Host: "192.0.2.1"},
	} {
		if _, err := Serve(t.Context(), o); err == nil || name != "a host nobody" && !errors.Is(err, ErrOptions) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

var _ control.DealerHandler = (*own)(nil)
