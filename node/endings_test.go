package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

func TestAFetchEndsInOneOutcomeAKeyWhateverEndsIt(t *testing.T) {
	cfg := testConfig(t, 64)
	cfg.AllowHosts = []string{"127.0.0.0/8"}
	n := startNode(t, cfg)
	c := dial(t, n)
	// A listener that never answers.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	port := silent.Addr().(*net.TCPAddr).Port
	params := func(hosts ...string) (p ec.Params) {
		for i, h := range hosts {
			p.Set(fmt.Sprintf("k%d", i), &ec.Announcement{ItemIndices: []int{0}, Metadata: []byte("{}"), PeerHost: h, PeerPort: port, SizeBytes: testBlock, Shape: []int{1, testBlock / 2}})
		}
		return p
	}
	collect := func(ch <-chan client.FetchResult) map[ec.Outcome]int {
		out := map[ec.Outcome]int{}
		for r := range ch {
			out[r.Outcome]++
			if r.Reason == "" {
				t.Errorf("no reason: %+v", r)
			}
		}
		return out
	}

	ch, err := c.Fetch(testContext(t), params("127.0.0.1", "10.9.9.9"), 50*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if got := collect(ch); got[ec.FetchTimedOut]+got[ec.FetchUnreachable] != 1 || got[ec.FetchFailed] != 1 {
		t.Errorf("a time limit, a host that is not allowed: %v", got)
	}

	ctx, cancel := context.WithCancel(testContext(t))
	if ch, err = c.Fetch(ctx, params("127.0.0.1", "127.0.0.1"), 0); err != nil {
		t.Fatal(err)
	}
	cancel()
	if got := collect(ch); got[ec.FetchCanceled] != 2 {
		t.Errorf("a caller that has gone: %v", got)
	}
	eventually(t, "the node has stopped too", func() bool { return n.pools[0].consumer.Stats().Flights == 0 })

	other := dial(t, n)
	if ch, err = other.Fetch(testContext(t), params("127.0.0.1"), 0); err != nil {
		t.Fatal(err)
	}
	_ = other.Close()
	if got := collect(ch); got[ec.FetchFailed] != 1 {
		t.Errorf("a connection that has gone: %v", got)
	}
	if _, err := other.Fetch(testContext(t), params("127.0.0.1"), 0); !errors.Is(err, client.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}

	if ch, err = c.Fetch(testContext(t), ec.Params{}, 0); err != nil {
		t.Fatal(err)
	}
	if got := collect(ch); len(got) != 0 {
		t.Errorf("nothing to fetch: %v", got)
	}
}

func TestACallThatIsGivenUpLeavesNothingReserved(t *testing.T) {
	n := startNode(t, testConfig(t, 64))
	c := dial(t, n)
	for i := range 200 {
		ctx, cancel := context.WithCancel(testContext(t))
		go func() {
			for range i % 7 {
				runtime.Gosched()
			}
			cancel()
		}()
		if r, err := c.Reserve(ctx, "k", spec(1)); err == nil {
			if err := r.Discard(testContext(t)); err != nil {
				t.Fatal(err)
			}
		} else if !errors.Is(err, context.Canceled) && !errors.Is(err, ec.ErrPending) {
			t.Fatal(err)
		}
	}
	eventually(t, "all is free", func() bool {
		s, err := c.Stats(testContext(t))
		return err == nil && s.FreeBlocks == 64 && s.Filling == 0
	})
}

// FuzzConnection writes anything after a good hello: the node must neither die nor lose blocks.
func FuzzConnection(f *testing.F) {
	for _, m := range []api.Message{
		&api.Request{ID: 1, Ops: []api.Op{{Kind: api.OpReserve, Key: "k", Dtype: "torch.bfloat16", Shape: []int64{1, 1024}, Bytes: 2048}, {Kind: api.OpCommit, Handle: 1}, {Kind: api.OpMap, Key: "k"}, {Kind: api.OpRelease, Handle: 2}}},
		&api.Request{ID: 2, Ops: []api.Op{{Kind: api.OpAnnounce, Key: "k", Metadata: []byte("{}")}, {Kind: api.OpFetch, Key: "k", Ref: 1, Entry: []byte(`{"metadata":{}}`)}, {Kind: api.OpCancel, Ref: 1}, {Kind: api.OpList, Ref: 2}, {Kind: api.OpWait, Key: "k", Ref: 3}, {Kind: api.OpStats}}},
		&api.Bye{},
	} {
		frame, err := api.AppendFrame(nil, m, api.MaxRequestFrame)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(frame)
	}
	n := startNode(f, testConfig(f, 8))
	f.Fuzz(func(t *testing.T, b []byte) {
		sock, _ := byHand(t, n)
		if _, err := sock.Write(b); err != nil {
			return
		}
		_ = sock.CloseWrite()
		_, _ = io.Copy(io.Discard, sock)
		if err := n.failed(); err != nil {
			t.Fatal(err)
		}
	})
}
