package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// engineRole is what an engine process is told.
type engineRole struct {
	Socket  string
	Node    int
	Seed    uint64
	Keys    int
	Workers int
	Removes bool   // take entries out
	Board   string // directory of announcements that all engines read
	Ledger  string // file of keys whose commit was acknowledged
}

// report is what an engine says at its end.
type report struct {
	Saved, Mapped, Pulled, Local int64 // entries
	Lost                         int64 // connections
	Other                        map[string]int
	Wrong                        []string
}

// worker is one of an engine's threads of work. They share the connection, which the supervisor renews.
type worker struct {
	*engineProc
	rng *rand.Rand
}

type engineProc struct {
	r      engineRole
	log    *slog.Logger
	saved  atomic.Int64
	mapped atomic.Int64
	pulled atomic.Int64
	local  atomic.Int64

	mu    sync.Mutex
	c     *client.Client
	other map[string]int
	wrong []string
}

// runEngine works until it is told to end. Being killed is what it is for.
func runEngine(ctx context.Context, r engineRole) int {
	e := &engineProc{r: r, log: slog.New(slog.NewTextHandler(os.Stderr, nil)), other: map[string]int{}}
	var rep report
	fmt.Println("up") // from here on a SIGTERM is heeded
	for ctx.Err() == nil {
		dialing, cancel := context.WithTimeout(ctx, 2*time.Second)
		c, err := client.Dial(dialing, r.Socket, client.Options{
			Name: fmt.Sprintf("engine of node %d", r.Node), Log: e.log,
			Once: r.Seed%4 == 0, // some do not go on with what they had
		})
		cancel()
		if err != nil {
			if errors.Is(err, client.ErrProtocol) || errors.Is(err, client.ErrDenied) || errors.Is(err, client.ErrVersion) {
				e.bad("dial: %v", err)
			}
			pause(ctx, 5*time.Millisecond)
			continue
		}
		e.session(ctx, c, r.Seed+uint64(rep.Lost))
		_ = c.Close()
		rep.Lost++
	}
	rep.Saved, rep.Mapped, rep.Pulled, rep.Local = e.saved.Load(), e.mapped.Load(), e.pulled.Load(), e.local.Load()
	rep.Other, rep.Wrong = e.other, e.wrong
	if err := json.NewEncoder(os.Stdout).Encode(rep); err != nil {
		return exitFailed
	}
	if len(rep.Wrong) > 0 {
		return exitWrong
	}
	return 0
}

// session works on one connection until it is lost or ctx ends. No memory of the pool is touched after it returns.
func (e *engineProc) session(ctx context.Context, c *client.Client, seed uint64) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var work sync.WaitGroup
	for i := range e.r.Workers {
		w := &worker{e, rand.New(rand.NewPCG(seed, uint64(i)))}
		work.Go(func() {
			for ctx.Err() == nil && !over(c) {
				w.act(ctx, c)
			}
		})
	}
	work.Wait()
}

