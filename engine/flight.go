package engine

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// flight is something about a key that the loop waits for beside its steps: a pull, or another engine's encode. Items of any
// request join it; there is at most one a key. The step loop owns it.
type flight struct {
	items []*item
	group *group
	offer *ec.Announcement // of a pull
}

// group is one call of the node, for one or more flights. It is canceled when nobody waits for any of them.
type group struct {
	cancel   context.CancelFunc
	waiters  int
	canceled bool
}

// landing ends the flight of a key.
type landing struct {
	key    string
	result *client.FetchResult // of a pull
	err    error               // of a wait, or of a pull that could not be asked for
}

// board lets an item wait for the flight of its key. One that was canceled takes nobody: the item stays wanted, and is looked up
// again once the flight has landed.
func (e *Engine) board(it *item) {
	f := e.flights[it.key]
	if f.group.canceled {
		return
	}
	f.items = append(f.items, it)
	f.group.waiters++
	it.state = waiting
}

// leave takes an item of a request that is over out of its flight.
func (e *Engine) leave(it *item) {
	f := e.flights[it.key]
	f.items = slices.DeleteFunc(f.items, func(o *item) bool { return o == it })
	if f.group.waiters--; f.group.waiters == 0 {
		f.group.canceled = true
		f.group.cancel()
	}
}

func (e *Engine) depart(key string, items []*item, f *flight) {
	e.flights[key] = f
	for _, it := range items {
		e.board(it)
	}
}

// wait lets items wait for a key that someone else fills.
func (e *Engine) wait(key string, items []*item) {
	for _, it := range items {
		if it.attempts++; it.attempts == maxAttempts {
			failAll(items, unavailable("node: %s was being filled, and then was not there, %d times", key, maxAttempts))
			return
		}
	}
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.FetchTimeout)
	e.depart(key, items, &flight{group: &group{cancel: cancel}})
	pool := e.pool
	e.tasks.Go(func() {
		defer cancel()
		err := pool.WaitReady(ctx, key)
		e.inbox.put(func(b *mail) { b.landed = append(b.landed, landing{key: key, err: err}) })
	})
}

// pull asks the node, in one call, for everything that this step found missing and has an offer for.
func (e *Engine) pull(items []*item) {
	if len(items) == 0 {
		return
	}
	// The node keeps to the budget; the context is there in case it does not answer.
	ctx, cancel := context.WithTimeout(e.ctx, e.cfg.FetchTimeout+e.cfg.CallTimeout)
	g := &group{cancel: cancel}
	var params ec.Params
	byKey := make(map[string][]*item)
	for _, it := range items {
		if _, ok := params.Get(it.key); !ok {
			params.Set(it.key, it.offer) // the first of a key has the offer, see absent
		}
		byKey[it.key] = append(byKey[it.key], it)
	}
	for _, key := range params.Keys() {
		e.depart(key, byKey[key], &flight{group: g, offer: byKey[key][0].offer})
	}
	pool := e.pool
	e.tasks.Go(func() {
		defer cancel()
		land := func(l landing) { e.inbox.put(func(b *mail) { b.landed = append(b.landed, l) }) }
		left := make(map[string]bool)
		for _, key := range params.Keys() {
			left[key] = true
		}
		results, err := pool.Fetch(ctx, params, e.cfg.FetchTimeout)
		if err == nil {
			err = errors.New("the node ended the pull without a result")
			for r := range results {
				if left[r.Key] {
					delete(left, r.Key)
					land(landing{key: r.Key, result: &r})
				}
			}
		}
		for key := range left {
			land(landing{key: key, err: err})
		}
	})
}

// land gives a flight's end to its items: they are looked up again, now with what is known of the pull.
func (e *Engine) land(l landing) {
	f := e.flights[l.key]
	if f == nil {
		return
	}
	delete(e.flights, l.key)
	f.group.waiters -= len(f.items)
	for _, it := range f.items {
		it.state = wanted
		switch {
		case l.result != nil && l.result.Outcome == ec.FetchReady:
			if l.result.Plane != ec.PlaneLocal {
				it.out.Source, it.out.Plane, it.out.MS = SourcePulled, l.result.Plane, millis(l.result.Elapsed)
			}
		case l.result != nil:
			it.dropOffer(f.offer)
			it.out.Note = strings.TrimSuffix("pull: "+l.result.Outcome.String()+": "+l.result.Reason, ": ")
		case errors.Is(l.err, ec.ErrMissing): // nobody fills it any more
		case errors.Is(l.err, context.DeadlineExceeded):
			it.fail(lost(it.path, "the encoding %s was not ready within %v", it.key, e.cfg.FetchTimeout))
		case l.err != nil:
			it.dropOffer(f.offer)
			it.out.Note = l.err.Error()
		}
	}
}

// dropOffer forgets an offer that was tried in vain. An item that joined another's flight keeps its own, if that is another one.
func (it *item) dropOffer(tried *ec.Announcement) {
	if it.offer != nil && tried != nil && it.offer.PeerHost == tried.PeerHost && it.offer.PeerPort == tried.PeerPort {
		it.offer = nil
	}
}
