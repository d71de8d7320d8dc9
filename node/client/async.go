package client

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

// FetchResult is the outcome for one key.
type FetchResult struct {
	Key     string
	Outcome ec.Outcome
	Reason  string // for people, "" if ready
	Bytes   int64
	Spec    ec.Spec
	Plane   string // "local": the pool had it, no byte moved
	Elapsed time.Duration
	Mapped  *Mapped // of FetchMap, if ready: the receiver's to release
}

// Fetch pulls every key of p that has an address; a key whose entry makes no sense has failed. Results come as they are known and
// the channel is closed after the last. timeout 0 means the node's item budget. The channel holds all results: nobody has to read
// it. When ctx ends, keys without an outcome are canceled; when the connection is lost, they have failed.
//
// An entry that is ready may be evicted before it is mapped, if nobody else uses it: FetchMap leaves no time for that.
func (c *Client) Fetch(ctx context.Context, p ec.Params, timeout time.Duration) (<-chan FetchResult, error) {
	return c.fetch(ctx, p, timeout, false)
}

// FetchMap is Fetch, and Map of each key as soon as it is ready, by the node itself. The receiver reads all results, and releases
// the Mapped of each.
func (c *Client) FetchMap(ctx context.Context, p ec.Params, timeout time.Duration) (<-chan FetchResult, error) {
	return c.fetch(ctx, p, timeout, true)
}

func (c *Client) fetch(ctx context.Context, p ec.Params, timeout time.Duration, pin bool) (<-chan FetchResult, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if timeout < 0 {
		return nil, fmt.Errorf("fetch: %w: timeout %v is negative", ErrBadRequest, timeout)
	}
	f := &fetch{c: c, ctx: ctx, start: time.Now()}
	var bad []FetchResult
	for _, key := range p.Keys() {
		a, _ := p.Get(key)
		err := p.Err(key)
		if err == nil && !a.Servable() {
			continue
		}
		var entry []byte
		if err == nil {
			entry, err = api.EncodeEntry(key, a)
		}
		if err != nil {
			bad = append(bad, FetchResult{Key: key, Outcome: ec.FetchFailed, Reason: err.Error(), Elapsed: time.Since(f.start)})
			continue
		}
		f.ops = append(f.ops, api.Op{Kind: api.OpFetch, Key: key, Entry: entry, TimeoutMS: millis(timeout), Map: pin})
	}
	f.results = make(chan FetchResult, len(bad)+len(f.ops))
	for _, r := range bad {
		f.results <- r
	}
	if len(f.ops) == 0 {
		close(f.results)
		return f.results, nil
	}
	if err := f.begin(); err != nil {
		return nil, err
	}
	go f.follow()
	return f.results, nil
}

// fetch is one call of Fetch. Fields below ops are guarded by Client.mu.
type fetch struct {
	c       *Client
	ctx     context.Context
	start   time.Time
	results chan FetchResult // holds them all, so that nobody waits to send one
	ops     []api.Op
	left    int
	stop    func() bool
}

func (f *fetch) begin() error {
	c := f.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	f.left = len(f.ops)
	f.stop = context.AfterFunc(f.ctx, f.canceled)
	good := f.ops[:0]
	for _, op := range f.ops {
		c.nextID++
		op.Ref = c.nextID
		if err := op.Check(); err != nil {
			f.deliver(FetchResult{Key: op.Key, Outcome: ec.FetchFailed, Reason: err.Error()})
			continue
		}
		c.refs[op.Ref] = &fetchKey{f, op.Key, op.Map}
		good = append(good, op)
	}
	f.ops = good
	return nil
}

// follow sends the operations. Only results of those that the node refuses come with the replies, so the caller need not wait.
func (f *fetch) follow() {
	results, err := f.c.do(f.ctx, f.ops)
	f.c.mu.Lock()
	for i, op := range f.ops {
		switch {
		case err != nil:
			f.end(op, err)
		case results[i].Code != api.CodeOK:
			f.end(op, failure(op, results[i].Code, results[i].Message))
		}
	}
	f.c.mu.Unlock()
	if f.ctx.Err() != nil {
		f.cancel() // again: the first may have overtaken a request
	}
}

// end gives an operation its outcome, unless it has one.
func (f *fetch) end(op api.Op, err error) {
	if _, ok := f.c.refs[op.Ref]; !ok {
		return
	}
	delete(f.c.refs, op.Ref)
	outcome := ec.FetchFailed
	if f.ctx.Err() != nil {
		outcome = ec.FetchCanceled
	}
	f.deliver(FetchResult{Key: op.Key, Outcome: outcome, Reason: err.Error()})
}

