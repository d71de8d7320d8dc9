package node

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/transfer"
)

func get(t *testing.T, n *Node, path, host string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(testContext(t), http.MethodGet, "http://"+n.Ready().Admin+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = host
	r, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(b)
}

// C13: no metrics at all.
func TestMetricsCountOnePutOneHitOneMissOneEviction(t *testing.T) {
	n := startNode(t, testConfig(t, 4))
	c := dial(t, n)
	put(t, c, "a", 3, 1)
	checkBytes(t, c, "a", 3, 1) // a hit
	if _, err := c.Map(testContext(t), "nobody's"); err == nil {
		t.Fatal("a key that was never put")
	}
	put(t, c, "b", 2, 2) // evicts a
	if _, err := c.Announce(testContext(t), []client.AnnounceItem{{Key: "b"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Reserve(testContext(t), "c", spec(2)); err != nil {
		t.Fatal(err)
	}
	var p ec.Params
	p.Set("b", &ec.Announcement{ItemIndices: []int{0}, Metadata: []byte("{}"), PeerHost: "127.0.0.1", PeerPort: n.Ready().PeerPort, SizeBytes: 2 * testBlock, Shape: []int{2, testBlock / 2}})
	ch, err := c.Fetch(testContext(t), p, 0)
	if err != nil {
		t.Fatal(err)
	}
	if r := <-ch; r.Outcome != ec.FetchReady || r.Plane != ec.PlaneLocal {
		t.Fatalf("%+v", r)
	}
	// The release of what was mapped is not waited for; a round trip behind it is.
	if _, err := c.Stats(testContext(t)); err != nil {
		t.Fatal(err)
	}
	_, text := get(t, n, "/metrics", n.Ready().Admin)
	pool := fmt.Sprintf("pool=%q", n.pools[0].group)
	for series, want := range map[string]string{
		`tensorferry_entries{` + pool + `,state="ready"}`:           "1",
		`tensorferry_entries{` + pool + `,state="filling"}`:         "1",
		`tensorferry_bytes{` + pool + `,state="ready"}`:             "4096",
		`tensorferry_bytes{` + pool + `,state="filling"}`:           "4096",
		`tensorferry_bytes{` + pool + `,state="free"}`:              "0",
		`tensorferry_bytes{` + pool + `,state="quarantined"}`:       "0",
		`tensorferry_pinned_bytes{` + pool + `}`:                    "0",
		`tensorferry_held_bytes{` + pool + `}`:                      "4096",
		`tensorferry_holds{` + pool + `}`:                           "1",
		`tensorferry_quarantined{` + pool + `}`:                     "0",
		`tensorferry_epoch{` + pool + `}`:                           "1",
		`tensorferry_hits_total{` + pool + `}`:                      "1",
		`tensorferry_misses_total{` + pool + `}`:                    "1",
		`tensorferry_commits_total{` + pool + `}`:                   "2",
		`tensorferry_discards_total{` + pool + `}`:                  "0",
		`tensorferry_evictions_total{` + pool + `}`:                 "1",
		`tensorferry_full_total{` + pool + `}`:                      "0",
		`tensorferry_fetches_total{outcome="ready",` + pool + `}`:   "1",
		`tensorferry_fetches_total{outcome="missing",` + pool + `}`: "0",
		`tensorferry_fetched_bytes_total{` + pool + `}`:             "0",
		`tensorferry_acks_total{status="OK"}`:                       "0",
		`tensorferry_grants`:                                        "0",
		`tensorferry_grants_total`:                                  "0",
		`tensorferry_engines`:                                       "1",
		`tensorferry_engine_connections_total{result="accepted"}`:   "1",
		`tensorferry_engine_connections_total{result="slow"}`:       "0",
		`tensorferry_engine_reservations_left_total`:                "0",
		`tensorferry_side_channel_dropped_total{reason="frames"}`:   "0",
		`tensorferry_side_channel_cut_total{reason="stalled"}`:      "0",
	} {
		m := regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(series) + ` (.*)$`).FindStringSubmatch(text)
		if m == nil || m[1] != want {
			t.Errorf("%s: %v, want %s", series, m, want)
		}
	}
	for _, name := range []string{"go_goroutines", "process_open_fds"} {
		if !strings.Contains(text, "\n"+name+" ") {
			t.Errorf("no %s", name)
		}
	}
}

func TestAcksAreCountedByStatus(t *testing.T) {
	ca, cb := testConfig(t, 16), testConfig(t, 16)
	cb.ShmDir = ca.ShmDir
	na, nb := startNode(t, ca), startNode(t, cb)
	a, b := dial(t, na), dial(t, nb)
	put(t, a, "k", 2, 1)
	p, err := a.Announce(testContext(t), []client.AnnounceItem{{Key: "k", ItemIndices: []int{0}}})
	if err != nil {
		t.Fatal(err)
	}
	k, _ := p.Get("k")
	other := *k
	p.Set("gone", &other)
	ch, err := b.Fetch(testContext(t), p, 0)
	if err != nil {
		t.Fatal(err)
	}
	for r := range ch {
		if want := map[string]ec.Outcome{"k": ec.FetchReady, "gone": ec.FetchMissing}[r.Key]; r.Outcome != want {
			t.Errorf("%+v, want %v", r, want)
		}
	}
	_, text := get(t, na, "/metrics", na.Ready().Admin)
	for _, want := range []string{`acks_total{status="OK"} 1`, `acks_total{status="NACK_MISSING"} 1`, "granted_bytes_total 4096"} {
		if !strings.Contains(text, "\ntensorferry_"+want+"\n") {
			t.Errorf("no %s", want)
		}
	}
	_, text = get(t, nb, "/metrics", nb.Ready().Admin)
	if want := fmt.Sprintf("\ntensorferry_fetched_bytes_total{pool=%q} 4096\n", nb.pools[0].group); !strings.Contains(text, want) {
		t.Errorf("no %s", want)
	}
}

func TestAdminShowsEntriesAndStatus(t *testing.T) {
	cfg := testConfig(t, 16)
	cfg.Checksums = true
	n := startNode(t, cfg)
	c := dial(t, n)
	if _, text := get(t, n, "/v1/entries", n.Ready().Admin); strings.TrimSpace(text) != "[]" {
		t.Errorf("an empty pool: %s", text)
	}
	put(t, c, "k", 3, 1)
	m, err := c.Map(testContext(t), "k")
	if err != nil {
		t.Fatal(err)
	}
	defer m.Release()
	var entries []entryStatus
	if _, text := get(t, n, "/v1/entries", n.Ready().Admin); json.Unmarshal([]byte(text), &entries) != nil || len(entries) != 1 {
		t.Fatalf("%s", text)
	}
	e := entries[0]
	if e.Key != "k" || e.State != "ready" || e.Bytes != 3*testBlock || e.Dtype != "torch.bfloat16" || e.Pins != 1 || e.Gen == 0 ||
		len(e.Extents) != 1 || e.Extents[0][1] != 3 || e.Pool != n.pools[0].group || e.Sum != fmt.Sprintf("%016x", xxh3.Hash(payload(3, 1))) {
		t.Errorf("%+v", e)
	}
	var st nodeStatus
	if _, text := get(t, n, "/v1/status", n.Ready().Admin); json.Unmarshal([]byte(text), &st) != nil {
		t.Fatalf("%s", text)
	}
	if len(st.Planes) != 2 || len(st.Pools) != 1 || st.Pools[0].Region != n.Ready().Region || st.Pools[0].Epoch != 1 || len(st.Engines) != 1 ||
		st.Engines[0].Name != t.Name() || st.Config["timeouts.read"] != "20s" || st.Config["checksums"] != "true" || st.PeerPort != n.Ready().PeerPort {
		t.Errorf("%+v", st)
	}
}

func TestAdminIsReadOnlyAndKnowsItsHosts(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	for host, want := range map[string]int{
		"127.0.0.1": 200, "localhost:80": 200, "LOCALHOST": 200, "[::1]:5602": 200, "10.0.0.1": 200,
		"evil.example": 421, "localhost.evil.example:5602": 421, "127.0.0.1.evil.example": 421,
	} {
		if got, text := get(t, n, "/healthz", host); got != want {
			t.Errorf("Host %q: %d %s", host, got, text)
		}
	}
	for _, path := range []string{"/healthz", "/v1/entries", "/v1/status", "/metrics"} {
		r, err := http.Post("http://"+n.Ready().Admin+path, "text/plain", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Body.Close()
		if r.StatusCode != http.StatusMethodNotAllowed {
			t.Errorf("POST %s: %d", path, r.StatusCode)
		}
	}
	if got, _ := get(t, n, "/v1/other", "127.0.0.1"); got != http.StatusNotFound {
		t.Errorf("an unknown path: %d", got)
	}
}

// C83: a listener died and the process lived on, deaf.
func TestANodeWhoseListenerEndedIsNotHealthy(t *testing.T) {
	for name, end := range map[string]func(*Node) error{
		"engine socket": func(n *Node) error { return n.engines.sock.UnixListener.Close() },
		"side channel":  func(n *Node) error { return n.loop.Close() },
		"plane tcp": func(n *Node) error {
			i := slices.IndexFunc(n.planes, func(p transfer.Plane) bool { return p.Name() == transfer.TCP })
			return n.planes[i].Close()
		},
	} {
		n := startNode(t, testConfig(t, 16))
		if got, text := get(t, n, "/readyz", "127.0.0.1"); got != 200 {
			t.Fatalf("%d %s", got, text)
		}
		if err := end(n); err != nil {
			t.Fatal(err)
		}
		select {
		case <-n.Done():
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: not noticed", name)
		}
		if n.Err() == nil || !strings.Contains(n.Err().Error(), name) {
			t.Errorf("%s: %v", name, n.Err())
		}
		if got, text := get(t, n, "/healthz", "127.0.0.1"); got != 503 || !strings.Contains(text, name) {
			t.Errorf("%s: %d %s", name, got, text)
		}
	}
}

// Silent connections take no more than the places, and what asks afterwards is answered.
func TestTheAdminEndpointHasSoManyPlaces(t *testing.T) {
	n := startNode(t, testConfig(t, 4))
	var silent []net.Conn
	closed := make(chan struct{}, 3*adminPlaces)
	for range 3 * adminPlaces {
		c, err := net.Dial("tcp", n.Ready().Admin)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		silent = append(silent, c)
		go func() {
			_, _ = c.Read(make([]byte, 1))
			closed <- struct{}{}
		}()
	}
	for range 2 * adminPlaces {
		<-closed
	}
	for _, c := range silent {
		c.Close()
	}
	for range adminPlaces {
		<-closed
	}
	eventually(t, "places again", func() bool { taken, _ := n.admin.places(); return taken == 0 })
	if status, text := get(t, n, "/healthz", "localhost"); status != http.StatusOK {
		t.Errorf("%d %s", status, text)
	}
}

// places are how many connections have one, and how many of these ask nothing.
func (a *adminServer) places() (taken, waiting int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.taken), len(a.waiting)
}

// Connections that are kept for a next request made every probe fail, for as long as they were used once a minute.
func TestKeptConnectionsToTheAdminEndpointGiveWayToProbes(t *testing.T) {
	n := startNode(t, testConfig(t, 4))
	ask := func(c net.Conn, text string) {
		t.Helper()
		if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, text); err != nil {
			t.Fatal(err)
		}
	}
	answered := func(c net.Conn) bool {
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return false
		}
		_, err = io.Copy(io.Discard, r.Body)
		return err == nil && r.StatusCode == http.StatusOK
	}
	const request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
	kept := make([]net.Conn, adminPlaces)
	for i := range kept {
		c, err := net.Dial("tcp", n.Ready().Admin)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		kept[i] = c
		ask(c, request)
		if !answered(c) {
			t.Fatalf("connection %d is not answered", i)
		}
		eventually(t, "it is kept", func() bool { _, waiting := n.admin.places(); return waiting == i+1 })
	}
	probe := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for range 20 {
		for _, path := range []string{"/healthz", "/readyz"} {
			r, err := probe.Get("http://" + n.Ready().Admin + path)
			if err != nil {
				t.Fatal(err)
			}
			_ = r.Body.Close()
			if r.StatusCode != http.StatusOK {
				t.Errorf("%s: %d", path, r.StatusCode)
			}
		}
	}
	ask(kept[adminPlaces-1], request)
	if !answered(kept[adminPlaces-1]) {
		t.Error("the connection that was used last lost its place")
	}
	if _, err := kept[0].Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("%v; want the end of the connection that was used first", err)
	}
}

