package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
)

// window is how many requests are on their way at a time.
const window = 64

const answerTimeout = 30 * time.Second

// asker is a peer that asks a producer over a DEALER, ours and vLLM's in the same way.
type asker struct {
	loop    *control.Loop
	dealer  *control.Dealer
	session string
	up      chan struct{}
	isUp    sync.Once

	mu   sync.Mutex
	turn *turn
}

// turn is a number of requests that are to be answered.
type turn struct {
	frames     [][]byte // encoded requests, used in turns
	verify     bool     // answer each ack by a verify, and count what that is answered by
	sent, want int
	got        int
	bytes      int // of the last ack
	err        error
	done       chan struct{}
}

func newAsker(addr, session string) (*asker, error) {
	loop, err := control.NewLoop(control.Options{})
	if err != nil {
		return nil, err
	}
	a := &asker{loop: loop, session: session, up: make(chan struct{})}
	if a.dealer, err = loop.Dial(context.Background(), addr, a); err != nil {
		return nil, errors.Join(err, loop.Close())
	}
	select {
	case <-a.up:
		return a, nil
	case <-time.After(answerTimeout):
		return nil, errors.Join(fmt.Errorf("no connection to %s", addr), loop.Close())
	}
}

func (a *asker) close() error { return a.loop.Close() }

// Up implements control.DealerHandler.
func (a *asker) Up() { a.isUp.Do(func() { close(a.up) }) }

// Down implements control.DealerHandler.
func (a *asker) Down(err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.turn != nil {
		a.endLocked(err)
	}
}

func (a *asker) endLocked(err error) {
	a.turn.err = err
	close(a.turn.done)
	a.turn = nil
}

// Message implements control.DealerHandler.
func (a *asker) Message(body []byte) {
	m, err := wire.DecodeAtConsumer(body)
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.turn
	if t == nil {
		return
	}
	switch m := m.(type) {
	case *wire.Ack:
		t.bytes = len(body)
		if m.Status != wire.OK {
			err = fmt.Errorf("%s for %s", m.Status, m.Key)
		}
		if err == nil && t.verify {
			err = a.dealer.Send(wire.AppendVerify(nil, &wire.Verify{Key: m.Key, Session: a.session, Grant: m.Ferry.Grant, Gen: m.Ferry.Gen}))
			if err == nil {
				return
			}
		}
	case *wire.Verified:
		if !m.OK {
			err = fmt.Errorf("%s was not verified", m.Key)
		}
	}
	if err == nil {
		t.got++
		err = a.sendLocked(t)
	}
	if err != nil || t.got == t.want {
		a.endLocked(err)
	}
}

func (a *asker) sendLocked(t *turn) error {
	for t.sent < t.want && t.sent-t.got < window {
		if err := a.dealer.Send(t.frames[t.sent%len(t.frames)]); err != nil {
			return err
		}
		t.sent++
	}
	return nil
}

// ask has n requests answered, and gives the time that it took and the size of the last ack.
func (a *asker) ask(frames [][]byte, n int, verify bool) (time.Duration, int, error) {
	t := &turn{frames: frames, want: n, verify: verify, done: make(chan struct{})}
	start := time.Now()
	a.mu.Lock()
	a.turn = t
	if err := a.sendLocked(t); err != nil {
		a.endLocked(err)
	}
	a.mu.Unlock()
	select {
	case <-t.done:
		return time.Since(start), t.bytes, t.err
	case <-time.After(answerTimeout):
		a.mu.Lock()
		defer a.mu.Unlock()
		return 0, 0, fmt.Errorf("%d of %d requests were answered in %v", t.got, n, answerTimeout)
	}
}

// latencies asks n times, one request at a time with a pause before each.
func (a *asker) latencies(frames [][]byte, n int, pause func() time.Duration) ([]time.Duration, error) {
	took := make([]time.Duration, 0, n)
	for i := range n {
		time.Sleep(pause())
		d, _, err := a.ask(frames[i%len(frames):][:1], 1, false)
		if err != nil {
			return nil, err
		}
		took = append(took, d)
	}
	slices.Sort(took)
	return took, nil
}
