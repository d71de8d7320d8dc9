package stage

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/stage/wire"
)

func TestAClaimIsRepeatedUnderItsIdOnNewConnectionsUntilAnAnswerCame(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(3))
	p.onAsk(func(q asked) bool { return q.Op == wire.Get && len(p.asked(wire.Get)) < 3 })
	c := newClient(t, ClientOptions{Answer: 50 * time.Millisecond})
	g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
	if err != nil {
		t.Fatal(err)
	}
	releaseAs(t, g, empty(3))
	all := p.asked(wire.Get)
	if len(all) < 3 { // more where the third answer takes long, too
		t.Fatalf("%d questions, want 3", len(all))
	}
	for i, q := range all[1:] {
		if q.Claim != all[0].Claim || q.from.ID == all[i].from.ID {
			t.Errorf("question %d has claim %v by connection %q, the one before %v by %q", i+1, q.Claim, q.from.ID, all[i].Claim, all[i].from.ID)
		}
	}
	if d := p.wants(wire.Done, 1); d.Claim != all[0].Claim || d.Generation != p.payloads["k"].m.Generation {
		t.Errorf("done for claim %v of generation %v", d.Claim, d.Generation)
	}
	p.free()
	if st := c.Stats(); st.Timeouts < 2 || st.Questions != uint64(len(all)) || st.Recoveries != 0 {
		t.Errorf("%+v", st)
	}
}

func TestIndependentGetsHaveDistinctClaims(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			p.put("k", empty(1))
			c := newClient(t, ClientOptions{})
			claims := map[wire.ID]bool{}
			for range 5 {
				g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
				if err != nil {
					t.Fatal(err)
				}
				releaseAs(t, g, empty(1))
			}
			for _, q := range p.asked(wire.Get) {
				claims[q.Claim] = true
			}
			if len(claims) != 5 {
				t.Errorf("5 gets had %d claims", len(claims))
			}
			p.free()
		})
	}
}

func TestAGetThatWaitsAsksUntilThePayloadIsThere(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			c := newClient(t, ClientOptions{Query: time.Millisecond})
			done := start(within(t, patience), c, Request{Key: "k", From: p.endpoint(), Wait: true})
			p.wants(wire.Get, 3)
			p.put("k", empty(1))
			g := receive(t, done)
			if g.err != nil {
				t.Fatal(g.err)
			}
			releaseAs(t, g.Got, empty(1))
			if first, last := p.asked(wire.Get)[0], p.wants(wire.Get, 3); first.Claim != last.Claim {
				t.Error("the claim changed while the payload was waited for")
			} else if plain == (last.Ferry != nil) {
				t.Errorf("the third question had the extension: %v", !plain)
			} else if !plain && last.Ferry.WaitMS == 0 {
				t.Error("a producer of ours was not asked to hold its answer back")
			}
			p.free()
		})
	}
}

func TestAGetThatDoesNotWaitEndsAtTheFirstAnswer(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			c := newClient(t, ClientOptions{})
			_, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
			if !errors.Is(err, ErrNotFound) {
				t.Errorf("%v, want ErrNotFound", err)
			}
			if n := len(p.asked(wire.Get)); n != 1 {
				t.Errorf("%d questions", n)
			}
		})
	}
}

func TestAGenerationThatIsGoneIsNotWaitedFor(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(1))
	metadata := wire.AppendMetadata(nil, &p.payloads["k"].m)
	p.put("k", empty(2))
	c := newClient(t, ClientOptions{})
	if _, err := c.Get(within(t, patience), Request{Key: "k", Metadata: metadata, Wait: true}); !errors.Is(err, ErrNotFound) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want ErrNotFound at once", err)
	}
}

func TestAtItsDeadlineAGetSaysWhatKeptIt(t *testing.T) {
	for _, plain := range []bool{true, false} {
		p := newProducer(t, plain)
		c := newClient(t, ClientOptions{})
		if _, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()}); !errors.Is(err, ErrNotFound) {
			t.Error(err)
		}
		_, err := c.Get(within(t, 300*time.Millisecond), Request{Key: "k", From: p.endpoint(), Wait: true})
		if !errors.Is(err, ErrNotFound) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want ErrNotFound at the deadline", name(plain), err)
		}
	}
}

func TestAProducerThatIsNotThereIsSaidAtOnceOrWaitedFor(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", empty(1))
	at := p.endpoint()
	if err := p.router.Close(); err != nil {
		t.Fatal(err)
	}
	c := newClient(t, ClientOptions{})
	eventually(t, "the port is closed", func() bool {
		_, err := c.Get(within(t, patience), Request{Key: "k", From: at})
		return errors.Is(err, ErrUnreachable) && !errors.Is(err, context.DeadlineExceeded)
	})
	_, err := c.Get(within(t, 100*time.Millisecond), Request{Key: "k", From: at, Wait: true})
	if !errors.Is(err, ErrUnreachable) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want ErrUnreachable at the deadline", err)
	}
	done := start(within(t, patience), c, Request{Key: "k", From: at, Wait: true})
	// One that does not wait is told at once although another does.
	if _, err := c.Get(within(t, patience), Request{Key: "k", From: at}); !errors.Is(err, ErrUnreachable) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v, want ErrUnreachable at once", err)
	}
	p.listen(newLoop(t), at.Port)
	g := receive(t, done)
	if g.err != nil {
		t.Fatal(g.err)
	}
	releaseAs(t, g.Got, empty(1))
	p.free()
	if st := c.Stats(); st.Recoveries != 0 {
		t.Errorf("%d recoveries of claims that nobody was asked for", st.Recoveries)
	}
}