func over(c *client.Client) bool {
	select {
	case <-c.Done():
		return true
	default:
		return false
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// bad notes what must not be. It is on disk at once: whoever sees it may be killed the next moment.
func (e *engineProc) bad(format string, a ...any) {
	text := fmt.Sprintf(format, a...)
	e.log.Error("WRONG", "what", text)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.wrong = append(e.wrong, text)
}

// met notes an error. Those that killing brings about are counted, others must not be.
func (e *engineProc) met(where, key string, err error) {
	if err == nil {
		return
	}
	for _, ok := range []error{
		client.ErrClosed, client.ErrClosing, client.ErrDisconnected, context.DeadlineExceeded, context.Canceled,
		ec.ErrMissing, ec.ErrNotReady, ec.ErrHeld, ec.ErrPending, ec.ErrFull, ec.ErrPinned, ec.ErrStale,
	} {
		if errors.Is(err, ok) {
			e.count(where + ": " + ok.Error())
			return
		}
	}
	e.bad("%s %s: %v", where, key, err)
}

func (e *engineProc) count(what string) {
	e.mu.Lock()
	e.other[what]++
	e.mu.Unlock()
}

func (w *worker) key() string { return keyName(w.rng.IntN(w.r.Keys)) }

// some is a random time.
func (w *worker) some(most time.Duration) time.Duration {
	return time.Duration(w.rng.Int64N(int64(most)))
}

// dawdle lasts a moment, or now and then longer than a node needs to be killed and to start again.
func (w *worker) dawdle(ctx context.Context) {
	d := w.some(20 * time.Millisecond)
	if w.rng.IntN(10) == 0 {
		d = w.some(2 * time.Second)
	}
	pause(ctx, d)
}

func (w *worker) act(ctx context.Context, c *client.Client) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second+w.some(2*time.Second))
	defer cancel()
	if w.rng.IntN(10) == 0 { // somebody gave up
		var soon context.CancelFunc
		ctx, soon = context.WithTimeout(ctx, w.some(20*time.Millisecond)+1)
		defer soon()
	}
	switch n := w.rng.IntN(100); {
	case n < 35:
		w.save(ctx, c)
	case n < 75:
		w.pull(ctx, c)
	case n < 92:
		w.read(ctx, c)
	case n < 94 && w.r.Removes:
		key := w.key()
		w.met("remove", key, c.Remove(ctx, key))
	case n < 96:
		infos, err := c.List(ctx)
		w.met("list", "", err)
		for _, i := range infos {
			if i.Spec.Bytes != specOf(i.Key).Bytes {
				w.bad("list: %s has %d bytes", i.Key, i.Spec.Bytes)
			}
		}
	default:
		key := w.key()
		short, cancel := context.WithTimeout(ctx, w.some(100*time.Millisecond)+1)
		w.met("wait", key, c.WaitReady(short, key))
		cancel()
	}
}

// save fills a key, in pieces, and announces it.
func (w *worker) save(ctx context.Context, c *client.Client) {
	key := w.key()
	r, err := c.Reserve(ctx, key, specOf(key))
	switch {
	case errors.Is(err, ec.ErrHeld):
		w.announce(ctx, c, key)
		return
	case err != nil:
		w.met("reserve", key, err)
		pause(ctx, time.Millisecond)
		return
	}
	at := 0
	for _, b := range r.Buffers() {
		cut := w.rng.IntN(len(b) + 1)
		fill(b[:cut], key, at)
		if w.rng.IntN(4) == 0 {
			w.dawdle(context.Background()) // writes go on whatever has become of the node: the memory is still this engine's
		}
		fill(b[cut:], key, at+cut)
		at += len(b)
	}
	if w.rng.IntN(10) == 0 {
		w.met("discard", key, r.Discard(ctx))
		return
	}
	if err := r.Commit(ctx); err != nil {
		w.met("commit", key, err)
		return
	}
	w.saved.Add(1)
	w.enter(key)
	w.announce(ctx, c, key)
}

