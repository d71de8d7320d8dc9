package chaos

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
	"github.com/tensorferry/tensorferry/transfer"
)

// check looks whether all is well again: every key can be had, nothing is left, all can be ended.
func (w *world) check() {
	if w.t.Failed() {
		return
	}
	clients := make([]*client.Client, len(w.nodes))
	for i := range w.nodes {
		c, err := w.dial(i)
		w.must(err)
		defer func() { _ = c.Close() }()
		clients[i] = c
	}
	for i, c := range clients {
		for k := range w.keys {
			w.putAgain(c, w.nodes[i].name, keyName(k))
		}
	}
	w.countOneSided("pulled without asking, by the last nodes under harm")
	for k := 0; k < w.keys && len(clients) > 1; k++ {
		from := k % len(clients)
		w.pullAgain(clients, from, (from+1)%len(clients), keyName(k))
	}
	w.countOneSided("pulled without asking, by the last nodes")
	if len(clients) > 1 && len(w.hosts) > 0 && w.hosts[0] == w.hosts[1] && w.planes[0] == transfer.Mapped && w.counts["pulled without asking, by the last nodes"] == 0 {
		w.fail("nodes of one machine pulled nothing without asking")
	}
	for i, c := range clients {
		w.mustRest(i, c)
		_ = c.Close()
	}
	for i, n := range w.nodes {
		if n.config.KeepRegion { // one more, to take it away
			n.config.KeepRegion = false
			if status, err := n.end(); err != nil || status != 0 {
				w.fail("%s, told to end: status %d, %v\n%s", n.name, status, err, tail(n.log, 6000))
			}
			w.startNode(i)
		}
		if files := n.files(); files > w.files+100 {
			w.fail("%s has %d descriptors open", n.name, files)
		}
		if status, err := n.end(); err != nil || status != 0 {
			w.fail("%s, told to end: status %d, %v\n%s", n.name, status, err, tail(n.log, 6000))
		}
		w.mustBeGone(n)
	}
	for i, dir := range w.shm {
		var names []string
		w.must(w.hosts[i].try(func() error {
			left, err := os.ReadDir(dir)
			for _, f := range left {
				names = append(names, f.Name())
			}
			return err
		}))
		if len(names) > 0 {
			w.fail("left in %s: %v", dir, names)
		}
	}
}

// eventually calls f until it says yes, or patience is over.
func eventually(f func() (bool, error)) error {
	var err error
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		var ok bool
		if ok, err = f(); ok {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("not within %v: %w", patience, err)
		}
	}
}

// putAgain makes sure that a key is not stuck: it is there and right, or it can be saved.
func (w *world) putAgain(c *client.Client, where, key string) {
	err := eventually(func() (bool, error) {
		_, err := c.Put(w.within(), key, specOf(key), bytesOf(key))
		return err == nil, err // pending, or full of what is still held
	})
	if err != nil {
		w.fail("%s: %s is stuck: %v", where, key, err)
		return
	}
	m, err := c.Map(w.within(), key)
	if err == nil {
		err = check(m.Buffers(), key)
		m.Release()
	}
	if err != nil && !errors.Is(err, ec.ErrMissing) { // other keys may need its room; nobody else is here
		w.fail("%s: %s: %v", where, key, err)
	}
}

func bytesOf(key string) []byte {
	b := make([]byte, specOf(key).Bytes)
	fill(b, key, 0)
	return b
}

// pullAgain moves a key from one node to another.
func (w *world) pullAgain(clients []*client.Client, from, to int, key string) {
	err := eventually(func() (bool, error) {
		if _, err := clients[from].Put(w.within(), key, specOf(key), bytesOf(key)); err != nil {
			return false, err
		}
		p, err := clients[from].Announce(w.within(), []client.AnnounceItem{{Key: key, ItemIndices: []int{0}}})
		if err != nil {
			return false, err
		}
		if err := clients[to].Remove(w.within(), key); err != nil && !errors.Is(err, ec.ErrMissing) {
			return false, err
		}
		results, err := clients[to].FetchMap(w.within(), p, 0)
		if err != nil {
			return false, err
		}
		for r := range results {
			if r.Outcome != ec.FetchReady {
				return false, fmt.Errorf("%s: %s", r.Outcome, r.Reason)
			}
			err := check(r.Mapped.Buffers(), key)
			r.Mapped.Release()
			if err != nil {
				w.fail("pulled by plane %s from node %d to node %d: %v", r.Plane, from, to, err)
			}
		}
		return true, nil
	})
	if err != nil {
		w.fail("%s cannot be pulled from node %d to node %d: %v", key, from, to, err)
	}
}

