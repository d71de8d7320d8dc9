package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/ec/wire"
)

// request is one chat completion on its way through the step loop. The HTTP goroutine makes it; the loop owns it until done is
// closed.
type request struct {
	ctx   context.Context
	items []*item
	words int // of text in the prompt
	done  chan struct{}

	// Set before done is closed.
	err    *Error
	report Report
	params *ec.Params // nil: nothing is announced
}

// item is one media item of a request.
type item struct {
	path     string // messages[0].content[1]
	index    int    // among the request's media items
	key      string
	grid     Grid
	media    *pixels          // to encode from; nil if the media is no longer on the request
	original *pixels          // to check against, if asked for
	offer    *ec.Announcement // where it can be pulled from; nil if nowhere
	announce bool

	state    itemState
	attempts int
	out      Embedded
	ann      *ec.Announcement // what is announced for it
	err      *Error
}

type itemState uint8

const (
	wanted  itemState = iota // to be mapped in the next step
	waiting                  // for a flight
	found                    // ready in the pool
	served                   // out is filled in
	failed                   // err says why
)

func (it *item) fail(err *Error) { it.state, it.err = failed, err }

// parse makes a request of a body: every image is decoded here, so a bad one is refused before anything else is done.
func (e *Engine) parse(ctx context.Context, body []byte) (*chatRequest, *request, *Error) {
	var c chatRequest
	if err := json.Unmarshal(body, &c); err != nil {
		return nil, nil, badRequest("", "the body is not a chat completion request: %v", err)
	}
	if c.Model != "" && c.Model != e.cfg.Model {
		return nil, nil, &Error{404, "NotFoundError", "model", fmt.Sprintf("no model %q here; this engine serves %q", clip(c.Model), e.cfg.Model)}
	}
	if len(c.Messages) == 0 {
		return nil, nil, badRequest("messages", "empty; want at least one message")
	}
	params, perr := transferParams(&c)
	if perr != nil {
		return nil, nil, perr
	}
	r := &request{ctx: ctx, done: make(chan struct{})}
	grids := make(map[string]Grid)
	for m, msg := range c.Messages {
		if len(msg.Content) == 0 || string(msg.Content) == "null" {
			continue
		}
		var text string
		if json.Unmarshal(msg.Content, &text) == nil {
			r.words += len(strings.Fields(text))
			continue
		}
		var parts []part
		if err := json.Unmarshal(msg.Content, &parts); err != nil {
			return nil, nil, badRequest(fmt.Sprintf("messages[%d].content", m), "neither a string nor a list of content items: %v", err)
		}
		for i := range parts {
			path := fmt.Sprintf("messages[%d].content[%d]", m, i)
			if parts[i].Type == "text" {
				r.words += len(strings.Fields(parts[i].Text))
				continue
			}
			if len(r.items) == e.cfg.MaxItems {
				return nil, nil, badRequest(path, "more than %d media items in one request", e.cfg.MaxItems)
			}
			it, err := e.parseItem(ctx, &parts[i], path, c.Check)
			if err != nil {
				return nil, nil, err
			}
			if g, ok := grids[it.key]; ok && g != it.grid {
				return nil, nil, badRequest(path, "key %s stands for two images: image_grid_thw %v and %v", it.key, g, it.grid)
			}
			grids[it.key] = it.grid
			it.index = len(r.items)
			if e.cfg.Role != Producer {
				it.takeOffer(&params)
			}
			r.items = append(r.items, it)
		}
	}
	return &c, r, nil
}

// takeOffer keeps an announcement that has an address. One that makes no sense is as good as none, and is said where it matters.
func (it *item) takeOffer(p *ec.Params) {
	err := p.Err(it.key)
	if a, ok := p.Get(it.key); ok && a.Servable() {
		it.offer = a
	} else if err != nil && !errors.Is(err, wire.ErrNoEntry) {
		it.out.Note = err.Error()
	}
}

