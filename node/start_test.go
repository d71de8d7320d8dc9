package node

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

func openFiles(t *testing.T) int {
	t.Helper()
	d, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(d)
}

func TestReadyIsTheContractOfTheCommandLine(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	b, err := json.Marshal(n.Ready())
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if len(got) != 7 || got["event"] != "ready" || got["peer_host"] != "127.0.0.1" || got["peer_port"].(float64) < 1 || got["pid"].(float64) != float64(os.Getpid()) {
		t.Errorf("%s", b)
	}
	if _, _, err := net.SplitHostPort(got["admin"].(string)); err != nil {
		t.Error(err)
	}
	for _, path := range []string{"socket", "region"} {
		if _, err := os.Stat(got[path].(string)); err != nil {
			t.Error(err)
		}
	}
}

func TestAStartThatFailsLeavesNothing(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, c := range []struct {
		name   string
		change func(*Config)
		want   []string
		is     error
	}{
		// C83: a bind that failed in a thread.
		{"side channel taken", func(c *Config) { c.SideChannel = taken.Addr().String() }, []string{"side_channel", taken.Addr().String()}, syscall.EADDRINUSE},
		{"a side channel whose host is nobody's", func(c *Config) { c.SideChannel, c.Trusted = "no-such-host.invalid:0", true }, []string{"side_channel", "no-such-host.invalid:0"}, ErrConfig},
		{"a side channel of another machine", func(c *Config) { c.SideChannel, c.Trusted = "192.0.2.1:0", true }, []string{"side_channel", "192.0.2.1:0"}, syscall.EADDRNOTAVAIL},
		{"admin taken", func(c *Config) { c.Admin = taken.Addr().String() }, []string{"admin", taken.Addr().String()}, syscall.EADDRINUSE},
		{"data port taken", func(c *Config) { c.DataPort = taken.Addr().(*net.TCPAddr).Port }, []string{"planes", "tcp"}, syscall.EADDRINUSE},
		{"a plane that this machine has not", func(c *Config) { c.Planes, c.NIXL.Library = []string{"mapped", "nixl"}, "/no/such/libnixl_capi.so" }, []string{"planes", "nixl"}, nixl.ErrMissing},
		// C11: nobody checked the size against /dev/shm.
		{"more than there is", func(c *Config) { c.Pools[0].ECCPUBytes = "1000TiB" }, []string{"ec_cpu_bytes", "1000TiB"}, ErrConfig},
		{"more than the tmpfs", func(c *Config) { c.Pools[0].ECCPUBytes = "900GiB" }, []string{"ec_cpu_bytes", "900GiB", "free"}, ErrConfig},
		{"no directory for the socket", func(c *Config) { c.Socket = "/no/such/dir/s" }, []string{"/no/such/dir/s"}, os.ErrNotExist},
		{"the second pool too large", func(c *Config) {
			p := c.Pools[0]
			p.Model, p.ECCPUBytes = "other", "900GiB"
			c.Pools = append(c.Pools, p)
		}, []string{"900GiB"}, ErrConfig},
	} {
		cfg := testConfig(t, 16)
		c.change(&cfg)
		files, goroutines := openFiles(t), runtime.NumGoroutine()
		n, err := Start(testContext(t), cfg, quiet())
		if err == nil {
			_ = n.Close(testContext(t))
			t.Errorf("%s: started", c.name)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", c.name, err, w)
			}
		}
		if !errors.Is(err, c.is) {
			t.Errorf("%s: %v does not wrap %v", c.name, err, c.is)
		}
		if left, _ := os.ReadDir(cfg.ShmDir); len(left) > 0 {
			t.Errorf("%s: left %v in shared memory", c.name, left)
		}
		if left, _ := os.ReadDir(filepath.Dir(cfg.Socket)); len(left) > 0 {
			t.Errorf("%s: left %v beside the socket", c.name, left)
		}
		eventually(t, c.name+": descriptors and goroutines are given back", func() bool {
			return openFiles(t) <= files && runtime.NumGoroutine() <= goroutines
		})
	}
	if _, err := Start(testContext(t), func() Config { c := testConfig(t, 1); c.Pools[0].ECCPUBytes = "900GiB"; return c }(), quiet()); !errors.As(err, new(*region.SpaceError)) {
		t.Errorf("%v; want a region.SpaceError", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Start(ctx, testConfig(t, 16), quiet()); !errors.Is(err, context.Canceled) {
		t.Errorf("a start without a context: %v", err)
	}
}

func TestANodeThatIsClosedLeavesNothing(t *testing.T) {
	cfg := testConfig(t, 16)
	files, goroutines := openFiles(t), runtime.NumGoroutine()
	n, err := Start(testContext(t), cfg, quiet())
	if err != nil {
		t.Fatal(err)
	}
	c := dial(t, n)
	put(t, c, "k", 2, 1)
	if _, err := c.Reserve(testContext(t), "r", spec(2)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := n.Close(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	<-n.Done()
	if err := n.Err(); err != nil {
		t.Errorf("a clean end: %v", err)
	}
	_ = c.Close()
	for _, path := range []string{n.Ready().Socket, n.Ready().Region} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", path, err)
		}
	}
	eventually(t, "descriptors and goroutines are given back", func() bool {
		return openFiles(t) <= files && runtime.NumGoroutine() <= goroutines
	})
}

func TestKeepRegionLeavesTheRegionForARestart(t *testing.T) {
	cfg := testConfig(t, 16)
	cfg.KeepRegion = true
	for epoch := uint64(1); epoch <= 2; epoch++ {
		n, err := Start(testContext(t), cfg, quiet())
		if err != nil {
			t.Fatal(err)
		}
		if got := n.pools[0].region.Epoch(); got != epoch {
			t.Errorf("epoch %d, want %d", got, epoch)
		}
		if err := n.Close(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(n.Ready().Region); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(cfg.Socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the socket: %v", err)
		}
	}
	cfg.KeepRegion = false
	startNode(t, cfg) // takes it away at its end
}

// C9, C10: ranks and instances that collided on one region.
func TestNodesOfOneMachineShareNothingByAccident(t *testing.T) {
	cfg := testConfig(t, 16)
	a := startNode(t, cfg)
	if _, err := Start(testContext(t), cfg, quiet()); !errors.Is(err, ErrSocketInUse) {
		t.Errorf("the same socket: %v; want ErrSocketInUse", err)
	}
	other := cfg
	other.Socket += "2"
	b := startNode(t, other)
	same := cfg
	same.Socket += "3"
	same.Instance = a.s.Instance
	if _, err := Start(testContext(t), same, quiet()); !errors.Is(err, region.ErrInUse) || !strings.Contains(err.Error(), "instance") {
		t.Errorf("the same instance: %v; want region.ErrInUse", err)
	}
	same.Rank = 1
	c := startNode(t, same)
	regions := map[string]bool{a.Ready().Region: true, b.Ready().Region: true, c.Ready().Region: true}
	ids := map[string]bool{a.id: true, b.id: true, c.id: true}
	if len(regions) != 3 || len(ids) != 3 {
		t.Errorf("regions %v, ids %v", regions, ids)
	}
}

// A probe that comes in the middle of a start waits for its end, and sees all of the node.
func TestProbesDuringTheStartSeeAWholeNode(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := testConfig(t, 16)
	cfg.Admin = free.Addr().String()
	if err := free.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	first := make(chan nodeStatus, 1)
	var probing sync.WaitGroup
	for _, path := range []string{"/readyz", "/healthz", "/metrics", "/v1/status"} {
		probing.Go(func() {
			for ctx.Err() == nil {
				req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+cfg.Admin+path, nil)
				if err != nil {
					t.Error(err)
					return
				}
				r, err := http.DefaultClient.Do(req)
				if err != nil {
					continue // it is not bound yet
				}
				if r.StatusCode != http.StatusOK {
					t.Errorf("%s: %s", path, r.Status)
				}
				var st nodeStatus
				if path == "/v1/status" {
					if err := json.NewDecoder(r.Body).Decode(&st); err != nil {
						t.Error(err)
					}
				}
				_ = r.Body.Close()
				if path == "/v1/status" {
					first <- st
				}
				return
			}
		})
	}
	n := startNode(t, cfg)
	st := <-first
	probing.Wait()
	r := n.Ready()
	if st.PID != r.PID || st.Admin != cfg.Admin || st.Socket != r.Socket || st.PeerPort != r.PeerPort || len(st.Pools) != 1 {
		t.Errorf("%+v, while Ready is %+v", st, r)
	}
}

// What is in use is found out before the region of the node before is touched: that waits as it was.
func TestAStartThatFailsForAPortLeavesTheRegionAsItIs(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	cfg := testConfig(t, 16)
	cfg.Instance = "inst" // not of the socket's path, which changes
	p := spawnNode(t, cfg)
	p.kill()
	before, err := os.Stat(p.ready.Region)
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range []func(*Config){
		func(c *Config) { c.SideChannel = taken.Addr().String() },
		func(c *Config) { c.Admin = taken.Addr().String() },
		func(c *Config) { c.DataPort = taken.Addr().(*net.TCPAddr).Port },
		func(c *Config) { c.Socket = "/no/such/dir/s" },
	} {
		bad := cfg
		change(&bad)
		if _, err := Start(testContext(t), bad, quiet()); err == nil {
			t.Fatal("started")
		}
		if after, err := os.Stat(p.ready.Region); err != nil || !os.SameFile(before, after) {
			t.Fatalf("the region: %v", err)
		}
	}
	n := startNode(t, cfg)
	if e := n.pools[0].region.Epoch(); e != 2 || !n.pools[0].region.Adopted() {
		t.Errorf("epoch %d, adopted %v: want 2, as after one restart", e, n.pools[0].region.Adopted())
	}
}

// A start that fails late gives back what it took over: what peers of the node before may still READ stays out of use.
func TestAStartThatFailsLateLeavesWhatWasGrantedGranted(t *testing.T) {
	cfg := testConfig(t, 16)
	cfg.Instance = "inst" // not of the socket's path, which changes
	p := spawnNode(t, cfg)
	c := dialNode(t, cfg.Socket)
	put(t, c, "granted", 2, 1)
	put(t, c, "free", 2, 2)
	p.kill()
	s, err := cfg.check()
	if err != nil {
		t.Fatal(err)
	}
	open := func() *Node {
		t.Helper()
		n := &Node{s: s, log: quiet()}
		if err := n.startPools(testContext(t)); err != nil {
			t.Fatal(err)
		}
		return n
	}
	granted := func(n *Node) []string {
		var keys []string
		for _, i := range n.pools[0].grantedBefore {
			keys = append(keys, i.Key)
		}
		return keys
	}
	n := open()
	pin, err := n.pools[0].cache.Pin("granted")
	if err != nil {
		t.Fatal(err)
	}
	pin.KeepGranted() // as the node before would have
	if err := n.takeDown(testContext(t)); err != nil {
		t.Fatal(err)
	}
	for try := range 2 {
		n = open()
		if got := granted(n); !slices.Equal(got, []string{"granted"}) {
			t.Errorf("try %d: granted %v", try, got)
		}
		for _, p := range n.pools[0].granted { // as the end of a producer does
			p.Release()
		}
		if err := n.takeDown(testContext(t)); err != nil {
			t.Fatal(err)
		}
	}
	next := startNode(t, cfg)
	if !next.pools[0].region.Adopted() || next.pools[0].grantedBefore != nil {
		t.Errorf("adopted %v, %v", next.pools[0].region.Adopted(), next.pools[0].grantedBefore)
	}
	checkBytes(t, dial(t, next), "granted", 2, 1)
}

// What does not do what it looks like is said once, at the start.
func TestAStartWarnsOfWhatHasNoEffectOrGoesToADisk(t *testing.T) {
	usual := planeMakers[transfer.NIXL]
	defer func() { planeMakers[transfer.NIXL] = usual }()
	planeMakers[transfer.NIXL] = func(context.Context, *settings, *slog.Logger) (transfer.Plane, error) { return nil, errPlaneMissing }
	disk := t.TempDir()
	var st unix.Statfs_t
	if err := unix.Statfs(disk, &st); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		set  func(*Config)
		want string // "": no warning
	}{
		{"the usual", func(*Config) {}, ""},
		{"backends", func(c *Config) { c.NIXL.Backends = []string{"UCX"} }, `no effect: NIXL is not there; ferry doctor says more" settings=[nixl.backends]`},
		{"parameters", func(c *Config) { c.NIXL.Params = []string{"num_workers=2"} }, `settings=[nixl.params]`},
		{"both", func(c *Config) {
			c.NIXL.Backends, c.NIXL.Params = []string{"UCX"}, []string{"num_workers=2"}
		}, `settings="[nixl.backends nixl.params]"`},
		{"a disk", func(c *Config) { c.ShmDir = disk }, "shm_dir=" + disk},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.name == "a disk" && st.Type == unix.TMPFS_MAGIC {
				t.Skip("temporary files are on a tmpfs here")
			}
			cfg, log := testConfig(t, 16), &logged{}
			c.set(&cfg)
			n, err := Start(testContext(t), cfg, slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn})))
			if err != nil {
				t.Fatal(err)
			}
			if err := n.Close(testContext(t)); err != nil {
				t.Error(err)
			}
			if got := log.String(); c.want == "" && got != "" || !strings.Contains(got, c.want) || strings.Count(got, "\n") > 1 {
				t.Errorf("logged %q; want one line with %q", got, c.want)
			}
		})
	}
}
