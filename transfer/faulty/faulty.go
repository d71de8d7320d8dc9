// Package faulty wraps a data plane and makes chosen operations fail, wait, vanish or happen twice. It is deterministic: a rule
// names an operation and which occurrence of it on the plane, and delays end when the test says so, never by a clock. So it
// works in a testing/synctest bubble if the plane below does.
package faulty

import (
	"context"
	"fmt"
	"sync"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// Plane is a transfer.Plane with rules.
type Plane struct {
	inner transfer.Plane
	book  book
}

// New wraps inner, which the Plane's Close closes.
func New(inner transfer.Plane, rules ...Rule) *Plane {
	return &Plane{inner: inner, book: book{rules: rules}}
}

// Add adds rules. Earlier ones win. Occurrences are counted from the plane's start, not from here.
func (p *Plane) Add(rules ...Rule) {
	p.book.mu.Lock()
	defer p.book.mu.Unlock()
	p.book.rules = append(p.book.rules, rules...)
}

// Clear takes all rules away. What they hold already stays held.
func (p *Plane) Clear() {
	p.book.mu.Lock()
	defer p.book.mu.Unlock()
	p.book.rules = nil
}

// Count says how often op has happened.
func (p *Plane) Count(op Op) int {
	p.book.mu.Lock()
	defer p.book.mu.Unlock()
	return p.book.counts[op]
}

// Name implements transfer.Plane.
func (p *Plane) Name() string { return p.inner.Name() }

// Capabilities implements transfer.Plane.
func (p *Plane) Capabilities() transfer.Capabilities { return p.inner.Capabilities() }

// before meets op and does what comes before the operation itself.
func (p *Plane) before(ctx context.Context, op Op) error {
	rule := p.book.meet(op)
	if err := rule.wait(ctx); err != nil {
		return err
	}
	return rule.err()
}

// closing meets op around a close, which always happens.
func (p *Plane) closing(op Op, f func() error) error {
	rule := p.book.meet(op)
	_ = rule.wait(context.Background())
	err := f()
	if forced := rule.err(); forced != nil {
		return forced
	}
	return err
}

// Register implements transfer.Plane.
func (p *Plane) Register(ctx context.Context, m transfer.Memory, notify func(transfer.Notification)) (transfer.Registration, error) {
	if err := p.before(ctx, Register); err != nil {
		return nil, err
	}
	if notify != nil {
		notify = p.notifier(notify)
	}
	inner, err := p.inner.Register(ctx, m, notify)
	if err != nil {
		return nil, err
	}
	return &registration{Registration: inner, plane: p}, nil
}

func (p *Plane) notifier(notify func(transfer.Notification)) func(transfer.Notification) {
	return func(n transfer.Notification) {
		rule := p.book.meet(Notify)
		deliver := func() {
			notify(n)
			if rule != nil && rule.Duplicate {
				notify(n)
			}
		}
		switch {
		case rule == nil || rule.Hold == nil && !rule.Drop && rule.err() == nil:
			deliver()
		case rule.Drop || rule.err() != nil:
		default:
			go func() { // the plane below must not be blocked
				<-rule.Hold
				deliver()
			}()
		}
	}
}

// AddPeer implements transfer.Plane.
func (p *Plane) AddPeer(ctx context.Context, metadata []byte) (transfer.Peer, error) {
	if err := p.before(ctx, AddPeer); err != nil {
		return nil, err
	}
	inner, err := p.inner.AddPeer(ctx, metadata)
	if err != nil {
		return nil, err
	}
	c := &peer{plane: p, inner: inner, closing: make(chan struct{})}
	if v, ok := inner.(transfer.Viewer); ok {
		return &viewer{peer: c, inner: v}, nil
	}
	return c, nil
}

// Close implements transfer.Plane.
func (p *Plane) Close() error { return p.closing(PlaneClose, p.inner.Close) }

type registration struct {
	transfer.Registration
	plane *Plane
}

func (r *registration) Grant(id string, spans []region.Span) ([]byte, error) {
	if err := r.plane.before(context.Background(), Grant); err != nil {
		return nil, err
	}
	return r.Registration.Grant(id, spans)
}

func (r *registration) Revoke(id string) {
	rule := r.plane.book.meet(Revoke)
	_ = rule.wait(context.Background())
	if rule == nil || !rule.Drop {
		r.Registration.Revoke(id)
	}
}

func (r *registration) Close() error {
	return r.plane.closing(RegistrationClose, r.Registration.Close)
}

type peer struct {
	plane   *Plane
	inner   transfer.Peer
	once    sync.Once
	closing chan struct{}
	reads   sync.WaitGroup
}

func (c *peer) Read(ctx context.Context, q transfer.ReadRequest) (transfer.Read, error) {
	if err := c.plane.before(ctx, Read); err != nil {
		return nil, err
	}
	inner, err := c.inner.Read(ctx, q)
	if err != nil {
		return nil, err
	}
	rule := c.plane.book.meet(Complete)
	if rule == nil {
		return &read{Read: inner, plane: c.plane}, nil
	}
	r := &ruledRead{
		read: read{Read: inner, plane: c.plane}, rule: rule, peer: c,
		done: make(chan struct{}), canceled: make(chan struct{}),
	}
	c.reads.Go(r.run)
	return r, nil
}

// Close ends held READs, too.
func (c *peer) Close() error {
	return c.plane.closing(PeerClose, func() error {
		err := c.inner.Close()
		c.once.Do(func() { close(c.closing) })
		c.reads.Wait()
		return err
	})
}

type viewer struct {
	*peer
	inner transfer.Viewer
}

func (v *viewer) View(token []byte, remote []region.Span) ([][]byte, func(), error) {
	if err := v.plane.before(context.Background(), View); err != nil {
		return nil, nil, err
	}
	return v.inner.View(token, remote)
}

// read is a READ whose end has no rule.
type read struct {
	transfer.Read
	plane *Plane
}

func (r *read) Cancel() { r.cancel() }

// cancel passes a Cancel on unless a rule drops it, and says whether it did.
func (r *read) cancel() bool {
	rule := r.plane.book.meet(Cancel)
	_ = rule.wait(context.Background())
	if rule != nil && rule.Drop {
		return false
	}
	r.Read.Cancel()
	return true
}

// ruledRead is a READ whose end is delayed, dropped or changed. The plane below does the READ all the same: as with a real plane,
// its destination may be written until Done.
type ruledRead struct {
	read
	rule     *Rule
	peer     *peer
	done     chan struct{}
	err      error
	once     sync.Once
	canceled chan struct{}
}

func (r *ruledRead) run() {
	defer close(r.done)
	<-r.Read.Done()
	r.err = r.Read.Err()
	hold := r.rule.Hold
	switch {
	case r.rule.Drop:
		hold = nil // never ready
	case hold == nil:
		r.force()
		return
	}
	select {
	case <-hold:
		r.force()
	case <-r.canceled:
		r.err = fmt.Errorf("faulty: %w", transfer.ErrCanceled)
	case <-r.peer.closing:
		r.err = fmt.Errorf("faulty: peer closed: %w", transfer.ErrClosed)
	}
}

func (r *ruledRead) force() {
	if err := r.rule.err(); err != nil {
		r.err = err
	}
}

func (r *ruledRead) Done() <-chan struct{} { return r.done }
func (r *ruledRead) Err() error            { return r.err }

func (r *ruledRead) Cancel() {
	if r.cancel() {
		r.once.Do(func() { close(r.canceled) })
	}
}
