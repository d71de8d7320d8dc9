package stage

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// broken gives metadata of q's claim that no client can use, by name.
func broken(q asked, what string) []byte {
	m := *q.offer(q.p.payloads[q.Key])
	if m.Ferry != nil {
		m.Ferry.Try = q.Ferry.Try
	}
	switch what {
	case "a wrong size":
		m.Size++
		return wire.AppendMetadata(nil, &m)
	case "a huge shape":
		m.Specs = []wire.Spec{{DType: tensor.Float32, Shape: tensor.Shape{1 << 62, 1 << 62}}}
		return wire.AppendMetadata(nil, &m)
	}
	b := wire.AppendMetadata(nil, &m)
	return bytes.Replace(b, []byte("\xaeschema_version\x01"), []byte("\xaeschema_version\x02"), 1)
}

func TestMetadataThatCannotBeUsedEndsItsClaim(t *testing.T) {
	for what, want := range map[string]error{"schema 2": wire.ErrSchema, "a wrong size": wire.ErrMalformed, "a huge shape": wire.ErrMalformed} {
		for _, plain := range []bool{true, false} {
			t.Run(name(plain)+" "+what, func(t *testing.T) {
				p := newProducer(t, plain)
				p.put("k", empty(1))
				p.put("good", empty(1))
				p.onAsk(func(q asked) bool {
					if q.Op != wire.Get || q.Key == "good" {
						return false
					}
					p.mu.Lock()
					defer p.mu.Unlock()
					p.claims[q.Claim] = q
					q.send(broken(q, what))
					return true
				})
				c := newClient(t, ClientOptions{})
				if !plain { // so that it is known to be one of ours
					g, err := c.Get(within(t, patience), Request{Key: "good", From: p.endpoint()})
					if err != nil {
						t.Fatal(err)
					}
					releaseAs(t, g, empty(1))
				}
				if _, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()}); !errors.Is(err, want) {
					t.Errorf("%v, want %v", err, want)
				}
				p.free()
				if n := len(p.asked(wire.Fail)); n != 1 && !plain {
					t.Errorf("%d claims were given back", n)
				}
			})
		}
	}
}

func TestALostAnswerIsRecoveredOnlyToEndItsClaim(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(1))
	p.onAsk(func(q asked) bool {
		if len(p.asked(wire.Get)) > 1 {
			return false
		}
		p.mu.Lock() // claimed, and the answer is lost
		defer p.mu.Unlock()
		p.claims[q.Claim] = q
		return true
	})
	c := newClient(t, ClientOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	done := start(ctx, c, Request{Key: "k", From: p.endpoint()})
	first := p.wants(wire.Get, 1)
	cancel()
	if g := receive(t, done); !errors.Is(g.err, context.Canceled) {
		t.Errorf("%v, want context.Canceled", g.err)
	}
	again, last := p.wants(wire.Get, 2), p.wants(wire.Done, 1)
	if again.Claim != first.Claim || last.Claim != first.Claim || again.from.ID == first.from.ID {
		t.Errorf("claims %v, %v, done %v", first.Claim, again.Claim, last.Claim)
	}
	p.free()
	eventually(t, "the recovery is over", func() bool { return c.Stats().Pending == 0 })
	if st := c.Stats(); st.Recoveries != 1 || st.GivenUp != 0 || len(p.asked(wire.Get)) != 2 {
		t.Errorf("%+v after %d questions", st, len(p.asked(wire.Get)))
	}
}

func TestARecoveryAtAProducerThatTurnsOutToBeOursGivesThePayloadBack(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", empty(1))
	p.onAsk(func(q asked) bool { return len(p.asked(wire.Get)) == 1 })
	c := newClient(t, ClientOptions{})
	ctx, cancel := context.WithCancel(t.Context())
	done := start(ctx, c, Request{Key: "k", From: p.endpoint()})
	p.wants(wire.Get, 1)
	cancel()
	receive(t, done)
	p.wants(wire.Fail, 1)
	p.free()
	if n := len(p.asked(wire.Done)); n != 0 {
		t.Errorf("%d times done for a payload that nobody has got", n)
	}
}

func TestAMissingAcknowledgementHoldsUpNoResult(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(1))
	p.onAsk(func(q asked) bool { return q.Op == wire.Done && len(p.asked(wire.Done)) < 3 })
	c := newClient(t, ClientOptions{Answer: 100 * time.Millisecond})
	g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
	if err != nil {
		t.Fatal(err)
	}
	releaseAs(t, g, empty(1))
	last := p.wants(wire.Done, 3)
	p.free()
	for _, q := range p.asked(wire.Done) {
		if q.Claim != last.Claim || q.Generation != p.payloads["k"].m.Generation {
			t.Errorf("done of claim %v, generation %v", q.Claim, q.Generation)
		}
	}
}

func TestAClaimAtAProducerThatDiedIsGivenUpInTheEnd(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(1))
	p.onAsk(func(q asked) bool {
		if q.Op == wire.Done {
			_ = p.router.Close()
		}
		return q.Op == wire.Done
	})
	c := newClient(t, ClientOptions{Answer: 5 * time.Millisecond})
	g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
	if err != nil {
		t.Fatal(err)
	}
	releaseAs(t, g, empty(1))
	eventually(t, "it is given up", func() bool { return c.Stats().GivenUp == 1 && c.Stats().Pending == 0 })
}