// mustRest waits until nothing is reserved, pinned, held, granted or in quarantine. Leases end by themselves, so it must come.
func (w *world) mustRest(i int, c *client.Client) {
	err := eventually(func() (bool, error) {
		s, err := c.Stats(w.within())
		if err != nil {
			return false, err
		}
		infos, err := c.List(w.within())
		if err != nil {
			return false, err
		}
		used := 0
		for _, e := range infos {
			for _, x := range e.Extents {
				used += int(x.Count)
			}
		}
		m, err := w.metrics(i)
		if err != nil {
			return false, err
		}
		rest := map[string]int{
			"pinned blocks": s.PinnedBlocks, "filling": s.Filling, "quarantined blocks": s.QuarantinedBlocks, "held blocks": s.HeldBlocks,
			"blocks unaccounted for": s.Blocks - s.FreeBlocks - used,
		}
		for _, name := range []string{"grants", "granted_blocks", "burned_grants", "fetches_in_flight", "quarantined", "holds"} {
			v, ok := m["tensorferry_"+name]
			if !ok {
				return false, fmt.Errorf("no metric tensorferry_%s", name)
			}
			rest[name] = v
		}
		rest["engines beside the test"] = m["tensorferry_engines"] - 1
		maps.DeleteFunc(rest, func(_ string, n int) bool { return n == 0 })
		return len(rest) == 0, fmt.Errorf("%v", rest)
	})
	if err != nil {
		w.fail("%s does not come to rest: %v\n%s", w.nodes[i].name, err, tail(w.nodes[i].log, 3000))
	}
}

// countOneSided adds up the pulls of all nodes that asked nobody.
func (w *world) countOneSided(as string) {
	for i, n := range w.nodes {
		m, err := w.metrics(i)
		if err != nil {
			w.fail("%s: %v", n.name, err)
		}
		w.counts[as] += m["tensorferry_fetches_one_sided_total"]
	}
}

// leave ends a connection of the test's own, and waits until the node knows. The test lives on: of a node that is killed before, the next
// would keep what anybody has pinned until the test is dead.
func (w *world) leave(i int, c *client.Client) {
	_ = c.Close()
	err := eventually(func() (bool, error) {
		text, err := w.admin(i, "/v1/status")
		if err != nil {
			return false, err
		}
		var status struct{ Engines []struct{ PID int } }
		if err := json.Unmarshal(text, &status); err != nil {
			return false, err
		}
		for _, e := range status.Engines {
			if e.PID == os.Getpid() {
				return false, errors.New("the test is still connected")
			}
		}
		return true, nil
	})
	if err != nil {
		w.fail("%s: %v", w.nodes[i].name, err)
	}
}

// admin gets a page of a node's admin HTTP.
func (w *world) admin(i int, page string) (text []byte, err error) {
	n := w.nodes[i]
	err = n.host.try(func() error { // its loopback is the host's
		conn, err := net.DialTimeout("tcp", n.ready.Admin, patience)
		if err != nil {
			return err
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
			return err
		}
		req, err := http.NewRequest(http.MethodGet, "http://"+n.ready.Admin+page, nil)
		if err != nil {
			return err
		}
		if err := req.Write(conn); err != nil {
			return err
		}
		resp, err := http.ReadResponse(bufio.NewReader(conn), req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err = io.ReadAll(resp.Body)
		return err
	})
	return text, err
}

// metrics of a node, those of one name added up.
func (w *world) metrics(i int) (map[string]int, error) {
	text, err := w.admin(i, "/metrics")
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for line := range bytes.Lines(text) {
		f := strings.Fields(string(line))
		if len(f) < 2 || f[0] == "#" {
			continue
		}
		name, _, _ := strings.Cut(f[0], "{")
		if v, err := strconv.ParseFloat(f[len(f)-1], 64); err == nil {
			out[name] += int(v)
		}
	}
	return out, nil
}
