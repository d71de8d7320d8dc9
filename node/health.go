package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// checked is implemented by data planes that can break while the node goes on. Check tries to move bytes, and is nil if that worked.
type checked interface {
	Check(ctx context.Context) error
}

const (
	checkEvery   = 10 * time.Second // while it passes; a check of the nixl plane costs a few milliseconds
	checkAgain   = time.Second      // after one that failed
	checkTimeout = 5 * time.Second
	// An agent that died once is back within a second, and nobody need turn away from the node for that.
	checkFailures = 2
)

// planeHealth is what is known of the data planes since they passed their tests at the start.
type planeHealth struct {
	planes []transfer.Plane
	log    *slog.Logger

	mu   sync.Mutex
	down map[transfer.Plane]error // those that do not pass
}

func newPlaneHealth(planes []transfer.Plane, log *slog.Logger) *planeHealth {
	return &planeHealth{planes: planes, log: log, down: map[transfer.Plane]error{}}
}

// of says why a plane is down, nil if it is not.
func (h *planeHealth) of(p transfer.Plane) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.down[p]
}

// failed names the planes that are down.
func (h *planeHealth) failed() error {
	var errs []error
	for _, p := range h.planes {
		if err := h.of(p); err != nil {
			errs = append(errs, fmt.Errorf("plane %s: %w", p.Name(), err))
		}
	}
	return errors.Join(errs...)
}

// watch checks the planes, each by itself, until closed is.
func (h *planeHealth) watch(closed <-chan struct{}) {
	var all sync.WaitGroup
	for _, p := range h.planes {
		if c, ok := p.(checked); ok {
			all.Go(func() { h.watchOne(p, c, closed) })
		}
	}
	all.Wait()
}

func (h *planeHealth) watchOne(p transfer.Plane, c checked, closed <-chan struct{}) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-closed:
			cancel()
		case <-ctx.Done():
		}
	}()
	wait, failures := checkEvery, 0
	for {
		select {
		case <-closed:
			return
		case <-time.After(wait):
		}
		checking, done := context.WithTimeout(ctx, checkTimeout)
		err := c.Check(checking)
		done()
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			if failures >= checkFailures {
				h.log.Info("a data plane works again", "plane", p.Name())
			}
			wait, failures = checkEvery, 0
			h.set(p, nil)
			continue
		}
		wait, failures = checkAgain, failures+1
		switch {
		case failures == checkFailures:
			h.log.Error("a data plane does not work: the node is not ready until it does", "plane", p.Name(), "error", err)
			fallthrough
		case failures > checkFailures:
			h.set(p, err)
		}
	}
}

func (h *planeHealth) set(p transfer.Plane, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.down, p)
		return
	}
	h.down[p] = err
}

// watchFiles logs, until closed is, when what others find the node by has gone: the engine socket and the regions' files, which a hand or a
// cleaner of temporary files may take away. Putting the file back mends that, or a start of the node. Readiness looks by itself.
func watchFiles(closed <-chan struct{}, look func() error, log *slog.Logger) {
	tick := time.NewTicker(checkEvery)
	defer tick.Stop()
	var before error
	for {
		select {
		case <-closed:
			return
		case <-tick.C:
		}
		err := look()
		switch {
		case err != nil && before == nil:
			log.Error("the node can no longer be found, until what is gone is put back or it is started again", "error", err)
		case err == nil && before != nil:
			log.Info("the node can be found again: what was gone was put back", "was", before)
		}
		before = err
	}
}

// lostFiles looks for the engine socket and the regions: some 10 us.
func (n *Node) lostFiles() error {
	errs := []error{n.socket.lost()}
	for _, p := range n.pools {
		errs = append(errs, p.lost())
	}
	return errors.Join(errs...)
}

// lost says why a region is not what it was: cut short, its pages end whoever reads them; without its name, no restart finds it.
func (p *pool) lost() error {
	f, err := p.region.Reopen(false)
	if errors.Is(err, region.ErrClosed) || api.Exhausted(err) {
		return nil // it is at its end, or nothing can be said now
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var st, now unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("region %s: %w", p.region.Path(), err)
	}
	if want := p.region.PoolOffset() + p.region.Geometry().PoolBytes(); st.Size < want {
		return fmt.Errorf("region %s was cut from %d bytes to %d: a READ of what is missing ends its process", p.region.Path(), want, st.Size)
	}
	if err := unix.Lstat(p.region.Path(), &now); st.Nlink == 0 || err != nil || now.Dev != st.Dev || now.Ino != st.Ino {
		return fmt.Errorf("region %s was removed or replaced: a restart does not find what is in it", p.region.Path())
	}
	return nil
}
