package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// maxAttempts bounds how often an entry may vanish between being ready and being mapped before the item fails.
const maxAttempts = 16

// run is the step loop. A step takes what came since the last one, asks the node about all of it at once, starts pulls, encodes
// what is to be encoded, maps what is ready and answers. A request that waits for a pull waits beside the loop.
func (e *Engine) run() {
	defer e.end()
	pace := time.NewTimer(0)
	defer pace.Stop()
	<-pace.C
	for {
		select {
		case <-e.inbox.wake:
		case <-e.ctx.Done():
			return
		}
		start := time.Now()
		e.step(e.inbox.take(e.cfg.MaxBatch))
		if rest := e.cfg.Step - time.Since(start); rest > 0 {
			pace.Reset(rest)
			select {
			case <-pace.C:
			case <-e.ctx.Done():
				return
			}
		}
	}
}

// end fails what is left.
func (e *Engine) end() {
	m := e.inbox.take(int(^uint(0) >> 1))
	for _, r := range append(e.live, m.arrived...) {
		r.err = unavailable("the engine is shutting down")
		close(r.done)
	}
	if m.pool != nil {
		m.pool.Close()
	}
	e.pool.Close()
}

func (e *Engine) step(m mail) {
	if m.pool != nil {
		e.pool.Close()
		e.pool, e.info = m.pool, m.pool.Pool()
	}
	for _, l := range m.landed {
		e.land(l)
	}
	e.live = append(e.live, m.arrived...)
	e.dropCanceled()

	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.CallTimeout)
	encode, pull := e.lookup(ctx)
	cancel()
	e.pull(pull)
	for _, key := range sortedKeys(encode) {
		e.encode(encode[key])
	}
	pins := e.serve()
	e.announce()
	for _, p := range pins {
		p.Release()
	}
	e.answer()
}

// each visits the items of live requests that are in a state.
func (e *Engine) each(s itemState, visit func(*item)) {
	for _, r := range e.live {
		for _, it := range r.items {
			if it.state == s {
				visit(it)
			}
		}
	}
}

// dropCanceled forgets requests whose client has gone.
func (e *Engine) dropCanceled() {
	e.live = slices.DeleteFunc(e.live, func(r *request) bool {
		if r.ctx.Err() == nil {
			return false
		}
		e.drop(r, unavailable("the client has gone"))
		return true
	})
}

// lookup asks the node once about every wanted key, and says what is to be encoded (items by key) and what is to be pulled.
func (e *Engine) lookup(ctx context.Context) (encode map[string][]*item, pull []*item) {
	var keys []string
	items := make(map[string][]*item)
	e.each(wanted, func(it *item) {
		if _, flying := e.flights[it.key]; flying {
			e.board(it)
			return
		}
		if items[it.key] == nil {
			keys = append(keys, it.key)
		}
		items[it.key] = append(items[it.key], it)
	})
	if len(keys) == 0 {
		return nil, nil
	}
	infos, err := e.pool.Lookup(ctx, keys...)
	if err == nil && len(infos) != len(keys) {
		err = fmt.Errorf("asked for %d keys, the node answered %d", len(keys), len(infos))
	}
	encode = make(map[string][]*item)
	for i, key := range keys {
		if err != nil {
			for _, it := range items[key] {
				it.fail(unavailable("node: %v", err))
			}
			continue
		}
		switch infos[i].State {
		case ec.Ready:
			for _, it := range items[key] {
				it.state = found
			}
		case ec.Filling:
			e.wait(key, items[key])
		default:
			if e.absent(key, items[key]) {
				pull = append(pull, items[key]...)
			} else if items[key][0].state == wanted {
				encode[key] = items[key]
			}
		}
	}
	return encode, pull
}

// absent decides for the items of one key that the pool does not have. It is true if they are to be pulled. Else those with
// media come first, still wanted; with no media among them they have failed.
func (e *Engine) absent(key string, items []*item) (pull bool) {
	for _, it := range items {
		if it.offer == nil {
			continue
		}
		if err := e.refuse(it); err != nil {
			it.out.Note = err.Error()
			it.offer = nil
			continue
		}
		// The offer comes first: it speaks for the others in the flight.
		slices.SortStableFunc(items, func(a, b *item) int { return first(a.offer != nil, b.offer != nil) })
		return true
	}
	slices.SortStableFunc(items, func(a, b *item) int { return first(a.media != nil, b.media != nil) })
	if items[0].media != nil {
		return false
	}
	for _, it := range items {
		why := it.out.Note
		if why == "" {
			why = "it is not in the pool and ec_transfer_params has no address for it"
		}
		it.fail(lost(it.path, "the encoding %s is lost and the media is no longer on the request: %s", key, why))
	}
	return false
}

