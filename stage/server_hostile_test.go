package stage

import (
	"bytes"
	"log/slog"
	"sync"
	"testing"

	"github.com/pebbe/zmq4"
	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/wire"
)

// lines counts what is logged.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bytes.Count(l.b.Bytes(), []byte("\n"))
}

func TestRequestsThatMakeNoSenseAreDroppedAndLoggedOnce(t *testing.T) {
	log := &lines{}
	st, s := serve(t, Options{}, ServerOptions{Log: slog.New(slog.NewTextHandler(log, nil))})
	_, g := put(t, st, "k")
	hostile := rawSocket(t, zmq4.DEALER, address(s))
	get := wire.AppendRequest(nil, &wire.Request{Op: wire.Get, Key: "k", Claim: wire.TextID("c"), Ferry: &wire.FerryRequest{}})
	const rounds = 500
	kinds := [][]byte{
		[]byte("nixl_get_meta\xc1"),
		[]byte("nixl_get_meta"),
		[]byte("ferry_verify\x90"),
		get[:len(get)-1],
		append(bytes.Clone(get), 0),
		wire.AppendRequest(nil, &wire.Request{Op: wire.Get, Key: string(make([]byte, wire.MaxKey+1)), Claim: wire.TextID("c")}),
		append([]byte("nixl_xfer_done"), bytes.Repeat([]byte{0x91}, 1000)...),
	}
	for range rounds {
		for _, k := range kinds {
			if _, err := hostile.SendMessage("", k); err != nil {
				t.Fatal(err)
			}
		}
	}
	eventually(t, "all are counted", func() bool { return s.Stats().Malformed == uint64(rounds*len(kinds)) })
	if n := log.count(); n != 1 {
		t.Errorf("%d lines were logged", n)
	}
	if st := st.Stats(); st.Claims != 0 || st.Granted != 0 {
		t.Errorf("%+v", st)
	}
	if a := newPlain(t, s).ask(wire.Get, claimOf("k", g, "c")); a.Status != wire.Found {
		t.Errorf("%+v", a)
	}
}

func TestAFrameOverTheLimitEndsItsConnectionOnly(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	_, g := put(t, st, "k")
	hostile := rawSocket(t, zmq4.DEALER, address(s))
	if err := hostile.SetRcvtimeo(silence); err != nil {
		t.Fatal(err)
	}
	big := append([]byte("nixl_get_meta"), make([]byte, control.DefaultRouterMessage)...)
	if got := exchange(t, hostile, nil, big); got != nil {
		t.Errorf("%q", got)
	}
	if a := newPlain(t, s).ask(wire.Get, claimOf("k", g, "c")); a.Status != wire.Found {
		t.Errorf("%+v", a)
	}
	if n := s.Stats().Malformed; n != 0 {
		t.Errorf("%d reached the decoder", n)
	}
}

func TestForgedClaimsAreBoundedByPayloadAndSource(t *testing.T) {
	st, s := serve(t, Options{MaxSourceClaims: 100, MaxClaims: 8}, ServerOptions{})
	var generations []wire.ID
	for i := range 50 {
		_, g := put(t, st, keyOf(i))
		generations = append(generations, g)
	}
	forger := newPlain(t, s)
	granted := 0
	for i := range 1000 {
		if forger.ask(wire.Get, claimOf(keyOf(i/20), wire.ID{}, keyOf(i))).Status == wire.Found {
			granted++
		}
	}
	if claims := st.Stats().Claims; granted != 100 || claims != 100 {
		t.Errorf("%d granted, %d held, want 100", granted, claims)
	}
	if n := s.Stats().Full; n != 900 {
		t.Errorf("%d refused", n)
	}
	// Readers of other sources are served, also where the forger has all that one source can have: half of the claims, and one.
	o := newLocal(t, s)
	for _, id := range []string{"1", "2", "3"} {
		if a := o.ask(wire.Get, claimOf(keyOf(0), generations[0], id), wire.FerryRequest{}); a.Status != wire.Found {
			t.Errorf("%+v", a)
		}
	}
	// What ends makes room again.
	forger.ask(wire.Done, claimOf(keyOf(0), generations[0], keyOf(0)))
	if a := forger.ask(wire.Get, claimOf(keyOf(40), wire.ID{}, "again")); a.Status != wire.Found {
		t.Errorf("%+v", a)
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if len(st.sources) != 2 || len(st.owners) != 1 {
		t.Errorf("%v %v", st.sources, st.owners)
	}
}

// A plain peer's protocol has no secret but the claim's id: whoever knows it ends the claim. That this frees memory under the reader is
// their protocol's, and said in docs/security.md; what must not happen is that it is used again while a plain reader may still READ.
func TestAForgedDoneIsWithdrawnAsItsReadersOwn(t *testing.T) {
	st, s := serve(t, Options{}, ServerOptions{})
	m, g := put(t, st, "k")
	c := claimOf("k", g, "c")
	newPlain(t, s).ask(wire.Get, c)
	newPlain(t, s).ask(wire.Done, c)
	eventually(t, "released", m.isReleased)
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.ended) != 1 || m.withdraw != 1 {
		t.Errorf("%+v", m.ended)
	}
}

func FuzzServer(f *testing.F) {
	for op := wire.Get; op <= wire.Fail; op++ {
		f.Add(wire.AppendRequest(nil, &wire.Request{Op: op, Key: "k", Claim: wire.TextID("c")}), true)
		f.Add(wire.AppendRequest(nil, &wire.Request{Op: op, Key: "k", Claim: wire.TextID("c"), Ferry: &wire.FerryRequest{WaitMS: 1, Inline: 10}}), false)
	}
	f.Add([]byte("hello"), false)
	st, s := serve(f, Options{}, ServerOptions{})
	h := (*serverHandler)(s)
	f.Fuzz(func(t *testing.T, b []byte, local bool) {
		from := control.Source{ID: "nobody", Local: local}
		h.Message(from, b)
		h.Left(from)
		if _, w := st.Stats(), s.Stats().Waiting; w != 0 {
			t.Fatalf("%d wait for a connection that is gone", w)
		}
	})
}
