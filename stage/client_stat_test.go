package stage

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/slab"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestStatSaysWhatThereIsAndTakesNothing(t *testing.T) {
	a, b := newLink(t, 1<<20, withSum), newLink(t, 1<<20, onlyGets)
	root := tensor.Map{tensor.Field("x", bytesOf(t, 600, 1)), tensor.Field("n", tensor.Int(1))}
	pub, err := a.Put(within(t, patience), "k", root, PutOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []Request{{Key: "k", From: a.Endpoint()}, {Key: "k", Metadata: pub.Metadata}} {
		m, err := b.client.Stat(within(t, patience), r)
		if err != nil {
			t.Fatal(err)
		}
		if m.Kind != wire.Structured || m.Size != pub.Size || m.Generation != pub.Generation || len(m.Specs) != 2 ||
			m.Specs[1].DType != tensor.Uint8 || len(m.Groups) != 0 || m.Ferry == nil || m.Ferry.Sum == nil {
			t.Errorf("%+v", m)
		}
	}
	if s := a.Stats().Store; s.Granted != 0 || s.Claims != 0 || s.Payloads != 1 {
		t.Errorf("%+v", s)
	}
	if _, err := b.client.Stat(within(t, patience), Request{Key: "other", From: a.Endpoint()}); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
	a.Abort("failed", "out of memory")
	var failed *FailedError
	if _, err := b.client.Stat(within(t, patience), Request{Key: "failed", From: a.Endpoint()}); !errors.As(err, &failed) || failed.Reason != "out of memory" {
		t.Error(err)
	}
	if err := a.Cleanup("k"); err != nil {
		t.Fatal(err)
	}
	if _, err := b.client.Stat(within(t, patience), Request{Key: "k", Metadata: pub.Metadata}); !errors.Is(err, ErrNotFound) {
		t.Error(err)
	}
}

func TestAPlainProducerIsNotAskedForItsPayload(t *testing.T) {
	p := newProducer(t, true)
	p.put("k", tensor.Int(1))
	c := newClient(t, ClientOptions{})
	if _, err := c.Stat(within(t, patience), Request{Key: "k", From: p.endpoint()}); !errors.Is(err, ErrPlain) {
		t.Error(err)
	}
	if p.held() != 0 {
		t.Error("a claim was taken")
	}
	if _, err := c.Stat(within(t, patience), Request{Key: "k", From: Endpoint{"127.0.0.1", 1}}); !errors.Is(err, ErrUnreachable) {
		t.Error(err)
	}
}

func TestWithoutAPlaneToItNothingIsClaimedAtAPlainProducer(t *testing.T) {
	root := full(100 << 10)
	for _, wait := range []bool{false, true} {
		t.Run(fmt.Sprint("waits ", wait), func(t *testing.T) {
			p := newProducer(t, true)
			p.put("k", root)
			c := newClient(t, ClientOptions{Slab: newSlab(t, 1<<20)})
			for _, key := range []string{"k", "k", "not put yet"} {
				_, err := c.Get(within(t, patience), Request{Key: key, From: p.endpoint(), Wait: wait})
				if !errors.Is(err, slab.ErrNoPlane) || !strings.HasSuffix(err.Error(), ": this one needs nixl, here are mapped, tcp; nothing was taken") {
					t.Errorf("%s: %v", key, err)
				}
			}
			if asked := len(p.asked(wire.Get)) + len(p.asked(wire.Done)); asked != 0 {
				t.Errorf("%d questions about a claim", asked)
			}
			reader := newClient(t, ClientOptions{Slab: newPlainSlab(t, 1<<20)})
			got, err := reader.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
			if err != nil {
				t.Fatal(err)
			}
			releaseAs(t, got, root)
			p.free()
		})
	}
}

// Which kind of producer it is may not be told by a connection that is lost, nor by one that does not answer.
func TestWhoAProducerIsIsAskedAgainUntilItAnswers(t *testing.T) {
	for _, plain := range []bool{false, true} {
		t.Run(name(plain), func(t *testing.T) {
			p := newProducer(t, plain)
			root := full(100 << 10)
			p.put("k", root)
			n := 0
			p.onAsk(func(q asked) bool {
				if q.Op != wire.Stat {
					return false
				}
				n++
				return n == 1
			})
			c := newClient(t, ClientOptions{Slab: newSlab(t, 1<<20), Answer: 100 * time.Millisecond})
			got, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
			p.wants(wire.Stat, 2)
			if plain {
				if !errors.Is(err, slab.ErrNoPlane) || len(p.asked(wire.Get)) != 0 {
					t.Error(err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			releaseAs(t, got, root)
			p.free()
		})
	}
}