func first(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// refuse checks an offer against what the item must be, before anything is asked for or allocated.
func (e *Engine) refuse(it *item) error {
	rows, width := it.grid.Rows(), e.encoder.width
	if s := it.offer.Shape; s != nil && (len(s) != 2 || s[0] != rows || s[1] != width) {
		return fmt.Errorf("the announcement's shape is %v, the image has %d rows of width %d", s, rows, width)
	}
	if want := int64(rows) * e.info.BlockBytes; it.offer.SizeBytes != want {
		return fmt.Errorf("the announcement says %d bytes, the image has %d", it.offer.SizeBytes, want)
	}
	return nil
}

func (e *Engine) spec(g Grid) ec.Spec {
	rows := int64(g.Rows())
	return ec.Spec{Dtype: Dtype, Shape: []int64{rows, int64(e.encoder.width)}, Bytes: rows * int64(e.encoder.rowBytes())}
}

// encode makes the encoding of one key for all its items, once: into the pool, or into private memory if the pool has no room
// for it. The first item has media.
func (e *Engine) encode(items []*item) {
	it := items[0]
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.CallTimeout)
	res, err := e.pool.Reserve(ctx, it.key, e.spec(it.grid))
	cancel()
	switch {
	case errors.Is(err, ec.ErrHeld): // filled since the lookup
		for _, it := range items {
			it.state = found
		}
		return
	case errors.Is(err, ec.ErrPending):
		e.wait(it.key, items)
		return
	case errors.Is(err, ec.ErrFull), errors.Is(err, ec.ErrTooLarge), errors.Is(err, ec.ErrConflict):
		for _, it := range items {
			e.private(it, err.Error())
		}
		return
	case err != nil:
		for _, it := range items {
			it.fail(unavailable("node: %v", err))
		}
		return
	}
	start := time.Now()
	err = e.encoder.embed(it.media, res.Buffers())
	took := time.Since(start)
	ctx, cancel = context.WithTimeout(e.ctx, e.cfg.CallTimeout)
	defer cancel()
	if err != nil {
		res.Discard(ctx)
		for _, it := range items {
			it.fail(internal(it.path, "%v", err))
		}
		return
	}
	e.encodes.Add(1)
	if err := res.Commit(ctx); err != nil {
		for _, it := range items {
			it.fail(unavailable("node: the encoding could not be committed: %v", err))
		}
		return
	}
	for _, it := range items {
		it.state = found
	}
	it.out.Source, it.out.MS = SourceEncoded, millis(took)
}

// private encodes an item into memory of the engine's own. It serves the item, and is gone with it.
func (e *Engine) private(it *item, why string) {
	if it.media == nil {
		it.fail(badRequest(it.path, "key %s: %s", it.key, why))
		return
	}
	spec := e.spec(it.grid)
	buf := make([]byte, spec.Bytes)
	start := time.Now()
	if err := e.encoder.embed(it.media, [][]byte{buf}); err != nil {
		it.fail(internal(it.path, "%v", err))
		return
	}
	it.out.Source, it.out.MS, it.out.Note = SourceEncoded, millis(time.Since(start)), "not pooled: "+why
	e.encodes.Add(1)
	e.fill(it, spec, [][]byte{buf})
}

// serve maps what is ready and says what it is. The pins are kept until the step has announced.
func (e *Engine) serve() (pins []Mapped) {
	e.each(found, func(it *item) {
		ctx, cancel := context.WithTimeout(e.ctx, e.cfg.CallTimeout)
		m, err := e.pool.Map(ctx, it.key)
		cancel()
		switch {
		case errors.Is(err, ec.ErrMissing), errors.Is(err, ec.ErrNotReady): // evicted, or evicted and being filled again
			if it.attempts++; it.attempts == maxAttempts {
				it.fail(unavailable("node: the pool is too small for the load: %s was evicted %d times before it could be mapped", it.key, maxAttempts))
				return
			}
			it.state = wanted
			e.inbox.put(func(*mail) {}) // another step
			return
		case err != nil:
			it.fail(unavailable("node: %v", err))
			return
		}
		pins = append(pins, m)
		want := e.spec(it.grid)
		if got := m.Spec(); got.Dtype != want.Dtype || !slices.Equal(got.Shape, want.Shape) {
			e.private(it, fmt.Sprintf("the pool's entry is %v of %s, the image is %v of %s", got.Shape, got.Dtype, want.Shape, want.Dtype))
			return
		}
		if it.out.Source == "" {
			it.out.Source, it.out.Plane = SourcePool, "local"
		}
		it.out.Pooled = true
		e.fill(it, want, m.Buffers())
	})
	return pins
}

