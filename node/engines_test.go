package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// byHand is a connection past its handshake, without the client.
func byHand(t testing.TB, n *Node) (*net.UnixConn, *api.Conn) {
	t.Helper()
	nc, err := net.Dial("unix", n.Ready().Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	conn, err := greetByHand(nc.(*net.UnixConn))
	if err != nil {
		t.Fatal(err)
	}
	return nc.(*net.UnixConn), conn
}

func greetByHand(sock *net.UnixConn) (*api.Conn, error) {
	conn, _, err := greetWithToken(sock, nil)
	return conn, err
}

func greetWithToken(sock *net.UnixConn, token []byte) (*api.Conn, *api.Welcome, error) {
	conn, err := api.NewConn(sock, api.ConnOptions{InLimit: api.MaxReplyFrame, Backlog: 1 << 30})
	if err != nil {
		return nil, nil, err
	}
	if err := conn.Send(api.MaxRequestFrame, &api.Hello{Version: 1, MinVersion: 1, Token: token}); err != nil {
		return nil, nil, err
	}
	m, f, err := conn.ReceiveWithFile()
	if err != nil {
		return nil, nil, err
	}
	_ = f.Close()
	w, ok := m.(*api.Welcome)
	if !ok {
		return nil, nil, fmt.Errorf("%+v", m)
	}
	return conn, w, nil
}

func reserveByHand(sock *net.UnixConn, key string, rows int) error {
	return askByHand(sock, reserveOp(key, rows))
}

func reserveOp(key string, rows int) api.Op {
	s := spec(rows)
	return api.Op{Kind: api.OpReserve, Key: key, Dtype: s.Dtype, Shape: s.Shape, Bytes: s.Bytes}
}

// askByHand greets, and has operations carried out that must all succeed.
func askByHand(sock *net.UnixConn, ops ...api.Op) error {
	conn, err := greetByHand(sock)
	if err != nil {
		return err
	}
	if err := conn.Send(api.MaxRequestFrame, &api.Request{ID: 1, Ops: ops}); err != nil {
		return err
	}
	m, err := conn.Receive()
	if err != nil {
		return err
	}
	for i, r := range m.(*api.Reply).Results {
		if r.Code != api.CodeOK {
			return fmt.Errorf("%v: %s %s", ops[i].Kind, r.Code, r.Message)
		}
	}
	return nil
}

// C8: an engine of both roles saves and fetches on one connection.
func TestOneEngineSavesAndFetches(t *testing.T) {
	ca, cb := testConfig(t, 64), testConfig(t, 64)
	cb.ShmDir = ca.ShmDir
	a, b := dial(t, startNode(t, ca)), dial(t, startNode(t, cb))
	put(t, a, "x", 2, 1)
	put(t, b, "y", 2, 2)
	for _, d := range []struct {
		from, to *client.Client
		key      string
		seed     uint64
	}{{a, b, "x", 1}, {b, a, "y", 2}} {
		p, err := d.from.Announce(testContext(t), []client.AnnounceItem{{Key: d.key}})
		if err != nil {
			t.Fatal(err)
		}
		ch, err := d.to.Fetch(testContext(t), p, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		if r := <-ch; r.Outcome != ec.FetchReady {
			t.Fatalf("%+v", r)
		}
		checkBytes(t, d.to, d.key, 2, d.seed)
	}
}

func TestAnAnnouncementNamesWhatIsHeldAndNothingElse(t *testing.T) {
	for _, generation := range []int{1, 2} {
		cfg := testConfig(t, 64)
		cfg.ECProtocol = generation
		n := startNode(t, cfg)
		c := dial(t, n)
		s := spec(2)
		s.Shape, s.Bytes = []int64{3, testBlock/2 - 100}, 3*(testBlock-200) // not whole blocks
		if _, err := c.Put(testContext(t), "k", s, make([]byte, s.Bytes)); err != nil {
			t.Fatal(err)
		}
		filling, err := c.Reserve(testContext(t), "f", spec(1))
		if err != nil {
			t.Fatal(err)
		}
		p, err := c.Announce(testContext(t), []client.AnnounceItem{
			{Key: "k", ItemIndices: []int{1, 2}, Metadata: []byte(`{"grid":[1]}`)}, {Key: "f"}, {Key: "nobody's", Metadata: []byte(`{"grid":[2]}`)},
		})
		if err != nil {
			t.Fatal(err)
		}
		k, _ := p.Get("k")
		if k.PeerHost != "127.0.0.1" || k.PeerPort != n.Ready().PeerPort || k.SizeBytes != 3*testBlock || string(k.Metadata) != `{"grid":[1]}` {
			t.Errorf("generation %d: %+v", generation, k)
		}
		if generation == 2 && (len(k.ItemIndices) != 2 || len(k.Shape) != 2 || k.Shape[0] != 3) || generation == 1 && (k.ItemIndices != nil || k.Shape != nil) {
			t.Errorf("generation %d: item_indices %v, shape %v", generation, k.ItemIndices, k.Shape)
		}
		// What is being filled is announced: it cannot be evicted, and an early reader is told NOT_READY.
		if f, _ := p.Get("f"); !f.Servable() {
			t.Errorf("a key being filled: %+v", f)
		}
		if none, _ := p.Get("nobody's"); none.Servable() || string(none.Metadata) != "{}" {
			t.Errorf("a key not held: %+v", none)
		}
		infos, err := c.Lookup(testContext(t), "k", "f", "nobody's")
		if err != nil {
			t.Fatal(err)
		}
		if infos[0].Holds != 1 || infos[0].State != ec.Ready || infos[1].State != ec.Filling || infos[2].State != ec.Absent || infos[2].Key != "nobody's" {
			t.Errorf("%+v", infos)
		}
		if err := filling.Discard(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if err := filling.Commit(testContext(t)); !errors.Is(err, ec.ErrStale) {
			t.Errorf("Commit after Discard: %v", err)
		}
	}
}

// C7: lookups that blocked the scheduler.
func TestWhatIsBeingFilledIsPendingAndCanBeWaitedFor(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	a, b := dial(t, n), dial(t, n)
	if err := b.WaitReady(testContext(t), "k"); !errors.Is(err, ec.ErrMissing) {
		t.Fatalf("nobody fills it: %v", err)
	}
	r, err := a.Reserve(testContext(t), "k", spec(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Map(testContext(t), "k"); !errors.Is(err, ec.ErrNotReady) {
		t.Errorf("Map: %v", err)
	}
	short, cancel := context.WithTimeout(testContext(t), 20*time.Millisecond)
	defer cancel()
	if err := b.WaitReady(short, "k"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait with a deadline: %v", err)
	}
	waited := make(chan error, 1)
	go func() { waited <- b.WaitReady(testContext(t), "k") }()
	if err := r.Commit(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err != nil {
		t.Errorf("WaitReady: %v", err)
	}
}

func TestTheEndOfAConnectionReleasesPinsAndDiscardsReservations(t *testing.T) {
	n := startNode(t, testConfig(t, 8))
	a, b := dial(t, n), dial(t, n)
	put(t, a, "k", 4, 1)
	if _, err := b.Map(testContext(t), "k"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Reserve(testContext(t), "r", spec(4)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Reserve(testContext(t), "new", spec(8)); !errors.Is(err, ec.ErrFull) {
		t.Fatalf("all is in use: %v", err)
	}
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	<-b.Done()
	// The client said bye: its blocks are free although this process lives.
	eventually(t, "there is room", func() bool {
		r, err := a.Reserve(testContext(t), "new", spec(8))
		return err == nil && r != nil
	})
}

// Who says bye right behind a request and closes reads neither the reply nor a push. The bye counts all the same.
func TestAByeCountsThoughItsEngineReadsNoReply(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	c := dial(t, n)
	put(t, c, "k", 1, 1)
	for i := range 32 {
		nc, err := net.Dial("unix", n.Ready().Socket)
		if err != nil {
			t.Fatal(err)
		}
		sock := nc.(*net.UnixConn)
		if err := reserveByHand(sock, fmt.Sprint("r", i), 1); err != nil {
			t.Fatal(err)
		}
		var frames []byte
		for _, m := range []api.Message{
			&api.Request{ID: 2, Ops: []api.Op{{Kind: api.OpStats}}},
			&api.Request{ID: 3, Ops: []api.Op{{Kind: api.OpList, Ref: 1}, {Kind: api.OpWait, Key: "k", Ref: 2}, {Kind: api.OpMap, Key: "k"}}},
			&api.Request{ID: 4, Ops: []api.Op{{Kind: api.OpStats}}},
			&api.Bye{},
		} {
			if frames, err = api.AppendFrame(frames, m, api.MaxRequestFrame); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := sock.Write(frames); err != nil {
			t.Fatal(err)
		}
		_ = sock.Close()
	}
	eventually(t, "all are gone", func() bool { return len(n.engines.list()) == 1 })
	if away, left, pinned := n.pools[0].clients.away(); away != 0 || left != 0 || pinned != 0 {
		t.Errorf("%d clients away, with %d reservations and %d pins; all said bye", away, left, pinned)
	}
	if s := n.pools[0].cache.Stats(); s.FreeBlocks != 63 || s.PinnedBlocks != 0 {
		t.Errorf("%+v; want 63 blocks free and none pinned", s)
	}
}

func TestAStepTakesOneRoundTrip(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	c := dial(t, n)
	put(t, c, "old", 1, 1)
	before := n.engines.counters.requests.Load()
	got, err := c.Batch(testContext(t),
		client.ReserveOp("new", spec(2)),
		client.ReserveOp("old", spec(1)),
		client.MapOp("old"),
		client.MapOp("missing"),
		client.LookupOp("old"),
		client.AnnounceOp(client.AnnounceItem{Key: "old"}),
		client.ReserveOp("", spec(1)),
		client.StatsOp(),
	)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []error{nil, ec.ErrHeld, nil, ec.ErrMissing, nil, nil, ec.ErrKey, nil} {
		if !errors.Is(got[i].Err, want) {
			t.Errorf("operation %d: %v, want %v", i, got[i].Err, want)
		}
	}
	if got[2].Mapped == nil || !bytes.Equal(bytes.Join(got[2].Mapped.Buffers(), nil), payload(1, 1)) || got[4].Info.Pins != 1 ||
		!got[5].Announcement.Servable() || got[7].Stats.Filling != 1 {
		t.Errorf("%+v", got)
	}
	second, err := c.Batch(testContext(t), client.CommitOp(got[0].Reservation), client.ReleaseOp(got[2].Mapped), client.MapOp("new"), client.RemoveOp("old"))
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range second {
		if r.Err != nil {
			t.Errorf("operation %d: %v", i, r.Err)
		}
	}
	got[2].Mapped.Release() // over already: nothing happens
	if n := n.engines.counters.requests.Load() - before; n != 2 {
		t.Errorf("%d requests, want 2", n)
	}
}

func TestALongListingIsWhole(t *testing.T) {
	n := startNode(t, testConfig(t, 3000))
	c := dial(t, n)
	var reserve, commit []client.Op
	for i := range 3*api.MaxListChunk + 5 {
		reserve = append(reserve, client.ReserveOp(fmt.Sprintf("key-%05d", i), spec(1)))
	}
	got, err := c.Batch(testContext(t), reserve...)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range got {
		commit = append(commit, client.CommitOp(r.Reservation))
	}
	if _, err := c.Batch(testContext(t), commit...); err != nil {
		t.Fatal(err)
	}
	list, err := c.List(testContext(t))
	if err != nil || len(list) != len(reserve) {
		t.Fatalf("%d entries, %v", len(list), err)
	}
	for i, e := range list {
		if e.Key != fmt.Sprintf("key-%05d", i) || e.State != ec.Ready {
			t.Fatalf("entry %d: %+v", i, e)
		}
	}
}

func TestABatchLargerThanAFrameIsSplit(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	c := dial(t, n)
	put(t, c, "k", 1, 1)
	metadata := []byte(`{"x":"` + strings.Repeat("y", 60_000) + `"}`)
	items := make([]client.AnnounceItem, 400) // 24 MB
	for i := range items {
		items[i] = client.AnnounceItem{Key: fmt.Sprintf("k%d", i), Metadata: metadata}
	}
	items[7].Key = "k"
	p, err := c.Announce(testContext(t), items)
	if err != nil || p.Len() != 400 {
		t.Fatalf("%d, %v", p.Len(), err)
	}
	if k, _ := p.Get("k"); !bytes.Equal(k.Metadata, metadata) {
		t.Error("metadata of the held key changed")
	}
	infos, err := c.Lookup(testContext(t), make([]string, 0)...)
	if err != nil || len(infos) != 0 {
		t.Errorf("no keys: %v, %v", infos, err)
	}
}

func TestNoMoreIsAnnouncedAtATimeThanAPeerTakes(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	c := dial(t, n)
	put(t, c, "k", 1, 1)
	items := make([]client.AnnounceItem, wire.MaxEntries+1)
	for i := range items {
		items[i] = client.AnnounceItem{Key: fmt.Sprint("k", i)}
	}
	items[0].Key = "k"
	if _, err := c.Announce(testContext(t), items); !errors.Is(err, client.ErrLimit) {
		t.Errorf("%d keys: %v", len(items), err)
	}
	if holds := n.pools[0].cache.Stats().Holds; holds != 0 {
		t.Errorf("%d holds", holds)
	}
	p, err := c.Announce(testContext(t), items[:wire.MaxEntries])
	if err != nil || p.Len() != wire.MaxEntries {
		t.Fatalf("%d keys: %v", p.Len(), err)
	}
	results, err := c.Fetch(testContext(t), p, 0)
	if err != nil {
		t.Fatalf("what was announced is not taken: %v", err)
	}
	for range results {
	}
}

func TestAnEngineThatDoesNotReadIsDisconnected(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	good := dial(t, n)
	put(t, good, "a", 1, 1)
	sock, _ := byHand(t, n)
	ops := make([]api.Op, api.MaxOps)
	for i := range ops {
		ops[i] = api.Op{Kind: api.OpLookup, Key: "a"} // answers are longer than questions
	}
	frame, err := api.AppendFrame(nil, &api.Request{Ops: ops}, api.MaxRequestFrame)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = sock.Write(frame)
	}
	eventually(t, "it is disconnected", func() bool { return n.engines.counters.slow.Load() == 1 })
	put(t, good, "k", 1, 1) // others are served all the while
}

// An engine that does not read its socket may read the pool all the same: its device does.
func TestAnEngineThatIsDisconnectedKeepsItsPinsUntilItComesAgain(t *testing.T) {
	n := startNode(t, testConfig(t, 8))
	good := dial(t, n)
	put(t, good, "k", 4, 1)
	connect := func(token []byte) (*net.UnixConn, *api.Conn, *api.Welcome) {
		nc, err := net.Dial("unix", n.Ready().Socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = nc.Close() })
		conn, w, err := greetWithToken(nc.(*net.UnixConn), token)
		if err != nil {
			t.Fatal(err)
		}
		return nc.(*net.UnixConn), conn, w
	}
	sock, conn, w := connect(nil)
	gen := ask(t, conn, 1, api.Op{Kind: api.OpMap, Key: "k"})[0].Info.Gen
	ops := make([]api.Op, api.MaxOps)
	for i := range ops {
		ops[i] = api.Op{Kind: api.OpLookup, Key: "k"}
	}
	frame, err := api.AppendFrame(nil, &api.Request{Ops: ops}, api.MaxRequestFrame)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = sock.Write(frame)
	}
	stays := func(when string) {
		t.Helper()
		if err := good.Remove(testContext(t), "k"); !errors.Is(err, ec.ErrPinned) {
			t.Fatalf("%s: %v; want ErrPinned", when, err)
		}
		if _, err := good.Reserve(testContext(t), "new", spec(5)); !errors.Is(err, ec.ErrFull) {
			t.Fatalf("%s: %v; want ErrFull", when, err)
		}
		checkBytes(t, good, "k", 4, 1)
	}
	clients := n.pools[0].clients
	eventually(t, "it is away", func() bool {
		away, _, pinned := clients.away()
		return away == 1 && pinned == 1
	})
	stays("it is away")
	_, conn, again := connect(w.Token)
	if !bytes.Equal(again.Token, w.Token) {
		t.Fatal("the node does not know it any more")
	}
	stays("it has not restated anything")
	results := ask(t, conn, 1, api.Op{Kind: api.OpRepin, Key: "k", Gen: gen}, api.Op{Kind: api.OpRestated})
	if results[0].Code != api.CodeOK || results[1].Code != api.CodeOK {
		t.Fatalf("%+v", results)
	}
	if _, _, pinned := clients.away(); pinned != 0 {
		t.Errorf("%d pins are kept beside what it restated", pinned)
	}
	stays("it has it again")
	if r := ask(t, conn, 2, api.Op{Kind: api.OpRelease, Handle: results[0].Handle}); r[0].Code != api.CodeOK {
		t.Fatalf("%+v", r)
	}
	put(t, good, "new", 8, 2)
}

func TestFramesThatMakeNoSenseEndTheConnectionAndNothingElse(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	good := dial(t, n)
	frame := func(payload ...byte) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(payload))), payload...)
	}
	for i, b := range [][]byte{
		frame(0x90),
		frame(),
		binary.BigEndian.AppendUint32(nil, api.MaxRequestFrame+1),
		{0xff, 0xff, 0xff, 0xff},
		frame(0xdf, 0xff, 0xff, 0xff, 0xff),
	} {
		sock, conn := byHand(t, n)
		if _, err := sock.Write(b); err != nil {
			t.Fatal(err)
		}
		m, err := conn.Receive()
		if r, ok := m.(*api.Refused); !ok || r.Code != api.CodeBadRequest {
			t.Errorf("frame %d: %+v, %v", i, m, err)
		}
		if _, err := conn.Receive(); !errors.Is(err, io.EOF) {
			t.Errorf("frame %d: then %v", i, err)
		}
	}
	if got := n.engines.counters.malformed.Load(); got != 5 {
		t.Errorf("%d counted", got)
	}
	put(t, good, "k", 1, 1)
}

func TestHandshakesAreRefusedWithAReason(t *testing.T) {
	cfg := testConfig(t, 64)
	second := cfg.Pools[0]
	second.Model = "another"
	cfg.Pools = append(cfg.Pools, second)
	n := startNode(t, cfg)
	for _, c := range []struct {
		name  string
		first api.Message
		want  api.Code
		text  string
	}{
		{"a later version", &api.Hello{Version: 9, MinVersion: 8, Pool: n.pools[0].group}, api.CodeVersion, "1 to 1"},
		{"no pool named of two", &api.Hello{Version: 1}, api.CodeNoPool, n.pools[1].group},
		{"a pool that is not here", &api.Hello{Version: 1, Pool: "f00"}, api.CodeNoPool, "another"},
		{"no hello", &api.Request{}, api.CodeBadRequest, "hello"},
		{"a name that is too long", &api.Hello{Version: 1, MinVersion: 1, Pool: n.pools[0].group, Name: strings.Repeat("n", 5000)}, api.CodeBadRequest, `a string of 5000 bytes, at most 4096, in "name"`},
	} {
		nc, err := net.Dial("unix", n.Ready().Socket)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := api.NewConn(nc.(*net.UnixConn), api.ConnOptions{InLimit: api.MaxReplyFrame, Backlog: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		if err := conn.Send(api.MaxRequestFrame, c.first); err != nil {
			t.Fatal(err)
		}
		m, f, err := conn.ReceiveWithFile()
		if r, ok := m.(*api.Refused); !ok || f != nil || r.Code != c.want || !strings.Contains(r.Message, c.text) {
			t.Errorf("%s: %+v, %v, %v", c.name, m, f, err)
		}
		_ = conn.Close()
	}
	_, err := client.Dial(testContext(t), n.Ready().Socket, client.Options{})
	if !errors.Is(err, client.ErrNoPool) {
		t.Errorf("%v; want ErrNoPool", err)
	}
	c, err := client.Dial(testContext(t), n.Ready().Socket, client.Options{Pool: n.pools[1].group})
	if err != nil || c.Pool().Model != "another" {
		t.Fatalf("%v", err)
	}
	_ = c.Close()
}

func TestManyEnginesAtOnceLeaveAWholePool(t *testing.T) {
	n := startNode(t, testConfig(t, 32))
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			c, err := client.Dial(testContext(t), n.Ready().Socket, client.Options{})
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = c.Close() }()
			for i := range 60 {
				seed := uint64((g + i) % 12)
				key := fmt.Sprintf("k%d", seed)
				rows := int(seed)%5 + 1
				_, err := c.Put(testContext(t), key, spec(rows), payload(rows, seed))
				if err != nil && !errors.Is(err, ec.ErrPending) && !errors.Is(err, ec.ErrFull) {
					t.Error(err)
				}
				m, err := c.Map(testContext(t), key)
				if errors.Is(err, ec.ErrMissing) || errors.Is(err, ec.ErrNotReady) {
					continue
				}
				if err != nil {
					t.Error(err)
					continue
				}
				if !bytes.Equal(bytes.Join(m.Buffers(), nil), payload(rows, seed)) {
					t.Errorf("%s has other bytes", key)
				}
				m.Release()
			}
		})
	}
	wg.Wait()
	eventually(t, "nothing is pinned or filling", func() bool {
		s := n.pools[0].cache.Stats()
		return s.PinnedBlocks == 0 && s.Filling == 0 && s.QuarantinedBlocks == 0
	})
}

func TestClosingTheNodeTellsItsEngines(t *testing.T) {
	cfg := testConfig(t, 64)
	n, err := Start(testContext(t), cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.Dial(testContext(t), n.Ready().Socket, client.Options{Once: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	put(t, c, "k", 2, 1)
	m, err := c.Map(testContext(t), "k")
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Close(testContext(t)); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if err := c.Err(); !errors.Is(err, client.ErrClosed) || !errors.Is(err, client.ErrClosing) {
		t.Errorf("%v; want ErrClosed and ErrClosing", err)
	}
	if _, err := c.Lookup(testContext(t), "k"); !errors.Is(err, client.ErrClosed) {
		t.Errorf("%v", err)
	}
	// What was mapped stays readable until the client closes.
	if !bytes.Equal(bytes.Join(m.Buffers(), nil), payload(2, 1)) {
		t.Error("the mapping changed when the node went")
	}
	m.Release()
	if _, err := client.Dial(testContext(t), filepath.Join(t.TempDir(), "none"), client.Options{}); err == nil {
		t.Error("a node that is not there")
	}
}
