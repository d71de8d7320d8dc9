package deploy

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPortsAreThoseOfThePeers(t *testing.T) {
	for _, c := range []struct {
		base, from int
		Place
		want int
	}{
		{50051, 2, Place{Rank: 3}, 50101},
		{50051, 0, Place{Replica: 1, Purpose: KVTransfer}, 51175},
		{50051, 1, Place{Replica: 3, Rank: 2, Purpose: Orchestrator}, 53356},
		{50051, 0, Place{}, 50051},
		{1, 0, Place{}, 1},
		{65535, 0, Place{}, 65535},
		{50051, 15, Place{Replica: 15, Rank: 7}, 0},
		{65535, 1, Place{}, 0},
		{0, 0, Place{}, 0},
		{50051, 16, Place{}, 0},
		{50051, -1, Place{}, 0},
		{50051, 0, Place{Replica: -1}, 0},
		{50051, 0, Place{Rank: -1}, 0},
		{50051, 0, Place{Rank: 1 << 62}, 0},
		{50051, 0, Place{Replica: 1 << 62}, 0},
		{50051, 0, Place{Purpose: 3}, 0},
	} {
		got, err := Port(c.base, c.from, c.Place)
		if got != c.want || (err != nil) != (c.want == 0) || err != nil && !errors.Is(err, ErrPort) {
			t.Errorf("%+v: %d, %v", c, got, err)
		}
	}
}

func TestOneCollisionOfTheFormulaIsRefusedAtTheStart(t *testing.T) {
	// Request forwarding of rank 6 of stage 4 and KV transfer of rank 0 of stage 0 have one port.
	d := mustLoad(t, []string{"main.yaml", `
connectors: {n: {name: NixlConnector, extra: {host: auto, zmq_port: 50051}}}
stages:
  - {stage_id: 0, omni_kv_config: {need_send_cache: true}, output_connectors: {to_stage_4: n}}
  - {stage_id: 4, tensor_parallel_size: 7, output_connectors: {to_stage_5: n}}
  - {stage_id: 5}
`})
	err := d.CheckPorts(nil)
	var e *Error
	if !errors.Is(err, ErrCollision) || !errors.As(err, &e) {
		t.Fatal(err)
	}
	if e.Key != "connectors.n.extra.zmq_port" || e.Value != "50151" {
		t.Error(err)
	}
	for _, part := range []string{
		"main.yaml", "kv_transfer of stage 0, replica 0, rank 0", "request_forwarding of stage 4, replica 0, rank 6", "another zmq_port",
	} {
		if !strings.Contains(e.Text+e.File, part) {
			t.Errorf("no %q in %v", part, err)
		}
	}
	// Where only one of the stages is on this host, there is none; nor where only one purpose is in use.
	if err := d.CheckPorts(func(l Listener) bool { return l.Stage == 4 }); err != nil {
		t.Error(err)
	}
	if err := d.CheckPorts(nil, RequestForwarding); err != nil {
		t.Error(err)
	}
	if err := d.CheckPorts(nil, RequestForwarding, KVTransfer, Orchestrator); !errors.Is(err, ErrCollision) {
		t.Error(err)
	}
}

