package stage

import (
	"errors"
	"testing"

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
