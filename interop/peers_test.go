package interop

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/tensorferry/tensorferry/ec"
)

// producer is a real vLLM producer.
type producer struct {
	*process
	Host    string         `json:"host"`
	Port    int            `json:"port"`
	Entries map[string]int `json:"entries"`
	Params  ec.Params      `json:"ec_transfer_params"`
}

func script(t testing.TB, name string, args ...string) *process {
	t.Helper()
	cmd := exec.Command(python(t), append([]string{name}, args...)...)
	cmd.Dir = filepath.Join("peers", "vllm")
	p := start(t, name, cmd)
	t.Cleanup(func() { // V12: a killed vLLM leaves its region behind
		p.kill()
		left, err := filepath.Glob(fmt.Sprintf("/dev/shm/vllm_ec_*peer%d_*", cmd.Process.Pid))
		must(t, err)
		for _, f := range left {
			must(t, os.Remove(f))
		}
	})
	return p
}

func startProducer(t testing.TB, args ...string) *producer {
	t.Helper()
	p := launchProducer(t, args...)
	p.ready()
	return p
}

// launchProducer does not wait for it, so that others can start beside it.
func launchProducer(t testing.TB, args ...string) *producer {
	t.Helper()
	return &producer{process: script(t, "ec_producer.py", args...)}
}

func (p *producer) ready() {
	p.t.Helper()
	p.answer(p)
}

// consumer is a real vLLM consumer that steps all the time.
type consumer struct {
	*process
	Region string `json:"shm"` // its file

	unconnected int // pulls that it failed to begin after its producer's restart
}

type pulled struct {
	Key    string  `json:"mm_hash"`
	Result string  `json:"result"`
	Good   bool    `json:"good"`
	MS     float64 `json:"ms"`
}

func startConsumer(t testing.TB, args ...string) *consumer {
	t.Helper()
	c := launchConsumer(t, args...)
	c.ready()
	return c
}

// launchConsumer does not wait for it, so that others can start beside it.
func launchConsumer(t testing.TB, args ...string) *consumer {
	t.Helper()
	return &consumer{process: script(t, "ec_live.py", args...)}
}

func (c *consumer) ready() {
	c.t.Helper()
	c.answer(c)
}

func (c *consumer) tell(v any) {
	c.t.Helper()
	line, err := json.Marshal(v)
	must(c.t, err)
	c.say(string(line))
}

// ask begins pulls.
func (c *consumer) ask(address string, sizes map[string]int) {
	c.t.Helper()
	c.tell(map[string]any{"pull": sizes, "peer": address})
}

// ends waits for n pulls.
func (c *consumer) ends(n int) map[string]pulled {
	c.t.Helper()
	out := map[string]pulled{}
	for range n {
		var p pulled
		c.answer(&p)
		out[p.Key] = p
	}
	return out
}

// pullAll pulls and wants every byte.
func (c *consumer) pullAll(address string, sizes map[string]int) {
	c.t.Helper()
	c.ask(address, sizes)
	c.wantPulled(sizes)
}

// wantPulled waits for pulls that have begun, and wants every byte.
func (c *consumer) wantPulled(sizes map[string]int) {
	c.t.Helper()
	for key, p := range c.ends(len(sizes)) {
		c.t.Logf("%d bytes: %s after %.1f ms", sizes[key], p.Result, p.MS)
		if p.Result != "pulled" || !p.Good {
			c.t.Errorf("%s, %d bytes: %s, bytes right: %v", key, sizes[key], p.Result, p.Good)
		}
	}
}

