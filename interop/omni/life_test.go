package omni

import (
	"context"
	"encoding/hex"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

var (
	one = raw(tensor.Float32, 1, 100)
	two = raw(tensor.Float32, 2, 100)
)

const bytesOfOne = 400 // and of two

// big is what a READ by tcp takes a while for.
func big() tensor.Tensor { return raw(tensor.Uint8, 3, 16<<20) }

func TestARealReaderGetsTheLastOfTwoPuts(t *testing.T) {
	e, r := newOurs(t, settings{}), newReceiver(t, unhurried)
	first := e.put("k", one, stage.PutOptions{})
	second := e.put("k", two, stage.PutOptions{})
	e.ended(first, stage.Replaced)
	r.fails(getting(first))
	r.wants(getting(second), bytesOfOne, describe(two))
	e.ended(second, stage.Read)

	s := newSender(t, nil, nil)
	old := s.put("k", describe(one))
	s.put("k", describe(two))
	if _, err := e.Get(patient(t), stage.Request{Key: "k", Metadata: old, Wait: true}); !errors.Is(err, stage.ErrNotFound) {
		t.Errorf("the generation that was replaced: %v", err)
	}
	e.get(stage.Request{Key: "k", From: s.at}, describe(two))
	s.drained()
}

func TestWhatARealReaderHasClaimedStays(t *testing.T) {
	e, r := newOurs(t, settings{store: stage.Options{Lease: 10 * time.Millisecond}}), newReceiver(t, unhurried)
	p := e.put("k", one, stage.PutOptions{Lease: time.Minute})
	r.stopsAt("transfer", false)
	q := getting(p)
	r.tell(q)
	r.stopped()
	if _, err := e.Put(patient(t), "k", two, stage.PutOptions{}); !errors.Is(err, stage.ErrClaimed) {
		t.Errorf("a put of its key: %v", err)
	}
	if err := e.Cleanup("k"); !errors.Is(err, stage.ErrClaimed) {
		t.Errorf("cleanup: %v", err)
	}
	// What others say about claims changes nothing: a done for a claim that is not there, or for another generation of it.
	forger := newReceiver(t, ask{"sender_host": e.Endpoint().Host, "sender_zmq_port": e.Endpoint().Port})
	for claim, generation := range map[string]any{"no such claim": p.Generation.String(), wire.NewID().String(): nil, "": "no such generation"} {
		forged := forger.do(ask{"op": "done", "key": "k", "metadata": hex.EncodeToString(p.Metadata), "claim": claim, "generation": generation})
		if !forged.OK {
			t.Error("a done was not acknowledged")
		}
	}
	if n := e.Stats().Store.Claims; n != 1 {
		t.Errorf("%d claims", n)
	}
	r.signal(syscall.SIGCONT)
	r.got(q, r.answer(), bytesOfOne, describe(one))
	e.ended(p, stage.Read)

	short := e.put("k", one, stage.PutOptions{}) // of which nobody wants any
	e.ended(short, stage.Expired)
	r.fails(getting(short))
	gone := e.put("k", one, stage.PutOptions{Lease: time.Minute})
	must(t, e.Cleanup("k"))
	e.ended(gone, stage.CleanedUp)
	r.fails(getting(gone))
}

func TestAPayloadForTwoRealReadersGoesToBoth(t *testing.T) {
	e, a, b := newOurs(t, settings{}), newReceiver(t, nil), newReceiver(t, nil)
	p := e.put("k", one, stage.PutOptions{Readers: 2})
	a.stopsAt("transfer", false)
	q := getting(p)
	a.tell(q)
	a.stopped()
	b.wants(getting(p), bytesOfOne, describe(one))
	select {
	case <-p.Released():
		t.Error("released while the other one reads")
	default:
	}
	a.signal(syscall.SIGCONT)
	a.got(q, a.answer(), bytesOfOne, describe(one))
	e.ended(p, stage.Read)
	if st := e.Stats().Store; st.Granted != 2 || st.Done != 2 {
		t.Errorf("%d claims granted, %d done", st.Granted, st.Done)
	}
}

func TestWhoComesBeforeThePutWaits(t *testing.T) {
	e, r, s := newOurs(t, settings{}), newReceiver(t, nil), newSender(t, nil, nil)
	q := ask{"op": "get", "key": "k", "metadata": at(e.Endpoint()), "wait": patience.Seconds()}
	r.tell(q)
	eventually(t, "the reader has asked twice", func() bool { return e.Stats().Server.NotFound >= 2 })
	p := e.put("k", one, stage.PutOptions{})
	r.got(q, r.answer(), bytesOfOne, describe(one))
	e.ended(p, stage.Read)

	if _, err := e.Get(patient(t), stage.Request{Key: "k", From: s.at}); !errors.Is(err, stage.ErrNotFound) {
		t.Errorf("a get that does not wait: %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := e.Get(short, stage.Request{Key: "k", From: s.at, Wait: true})
	if !errors.Is(err, stage.ErrNotFound) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a get whose deadline is over: %v", err)
	}
	asked := e.Stats().Client.Questions
	got := make(chan error)
	go func() {
		g, err := e.Get(patient(t), stage.Request{Key: "k", From: s.at, Wait: true})
		if err == nil {
			same(t, "k", describe(g.Root), describe(two))
			err = g.Release()
		}
		got <- err
	}()
	eventually(t, "we have asked twice", func() bool { return e.Stats().Client.Questions >= asked+2 })
	s.put("k", describe(two))
	must(t, <-got)
	e.told()
	s.drained()
}

func TestALeaseOfARealProducerEnds(t *testing.T) {
	e, s := newOurs(t, settings{getsOnly: true}), newSender(t, ask{"lease_seconds": 0.05}, nil)
	m := s.put("k", describe(one))
	s.drained()
	if _, err := e.Get(patient(t), stage.Request{Key: "k", Metadata: m, Wait: true}); !errors.Is(err, stage.ErrNotFound) {
		t.Error(err)
	}
	s.put("l", describe(one))
	s.do(ask{"op": "cleanup", "key": "l"})
	if _, err := e.Get(patient(t), stage.Request{Key: "l", From: s.at}); !errors.Is(err, stage.ErrNotFound) {
		t.Error(err)
	}
}

// O3: there such a claim stays.
func TestAGetThatIsCalledOffLeavesNoClaimAtARealProducer(t *testing.T) {
	e, s := newOurs(t, settings{bytes: 64 << 20, getsOnly: true}), newSender(t, nil, tcpOnly)
	g := newGate(t, s.at)
	s.put("k", describe(one))
	g.hold()
	ctx, cancel := context.WithCancel(patient(t))
	got := make(chan error)
	get := func(key string) {
		_, err := e.Get(ctx, stage.Request{Key: key, From: g.at()})
		got <- err
	}
	go get("k")
	eventually(t, "the claim is answered", func() bool { return g.held() == 1 })
	if n := len(s.do(ask{"op": "stat"}).Pending["k"]); n != 1 {
		t.Fatalf("%d claims", n)
	}
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	g.release()
	s.drained()

	// During the READ: the producer is stopped, so it is not over before we call it off.
	if r := s.do(ask{"op": "puts", "key": "b", "first": 0, "count": 1, "bytes": 32 << 20}); !r.OK {
		t.Fatal("their put failed")
	}
	g.hold()
	ctx, cancel = context.WithCancel(patient(t))
	go get("b0")
	eventually(t, "the claim is answered", func() bool { return g.held() == 1 })
	s.signal(syscall.SIGSTOP)
	s.stopped()
	g.release()
	eventually(t, "the READ has its buffer", func() bool { return e.slab.Used() > 0 })
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	s.signal(syscall.SIGCONT)
	if !s.drainedUnlessEnded() {
		s = newSender(t, nil, tcpOnly)
	}
	m := s.put("k", describe(two))
	e.get(stage.Request{Key: "k", Metadata: m}, describe(two))
	s.drained()
}

// O4: a plain reader says done whatever came of it, and so the payload is gone. Nothing else is.
func TestAPayloadThatARealReaderCannotDecodeIsUsedUp(t *testing.T) {
	e, r := newOurs(t, settings{}), newReceiver(t, unhurried)
	p := e.put("k", values()["nested"], stage.PutOptions{})
	r.do(ask{"op": "stumble"})
	r.fails(getting(p))
	e.ended(p, stage.Read)
	p = e.put("k", one, stage.PutOptions{})
	r.wants(getting(p), bytesOfOne, describe(one))
	e.ended(p, stage.Read)
}

func TestAPayloadOfARealProducerThatDoesNotDecodeEndsItsClaim(t *testing.T) {
	e, s := newOurs(t, settings{getsOnly: true}), newSender(t, nil, nil)
	for _, name := range []string{"nested", "object"} {
		m := s.put(name, describe(values()[name]))
		s.do(ask{"op": "spoil", "key": name})
		if _, err := e.Get(patient(t), stage.Request{Key: name, Metadata: m}); !errors.Is(err, wire.ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
		e.told()
		s.drained()
	}
}

// A reader whose answer was lost may give up: it asks again behind the scenes, only to say done.
func TestARealReaderThatGivesUpLeavesNoClaim(t *testing.T) {
	e := newOurs(t, settings{})
	g := newGate(t, e.Endpoint())
	r := newReceiver(t, ask{"sender_host": g.at().Host, "sender_zmq_port": g.at().Port})
	p := e.put("k", one, stage.PutOptions{})
	g.hold()
	r.fails(ask{"op": "get", "key": "k"})
	e.claimed(p)
	g.release()
	r.do(ask{"op": "abandon", "key": "k"})
	e.ended(p, stage.Read)
}

// Their query times out after 10 ms and comes again by another connection, under the same claim: it is one.
func TestARealReadersClaimThatWasAnsweredLateIsTheSame(t *testing.T) {
	e := newOurs(t, settings{})
	g := newGate(t, e.Endpoint())
	r := newReceiver(t, ask{"sender_host": g.at().Host, "sender_zmq_port": g.at().Port})
	p := e.put("k", one, stage.PutOptions{})
	g.hold()
	q := ask{"op": "get", "key": "k", "wait": patience.Seconds()}
	r.tell(q)
	eventually(t, "three answers are late", func() bool { return g.held() >= 3 })
	g.release()
	r.got(q, r.answer(), bytesOfOne, describe(one))
	e.ended(p, stage.Read)
	if st := e.Stats(); st.Store.Granted != 1 || st.Server.Gets < 3 {
		t.Errorf("%d claims granted to %d questions", st.Store.Granted, st.Server.Gets)
	}
}