// fill says what an item's bytes are, and checks them if asked to.
func (e *Engine) fill(it *item, s ec.Spec, bufs [][]byte) {
	h := sha256.New()
	for _, b := range bufs {
		h.Write(b)
	}
	it.state = served
	it.out.Item, it.out.Key, it.out.Shape, it.out.Dtype, it.out.Bytes = it.path, it.key, s.Shape, s.Dtype, s.Bytes
	it.out.Digest = hex.EncodeToString(h.Sum(nil))
	if it.original == nil {
		return
	}
	again := make([]byte, s.Bytes)
	ok := e.encoder.embed(it.original, [][]byte{again}) == nil
	for _, b := range bufs {
		n := min(len(b), len(again))
		ok = ok && bytes.Equal(b, again[:n])
		again = again[n:]
	}
	ok = ok && len(again) == 0
	it.out.Checked = &ok
}

// announce takes a hold on each encoding that was served in this step and is to be announced: one call, unless a key is
// announced for several requests, since each announcement has a hold of its own.
func (e *Engine) announce() {
	rounds := make([][]*item, 0, 1)
	for _, r := range e.live {
		seen := make(map[string]*item)
		for _, it := range r.items {
			if it.state != served || !it.announce || it.ann != nil {
				continue
			}
			if !it.out.Pooled {
				// All or nothing: nobody rewrites the media away for what cannot be served.
				it.ann = &ec.Announcement{Metadata: json.RawMessage("{}")}
				continue
			}
			if seen[it.key] != nil { // twice in one request: one announcement, see answer
				continue
			}
			seen[it.key] = it
			n := 0
			for n < len(rounds) && slices.ContainsFunc(rounds[n], func(o *item) bool { return o.key == it.key }) {
				n++
			}
			if n == len(rounds) {
				rounds = append(rounds, nil)
			}
			rounds[n] = append(rounds[n], it)
		}
	}
	for _, round := range rounds {
		items := make([]client.AnnounceItem, len(round))
		for i, it := range round {
			items[i] = client.AnnounceItem{Key: it.key, ItemIndices: []int{it.index}, Metadata: metadata(it.grid)}
		}
		ctx, cancel := context.WithTimeout(e.ctx, e.cfg.CallTimeout)
		params, err := e.pool.Announce(ctx, items)
		cancel()
		for _, it := range round {
			a, ok := params.Get(it.key)
			switch {
			case err != nil:
				it.fail(unavailable("node: announce: %v", err))
			case !ok:
				it.fail(internal(it.path, "the node's announcement leaves %s out", it.key))
			default:
				it.ann = a
			}
		}
	}
}

func metadata(g Grid) json.RawMessage {
	return fmt.Appendf(nil, `{"image_grid_thw":[[%d,%d,%d]]}`, g[0], g[1], g[2])
}

// answer ends the requests that have all they need, and those that failed.
func (e *Engine) answer() {
	e.live = slices.DeleteFunc(e.live, func(r *request) bool {
		open := false
		for _, it := range r.items {
			if it.state == failed {
				e.drop(r, it.err)
				return true
			}
			open = open || it.state != served
		}
		if open {
			return false
		}
		e.complete(r)
		close(r.done)
		return true
	})
}

// drop ends a request that failed. Flights end if nobody else waits for them.
func (e *Engine) drop(r *request, err *Error) {
	for _, it := range r.items {
		if it.state == waiting {
			e.leave(it)
		}
	}
	r.err = err
	close(r.done)
}

func (e *Engine) complete(r *request) {
	r.report = Report{
		Engine: e.cfg.Name, Role: e.cfg.Role, Weights: "dummy", Node: e.info.Node,
		Encodes: e.encodes.Load(), Items: make([]Embedded, 0, len(r.items)),
	}
	var params ec.Params
	indices := make(map[string][]int)
	for _, it := range r.items {
		r.report.Items = append(r.report.Items, it.out)
		if it.announce {
			indices[it.key] = append(indices[it.key], it.index)
		}
	}
	for _, it := range r.items {
		if it.ann == nil {
			continue
		}
		a := *it.ann
		if a.Servable() && a.ItemIndices != nil {
			a.ItemIndices = indices[it.key]
		}
		params.Set(it.key, &a)
	}
	if params.Len() > 0 {
		r.params = &params
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func sortedKeys(m map[string][]*item) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
