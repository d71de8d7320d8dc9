package node

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// faulty is a plane whose checks do as they are told.
type faulty struct {
	transfer.Plane
	fails, hangs atomic.Bool
	checks       atomic.Int64
}

func (p *faulty) Check(ctx context.Context) error {
	p.checks.Add(1)
	if p.hangs.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	if p.fails.Load() {
		return errors.New("the agents keep dying")
	}
	return nil
}

func newFaulty() *faulty { return &faulty{Plane: (&transfertest.Fabric{}).Plane()} }

// C78: every transfer failed while all were Ready.
func TestReadinessFollowsAPlaneThatBreaksAndRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newFaulty()
		h := newPlaneHealth([]transfer.Plane{p, (&transfertest.Fabric{}).Plane()}, slog.New(slog.DiscardHandler))
		closed := make(chan struct{})
		go h.watch(closed)
		at := func(d time.Duration, want string) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			if err := h.failed(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("after %v: %v, want %q", d, err, want)
			}
		}
		at(time.Minute, "")
		if n := p.checks.Load(); n != int64(time.Minute/checkEvery) {
			t.Errorf("%d checks in a minute", n)
		}
		p.fails.Store(true)
		at(checkEvery, "") // it may have been the moment in which an agent is started again
		at(checkAgain, "the agents keep dying")
		at(time.Hour, "the agents keep dying")
		p.fails.Store(false)
		at(checkAgain, "")
		p.hangs.Store(true)
		at(checkEvery+2*checkTimeout+checkAgain, "deadline")
		close(closed) // also during a check that hangs
	})
}

func TestANodeWhosePlaneIsBrokenIsNotReadyAndHealthy(t *testing.T) {
	cfg := testConfig(t, 16)
	cfg.Admin = "127.0.0.1:0"
	n := startNode(t, cfg)
	status := func(path string) (int, string) {
		t.Helper()
		r, err := http.Get("http://" + n.Ready().Admin + path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		var text strings.Builder
		if err := r.Write(&text); err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, text.String()
	}
	n.planeHealth.set(n.planes[0], errors.New("the agents keep dying"))
	if code, text := status("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(text, n.planes[0].Name()+": the agents keep dying") {
		t.Errorf("readyz: %d %s", code, text)
	}
	if code, _ := status("/healthz"); code != http.StatusOK {
		t.Errorf("healthz: %d: a restart would not help", code)
	}
	if _, text := status("/metrics"); !strings.Contains(text, `tensorferry_plane_up{plane="`+n.planes[0].Name()+`"} 0`) {
		t.Error("not in /metrics")
	}
	n.planeHealth.set(n.planes[0], nil)
	if code, _ := status("/readyz"); code != http.StatusOK {
		t.Errorf("readyz: %d", code)
	}
}

func TestANodeThatCannotBeFoundAnyMoreIsNotReady(t *testing.T) {
	for _, c := range []struct {
		name string
		lose func(n *Node) error
		want string
	}{
		{"its socket is removed", func(n *Node) error { return os.Remove(n.Ready().Socket) }, "was removed: no engine can connect"},
		{"its socket is replaced", func(n *Node) error {
			return errors.Join(os.Remove(n.Ready().Socket), os.WriteFile(n.Ready().Socket, nil, 0o600))
		}, "was replaced by another file"},
		{"its region is removed", func(n *Node) error { return os.Remove(n.Ready().Region) }, "a restart does not find"},
		{"its region is renamed", func(n *Node) error {
			return os.Rename(n.Ready().Region, n.Ready().Region+".old")
		}, "a restart does not find"},
		{"its region is cut", func(n *Node) error { return os.Truncate(n.Ready().Region, n.pools[0].region.PoolOffset()) }, "was cut from"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cfg := testConfig(t, 16)
			n, err := Start(testContext(t), cfg, quiet())
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = n.Close(testContext(t))
				for _, path := range []string{n.Ready().Region + ".old", n.Ready().Socket} {
					_ = os.Remove(path)
				}
			}()
			if err := n.lostFiles(); err != nil {
				t.Fatal(err)
			}
			if err := c.lose(n); err != nil {
				t.Fatal(err)
			}
			// At once, and not when somebody has looked next.
			resp, err := http.Get("http://" + n.Ready().Admin + "/readyz")
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(text), c.want) {
				t.Errorf("%d %s; want 503 and %q", resp.StatusCode, text, c.want)
			}
		})
	}
}

func TestFilesThatGoAndComeAreLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var state atomic.Pointer[error]
		look := func() error {
			if err := state.Load(); err != nil {
				return *err
			}
			return nil
		}
		closed, ended := make(chan struct{}), make(chan struct{})
		log := &logged{}
		go func() {
			defer close(ended)
			watchFiles(closed, look, slog.New(slog.NewTextHandler(log, nil)))
		}()
		for i, err := range []error{nil, errors.New("the socket was removed"), errors.New("and the region"), nil, nil} {
			state.Store(nil)
			if err != nil {
				state.Store(&err)
			}
			time.Sleep(checkEvery)
			synctest.Wait()
			if got, want := strings.Count(log.String(), "\n"), []int{0, 1, 1, 2, 2}[i]; got != want {
				t.Errorf("look %d: %d log lines, want %d:\n%s", i, got, want, log.String())
			}
			if want := "level=INFO msg=\"the node can be found again: what was gone was put back\""; strings.Contains(log.String(), want) != (i >= 3) {
				t.Errorf("look %d: %q in the log: %v", i, want, i < 3)
			}
		}
		close(closed)
		<-ended
	})
}
