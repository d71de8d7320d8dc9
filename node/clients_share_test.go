package node

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// tryByHand connects, and says why not.
func tryByHand(t *testing.T, n *Node) (*net.UnixConn, error) {
	t.Helper()
	nc, err := net.Dial("unix", n.Ready().Socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = nc.Close() })
	_, err = greetByHand(nc.(*net.UnixConn))
	return nc.(*net.UnixConn), err
}

func wantLimit(t *testing.T, err error, says ...string) {
	t.Helper()
	for _, w := range append(says, string(api.CodeLimit)) {
		if err == nil || !strings.Contains(err.Error(), w) {
			t.Errorf("%v; want %q in it", err, w)
		}
	}
}

func TestOneProcessCannotTakeAllConnections(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	n.engines.mu.Lock()
	n.engines.share = 3
	n.engines.mu.Unlock()
	var last *net.UnixConn
	for range 3 {
		var err error
		if last, err = tryByHand(t, n); err != nil {
			t.Fatal(err)
		}
	}
	_, err := tryByHand(t, n)
	wantLimit(t, err, fmt.Sprintf("pid %d has 3 of the 1024 connections", os.Getpid()))
	other := startEngine(t, n, "reserve", nil)
	other.says(t)
	if err := last.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a connection that has ended is counted no more", func() bool {
		_, err := tryByHand(t, n)
		return err == nil
	})
}

// Whoever connects anew each time, and leaves a reservation each time, leaves a client each time.
func TestOneProcessCannotTakeAllClientsOfAPool(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	clients := n.pools[0].clients
	clients.mu.Lock()
	clients.rows = 3
	clients.mu.Unlock()
	for i := range 3 {
		nc, err := net.Dial("unix", n.Ready().Socket)
		if err != nil {
			t.Fatal(err)
		}
		if err := reserveByHand(nc.(*net.UnixConn), fmt.Sprint("k", i), 1); err != nil {
			t.Fatal(err)
		}
		_ = nc.Close()
	}
	eventually(t, "all of them have gone", func() bool {
		away, _, _ := clients.away()
		return away == 3
	})
	_, err := tryByHand(t, n)
	wantLimit(t, err, fmt.Sprintf("process %d has 3 of the pool's 1024 clients", os.Getpid()))
	startEngine(t, n, "reserve", nil).says(t)
}

// However many connections a process leaves, its death is one thing to wait for, and one descriptor of the node's.
func TestTheConnectionsThatAProcessLeavesTakeOneDescriptor(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	clients := n.pools[0].clients
	const left = 20
	before, tokens := openFiles(t), make([][]byte, left)
	for i := range left {
		nc, err := net.Dial("unix", n.Ready().Socket)
		if err != nil {
			t.Fatal(err)
		}
		conn, w, err := greetWithToken(nc.(*net.UnixConn), nil)
		if err != nil {
			t.Fatal(err)
		}
		tokens[i] = w.Token
		if r := ask(t, conn, 1, reserveOp(fmt.Sprint("k", i), 1)); r[0].Code != api.CodeOK {
			t.Fatalf("%+v", r)
		}
		_ = nc.Close()
	}
	eventually(t, "all of them have gone, and one descriptor is left", func() bool {
		away, reservations, _ := clients.away()
		return away == left && reservations == left && openFiles(t) == before+1
	})
	for _, token := range tokens { // each ends on its own, the descriptor with the last
		nc, err := net.Dial("unix", n.Ready().Socket)
		if err != nil {
			t.Fatal(err)
		}
		conn, w, err := greetWithToken(nc.(*net.UnixConn), token)
		if err != nil || !bytes.Equal(w.Token, token) {
			t.Fatalf("%v, or the node does not know it any more", err)
		}
		if err := conn.Send(api.MaxRequestFrame, &api.Bye{}); err != nil {
			t.Fatal(err)
		}
		_ = nc.Close()
	}
	eventually(t, "nothing is left", func() bool {
		away, _, _ := clients.away()
		clients.mu.Lock()
		defer clients.mu.Unlock()
		return away == 0 && len(clients.exits) == 0 && openFiles(t) == before
	})
	if s := n.pools[0].cache.Stats(); s.FreeBlocks != 64 {
		t.Errorf("%+v; want 64 free blocks", s)
	}
}