func (e *Engine) parseItem(ctx context.Context, p *part, path string, check bool) (*item, *Error) {
	it := &item{path: path, key: p.UUID}
	if len(p.UUID) > wire.MaxKey {
		return nil, badRequest(path, "uuid is %d bytes; at most %d", len(p.UUID), wire.MaxKey)
	}
	switch p.Type {
	case "image_url":
		raw, px, err := e.image(ctx, p.ImageURL, path)
		if err != nil {
			return nil, err
		}
		it.media, it.grid, it.announce = px, px.grid, e.cfg.Role != Consumer
		if check {
			it.original = px
		}
		if it.key == "" {
			it.key = e.hash(raw)
		}
	case "image_embeds":
		g, err := gridFromMetadata(p.ImageEmbeds)
		if err != nil {
			return nil, badRequest(path, "%v", err)
		}
		if it.key == "" {
			return nil, badRequest(path, "image_embeds without uuid: the uuid is the encoding's key (mm_hash)")
		}
		it.grid = g
		// The original of a rewritten item serves the check alone; it is never encoded in place of a lost encoding.
		if check && len(p.ImageURL) > 0 {
			_, px, err := e.image(ctx, p.ImageURL, path)
			if err != nil {
				return nil, err
			}
			if px.grid != g {
				return nil, badRequest(path, "image_grid_thw %v is not that of the image to check against, %v", g, px.grid)
			}
			it.original = px
		}
	case "":
		return nil, badRequest(path, "content item without a type")
	default:
		return nil, badRequest(path, "content items of type %q are not served; this engine takes text, image_url and image_embeds", clip(p.Type))
	}
	return it, nil
}

// image loads and decodes what an image_url says; as many at a time as there are cores, which bounds the memory of decoding.
func (e *Engine) image(ctx context.Context, v json.RawMessage, path string) ([]byte, *pixels, *Error) {
	var ref string
	if json.Unmarshal(v, &ref) != nil {
		var o struct {
			URL string `json:"url"`
		}
		if err := json.Unmarshal(v, &o); err != nil {
			return nil, nil, badRequest(path, `image_url: want {"url": "data:image/jpeg;base64,..."}`)
		}
		ref = o.URL
	}
	if ref == "" {
		return nil, nil, badRequest(path, "image_url has no url")
	}
	raw, err := e.media.load(ref)
	if err != nil {
		return nil, nil, badRequest(path, "%v", err)
	}
	if err := e.decoding.Acquire(ctx, 1); err != nil {
		return nil, nil, unavailable("%v", err)
	}
	defer e.decoding.Release(1)
	px, err := decodeImage(raw, e.cfg.MaxImagePixels)
	if err != nil {
		return nil, nil, badRequest(path, "%v", err)
	}
	return raw, px, nil
}

// hash is the key of an image that came without a uuid: what decides the encoding's bytes goes into it.
func (e *Engine) hash(raw []byte) string {
	h := sha256.New()
	fmt.Fprintf(h, "%s\x00%s\x00%d\x00", e.cfg.Model, processing, e.encoder.width)
	h.Write(raw)
	return hex.EncodeToString(h.Sum(nil))
}

// gridFromMetadata reads image_grid_thw, as one triple or as a list of one.
func gridFromMetadata(v json.RawMessage) (Grid, error) {
	var m struct {
		Grid json.RawMessage `json:"image_grid_thw"`
	}
	if err := json.Unmarshal(v, &m); err != nil || len(m.Grid) == 0 {
		return Grid{}, fmt.Errorf(`image_embeds: want the announced metadata, {"image_grid_thw": [[1, h, w]]}`)
	}
	var list [][]int
	if json.Unmarshal(m.Grid, &list) != nil {
		list = make([][]int, 1)
		if err := json.Unmarshal(m.Grid, &list[0]); err != nil {
			return Grid{}, fmt.Errorf("image_grid_thw %s: want [[1, h, w]]", clip(string(m.Grid)))
		}
	}
	if len(list) != 1 || len(list[0]) != 3 {
		return Grid{}, fmt.Errorf("image_grid_thw %s: want [[1, h, w]]", clip(string(m.Grid)))
	}
	g := Grid(list[0])
	return g, g.valid()
}

// transferParams reads ec_transfer_params from either place that clients put it in: the top level, or extra_args.
func transferParams(c *chatRequest) (ec.Params, *Error) {
	var top, extra ec.Params
	parse := func(v json.RawMessage, p *ec.Params, path string) *Error {
		if len(v) == 0 || bytes.Equal(v, []byte("null")) {
			return nil
		}
		if err := json.Unmarshal(v, p); err != nil {
			return badRequest(path, "%v", err)
		}
		return nil
	}
	if err := parse(c.Params, &top, "ec_transfer_params"); err != nil {
		return top, err
	}
	if err := parse(c.ExtraArgs.Params, &extra, "extra_args.ec_transfer_params"); err != nil {
		return top, err
	}
	if top.Len() == 0 {
		return extra, nil
	}
	if extra.Len() > 0 && !sameParams(top, extra) {
		return top, badRequest("ec_transfer_params", "given twice, at the top level and in extra_args, and the two differ; send one")
	}
	return top, nil
}

func sameParams(a, b ec.Params) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}
