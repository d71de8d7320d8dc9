package node

import (
	"fmt"
	"sync"
	"syscall"
	"testing"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// C5: peers were answered between an engine's steps only, so that a busy engine's peers waited in vain. Here an engine stands still for
// good, in the middle of filling an entry, while fifty keys are asked for.
func TestPeersAreAnsweredWhileAnEngineIsStopped(t *testing.T) {
	cfg := testConfig(t, 1024) // all that is asked for at a time is less than a quarter, the share of one source
	cfg.Planes = []string{"tcp"}
	na, nb := startNode(t, cfg), startNode(t, testConfig(t, 256))
	a, b := dial(t, na), dial(t, nb)
	p := startEngine(t, na, "reserve", nil)
	p.says(t)
	if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var all []client.AnnounceItem
	for i := range 50 {
		key := fmt.Sprint("key", i)
		put(t, a, key, 1+i%3, uint64(i))
		all = append(all, client.AnnounceItem{Key: key})
	}
	params, err := a.Announce(testContext(t), all)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			results, err := b.Fetch(testContext(t), params, 0)
			if err != nil {
				t.Error(err)
				return
			}
			for r := range results {
				if r.Outcome != ec.FetchReady {
					t.Errorf("%+v", r)
				}
			}
		})
	}
	wg.Wait()
	for i := range 50 {
		checkBytes(t, b, fmt.Sprint("key", i), 1+i%3, uint64(i))
	}
	if s := nb.pools[0].consumer.Stats(); s.AckTimeouts != 0 || s.NotReady != 0 {
		t.Errorf("the peer let the asker wait: %+v", s)
	}
}
