package node

import (
	"context"
	"log/slog"
	"strings"
	"testing"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/nixl"
)

// mortal is a plane whose agents have died.
type mortal struct{ *faulty }

func (mortal) Counts() nixl.Counts {
	return nixl.Counts{
		Serve: nixl.DeathCounts{nixl.DeathAbort: 1, nixl.DeathUnknown: 2}, Fetch: nixl.DeathCounts{nixl.DeathFault: 3, nixl.DeathKilled: 4},
		Unsettled: 5, Retired: 6,
	}
}

func TestAgentsThatDieAreInTheMetrics(t *testing.T) {
	usual := planeMakers[transfer.TCP]
	defer func() { planeMakers[transfer.TCP] = usual }()
	planeMakers[transfer.TCP] = func(context.Context, *settings, *slog.Logger) (transfer.Plane, error) {
		return mortal{newFaulty()}, nil
	}
	cfg := testConfig(t, 16)
	cfg.Planes = []string{transfer.TCP}
	n := startNode(t, cfg)
	_, text := get(t, n, "/metrics", n.Ready().Admin)
	for _, want := range []string{
		`agents_died_total{reason="abort",role="serve"} 1`, `agents_died_total{reason="unknown",role="serve"} 2`,
		`agents_died_total{reason="fault",role="fetch"} 3`, `agents_died_total{reason="killed",role="fetch"} 4`,
		`agents_died_total{reason="given_up",role="fetch"} 0`, `agents_died_total{reason="exit",role="serve"} 0`,
		`reads_unsettled_total 5`, `agents_replaced_total 6`,
	} {
		if !strings.Contains(text, "\ntensorferry_"+want+"\n") {
			t.Errorf("no %s", want)
		}
	}
}

func TestWithoutNIXLThereAreNoMetricsOfItsAgents(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	if _, text := get(t, n, "/metrics", n.Ready().Admin); strings.Contains(text, "tensorferry_agents_died_total") {
		t.Error("there are")
	}
}
