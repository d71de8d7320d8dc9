package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/tensorferry/tensorferry/ec"
)

// adminServer is the admin HTTP: read only, no authentication, on loopback unless the network is trusted.
type adminServer struct {
	addr     string // HOST:PORT as bound
	listener net.Listener
	srv      *http.Server  // nil before serve
	done     chan struct{} // closed when it serves no more

	mu      sync.Mutex
	taken   map[net.Conn]struct{} // places
	waiting []net.Conn            // of these: those without a request, the longest first
	err     error                 // why it ended by itself
}

// listenAdmin takes the port. Who connects waits for serve.
func listenAdmin(ctx context.Context, s *settings) (*adminServer, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(s.adminHost, strconv.Itoa(s.adminPort)))
	if err != nil {
		return nil, err
	}
	return &adminServer{addr: l.Addr().String(), listener: l, done: make(chan struct{}), taken: make(map[net.Conn]struct{})}, nil
}

// unbind gives the port up, whether it is served or not.
func (a *adminServer) unbind() error {
	if err := a.listener.Close(); !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// adminPlaces is how many connections the admin endpoint has at a time: each takes a descriptor, and anybody on the machine may connect.
const adminPlaces = 64

// count gives places: a new connection without one takes that of the connection that has waited for a request for the longest (one
// that is not read whole is none), so that probes are answered whoever keeps connections open, and is closed if all are being answered.
func (a *adminServer) count(c net.Conn, state http.ConnState) {
	if evicted := a.place(c, state); evicted != nil {
		_ = evicted.Close()
	}
}

// place is what count does but for the closing.
func (a *adminServer) place(c net.Conn, state http.ConnState) (evicted net.Conn) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if i := slices.Index(a.waiting, c); i >= 0 {
		a.waiting = slices.Delete(a.waiting, i, i+1)
	}
	switch state {
	case http.StateNew:
		if len(a.taken) == adminPlaces {
			if len(a.waiting) == 0 {
				return c
			}
			evicted = a.waiting[0]
			a.waiting = slices.Delete(a.waiting, 0, 1)
			delete(a.taken, evicted)
		}
		a.taken[c] = struct{}{}
		a.waiting = append(a.waiting, c)
	case http.StateIdle:
		if _, ok := a.taken[c]; ok { // else it is being closed
			a.waiting = append(a.waiting, c)
		}
	case http.StateClosed, http.StateHijacked:
		delete(a.taken, c)
	}
	return evicted
}

// serve answers from now on, of a node all of which is up: handlers read its fields without a lock.
func (a *adminServer) serve(n *Node) {
	a.srv = &http.Server{
		Handler:           checkHost(n.s.adminHost, n.adminMux()),
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      30 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(n.log.Handler(), slog.LevelDebug),
		ConnState:         a.count,
	}
	go func() {
		defer close(a.done)
		if err := a.srv.Serve(a.listener); !errors.Is(err, http.ErrServerClosed) {
			a.mu.Lock()
			a.err = fmt.Errorf("admin: %w", err)
			a.mu.Unlock()
		}
	}()
}

func (a *adminServer) failed() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.err
}

// close gives requests under way a moment, and ends them.
func (a *adminServer) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	err := a.srv.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = a.srv.Close()
	}
	<-a.done
	return err
}

// checkHost refuses requests whose Host is a name: a web page whose name was made to point to this address (DNS rebinding) sends
// its own. Addresses, localhost and the configured host are let through.
func checkHost(own string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
		_, err := netip.ParseAddr(host)
		if err != nil && !strings.EqualFold(host, "localhost") && !strings.EqualFold(host, own) {
			http.Error(w, "unknown host: use the address", http.StatusMisdirectedRequest)
			return
		}
		w.Header().Set("X-Content-Type-Options", "nosniff")
		next.ServeHTTP(w, r)
	})
}

func (n *Node) adminMux() *http.ServeMux {
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(&collector{n}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", n.health(n.failed))
	mux.HandleFunc("GET /readyz", n.health(n.notReady))
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /v1/entries", func(w http.ResponseWriter, _ *http.Request) { n.writeJSON(w, n.entries()) })
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) { n.writeJSON(w, n.status()) })
	return mux
}

func (n *Node) health(check func() error) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		if err := check(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		_, _ = w.Write([]byte("ok\n"))
	}
}

var errEnding = errors.New("the node is ending")

// over is failed, and errEnding of a node that is ending.
func (n *Node) over() error {
	select {
	case <-n.closed:
		return errEnding
	default:
		return n.failed()
	}
}

// notReady also says which data planes cannot move bytes for now, and whether others can still find the node.
func (n *Node) notReady() error {
	return errors.Join(n.over(), n.planeHealth.failed(), n.lostFiles())
}

func (n *Node) writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(v); err != nil {
		n.log.Debug("admin: answer not written", "error", err)
	}
}