func TestAnAdminConnectionThatIsBeingAnsweredKeepsItsPlace(t *testing.T) {
	a := adminServer{taken: make(map[net.Conn]struct{})}
	conns := make([]net.Conn, adminPlaces+3)
	for i := range conns {
		c, other := net.Pipe()
		defer c.Close()
		defer other.Close()
		conns[i] = c
	}
	for _, step := range []struct {
		conn    int
		state   http.ConnState
		evicted int // -1: none
		waiting int
	}{
		{adminPlaces, http.StateNew, adminPlaces, 0}, // all are being answered
		{adminPlaces, http.StateClosed, -1, 0},
		{5, http.StateIdle, -1, 1},
		{3, http.StateIdle, -1, 2},
		{5, http.StateActive, -1, 1},
		{5, http.StateIdle, -1, 2},
		{adminPlaces + 1, http.StateNew, 3, 2}, // it waited for longer than 5
		{3, http.StateIdle, -1, 2},             // its request came just then
		{3, http.StateClosed, -1, 2},
		{adminPlaces + 1, http.StateActive, -1, 1},
		{adminPlaces + 2, http.StateNew, 5, 1},
	} {
		if len(a.taken) == 0 {
			for _, c := range conns[:adminPlaces] {
				if a.place(c, http.StateNew) != nil || a.place(c, http.StateActive) != nil {
					t.Fatal("no place")
				}
			}
		}
		evicted := slices.Index(conns, a.place(conns[step.conn], step.state))
		if taken, waiting := a.places(); evicted != step.evicted || taken != adminPlaces || waiting != step.waiting {
			t.Errorf("%+v: evicted %d, %d taken, %d waiting", step, evicted, taken, waiting)
		}
	}
}
