package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/node/client"
)

// guests are what is connected to the node.
type guests struct {
	engines []*client.Client
	peers   []*peer
	at      int // of the next key
}

func connect(at *offer, engines, peers int) (g *guests, err error) {
	g = &guests{}
	for range engines {
		e, err := client.Dial(context.Background(), at.Socket, client.Options{Name: "bench"})
		if err != nil {
			return nil, errors.Join(err, g.close())
		}
		g.engines = append(g.engines, e)
	}
	for range peers {
		p, err := newPeer(at.Addr)
		if err != nil {
			return nil, errors.Join(err, g.close())
		}
		g.peers = append(g.peers, p)
	}
	return g, nil
}

func (g *guests) close() error {
	var errs []error
	for _, e := range g.engines {
		errs = append(errs, e.Close())
	}
	for _, p := range g.peers {
		errs = append(errs, p.close())
	}
	return errors.Join(errs...)
}

// put reserves and commits n entries, in batches, over and over the same keys, of which the pool holds a half.
func (g *guests) put(n int) error {
	const (
		batch = 100
		keys  = 1 << 14
	)
	ctx, e := context.Background(), g.engines[0]
	for range n / batch {
		ops := make([]client.Op, batch)
		for i := range ops {
			ops[i] = client.ReserveOp(key(g.at%keys), spec())
			g.at++
		}
		res, err := e.Batch(ctx, ops...)
		if err != nil {
			return err
		}
		for i, r := range res {
			if r.Err != nil {
				return r.Err
			}
			ops[i] = client.CommitOp(r.Reservation)
		}
		if res, err = e.Batch(ctx, ops...); err != nil {
			return err
		}
		for _, r := range res {
			if r.Err != nil {
				return r.Err
			}
		}
	}
	return nil
}

// peer is another node, as far as the control channel goes.
type peer struct {
	loop    *control.Loop
	dealer  *control.Dealer
	up      chan struct{}
	isUp    sync.Once
	answers chan wire.Message
}

func newPeer(addr string) (*peer, error) {
	loop, err := control.NewLoop(control.Options{})
	if err != nil {
		return nil, err
	}
	p := &peer{loop: loop, up: make(chan struct{}), answers: make(chan wire.Message, 1)}
	if p.dealer, err = loop.Dial(context.Background(), addr, p); err != nil {
		return nil, errors.Join(err, loop.Close())
	}
	select {
	case <-p.up:
		return p, nil
	case <-time.After(timeout):
		return nil, errors.Join(fmt.Errorf("no connection to %s", addr), loop.Close())
	}
}

func (p *peer) close() error { return p.loop.Close() }

// Up, Down and Message implement control.DealerHandler.
func (p *peer) Up()        { p.isUp.Do(func() { close(p.up) }) }
func (p *peer) Down(error) {}
func (p *peer) Message(body []byte) {
	if m, err := wire.DecodeAtConsumer(append([]byte(nil), body...)); err == nil {
		p.answers <- m
	}
}

func (p *peer) ask(frame []byte) (wire.Message, error) {
	if err := p.dealer.Send(frame); err != nil {
		return nil, err
	}
	select {
	case m := <-p.answers:
		return m, nil
	case <-time.After(timeout):
		return nil, errors.New("no answer")
	}
}

// visit is all that a peer does.
func visit(addr string, i int) (err error) {
	p, err := newPeer(addr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	session := fmt.Sprint("session-", i)
	m, err := p.ask(wire.AppendRequest(nil, &wire.Request{
		Key: key(i % 64), CompatHash: compat.Hash(), Session: session, Version: wire.Generation2,
		Ferry: &wire.FerryRequest{Node: fmt.Sprint("peer-", i), Epoch: 1, Planes: []string{"tcp"}, Compat: compat},
	}, wire.Generation2))
	if err != nil {
		return err
	}
	ack, ok := m.(*wire.Ack)
	if !ok || ack.Status != wire.OK {
		return fmt.Errorf("peer %d was answered %+v", i, m)
	}
	m, err = p.ask(wire.AppendVerify(nil, &wire.Verify{Key: ack.Key, Session: session, Grant: ack.Ferry.Grant, Gen: ack.Ferry.Gen}))
	if v, ok := m.(*wire.Verified); err == nil && (!ok || !v.OK) {
		err = fmt.Errorf("peer %d was told %+v", i, m)
	}
	return err
}

// comeAndGo has n peers visit, 20 at a time. The entries that they ask for are put there first.
func comeAndGo(at *offer, n int) error {
	g, err := connect(at, 1, 0)
	if err != nil {
		return err
	}
	for i := range 64 {
		if _, err := g.engines[0].Put(context.Background(), key(i), spec(), make([]byte, spec().Bytes)); err != nil {
			return errors.Join(err, g.close())
		}
	}
	if err := g.close(); err != nil {
		return err
	}
	var all errgroup.Group
	all.SetLimit(20)
	for i := range n {
		all.Go(func() error { return visit(at.Addr, i) })
	}
	return all.Wait()
}