// entryStatus is one entry of /v1/entries.
type entryStatus struct {
	Pool    string      `json:"pool"` // compatibility hash
	Key     string      `json:"key"`
	State   string      `json:"state"` // "filling", "ready"
	Bytes   int64       `json:"bytes"`
	Shape   []int64     `json:"shape"`
	Dtype   string      `json:"dtype"`
	Pins    int         `json:"pins"`
	Holds   int         `json:"holds"`
	Grants  int         `json:"grants"` // to peers that may READ it
	Burned  int         `json:"burned"` // of these: their lease is over, and the peer may READ all the same
	Gen     uint64      `json:"gen"`
	Slot    int         `json:"slot"`
	Extents [][2]uint32 `json:"extents"` // start, count, in blocks
	Owner   uint64      `json:"owner"`   // the engine that fills or filled it, 0: the node itself
	Sum     string      `json:"xxh3,omitempty"`
}

func (n *Node) entries() []entryStatus {
	out := []entryStatus{}
	for _, p := range n.pools {
		for _, i := range p.entries() {
			out = append(out, entryOf(p.group, i))
		}
	}
	return out
}

func entryOf(group string, i ec.Info) entryStatus {
	e := entryStatus{
		Pool: group, Key: i.Key, State: i.State.String(), Bytes: i.Spec.Bytes, Shape: i.Spec.Shape, Dtype: i.Spec.Dtype,
		Pins: i.Pins, Holds: i.Holds, Grants: i.Grants, Burned: i.Burned, Gen: i.Gen, Slot: i.Slot, Owner: i.Owner, Extents: make([][2]uint32, len(i.Extents)),
	}
	for j, x := range i.Extents {
		e.Extents[j] = [2]uint32{x.Start, x.Count}
	}
	if i.HasChecksum {
		e.Sum = fmt.Sprintf("%016x", i.Checksum)
	}
	return e
}

// nodeStatus is /v1/status.
type nodeStatus struct {
	Node       string            `json:"node"`
	Instance   string            `json:"instance"`
	PID        int               `json:"pid"`
	UptimeS    float64           `json:"uptime_s"`
	Socket     string            `json:"socket"`
	PeerHost   string            `json:"peer_host"`
	PeerPort   int               `json:"peer_port"`
	Admin      string            `json:"admin"`
	ECProtocol int               `json:"ec_protocol"`
	Planes     []string          `json:"planes"`
	Engines    []engineStatus    `json:"engines"`
	Pools      []poolStatus      `json:"pools"`
	Config     map[string]string `json:"config"` // in force, by key
}

type engineStatus struct {
	Conn  uint64 `json:"conn"`
	Owner uint64 `json:"owner"` // of what it reserves, in /v1/entries
	Name  string `json:"name"`
	PID   int    `json:"pid"`
	Pool  string `json:"pool"`

	ReservedBlocks int `json:"reserved_blocks"` // by all connections of its process
}

type poolStatus struct {
	Group       string `json:"group"`
	Model       string `json:"model"`
	Dtype       string `json:"dtype"`
	VLLMVersion string `json:"vllm_version"`
	BlockBytes  int64  `json:"block_bytes"`
	Blocks      int    `json:"blocks"`
	Region      string `json:"region"`
	Epoch       uint64 `json:"epoch"`

	Grants grantStatus `json:"grants"`
}

// grantStatus is what peers may READ of a pool. Blocks are counted once.
type grantStatus struct {
	Grants         int     `json:"grants"`
	Blocks         int     `json:"blocks"`
	Burned         int     `json:"burned"` // of plain peers, past their lease and not read
	BurnedBlocks   int     `json:"burned_blocks"`
	RetiringS      float64 `json:"retiring_s"`      // since when a former agent serves on, 0: there is none
	RetiringBlocks int     `json:"retiring_blocks"` // that nothing but former agents serves
}

func grantsOf(g ec.PoolGrants) grantStatus {
	return grantStatus{g.Grants, g.GrantedBlocks, g.Burned, g.BurnedBlocks, g.RetiringFor.Seconds(), g.RetiringBlocks}
}

func (n *Node) status() nodeStatus {
	st := nodeStatus{
		Node: n.id, Instance: n.s.Instance, PID: n.ready.PID, UptimeS: time.Since(n.started).Seconds(), Socket: n.ready.Socket,
		PeerHost: n.ready.PeerHost, PeerPort: n.ready.PeerPort, Admin: n.ready.Admin, ECProtocol: n.s.ECProtocol,
		Planes: n.planeList(), Engines: n.engines.list(), Config: map[string]string{},
	}
	for _, p := range n.pools {
		st.Pools = append(st.Pools, poolStatus{
			Group: p.group, Model: p.Model, Dtype: p.Dtype, VLLMVersion: p.VLLMVersion, BlockBytes: p.BlockBytes,
			Blocks: p.blocks, Region: p.region.Path(), Epoch: p.region.Epoch(), Grants: grantsOf(n.producer.Granted(p.cache)),
		})
	}
	c := n.s.Config
	for key, f := range fieldsOf(reflect.ValueOf(&c).Elem(), "") {
		text := fmt.Sprint(f.Interface())
		if list, ok := f.Interface().([]string); ok {
			text = strings.Join(list, ",")
		}
		st.Config[key] = text
	}
	return st
}