func TestAGetWhoseProducerDiesAfterTheClaimFindsTheNextOne(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			p.put("k", empty(1))
			at := p.endpoint()
			p.onAsk(func(q asked) bool {
				if len(p.asked(wire.Get)) == 1 {
					_ = p.router.Close()
					return true
				}
				return false
			})
			c := newClient(t, ClientOptions{})
			done := start(within(t, patience), c, Request{Key: "k", From: at, Wait: true})
			p.wants(wire.Get, 1)
			p.listen(newLoop(t), at.Port)
			g := receive(t, done)
			if g.err != nil {
				t.Fatal(g.err)
			}
			releaseAs(t, g.Got, empty(1))
			p.free()
		})
	}
}

func TestALateAnswerOfOursGivesItsClaimBack(t *testing.T) {
	p := newProducer(t, false)
	p.put("k", full(100))
	p.put("first", empty(1))
	held := make(chan asked, 1)
	p.onAsk(func(q asked) bool {
		if q.Op == wire.Get && q.Key == "k" {
			held <- q
			return true
		}
		return false
	})
	c := newClient(t, ClientOptions{})
	g, err := c.Get(within(t, patience), Request{Key: "first", From: p.endpoint()})
	if err != nil {
		t.Fatal(err)
	}
	releaseAs(t, g, empty(1))
	ctx, cancel := context.WithCancel(t.Context())
	done := start(ctx, c, Request{Key: "k", From: p.endpoint()})
	q := receive(t, held)
	cancel()
	receive(t, done)
	if n := c.Stats().Pending; n == 0 {
		t.Error("nothing waits for the late answer")
	}
	q.serve()
	if f := p.wants(wire.Fail, 1); f.Claim != q.Claim || f.Generation != p.payloads["k"].m.Generation {
		t.Errorf("given back: claim %v, generation %v", f.Claim, f.Generation)
	}
	p.free()
	eventually(t, "nothing is pending", func() bool { return c.Stats().Pending == 0 })
	if st := c.Stats(); st.Late != 1 {
		t.Errorf("%d late answers", st.Late)
	}
}

func TestAWaitThatIsCalledOffIsCalledOffAtTheProducer(t *testing.T) {
	l := newLink(t, 1<<20)
	c := newClient(t, ClientOptions{})
	for range 2 { // by tcp, where nobody knows that it is ours, then by its socket
		ctx, cancel := context.WithCancel(t.Context())
		done := start(ctx, c, Request{Key: "k", From: l.Endpoint(), Wait: true})
		eventually(t, "it waits", func() bool { return l.server.Stats().Waiting == 1 })
		cancel()
		receive(t, done)
		eventually(t, "nobody waits", func() bool { return l.server.Stats().Waiting == 0 && c.Stats().Pending == 0 })
		mustPut(t, l, "other", empty(1), PutOptions{})
		g, err := c.Get(within(t, patience), Request{Key: "other", From: l.Endpoint()})
		if err != nil {
			t.Fatal(err)
		}
		releaseAs(t, g, empty(1))
	}
}

func TestAClaimThatWasLostIsReadOnceMore(t *testing.T) {
	for _, always := range []bool{false, true} {
		p := newProducer(t, false)
		p.put("k", full(100_000))
		p.onAsk(func(q asked) bool {
			if q.Op != wire.Verify || len(p.asked(wire.Verify)) > 1 && !always {
				return false
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			delete(p.claims, q.Claim)
			q.answer(wire.Reply{Status: wire.Lost})
			return true
		})
		c := newClient(t, ClientOptions{})
		g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
		if always {
			if !errors.Is(err, ErrLost) {
				t.Errorf("%v, want ErrLost", err)
			}
		} else if err != nil {
			t.Error(err)
		} else {
			releaseAs(t, g, full(100_000))
		}
		if all := p.asked(wire.Get); len(all) != 2 || all[0].Claim == all[1].Claim {
			t.Errorf("%d claims", len(all))
		}
		p.free()
		if n := c.o.Slab.(*slab.Slab).Used(); n != 0 {
			t.Errorf("%d bytes of the slab are in use", n)
		}
	}
}

func TestBytesWithAWrongChecksumAreGivenToNobody(t *testing.T) {
	for _, size := range []int{100, 100_000} { // inline, and READ
		p := newProducer(t, false)
		p.put("k", full(size))
		*p.payloads["k"].m.Ferry.Sum++
		c := newClient(t, ClientOptions{})
		if _, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()}); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%v, want ErrCorrupt", err)
		}
		p.free()
		if n := len(p.asked(wire.Fail)); n != maxTries {
			t.Errorf("%d claims were given back, want %d", n, maxTries)
		}
		if st := c.Stats(); st.Corrupt != maxTries || st.Retries != maxTries-1 || c.o.Slab.(*slab.Slab).Used() != 0 {
			t.Errorf("%+v, %d bytes in use", st, c.o.Slab.(*slab.Slab).Used())
		}
	}
}
