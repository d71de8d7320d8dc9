package ec

import (
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"sync"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/internal/sparselog"
)

// maxLogSubjects bounds what peers can make a node remember of what it wrote into its log.
const maxLogSubjects = 256

// logMismatch names the field by which a peer's compatibility hash differs from ours.
func (p *Producer) logMismatch(from control.Source, r *wire.Request) {
	const what = "a peer is not compatible: answered NACK_INCOMPAT"
	if r.Ferry == nil {
		ours := make([]string, 0, len(p.order))
		for _, pool := range p.order {
			ours = append(ours, pool.compat.Hash()+" of "+describe(pool.compat))
		}
		p.log.warn("incompatible", from.Addr, what, "theirs", r.CompatHash, "ours", strings.Join(ours, "; "),
			"fix", "compare these four inputs with the peer's own")
		return
	}
	p.log.warn("incompatible", from.Addr, what, "node", r.Ferry.Node, "differs", p.nearestDifference(r.Ferry.Compat))
}

// nearestDifference compares with the pool that differs in the fewest fields.
func (p *Producer) nearestDifference(theirs wire.Compat) string {
	var best []string
	for i, pool := range p.order {
		d := differences(theirs, pool.compat)
		if i == 0 || len(d) < len(best) {
			best = d
		}
	}
	switch {
	case len(p.order) == 0:
		return "no pool is served here"
	case len(best) == 0:
		return "nothing but the hash itself, which does not match the fields sent with it"
	}
	return strings.Join(best, "; ")
}

func differences(theirs, ours wire.Compat) []string {
	var d []string
	text := func(name, t, o string) {
		if t != o {
			d = append(d, fmt.Sprintf("%s: theirs %.200q, ours %q", name, t, o))
		}
	}
	text("vllm_version", theirs.VLLMVersion, ours.VLLMVersion)
	text("model", theirs.Model, ours.Model)
	text("dtype", theirs.Dtype, ours.Dtype)
	if theirs.BlockBytes != ours.BlockBytes {
		d = append(d, fmt.Sprintf("block_size_bytes: theirs %d, ours %d", theirs.BlockBytes, ours.BlockBytes))
	}
	return d
}

func describe(c wire.Compat) string {
	return fmt.Sprintf("vllm_version %q, model %q, dtype %q, block_size_bytes %d", c.VLLMVersion, c.Model, c.Dtype, c.BlockBytes)
}

// throttledLog spaces out the lines of each kind about each subject.
type throttledLog struct {
	log  *slog.Logger
	mu   sync.Mutex
	seen map[[2]string]*sparselog.Cause
}

func newThrottledLog(l *slog.Logger) *throttledLog {
	if l == nil {
		l = slog.Default()
	}
	return &throttledLog{log: l, seen: map[[2]string]*sparselog.Cause{}}
}

// warn logs, unless a line of that kind about that peer was logged a moment ago.
func (t *throttledLog) warn(kind, peer, msg string, args ...any) {
	if peer != "" {
		args = append(args, "peer", peer)
	}
	t.cause(kind, peer).Warn(t.log, msg, args...)
}

// cause finds or makes that of a subject. When there are too many, the rest of a kind share one.
func (t *throttledLog) cause(kind, peer string) *sparselog.Cause {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := [2]string{kind, peer}
	if t.seen[k] == nil && len(t.seen) >= maxLogSubjects {
		maps.DeleteFunc(t.seen, func(_ [2]string, c *sparselog.Cause) bool { return c.Idle() })
		if len(t.seen) >= maxLogSubjects {
			k[1] = "*"
		}
	}
	c := t.seen[k]
	if c == nil {
		c = &sparselog.Cause{}
		t.seen[k] = c
	}
	return c
}