// enter writes an acknowledged key into the ledger.
func (w *worker) enter(key string) {
	f, err := os.OpenFile(w.r.Ledger, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err == nil {
		_, err = f.WriteString(key + "\n")
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		w.bad("ledger: %v", err)
	}
}

func (w *worker) announce(ctx context.Context, c *client.Client, key string) {
	items := []client.AnnounceItem{{Key: key, ItemIndices: []int{0}}, {Key: w.key(), ItemIndices: []int{1}}}
	if items[0].Key == items[1].Key {
		items = items[:1]
	}
	p, err := c.Announce(ctx, items)
	if err != nil {
		w.met("announce", key, err)
		return
	}
	w.post(p)
}

const boardPlaces = 12 // of one node's announcements: what is up is new

// post puts announcements up for all engines, whole or not at all.
func (w *worker) post(p ec.Params) {
	text, err := json.Marshal(&p)
	if err != nil {
		w.bad("announcement: %v", err)
		return
	}
	name := filepath.Join(w.r.Board, fmt.Sprintf("%d-%02d", w.r.Node, w.rng.IntN(boardPlaces)))
	temp := fmt.Sprintf("%s.%d.%d", name, os.Getpid(), w.rng.Uint64())
	if err := errors.Join(os.WriteFile(temp, text, 0o600), os.Rename(temp, name)); err != nil {
		w.bad("board: %v", err)
	}
}

// pull fetches what somebody announced, here or elsewhere, and checks it.
func (w *worker) pull(ctx context.Context, c *client.Client) {
	names, err := os.ReadDir(w.r.Board)
	if err != nil {
		w.bad("board: %v", err)
		return
	}
	if len(names) == 0 {
		pause(ctx, time.Millisecond)
		return
	}
	name := names[w.rng.IntN(len(names))].Name()
	for range 2 { // mostly of other nodes
		if !strings.HasPrefix(name, fmt.Sprint(w.r.Node, "-")) {
			break
		}
		name = names[w.rng.IntN(len(names))].Name()
	}
	text, err := os.ReadFile(filepath.Join(w.r.Board, name))
	if errors.Is(err, os.ErrNotExist) {
		return // renamed since
	}
	var p ec.Params
	if err == nil {
		err = json.Unmarshal(text, &p)
	}
	if err != nil {
		if !strings.Contains(name, ".") {
			w.bad("board: %s: %v", name, err)
		}
		return // a half written one, not put up yet
	}
	results, err := c.FetchMap(ctx, p, w.some(3*time.Second)+time.Millisecond)
	if err != nil {
		w.met("fetch", "", err)
		return
	}
	for r := range results {
		switch r.Outcome {
		case ec.FetchReady:
			if r.Plane == ec.PlaneLocal {
				w.local.Add(1)
			} else {
				w.pulled.Add(1)
			}
			w.use(ctx, c, r.Key, r.Mapped, "pulled by plane "+r.Plane)
		case ec.FetchIncompatible, ec.FetchConflict:
			w.bad("fetch %s: %s: %s", r.Key, r.Outcome, r.Reason)
		case ec.FetchFailed:
			if strings.Contains(r.Reason, ec.ErrChecksum.Error()) {
				w.bad("fetch %s: %s: %s", r.Key, r.Outcome, r.Reason)
			}
			w.count("fetch failed: " + firstWords(r.Reason))
		default:
			w.count("fetch: " + r.Outcome.String())
		}
	}
}

// firstWords is the part of a reason that many have in common.
func firstWords(s string) string {
	if i := strings.IndexAny(s, "\"0123456789"); i > 0 {
		s = s[:i]
	}
	return s[:min(len(s), 60)]
}

func (w *worker) read(ctx context.Context, c *client.Client) {
	key := w.key()
	m, err := c.Map(ctx, key)
	if err != nil {
		w.met("map", key, err)
		return
	}
	w.mapped.Add(1)
	w.use(ctx, c, key, m, "mapped")
}

// use checks an entry, at once and again before it lets go of it: what is pinned stays as it is, whoever dies meanwhile.
func (w *worker) use(ctx context.Context, c *client.Client, key string, m *client.Mapped, how string) {
	defer m.Release()
	if err := check(m.Buffers(), key); err != nil {
		w.bad("%s: %v; gen %d, extents %v, valid: %v, connection: %v", how, err, m.Info().Gen, m.Info().Extents, m.Valid(), c.Err())
		return
	}
	if w.rng.IntN(3) > 0 {
		return
	}
	w.dawdle(ctx)
	if err := check(m.Buffers(), key); err != nil {
		w.bad("%s, and changed while it was pinned: %v; gen %d, extents %v, valid: %v, connection: %v", how, err, m.Info().Gen, m.Info().Extents, m.Valid(), c.Err())
	}
}
