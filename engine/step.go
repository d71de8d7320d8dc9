package engine

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/tensorferry/tensorferry/ec"
)

// maxAttempts bounds how often an entry may vanish under a request, being filled or being ready, before the request fails.
const maxAttempts = 16

// run is the step loop. A step takes what came since the last one, maps all of it that the pool has in one call, starts pulls and
// waits for what is elsewhere, encodes the rest, announces and answers. A request that waits does so beside the loop.
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
	var s step
	for _, l := range m.landed {
		e.land(l)
		if l.result != nil && l.result.Mapped != nil {
			s.pins = append(s.pins, l.result.Mapped) // until this step has looked it up
		}
	}
	e.live = append(e.live, m.arrived...)
	e.dropCanceled()

	e.look(&s)
	e.pull(s.pull)
	e.encode(&s)
	e.announce()
	for _, p := range s.pins {
		p.Release()
	}
	e.answer()
}

// step is what one step has to do.
type step struct {
	pull   []*item
	encode [][]*item // items of one key, the first with media
	pins   []Mapped  // of what was pulled or served; kept until the step has announced
}

// call bounds one call of the node.
func (e *Engine) call() (context.Context, context.CancelFunc) {
	return context.WithTimeout(e.ctx, e.cfg.CallTimeout)
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

// look maps every wanted key that the pool has, and decides what is to be done about the others.
func (e *Engine) look(s *step) {
	var keys []string
	items := make(map[string][]*item)
	for _, r := range e.live {
		for _, it := range r.items {
			if it.state != wanted {
				continue
			}
			if _, flying := e.flights[it.key]; flying {
				e.board(it)
				continue
			}
			if items[it.key] == nil {
				keys = append(keys, it.key)
			}
			items[it.key] = append(items[it.key], it)
		}
	}
	if len(keys) == 0 {
		return
	}
	ctx, cancel := e.call()
	defer cancel()
	results, err := e.pool.Map(ctx, keys...)
	for i, key := range keys {
		group := items[key]
		switch {
		case err != nil:
			failAll(group, unavailable("node: %v", err))
		case results[i].Err == nil:
			for _, it := range group {
				if it.out.Source == "" {
					it.out.Source, it.out.Plane = SourcePool, ec.PlaneLocal
				}
			}
			e.serve(s, group, results[i].Mapped)
		case errors.Is(results[i].Err, ec.ErrMissing):
			e.absent(s, key, group)
		case errors.Is(results[i].Err, ec.ErrNotReady):
			e.wait(key, group)
		case errors.Is(results[i].Err, ec.ErrKey):
			failAll(group, badRequest(group[0].path, "uuid %q: %v", clip(key), results[i].Err))
		default:
			failAll(group, unavailable("node: %v", results[i].Err))
		}
	}
}

func failAll(items []*item, err *Error) {
	for _, it := range items {
		it.fail(err)
	}
}

// absent decides what is to be done for the items of a key that the pool does not have: pull it, encode it, or give up.
func (e *Engine) absent(s *step, key string, items []*item) {
	for _, it := range items {
		it.out.Source = "" // what it was pulled for has gone
		if it.offer == nil {
			continue
		}
		if err := e.refuse(it); err != nil {
			it.out.Note = err.Error()
			it.offer = nil
			continue
		}
		// The one with the offer speaks for the others.
		slices.SortStableFunc(items, func(a, b *item) int { return firstWith(a.offer != nil, b.offer != nil) })
		s.pull = append(s.pull, items...)
		return
	}
	slices.SortStableFunc(items, func(a, b *item) int { return firstWith(a.media != nil, b.media != nil) })
	if items[0].media != nil {
		s.encode = append(s.encode, items)
		return
	}
	for _, it := range items {
		why := it.out.Note
		if why == "" {
			why = "it is not in the pool and ec_transfer_params has no address for it"
		}
		it.fail(lost(it.path, "the encoding %s is lost and the media is no longer on the request: %s", key, why))
	}
}

func firstWith(a, b bool) int {
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

// again leaves items for the next step, unless that has been done too often.
func (e *Engine) again(items []*item) {
	for _, it := range items {
		if it.attempts++; it.attempts == maxAttempts {
			failAll(items, unavailable("node: the pool is too small for the load: %s was evicted %d times before it could be mapped", it.key, maxAttempts))
			return
		}
		it.state = wanted
	}
	e.inbox.put(func(*mail) {}) // wakes the next step
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