func TestCollisionsAreOfOneHostAndOnePort(t *testing.T) {
	deployment := func(a, b, stage string) string {
		return fmt.Sprintf(`
connectors:
  a: {name: NixlConnector, extra: {%s}}
  b: {name: FerryConnector, extra: {%s}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_2: a, to_stage_3: a} %s}
  - {stage_id: 1, output_connectors: {to_stage_2: b}}
  - {stage_id: 2}
  - {stage_id: 3}
`, a, b, stage)
	}
	for name, c := range map[string]struct{ a, b, stage, want string }{
		"two connectors":          {"host: auto, zmq_port: 50052", "host: auto, zmq_port: 50051", "", "50052"},
		"two hosts":               {"host: 10.0.0.1, zmq_port: 50052", "host: 10.0.0.2, zmq_port: 50051", "", ""},
		"one may be the other":    {"host: 10.0.0.1, zmq_port: 50052", "host: auto, zmq_port: 50051", "", "50052"},
		"any free port":           {"host: auto, zmq_port: 0", "host: auto, zmq_port: 0", "", ""},
		"edges share a listener":  {"host: auto", "host: auto", "", ""},
		"ranks run into replicas": {"host: auto, zmq_port: 2000", "host: auto, zmq_port: 60000", ", num_replicas: 2, tensor_parallel_size: 65", "at most 64 ranks"},
		"many are counted":        {"host: auto, zmq_port: 2000", "host: auto, zmq_port: 60000", ", num_replicas: 2, tensor_parallel_size: 84", "and 12 more"},
		"over the end":            {"host: auto, zmq_port: 65000", "host: auto, zmq_port: 60000", ", num_replicas: 2", "connectors.a.extra.zmq_port: 65000: request_forwarding of stage 0, replica 1, rank 0 would be at port 66024"},
	} {
		err := mustLoad(t, []string{"main.yaml", deployment(c.a, c.b, c.stage)}).CheckPorts(nil)
		if (err != nil) != (c.want != "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Eight replicas of a stage, four ranks each, start on one host.
func TestReplicasAndRanksOfOneHostHavePortsOfTheirOwn(t *testing.T) {
	d := mustLoad(t, []string{"main.yaml", `
connectors: {n: {name: NixlConnector, extra: {host: auto}}}
stages:
  - {stage_id: 0, num_replicas: 8, tensor_parallel_size: 4, output_connectors: {to_stage_1: n}}
  - {stage_id: 1, num_replicas: 8, tensor_parallel_size: 4, output_connectors: {to_stage_2: n}}
  - {stage_id: 2, num_replicas: 8}
`})
	all, err := d.Listeners()
	if err != nil || len(all) != 64 || d.CheckPorts(nil) != nil {
		t.Error(len(all), err, d.CheckPorts(nil))
	}
	for _, l := range all {
		out := mustStage(t, d, l.Stage, l.Place).Outgoing
		if len(out) != 1 || out[0].Bind.Port != l.Port {
			t.Errorf("%v at %d: %+v", l, l.Port, out)
		}
	}
}

func TestExplicitSenderEndpointsAreKept(t *testing.T) {
	p := Place{Replica: 2, Rank: 1}
	for extra, want := range map[string]Endpoint{
		`host: auto`:                                                 {here, 50051 + 2*1024 + 16},
		`host: 10.0.0.1, zmq_port: 50061`:                            {"10.0.0.1", 50061 + 2*1024 + 16},
		`zmq_port: 50061`:                                            {"127.0.0.1", 50061 + 2*1024 + 16},
		`host: auto, sender_host: 10.0.0.2`:                          {"10.0.0.2", 50051 + 2*1024 + 16},
		`host: auto, sender_zmq_port: 7000`:                          {here, 7000},
		`host: "*", sender_host: b.example, sender_zmq_port: "7001"`: {"b.example", 7001},
		`host: auto, zmq_port: 0`:                                    {here, 0},
		`host: auto, zmq_port: 65535, sender_zmq_port: 7002, sender_host: "fd00::17"`: {"fd00::17", 7002},
	} {
		s := mustStage(t, mustLoad(t, pair("{name: NixlConnector, extra: {"+extra+"}}")), 1, p)
		if s.Incoming[0].Sender != want || s.Outgoing != nil {
			t.Errorf("%s: %+v", extra, s)
		}
	}
}

func TestAProducerListensWhereTheFileSays(t *testing.T) {
	for extra, want := range map[string]Outgoing{
		`host: auto`:                     {Bind: Endpoint{here, 50051 + 16}, AnyPort: true},
		``:                               {Bind: Endpoint{here, 50051 + 16}, AnyPort: true},
		`host: auto, zmq_port: 50051`:    {Bind: Endpoint{here, 50051 + 16}},
		`host: 10.0.0.1, zmq_port: 0`:    {Bind: Endpoint{"10.0.0.1", 0}},
		`sender_host: 10.0.0.3`:          {Bind: Endpoint{here, 50051 + 16}, AnyPort: true},
		`host: "::", sender_zmq_port: 9`: {Bind: Endpoint{here, 50051 + 16}, AnyPort: true},
	} {
		want.To, want.Settings = 1, usual(NIXL, "c")
		s := mustStage(t, mustLoad(t, pair("{name: NixlConnector, extra: {"+extra+"}}")), 0, Place{Rank: 1})
		if diff := cmp.Diff([]Outgoing{want}, s.Outgoing); diff != "" {
			t.Errorf("%s: %s", extra, diff)
		}
	}
	d := mustLoad(t, nixl("zmq_port: 65000"))
	for id := range 2 {
		_, err := d.Stage(id, Place{Replica: 1})
		var e *Error
		if !errors.Is(err, ErrPort) || !errors.As(err, &e) || e.Key != "connectors.c.extra.zmq_port" || e.Value != "65000" {
			t.Error(err)
		}
	}
	if _, err := d.Stage(0, Place{Rank: -1}); !errors.Is(err, ErrPort) {
		t.Error(err)
	}
}

func TestAMiddleStageReceivesAndPublishes(t *testing.T) {
	d := mustLoad(t, []string{"main.yaml", `
connectors:
  a: {name: NixlConnector, extra: {host: 10.0.0.1, zmq_port: 50061}}
  b: {name: NixlConnector, extra: {host: 10.0.0.2, zmq_port: 50071, lease_seconds: 9}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: a}}
  - {stage_id: 1, input_connectors: {from_stage_0: a}, output_connectors: {to_stage_2: b}}
  - {stage_id: 2, input_connectors: {from_stage_1: b}}
`})
	out := usual(NIXL, "b")
	out.Lease = 9e9
	want := &Stage{
		ID: 1, Place: Place{Rank: 1},
		Incoming: []Incoming{{From: 0, Settings: usual(NIXL, "a"), Sender: Endpoint{"10.0.0.1", 50077}}},
		Outgoing: []Outgoing{{To: 2, Settings: out, Bind: Endpoint{"10.0.0.2", 50088}}},
	}
	if diff := cmp.Diff(want, mustStage(t, d, 1, Place{Rank: 1})); diff != "" {
		t.Error(diff)
	}
	if s := mustStage(t, d, 2, Place{Rank: 1}); s.Incoming[0].Sender != want.Outgoing[0].Bind {
		t.Errorf("%+v", s)
	}
}

// An outgoing block makes a stage publish that has no outgoing edge in the file.
func TestAnOutgoingBlockPublishes(t *testing.T) {
	for block, want := range map[string]Outgoing{
		`{}`: {To: -1, Bind: Endpoint{here, 50052}, AnyPort: true},
		`{host: 10.0.0.5, zmq_port: "50091", to_stage: 2, from_stage: 3}`: {To: 2, Bind: Endpoint{"10.0.0.5", 50094}},
	} {
		d := mustLoad(t, nixl("outgoing: "+block))
		want.Settings = usual(NIXL, "c")
		s := mustStage(t, d, 1, Place{})
		if diff := cmp.Diff([]Outgoing{want}, s.Outgoing); diff != "" {
			t.Errorf("%s: %s", block, diff)
		}
		if s := mustStage(t, d, 0, Place{}); len(s.Outgoing) != 1 || s.Outgoing[0].To != 1 {
			t.Errorf("%s: %+v", block, s.Outgoing)
		}
		if all, err := d.Listeners(); err != nil || len(all) != 2 || all[1].Port != want.Bind.Port {
			t.Errorf("%s: %v, %v", block, all, err)
		}
	}
}