func (f *fetch) deliver(r FetchResult) {
	if r.Elapsed == 0 {
		r.Elapsed = time.Since(f.start)
	}
	f.results <- r
	if f.left--; f.left == 0 {
		f.stop()
		close(f.results)
	}
}

func (f *fetch) canceled() {
	f.c.mu.Lock()
	for _, op := range f.ops {
		f.end(op, context.Cause(f.ctx))
	}
	f.c.mu.Unlock()
	f.cancel()
}

func (f *fetch) cancel() {
	cancels := make([]api.Op, len(f.ops))
	for i, op := range f.ops {
		cancels[i] = api.Op{Kind: api.OpCancel, Ref: op.Ref}
	}
	f.c.post(cancels)
}

// fetchKey is one key of a fetch.
type fetchKey struct {
	f   *fetch
	key string
	pin bool // the node was asked for one
}

func (k *fetchKey) push(p *api.Push) (took bool) {
	r := FetchResult{
		Key: k.key, Outcome: outcomeOf(p.Outcome), Reason: p.Message, Bytes: p.Bytes, Plane: p.Plane,
		Elapsed: time.Duration(p.ElapsedUS) * time.Microsecond,
	}
	if p.Info != nil {
		r.Spec = p.Info.Spec
	}
	if r.Outcome == ec.FetchReady && k.pin {
		var err error
		if r.Mapped, err = k.mapped(p); err != nil {
			r.Outcome, r.Reason = ec.FetchFailed, err.Error()
		}
	}
	k.f.deliver(r)
	return r.Mapped != nil
}

func (k *fetchKey) mapped(p *api.Push) (*Mapped, error) {
	if p.Handle == 0 || p.Info == nil {
		return nil, fmt.Errorf("%w: it fetches, and does not map what it fetched", ErrUnsupported)
	}
	return k.f.c.mapped(p.Handle, *p.Info)
}

func (k *fetchKey) lost(err error) {
	k.f.deliver(FetchResult{Key: k.key, Outcome: ec.FetchFailed, Reason: err.Error()})
}

// outcomeOf reads an outcome's name; one of a later node is a failure, which its message explains.
func outcomeOf(name string) ec.Outcome {
	for o := ec.FetchReady; o <= ec.FetchCanceled; o++ {
		if o.String() == name {
			return o
		}
	}
	return ec.FetchFailed
}

// WaitReady waits until the key is ready, or nobody is filling it any more (ec.ErrMissing).
func (c *Client) WaitReady(ctx context.Context, key string) error {
	w := &waiter{pushes: make(chan *api.Push, 1), gone: make(chan error, 1)}
	p, err := c.wait(ctx, api.Op{Kind: api.OpWait, Key: key}, w)
	if err != nil {
		return err
	}
	return failure(api.Op{Kind: api.OpWait, Key: key}, p.Code, p.Message)
}

// List is all entries, in eviction order.
func (c *Client) List(ctx context.Context) ([]ec.Info, error) {
	w := &waiter{pushes: make(chan *api.Push, 1), gone: make(chan error, 1)}
	p, err := c.wait(ctx, api.Op{Kind: api.OpList}, w)
	if err != nil {
		return nil, err
	}
	if err := failure(api.Op{Kind: api.OpList}, p.Code, p.Message); err != nil {
		return nil, err
	}
	return w.entries, nil
}

// waiter takes the pushes of one operation, collects entries, and hands on the last push.
type waiter struct {
	entries []ec.Info // complete when pushes has given the last
	pushes  chan *api.Push
	gone    chan error
}

func (w *waiter) push(p *api.Push) (took bool) {
	w.entries = append(w.entries, p.Entries...)
	if p.Last {
		w.pushes <- p
	}
	return false
}

func (w *waiter) lost(err error) { w.gone <- err }

// wait sends op and waits for its last push.
func (c *Client) wait(ctx context.Context, op api.Op, w *waiter) (*api.Push, error) {
	ref, err := c.register(w)
	if err != nil {
		return nil, err
	}
	op.Ref = ref
	defer c.forget(ref)
	if err := op.Check(); err != nil {
		return nil, fmt.Errorf("%s %.64q: %w", op.Kind, op.Key, err)
	}
	results, err := c.do(ctx, []api.Op{op})
	if err == nil {
		err = failure(op, results[0].Code, results[0].Message)
	}
	if err == nil {
		select {
		case p := <-w.pushes:
			return p, nil
		case err = <-w.gone:
		case <-ctx.Done():
			err = ctx.Err()
		}
	}
	if errors.Is(err, ctx.Err()) && c.forget(ref) {
		c.post([]api.Op{{Kind: api.OpCancel, Ref: ref}})
	}
	return nil, err
}

// millis rounds up, so that a short timeout is not taken for the default.
func millis(d time.Duration) int64 { return int64((d + time.Millisecond - 1) / time.Millisecond) }
