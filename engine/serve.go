package engine

import (
	"bytes"
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

// filled is a reservation on its way from encode to commit.
type filled struct {
	items []*item
	res   Reservation
	took  time.Duration
}

// encode makes the encoding of each key of the step, once for all its items: into the pool, or into private memory if the pool has
// no room for it.
func (e *Engine) encode(s *step) {
	if len(s.encode) == 0 {
		return
	}
	ask := make([]ReserveItem, len(s.encode))
	for i, items := range s.encode {
		ask[i] = ReserveItem{items[0].key, e.spec(items[0].grid)}
	}
	ctx, cancel := e.call()
	results, err := e.pool.Reserve(ctx, ask...)
	cancel()
	var commits []filled
	for i, items := range s.encode {
		if err == nil {
			err := results[i].Err
			switch {
			case err == nil:
				if f, ok := e.fillReservation(items, results[i].Reservation); ok {
					commits = append(commits, f)
				}
			case errors.Is(err, ec.ErrHeld): // filled since we looked
				e.again(items)
			case errors.Is(err, ec.ErrPending):
				e.wait(items[0].key, items)
			case errors.Is(err, ec.ErrFull), errors.Is(err, ec.ErrTooLarge), errors.Is(err, ec.ErrConflict):
				for _, it := range items {
					e.private(it, err.Error())
				}
			default:
				failAll(items, unavailable("node: %v", err))
			}
			continue
		}
		failAll(items, unavailable("node: %v", err))
	}
	e.commit(s, commits)
}

// fillReservation encodes straight into the pool.
func (e *Engine) fillReservation(items []*item, res Reservation) (filled, bool) {
	start := time.Now()
	if err := e.encoder.embed(items[0].media, res.Buffers()); err != nil {
		ctx, cancel := e.call()
		defer cancel()
		failAll(items, internal(items[0].path, "%v", errors.Join(err, res.Discard(ctx))))
		return filled{}, false
	}
	e.encodes.Add(1)
	return filled{items, res, time.Since(start)}, true
}

func (e *Engine) commit(s *step, all []filled) {
	if len(all) == 0 {
		return
	}
	res := make([]Reservation, len(all))
	for i := range all {
		res[i] = all[i].res
	}
	ctx, cancel := e.call()
	defer cancel()
	results, err := e.pool.Commit(ctx, res...)
	for i, f := range all {
		if err == nil && results[i].Err == nil {
			f.items[0].out.Source, f.items[0].out.MS = SourceEncoded, millis(f.took)
			for _, it := range f.items[1:] {
				it.out.Source, it.out.Plane = SourcePool, ec.PlaneLocal
			}
			e.serve(s, f.items, results[i].Mapped)
			continue
		}
		why := err
		if why == nil {
			why = results[i].Err
		}
		failAll(f.items, unavailable("node: the encoding could not be committed: %v", why))
	}
}

// serve gives items what was mapped for them. The pin is kept until the step has announced.
func (e *Engine) serve(s *step, items []*item, m Mapped) {
	s.pins = append(s.pins, m)
	for _, it := range items {
		want := e.spec(it.grid)
		if got := m.Spec(); got.Dtype != want.Dtype || !slices.Equal(got.Shape, want.Shape) {
			e.private(it, fmt.Sprintf("the pool's entry is %v of %s, the image is %v of %s", got.Shape, got.Dtype, want.Shape, want.Dtype))
			continue
		}
		it.out.Pooled = true
		e.report(it, want, m.Buffers())
	}
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
	it.out.Source, it.out.Plane, it.out.MS, it.out.Note = SourceEncoded, "", millis(time.Since(start)), "not pooled: "+why
	e.encodes.Add(1)
	e.report(it, spec, [][]byte{buf})
}

// report says what an item's bytes are, and checks them if asked to.
func (e *Engine) report(it *item, s ec.Spec, bufs [][]byte) {
	h := sha256.New()
	for _, b := range bufs {
		h.Write(b)
	}
	it.state = served
	it.out.Item, it.out.Key, it.out.Shape, it.out.Dtype, it.out.Bytes = it.path, it.key, s.Shape, s.Dtype, s.Bytes
	it.out.Digest = hex.EncodeToString(h.Sum(nil))
	if it.original != nil {
		ok := e.check(it.original, bufs, s.Bytes)
		it.out.Checked = &ok
	}
}

// check compares an encoding with one that is made anew.
func (e *Engine) check(px *pixels, bufs [][]byte, size int64) bool {
	want := make([]byte, size)
	if e.encoder.embed(px, [][]byte{want}) != nil {
		return false
	}
	for _, b := range bufs {
		if len(b) > len(want) || !bytes.Equal(b, want[:len(b)]) {
			return false
		}
		want = want[len(b):]
	}
	return len(want) == 0
}

// announce takes a hold on each encoding that was served in this step and is to be announced: one call, unless a key is
// announced for several requests, since each announcement has a hold of its own.
func (e *Engine) announce() {
	var rounds [][]*item
	for _, r := range e.live {
		seen := make(map[string]bool)
		for _, it := range r.items {
			switch {
			case it.state != served || !it.announce || it.ann != nil:
			case !it.out.Pooled:
				// All or nothing: nobody rewrites the media away for what cannot be served.
				it.ann = &ec.Announcement{Metadata: json.RawMessage("{}")}
			case !seen[it.key]: // twice in one request is one announcement, see complete
				seen[it.key] = true
				rounds = addToRound(rounds, it)
			}
		}
	}
	for _, round := range rounds {
		items := make([]client.AnnounceItem, len(round))
		for i, it := range round {
			items[i] = client.AnnounceItem{Key: it.key, ItemIndices: []int{it.index}, Metadata: metadata(it.grid)}
		}
		ctx, cancel := e.call()
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

// addToRound puts an item into the first round that does not have its key.
func addToRound(rounds [][]*item, it *item) [][]*item {
	for n, round := range rounds {
		if !slices.ContainsFunc(round, func(o *item) bool { return o.key == it.key }) {
			rounds[n] = append(round, it)
			return rounds
		}
	}
	return append(rounds, []*item{it})
}

func metadata(g Grid) json.RawMessage {
	return fmt.Appendf(nil, `{"image_grid_thw":[[%d,%d,%d]]}`, g[0], g[1], g[2])
}

// complete writes a request's report and its part of ec_transfer_params.
func (e *Engine) complete(r *request) {
	r.report = Report{
		Engine: e.cfg.Name, Role: e.cfg.Role, Weights: "dummy", Node: e.info.Node,
		Encodes: e.encodes.Load(), Items: make([]Embedded, 0, len(r.items)),
	}
	indices := make(map[string][]int)
	for _, it := range r.items {
		r.report.Items = append(r.report.Items, it.out)
		indices[it.key] = append(indices[it.key], it.index)
	}
	var params ec.Params
	for _, it := range r.items {
		if it.ann == nil {
			continue
		}
		a := *it.ann
		if a.ItemIndices != nil {
			a.ItemIndices = indices[it.key]
		}
		params.Set(it.key, &a)
	}
	if params.Len() > 0 {
		r.params = &params
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
