package client

import (
	"context"
	"encoding/json"
	"testing"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
)

// offered are params of keys that are all to be had.
func offered(keys ...string) (p ec.Params) {
	for _, k := range keys {
		p.Set(k, &ec.Announcement{Metadata: []byte("{}"), PeerHost: "h", PeerPort: 1, SizeBytes: testBlock})
	}
	return p
}

func ready(ref, handle uint64) *api.Push {
	return &api.Push{Ref: ref, Event: api.EventFetched, Last: true, Outcome: ec.FetchReady.String(), Handle: handle, Bytes: testBlock,
		Info: &ec.Info{Key: "k", Spec: testSpec, State: ec.Ready, Extents: []region.Extent{{Start: 1, Count: 1}}}}
}

func (f *fakeNode) released(handle uint64) {
	f.t.Helper()
	if r := f.request(); len(r.Ops) != 1 || r.Ops[0].Kind != api.OpRelease || r.Ops[0].Handle != handle {
		f.t.Errorf("%+v; want the release of %d", r.Ops, handle)
	}
}

func TestAFetchedEntryComesMapped(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	ch, err := c.FetchMap(testContext(t), offered("k"), 0)
	if err != nil {
		t.Fatal(err)
	}
	r := f.request()
	if !r.Ops[0].Map {
		t.Errorf("%+v", r.Ops[0])
	}
	f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, 1)})
	f.send(ready(r.Ops[0].Ref, 9))
	got := <-ch
	if got.Outcome != ec.FetchReady || got.Mapped == nil {
		t.Fatalf("%+v", got)
	}
	f.region.Pool()[testBlock] = 42
	if b := got.Mapped.Buffers(); len(b) != 1 || len(b[0]) != testBlock || b[0][0] != 42 {
		t.Errorf("%d buffers", len(b))
	}
	got.Mapped.Release()
	f.released(9)
}

func TestAPinThatNobodyWaitsForIsReleased(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	ctx, cancel := context.WithCancel(testContext(t))
	ch, err := c.FetchMap(ctx, offered("k"), 0)
	if err != nil {
		t.Fatal(err)
	}
	r := f.request()
	f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, 1)})
	cancel()
	if got := <-ch; got.Outcome != ec.FetchCanceled || got.Mapped != nil {
		t.Errorf("%+v", got)
	}
	f.send(ready(r.Ops[0].Ref, 9)) // had been sent before the cancel came
	op := f.request().Ops[0]
	for op.Kind == api.OpCancel { // once or twice
		op = f.request().Ops[0]
	}
	if op.Kind != api.OpRelease || op.Handle != 9 {
		t.Errorf("%+v; want the release of the pin", op)
	}
}

func TestEntriesThatCannotBeMappedHaveFailed(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	ch, err := c.FetchMap(testContext(t), offered("old", "wrong"), 0)
	if err != nil {
		t.Fatal(err)
	}
	r := f.request()
	f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, 2)})
	f.send(ready(r.Ops[0].Ref, 0)) // of a node that does not know what it was asked for
	wrong := ready(r.Ops[1].Ref, 8)
	wrong.Info.Extents[0].Start = testBlocks
	f.send(wrong)
	f.released(8)
	for got := range ch {
		if got.Outcome != ec.FetchFailed || got.Reason == "" || got.Mapped != nil {
			t.Errorf("%+v", got)
		}
	}
}

func TestAnEntryThatMakesNoSenseFailsAloneAndIsNotAskedFor(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	var p ec.Params
	if err := json.Unmarshal([]byte(`{
		"bad": {"metadata": {}, "peer_host": "h", "peer_port": 70000, "size_bytes": 1024},
		"good": {"metadata": {}, "peer_host": "h", "peer_port": 1, "size_bytes": 1024},
		"nowhere": {"metadata": {}}}`), &p); err != nil {
		t.Fatal(err)
	}
	ch, err := c.Fetch(testContext(t), p, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := f.request()
	if len(r.Ops) != 1 || r.Ops[0].Key != "good" || r.Ops[0].Map {
		t.Fatalf("%+v", r.Ops)
	}
	f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, 1)})
	f.send(ready(r.Ops[0].Ref, 0))
	got := map[string]ec.Outcome{}
	for r := range ch {
		got[r.Key] = r.Outcome
		if (r.Outcome == ec.FetchReady) != (r.Reason == "") {
			t.Errorf("%+v", r)
		}
	}
	if len(got) != 2 || got["bad"] != ec.FetchFailed || got["good"] != ec.FetchReady {
		t.Errorf("%v", got)
	}

	// With nothing else to ask for, too.
	var only ec.Params
	if err := json.Unmarshal([]byte(`{"bad": {"metadata": {}, "peer_host": 7}}`), &only); err != nil {
		t.Fatal(err)
	}
	if ch, err = c.Fetch(testContext(t), only, 0); err != nil {
		t.Fatal(err)
	}
	if r := <-ch; r.Key != "bad" || r.Outcome != ec.FetchFailed {
		t.Errorf("%+v", r)
	}
	if _, more := <-ch; more {
		t.Error("a second result")
	}
}

func TestAReplyThatComesWithThePushesIsAllThatAFetchNeeds(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	ch, err := c.Fetch(testContext(t), offered("k"), 0)
	if err != nil {
		t.Fatal(err)
	}
	r := f.request()
	if !r.Late {
		t.Errorf("%+v; want a request whose reply may be late", r)
	}
	if err := f.conn.Send(api.MaxReplyFrame, &api.Reply{ID: r.ID, Results: make([]api.Result, 1)}, ready(r.Ops[0].Ref, 0)); err != nil {
		t.Fatal(err)
	}
	if got := <-ch; got.Outcome != ec.FetchReady {
		t.Errorf("%+v", got)
	}
}