func TestAProcessReservesNoMoreThanItsShare(t *testing.T) {
	cfg := testConfig(t, 64)
	cfg.EngineShare = 0.25 // 16 blocks
	n := startNode(t, cfg)
	c, second := dial(t, n), dial(t, n)
	reserve := func(c *client.Client, key string, rows int) *client.Reservation {
		t.Helper()
		r, err := c.Reserve(testContext(t), key, spec(rows))
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	refused := func(c *client.Client, key string, rows int, says string) {
		t.Helper()
		_, err := c.Reserve(testContext(t), key, spec(rows))
		if !errors.Is(err, ec.ErrFull) || !strings.Contains(err.Error(), says) {
			t.Errorf("%d blocks for %s: %v; want ErrFull with %q", rows, key, err, says)
		}
	}
	reserved := func(want int) {
		t.Helper()
		if most, _ := n.pools[0].clients.shares(); most != want {
			t.Errorf("%d blocks are reserved, want %d", most, want)
		}
	}

	put(t, c, "ready", 9, 1) // what is ready counts no more
	large := reserve(c, "large", 20)
	reserved(20)
	refused(c, "a", 1, "20 blocks reserved, and 1 more would be over its share of the pool, 16 (engine_share)")
	if err := large.Discard(testContext(t)); err != nil {
		t.Fatal(err)
	}
	a := reserve(c, "a", 10)
	reserve(second, "b", 6)
	reserved(16)
	refused(second, "c", 1, "16 blocks reserved")
	if _, err := c.Reserve(testContext(t), "ready", spec(9)); !errors.Is(err, ec.ErrHeld) {
		t.Errorf("%v; it is there, which costs nothing", err)
	}
	if _, err := c.Reserve(testContext(t), "b", spec(6)); !errors.Is(err, ec.ErrPending) {
		t.Errorf("%v; another connection fills it", err)
	}
	reserved(16)
	startEngine(t, n, "reserve", nil).says(t) // 4 blocks, of another process
	if err := a.Commit(testContext(t)); err != nil {
		t.Fatal(err)
	}
	reserved(6)
	// What a connection leaves may still be written, and counts until its process says that it is not.
	nc, err := net.Dial("unix", n.Ready().Socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := reserveByHand(nc.(*net.UnixConn), "left", 10); err != nil {
		t.Fatal(err)
	}
	_ = nc.Close()
	eventually(t, "it is left", func() bool {
		_, left, _ := n.pools[0].clients.away()
		return left == 1
	})
	reserved(16)
	refused(c, "c", 1, "16 blocks reserved")
	if err := second.Close(); err != nil { // says bye
		t.Fatal(err)
	}
	eventually(t, "what it had is free", func() bool {
		most, _ := n.pools[0].clients.shares()
		return most == 10
	})
	reserve(c, "c", 6)

	m := scrape(t, n.Ready().Admin)
	for _, want := range []string{"tensorferry_engine_reserved_bytes{", "tensorferry_engine_share_refused_total{"} {
		_, rest, _ := strings.Cut(m, "\n"+want)
		line, _, _ := strings.Cut(rest, "\n")
		_, got, _ := strings.Cut(line, "} ")
		if v := map[bool]string{true: "32768", false: "5"}[strings.Contains(want, "bytes")]; got != v {
			t.Errorf("%s %s, want %s", want, got, v)
		}
	}
	for _, e := range n.status().Engines {
		if e.PID == os.Getpid() && (e.ReservedBlocks != 16 || e.Owner == 0) {
			t.Errorf("%+v", e)
		}
	}
}

func TestASharesReservationsAreCountedAfterARestart(t *testing.T) {
	cfg := testConfig(t, 64)
	cfg.EngineShare = 0.25
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	r, err := c.Reserve(testContext(t), "a", spec(12))
	if err != nil {
		t.Fatal(err)
	}
	p.kill()
	p = spawnNode(t, cfg)
	if _, err := c.Reserve(testContext(t), "b", spec(5)); !errors.Is(err, ec.ErrFull) {
		t.Errorf("%v; want ErrFull", err)
	}
	if err := r.Commit(testContext(t)); err != nil {
		t.Fatal(err)
	}
	b, err := c.Reserve(testContext(t), "b", spec(16))
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Discard(testContext(t)); err != nil {
		t.Error(err)
	}
	p.end()
}
