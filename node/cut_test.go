package node

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// A process of the same user can cut a node's memory away under it. That ends the node, and neither those that read from it nor the next
// node of its instance.
func TestARegionThatIsCutCostsItsOwnNodeAlone(t *testing.T) {
	cfg, co := testConfig(t, 64), testConfig(t, 64)
	co.ShmDir = cfg.ShmDir
	p, other := spawnNode(t, cfg), startNode(t, co)
	oc := dial(t, other)
	announce := func(c *client.Client, keys ...string) ec.Params {
		t.Helper()
		var items []client.AnnounceItem
		for i, k := range keys {
			put(t, c, k, 3, uint64(i))
			items = append(items, client.AnnounceItem{Key: k, ItemIndices: []int{0}})
		}
		params, err := c.Announce(testContext(t), items)
		if err != nil {
			t.Fatal(err)
		}
		return params
	}
	fetch := func(params ec.Params, limit time.Duration) client.FetchResult {
		t.Helper()
		ch, err := oc.Fetch(testContext(t), params, limit)
		if err != nil {
			t.Fatal(err)
		}
		return <-ch
	}
	c, err := client.Dial(testContext(t), cfg.Socket, client.Options{Name: "engine", Wait: time.Millisecond, Log: quiet()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	first, second := announce(c, "a"), announce(c, "b")
	if r := fetch(first, 0); r.Outcome != ec.FetchReady || r.Plane != "mapped" {
		t.Fatalf("%+v", r)
	}

	if err := os.Truncate(p.ready.Region, 0); err != nil {
		t.Fatal(err)
	}
	if r := fetch(second, time.Second); r.Outcome == ec.FetchReady {
		t.Errorf("read from a file without bytes: %+v", r)
	}
	if _, err := c.Reserve(testContext(t), "c", spec(1)); err == nil {
		t.Error("reserved in a slot table that is gone")
	}
	_ = p.cmd.Wait()
	if said := p.said(); !strings.Contains(said, "SIGBUS") {
		t.Errorf("it ended for another reason:\n%s", said)
	}

	next := spawnNode(t, cfg)
	if next.ready.Region != p.ready.Region {
		t.Errorf("region %s after %s", next.ready.Region, p.ready.Region)
	}
	if r := fetch(announce(dialNode(t, cfg.Socket), "d"), 0); r.Outcome != ec.FetchReady {
		t.Errorf("from the next node: %+v", r)
	}
	checkBytes(t, oc, "d", 3, 0)
	next.end()
}
