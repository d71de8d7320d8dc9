package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
)

// What the section about memory and descriptors does: put and get, in batches, then gets that are given up and waits that are aborted.
const (
	roundTrips = 10_000
	aborts     = 1000
	batch      = 250
	inFlight   = 16
	// slackMiB is by how much Go's heap may differ after two collections.
	slackMiB = 0.5
)

// usage is what an end has.
type usage struct {
	RSSMiB      float64 `json:"rss"`  // anonymous: the slab is not counted
	HeapMiB     float64 `json:"heap"` // of Go, in use
	Descriptors int     `json:"descriptors"`
	Goroutines  int     `json:"goroutines"`
	Held        int64   `json:"held"` // payloads, claims, and gets that are not over
}

func usageOf(c stage.Connector) (*usage, error) {
	runtime.GC()
	runtime.GC() // what has finalizers goes with the second
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u := &usage{HeapMiB: float64(m.HeapAlloc) / mib, Goroutines: runtime.NumGoroutine()}
	if l, ok := c.(*connect.Connector); ok {
		st := l.Stats()
		u.Held = int64(sumOf(st.Store.Payloads, st.Store.Claims, st.Store.Withdrawing, st.Client.Pending))
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kib, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				return nil, err
			}
			u.RSSMiB = float64(kib) / 1024
		}
	}
	open, err := os.ReadDir("/proc/self/fd")
	u.Descriptors = len(open)
	return u, err
}

func sumOf(n ...int) (sum int) {
	for _, x := range n {
		sum += x
	}
	return sum
}

// giveUp begins gets whose context ends while they are under way.
func (e *end) giveUp(ctx context.Context, c stage.Connector, q *request) (a answer, err error) {
	_, err = each(len(q.Keys), q.InFlight, func(i int) error {
		ctx, cancel := context.WithTimeout(ctx, time.Duration(rand.IntN(1000))*time.Microsecond)
		defer cancel()
		g, err := c.Get(ctx, stage.Request{Key: q.Keys[i], Metadata: q.Metadata[i]})
		if errors.Is(err, context.DeadlineExceeded) {
			return nil
		}
		if err != nil {
			return err
		}
		return g.Release()
	})
	return a, err
}

// waitForNothing begins gets that the producer aborts.
func (e *end) waitForNothing(ctx context.Context, c stage.Connector, q *request) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := each(len(q.Keys), q.InFlight, func(i int) error {
		_, err := c.Get(ctx, stage.Request{Key: q.Keys[i], From: *q.From, Wait: true})
		if !errors.Is(err, stage.ErrFailed) {
			return fmt.Errorf("a get that was aborted: %w", err)
		}
		return nil
	})
	return err
}

// cleanUp releases what was not read. A claim that was given up may still be on its way to its end.
func (e *end) cleanUp(c stage.Connector, q *request) error {
	for _, key := range q.Keys {
		for until := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			err := c.Cleanup(key)
			if err == nil {
				break
			}
			if !errors.Is(err, stage.ErrClaimed) || time.Now().After(until) {
				return err
			}
		}
	}
	return nil
}