// pullAfterRestart pulls from a producer that was restarted, and wants every byte, of all but what vLLM fails by itself without asking (V7):
// its next connection to a peer can find the former one's monitor there still, which fails the first request.
func (c *consumer) pullAfterRestart(address string, sizes map[string]int) {
	c.t.Helper()
	c.ask(address, sizes)
	for key, p := range c.ends(len(sizes)) {
		if p.Result == "pulled" && p.Good {
			continue
		}
		text, err := os.ReadFile(c.log)
		must(c.t, err)
		if p.Result != "unavailable" || bytes.Count(text, []byte("ZMQError: Address already in use")) <= c.unconnected {
			c.t.Errorf("%s: %s, bytes right: %v", key, p.Result, p.Good)
		}
		c.unconnected++
	}
}

func (c *consumer) evict() {
	c.t.Helper()
	c.tell(map[string]any{"evict": true})
	var answer struct{ Evicted int }
	c.answer(&answer)
}

// alive says whether it still steps.
func (c *consumer) alive() {
	c.t.Helper()
	c.pulls()
}

// pull is one that is not over: the blocks of vLLM's region that it is to fill, and whether the READ is posted.
type pull struct {
	Blocks []int `json:"blocks"`
	Posted bool  `json:"posted"`
}

func (c *consumer) pulls() map[string]pull {
	c.t.Helper()
	c.tell(map[string]any{"state": true})
	var answer struct {
		Pulls map[string]pull `json:"pulls"`
	}
	c.answer(&answer)
	return answer.Pulls
}

// pullAnnounced pulls by the node's announcements, and wants every byte.
func (c *consumer) pullAnnounced(n *nodeProcess, sizes map[string]int) {
	c.t.Helper()
	c.tell(map[string]any{"pull": sizes, "params": n.announce(slices.Collect(maps.Keys(sizes))...)})
	c.wantPulled(sizes)
}

// wantUnavailable pulls, and wants no end but the one at which vLLM fails the request, or encodes for itself.
func (c *consumer) wantUnavailable(address string, sizes map[string]int) {
	c.t.Helper()
	c.ask(address, sizes)
	for key, p := range c.ends(len(sizes)) {
		if p.Result != "unavailable" {
			c.t.Errorf("%s: %s", key, p.Result)
		}
	}
}

func (c *consumer) abort(keys ...string) {
	c.t.Helper()
	c.tell(map[string]any{"abort": keys})
	var aborted struct{ Aborted int }
	c.answer(&aborted)
	if aborted.Aborted != len(keys) {
		c.t.Errorf("%d requests aborted, want %d", aborted.Aborted, len(keys))
	}
}

// insert has vLLM save more entries, which Params then announces.
func (p *producer) insert(sizes map[string]int) {
	p.t.Helper()
	line, err := json.Marshal(sizes)
	must(p.t, err)
	var added struct {
		Params ec.Params `json:"ec_transfer_params"`
	}
	p.say("insert " + string(line))
	p.answer(&added)
	for key := range sizes {
		a, ok := added.Params.Get(key)
		if !ok {
			p.t.Fatalf("vLLM does not announce %q, but %q", key, added.Params.Keys())
		}
		p.Params.Set(key, a)
	}
}

// do gives vLLM's producer a command, whose answer says no more than that it was done.
func (p *producer) do(command string) {
	p.t.Helper()
	var done struct {
		OK    bool
		Error string
	}
	p.say(command)
	p.answer(&done)
	if !done.OK {
		p.t.Fatalf("%s: %s", command, done.Error)
	}
}

// value is a Python expression's in the producer, as Python prints it.
func (p *producer) value(expression string) string {
	p.t.Helper()
	var v struct {
		Value string
		Error string
	}
	p.say("exec " + expression)
	p.answer(&v)
	if v.Error != "" {
		p.t.Fatalf("%s: %s", expression, v.Error)
	}
	return v.Value
}

// stat is one of the producer's counts.
func (p *producer) stat(name string) int {
	p.t.Helper()
	stats := map[string]any{}
	p.say("stats")
	p.answer(&stats)
	v, ok := stats[name].(float64)
	if !ok {
		p.t.Fatalf("no %s in %v", name, stats)
	}
	return int(v)
}
