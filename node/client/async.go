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
// it. When ctx ends, keys without an outcome are canceled. When the connection is lost they are asked for again on the next; if none
// comes in time, they have failed.
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
			entry, err = a.MarshalJSON()
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
	return f.results, nil
}

// fetch is one call of Fetch. Its first requests are made by the caller's goroutine and its results handed on by the client's reader;
// it has a goroutine of its own only while its connection is lost. What follows results is guarded by Client.mu.
type fetch struct {
	c       *Client
	ctx     context.Context
	start   time.Time
	results chan FetchResult // holds them all, so that nobody waits to send one
	left    int
	stop    func() bool
	link    *link
	ops     []api.Op // sent on link, under their refs
	lost    []api.Op // to be sent: new, or their connection is lost
	follows bool     // a goroutine waits for the next connection
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
	for _, op := range f.ops {
		op.Ref = 1 // until it is sent
		if err := op.Check(); err != nil {
			f.deliver(FetchResult{Key: op.Key, Outcome: ec.FetchFailed, Reason: err.Error()})
			continue
		}
		f.lost = append(f.lost, op)
	}
	f.ops = nil
	f.send()
	return nil
}

// send sends what is not sent. What cannot be is lost again, and then there is a goroutine to send it on the next connection. Called
// with the lock held.
func (f *fetch) send() {
	c, l := f.c, f.c.link
	f.link, f.ops = l, f.lost
	f.lost = nil
	for i := range f.ops {
		c.nextID++
		f.ops[i].Ref = c.nextID
		c.refs[c.nextID] = &fetchKey{f, f.ops[i]}
	}
	for at := 0; at < len(f.ops); {
		ops := f.ops[at:]
		ops = ops[:chunk(ops)]
		_, err := c.sendLocked(l, ops, true, func(results []api.Result) { f.replied(ops, results) })
		if err == nil {
			at += len(ops)
			continue
		}
		for _, op := range f.ops[at:] {
			if k, ok := c.refs[op.Ref].(*fetchKey); ok { // else it knows already
				delete(c.refs, op.Ref)
				k.lost(err)
			}
		}
		return
	}
}

// replied ends what the node refuses; all else answers by pushes.
func (f *fetch) replied(ops []api.Op, results []api.Result) {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	for i, op := range ops {
		if results[i].Code != api.CodeOK {
			f.end(op, failure(op, results[i].Code, results[i].Message))
		}
	}
}

// follow sends what was lost with a connection on the next one.
func (f *fetch) follow(lost error) {
	if err := f.c.again(f.ctx, lost); err != nil {
		f.giveUp(err)
		return
	}
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	f.follows = false
	f.send()
}

// end gives an operation its outcome, unless it has one.
func (f *fetch) end(op api.Op, err error) {
	if k, ok := f.c.refs[op.Ref].(*fetchKey); ok && k.f == f {
		delete(f.c.refs, op.Ref)
		f.failed(op, err)
	}
}

// giveUp ends what has no connection.
func (f *fetch) giveUp(err error) {
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	for _, op := range f.lost {
		f.failed(op, err)
	}
	f.lost, f.follows = nil, false
}

func (f *fetch) failed(op api.Op, err error) {
	outcome := ec.FetchFailed
	if f.ctx.Err() != nil {
		outcome, err = ec.FetchCanceled, context.Cause(f.ctx)
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
	f.giveUp(context.Cause(f.ctx))
	f.c.mu.Lock()
	for _, op := range f.ops {
		f.end(op, context.Cause(f.ctx))
	}
	f.c.mu.Unlock()
	f.cancel()
}

func (f *fetch) cancel() {
	f.c.mu.Lock()
	l, ops := f.link, f.ops
	f.c.mu.Unlock()
	if l == nil {
		return
	}
	cancels := make([]api.Op, len(ops))
	for i, op := range ops {
		cancels[i] = api.Op{Kind: api.OpCancel, Ref: op.Ref}
	}
	f.c.post(l, cancels)
}

// fetchKey is one key of a fetch.
type fetchKey struct {
	f  *fetch
	op api.Op
}

func (k *fetchKey) push(p *api.Push) (took bool) {
	r := FetchResult{
		Key: k.op.Key, Outcome: outcomeOf(p.Outcome), Reason: p.Message, Bytes: p.Bytes, Plane: p.Plane,
		Elapsed: time.Duration(p.ElapsedUS) * time.Microsecond,
	}
	if p.Info != nil {
		r.Spec = p.Info.Spec
	}
	if r.Outcome == ec.FetchReady && k.op.Map {
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
	return k.f.c.mapped(k.f.link, p.Handle, *p.Info)
}

func (k *fetchKey) lost(err error) {
	if errors.Is(err, ErrDisconnected) {
		k.f.lost = append(k.f.lost, k.op)
		if !k.f.follows {
			k.f.follows = true
			go k.f.follow(err)
		}
		return
	}
	k.f.failed(k.op, err)
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
	_, err := c.wait(ctx, api.Op{Kind: api.OpWait, Key: key})
	return err
}

// List is all entries, in eviction order.
func (c *Client) List(ctx context.Context) ([]ec.Info, error) {
	return c.wait(ctx, api.Op{Kind: api.OpList})
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

// wait carries out an operation that answers by pushes, on as many connections as it takes, and gives their entries.
func (c *Client) wait(ctx context.Context, op api.Op) ([]ec.Info, error) {
	for {
		w := &waiter{pushes: make(chan *api.Push, 1), gone: make(chan error, 1)}
		p, err := c.waitOnce(ctx, op, w)
		if err == nil {
			return w.entries, failure(op, p.Code, p.Message)
		}
		if err = c.again(ctx, err); err != nil {
			return nil, err
		}
	}
}

// waitOnce sends op and waits for its last push.
func (c *Client) waitOnce(ctx context.Context, op api.Op, w *waiter) (*api.Push, error) {
	l, ref, err := c.register(w)
	if err != nil {
		return nil, err
	}
	op.Ref = ref
	defer c.forget(ref)
	if err := op.Check(); err != nil {
		return nil, fmt.Errorf("%s %.64q: %w", op.Kind, op.Key, err)
	}
	results, err := c.do(ctx, l, []api.Op{op})
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
		c.post(l, []api.Op{{Kind: api.OpCancel, Ref: ref}})
	}
	return nil, err
}

// millis rounds up, so that a short timeout is not taken for the default.
func millis(d time.Duration) int64 { return int64((d + time.Millisecond - 1) / time.Millisecond) }