func TestAnAnswerForAnotherClaimIsNotBelieved(t *testing.T) {
	for _, plain := range []bool{true, false} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			p.put("k", empty(1))
			wrong := true
			p.onAsk(func(q asked) bool {
				if q.Op != wire.Get || !wrong {
					return false
				}
				wrong = false
				m := *q.offer(p.payloads["k"])
				m.Claim = wire.NewID()
				q.answer(wire.Reply{Status: wire.Found, Metadata: &m})
				return true
			})
			c := newClient(t, ClientOptions{Query: time.Millisecond})
			g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
			if err != nil {
				t.Fatal(err)
			}
			releaseAs(t, g, empty(1))
			if st := c.Stats(); st.Bad != 1 {
				t.Errorf("%d bad answers were counted", st.Bad)
			}
			p.free()
		})
	}
}

func TestAProducerThatOnlyTalksNonsenseIsLeft(t *testing.T) {
	p := newProducer(t, false)
	p.onAsk(func(q asked) bool {
		q.answer(wire.Reply{Status: wire.Held})
		return true
	})
	c := newClient(t, ClientOptions{Query: time.Millisecond})
	if _, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint(), Wait: true}); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("%v, want ErrMalformed", err)
	}
	if n := len(p.asked(wire.Get)); n != maxBad {
		t.Errorf("it was asked %d times", n)
	}
}

func TestRefusalsAreTyped(t *testing.T) {
	p := newProducer(t, false)
	status := wire.Reply{}
	p.onAsk(func(q asked) bool {
		q.answer(status)
		return true
	})
	c := newClient(t, ClientOptions{})
	ask := func(a wire.Reply) error {
		status = a
		_, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint(), Wait: true})
		return err
	}
	var failed *FailedError
	if err := ask(wire.Reply{Status: wire.Failed, Reason: "the stage crashed"}); !errors.As(err, &failed) || failed.Reason != "the stage crashed" || failed.Key != "k" {
		t.Errorf("%v", err)
	}
	if err := ask(wire.Reply{Status: wire.Closing}); !errors.Is(err, ErrClosing) {
		t.Errorf("%v", err)
	}
	plain := newProducer(t, true)
	plain.onAsk(func(q asked) bool {
		q.answer(wire.Reply{Status: wire.GeometryMismatch})
		return true
	})
	if _, err := c.Get(within(t, patience), Request{Key: "k", From: plain.endpoint()}); !errors.Is(err, wire.ErrSchema) {
		t.Errorf("%v", err)
	}
}

func TestEndpointsThatMakeNoSenseAreNamed(t *testing.T) {
	c := newClient(t, ClientOptions{AllowHost: func(host string) error {
		if host == "forbidden" {
			return errors.New("not on the list")
		}
		t.Errorf("asked whether %q may be dialled", host)
		return nil
	}})
	for _, at := range []Endpoint{
		{}, {"", 5}, {"host", 0}, {"host", -1}, {"host", 65536}, {"no host", 5}, {"a/b", 5}, {"*", 5}, {"0.0.0.0", 5}, {"::", 5}, {"224.0.0.1", 5},
		{"..", 5}, {"h\x00st", 5}, {"tcp://host", 5}, {"a:b", 5},
	} {
		_, err := c.Get(within(t, patience), Request{Key: "k", From: at})
		if !errors.Is(err, ErrEndpoint) {
			t.Errorf("%q port %d: %v, want ErrEndpoint", at.Host, at.Port, err)
		}
	}
	if _, err := c.Get(within(t, patience), Request{Key: "k", From: Endpoint{"forbidden", 5}}); err == nil || errors.Is(err, ErrEndpoint) {
		t.Errorf("%v, want that of AllowHost", err)
	}
	m := wire.Metadata{SenderHost: "junk host", SenderPort: 5, Generation: wire.NewID(), Kind: wire.Tensors}
	if _, err := c.Get(within(t, patience), Request{Key: "k", Metadata: wire.AppendMetadata(nil, &m), From: Endpoint{"127.0.0.1", 5}}); !errors.Is(err, ErrEndpoint) {
		t.Errorf("%v, want ErrEndpoint", err)
	}
	for _, key := range []string{"", string(make([]byte, wire.MaxKey+1))} {
		if _, err := c.Get(within(t, patience), Request{Key: key, From: Endpoint{"127.0.0.1", 5}}); !errors.Is(err, ErrOptions) {
			t.Errorf("a key of %d bytes: %v", len(key), err)
		}
	}
	if _, err := c.Get(within(t, patience), Request{Key: "k", Metadata: []byte{0xc1}}); !errors.Is(err, wire.ErrMalformed) {
		t.Errorf("%v, want ErrMalformed", err)
	}
}

func TestClientOptionsAreChecked(t *testing.T) {
	s, l := newSlab(t, 4096), newLoop(t)
	for name, o := range map[string]ClientOptions{
		"no loop": {Slab: s}, "no slab": {Loop: l}, "query": {Slab: s, Loop: l, Query: -1}, "answer": {Slab: s, Loop: l, Answer: -1},
		"transfer": {Slab: s, Loop: l, Transfer: -1}, "inline": {Slab: s, Loop: l, Inline: wire.MaxInline + 1},
		"node": {Slab: s, Loop: l, Node: string(make([]byte, wire.MaxNode+1))},
	} {
		if _, err := NewClient(o); !errors.Is(err, ErrOptions) {
			t.Errorf("%s: %v, want ErrOptions", name, err)
		}
	}
}

var _ control.LeaveHandler = (*producerHandler)(nil)