// leaks prints what both ends have before and after.
func (b *bench) leaks(w io.Writer) error {
	fmt.Fprintf(w, "\n## Memory and descriptors\n\nTwo processes of ours, after %d round trips to warm up, after %d more, and after %d aborts: half of them gets of 1 MiB whose\n"+
		"context ends within 1 ms, half gets that wait for a payload which its producer aborts (over shm, where nobody else is told of an abort: all\nof the first kind). "+
		"Looked at %v later: for a while (here %v, else 30 s) a producer remembers which claims were verified. Producer / consumer.\n"+
		"What is held: payloads, claims, gets that are not over.\n\n", 2*batch, roundTrips, aborts, 2*retryGrace, retryGrace)
	measure.Table(w, "connector", "after", "memory, MiB", "of Go's heap in use, MiB", "descriptors", "goroutines", "held")
	for _, c := range b.leakCandidates() {
		if err := b.leak(w, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func (b *bench) leak(w io.Writer, c way) (err error) {
	p, err := b.ours(nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	if err := p.open(&c.open); err != nil {
		return err
	}
	var all [][2]*usage
	row := func(after string) error {
		time.Sleep(2 * retryGrace)
		u, err := p.usage(c.open.Name)
		if err != nil {
			return err
		}
		all = append(all, u)
		from, to := u[0], u[1]
		measure.Row(w, c.name, after, fmt.Sprintf("%.1f / %.1f", from.RSSMiB, to.RSSMiB), fmt.Sprintf("%.2f / %.2f", from.HeapMiB, to.HeapMiB),
			fmt.Sprintf("%d / %d", from.Descriptors, to.Descriptors), fmt.Sprintf("%d / %d", from.Goroutines, to.Goroutines),
			fmt.Sprintf("%d / %d", from.Held, to.Held))
		return nil
	}
	// Also what is over the limit of what comes inline, so that both ways are used.
	loads := []load{{Bytes: 64}, {Bytes: 256 * kib}}
	trips := func(n int) error {
		for i := range n / batch {
			if _, _, err := b.roundTrip(p, c, loads[i%len(loads)], batch, inFlight, false); err != nil {
				return err
			}
		}
		return nil
	}
	if err := trips(2 * batch); err != nil {
		return err
	}
	if err := b.abort(p, c, batch); err != nil {
		return err
	}
	if err := row("the start"); err != nil {
		return err
	}
	if err := trips(roundTrips); err != nil {
		return err
	}
	if err := row(fmt.Sprintf("%d put and get", roundTrips)); err != nil {
		return err
	}
	for range aborts / batch {
		if err := b.abort(p, c, batch); err != nil {
			return err
		}
	}
	if err := row(fmt.Sprintf("and %d aborts", aborts)); err != nil {
		return err
	}
	first, last := all[0], all[len(all)-1]
	same, worst := true, 0.0
	for side := range first {
		f, l := first[side], last[side]
		same = same && l.Descriptors <= f.Descriptors && l.Goroutines <= f.Goroutines && l.Held == 0
		worst = max(worst, l.HeapMiB-f.HeapMiB)
	}
	b.verdict(fmt.Sprintf("%s: heap, descriptors and goroutines back to the start", c.name),
		fmt.Sprintf("heap %+.2f MiB, descriptors %+d / %+d", worst, last[0].Descriptors-first[0].Descriptors, last[1].Descriptors-first[1].Descriptors),
		same && worst <= slackMiB)
	return nil
}

// abort makes n gets that get nothing.
func (b *bench) abort(p *pair, c way, n int) error {
	waiting := n / 2
	if c.open.Connector == "shm" {
		waiting = 0
	}
	l, keys := load{Bytes: mib}, b.keys(n-waiting)
	for len(keys) > 0 { // as many at once as there is room for
		now := keys[:min(len(keys), slabBytes/mib/2)]
		keys = keys[len(now):]
		put, err := p.from.ask(request{Op: "put", Name: c.open.Name, Load: &l, Keys: now, InFlight: 1})
		if err != nil {
			return err
		}
		if _, err := p.to.ask(request{Op: "get or give up", Name: c.open.Name, Keys: now, Metadata: put.Metadata, InFlight: 4}); err != nil {
			return err
		}
		if _, err := p.from.ask(request{Op: "clean up", Name: c.open.Name, Keys: now}); err != nil {
			return err
		}
	}
	if waiting == 0 {
		return nil
	}
	keys = b.keys(waiting)
	var both errgroup.Group
	both.Go(func() error {
		_, err := p.to.ask(request{Op: "wait for nothing", Name: c.open.Name, Keys: keys, From: c.open.From, InFlight: inFlight})
		return err
	})
	both.Go(func() error {
		_, err := p.from.ask(request{Op: "abort", Name: c.open.Name, Keys: keys})
		return err
	})
	return both.Wait()
}

// usage asks until nothing is held any more, or for a second.
func (p *pair) usage(name string) (u [2]*usage, err error) {
	for until := time.Now().Add(time.Second); ; time.Sleep(20 * time.Millisecond) {
		for side, end := range []*process{p.from, p.to} {
			a, err := end.ask(request{Op: "usage", Name: name})
			if err != nil {
				return u, err
			}
			u[side] = a.Usage
		}
		if u[0].Held+u[1].Held == 0 || time.Now().After(until) {
			return u, nil
		}
	}
}
