package deploy

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// guide is the example of vLLM-Omni's guide to its NixlConnector.
const guide = `
connectors:
  nixl_connector:
    name: NixlConnector
    extra:
      host: "auto"
      zmq_port: 50061
      backends: ["UCX"]

stages:
  - stage_id: 0
    output_connectors:
      to_stage_1: nixl_connector

  - stage_id: 1
    input_connectors:
      from_stage_0: nixl_connector
`

func TestTheGuidesExampleIsReadAsItIs(t *testing.T) {
	d := mustLoad(t, []string{"deploy.yaml", guide})
	want := []StageInfo{{ID: 0, Replicas: 1, Ranks: 1}, {ID: 1, Replicas: 1, Ranks: 1}}
	if diff := cmp.Diff(want, d.Stages, cmpopts.IgnoreUnexported(StageInfo{})); diff != "" {
		t.Error(diff)
	}
	p := Place{Replica: 1, Rank: 2}
	end := Endpoint{here, 50061 + 1024 + 32}
	for _, want := range []*Stage{
		{ID: 0, Place: p, Outgoing: []Outgoing{{To: 1, Settings: usual(NIXL, "nixl_connector"), Bind: end}}},
		{ID: 1, Place: p, Incoming: []Incoming{{From: 0, Settings: usual(NIXL, "nixl_connector"), Sender: end}}},
	} {
		if diff := cmp.Diff(want, mustStage(t, d, want.ID, p)); diff != "" {
			t.Error(diff)
		}
	}
	if len(d.Warnings) > 0 || d.CheckPorts(nil) != nil {
		t.Error(d.Warnings, d.CheckPorts(nil))
	}
	if _, err := d.Stage(2, p); !errors.Is(err, ErrNoStage) || !strings.Contains(err.Error(), "[0 1]") {
		t.Error(err)
	}
}

func TestSettingsAreReadWithTheTypesOfThePeers(t *testing.T) {
	set := func(change func(*Settings)) Settings {
		s := usual(NIXL, "c")
		change(&s)
		return s
	}
	for extra, want := range map[string]Settings{
		`lease_seconds: 60`:                set(func(s *Settings) { s.Lease = time.Minute }),
		`lease_seconds: "1.5"`:             set(func(s *Settings) { s.Lease = 1500 * time.Millisecond }),
		`lease_seconds: 1e3`:               set(func(s *Settings) { s.Lease = 1000 * time.Second }),
		`transfer_timeout_s: 0.25`:         set(func(s *Settings) { s.Transfer = 250 * time.Millisecond }),
		`poll_interval_s: 0.0005`:          set(func(s *Settings) { s.Poll = 500 * time.Microsecond }),
		`handshake_timeout_ms: 250`:        set(func(s *Settings) { s.Handshake = 250 * time.Millisecond }),
		`handshake_timeout_ms: 4`:          set(func(s *Settings) { s.Handshake, s.MetadataQuery = 4*time.Millisecond, 4*time.Millisecond }),
		`metadata_query_timeout_ms: "20"`:  set(func(s *Settings) { s.MetadataQuery = 20 * time.Millisecond }),
		`num_threads: "8"`:                 set(func(s *Settings) { s.Threads = 8 }),
		`num_threads: 8.0`:                 set(func(s *Settings) { s.Threads = 8 }),
		`backends: [UCX, GDS_MT]`:          set(func(s *Settings) { s.Backends = []string{"UCX", "GDS_MT"} }),
		`backends: LIBFABRIC`:              set(func(s *Settings) { s.Backends = []string{"LIBFABRIC"} }),
		`memory_type: dram`:                set(func(s *Settings) { s.MemoryType = "DRAM" }),
		`receive_device: "cuda:1"`:         set(func(s *Settings) { s.ReceiveDevice = "cuda:1" }),
		`role: auto`:                       set(func(*Settings) {}),
		`agent_name: x, from_stage: 7`:     set(func(*Settings) {}),
		`codec_chunk_frames: 25`:           set(func(*Settings) {}),
		`connector_get_max_wait: 300`:      set(func(*Settings) {}),
		`lease_seconds: "${LEASE}"`:        set(func(s *Settings) { s.Lease = 7 * time.Second }),
		`lease_seconds: $LEASE`:            set(func(s *Settings) { s.Lease = 7 * time.Second }),
		`lease_seconds: "${oc.env:LEASE}"`: set(func(s *Settings) { s.Lease = 7 * time.Second }),
		`lease_seconds: "${oc.env:NO, 9}"`: set(func(s *Settings) { s.Lease = 9 * time.Second }),
		`num_threads: "1${LEASE}"`:         set(func(s *Settings) { s.Threads = 17 }),
	} {
		d, err := load(t, nixl(extra), "LEASE=7")
		if err != nil {
			t.Error(err)
			continue
		}
		for id := range 2 {
			s := mustStage(t, d, id, Place{})
			got := append(edgeSettings(s.Incoming), edgeSettings(s.Outgoing)...)
			if diff := cmp.Diff([]Settings{want}, got); diff != "" {
				t.Errorf("%s, stage %d: %s", extra, id, diff)
			}
		}
	}
}

func edgeSettings[E Incoming | Outgoing](edges []E) (all []Settings) {
	for _, e := range edges {
		switch e := any(e).(type) {
		case Incoming:
			all = append(all, e.Settings)
		case Outgoing:
			all = append(all, e.Settings)
		}
	}
	return all
}

func TestEveryRefusalNamesFileKeyValueAndFix(t *testing.T) {
	for _, c := range []struct {
		extra, key, value, fix string
		is                     error
	}{
		{`lease_seconds: 0`, "lease_seconds", "0", "above 0", ErrConfig},
		{`lease_seconds: -1`, "lease_seconds", "-1", "above 0", ErrConfig},
		{`lease_seconds: .nan`, "lease_seconds", "NaN", "finite", ErrConfig},
		{`lease_seconds: .inf`, "lease_seconds", "+Inf", "finite", ErrConfig},
		{`lease_seconds: "nan"`, "lease_seconds", `"nan"`, "finite", ErrConfig},
		{`lease_seconds: 1e-9`, "lease_seconds", "1e-09", "above 0", ErrConfig},
		{`lease_seconds: 1e300`, "lease_seconds", "1e+300", "finite", ErrConfig},
		{`lease_seconds: 1h`, "lease_seconds", `"1h"`, "a number", ErrConfig},
		{`lease_seconds: true`, "lease_seconds", "true", "a number", ErrConfig},
		{`lease_seconds: [1]`, "lease_seconds", "[1]", "a number", ErrConfig},
		{`lease_seconds: {a: 1}`, "lease_seconds", "map[a:1]", "a number", ErrConfig},
		{`lease_seconds: `, "lease_seconds", "nothing", "leave the key out", ErrConfig},
		{`transfer_timeout_s: 0`, "transfer_timeout_s", "0", "above 0", ErrConfig},
		{`poll_interval_s: -.inf`, "poll_interval_s", "-Inf", "finite", ErrConfig},
		{`handshake_timeout_ms: 0`, "handshake_timeout_ms", "0", "milliseconds above 0", ErrConfig},
		{`metadata_query_timeout_ms: -10`, "metadata_query_timeout_ms", "-10", "milliseconds above 0", ErrConfig},
		{`num_threads: 0`, "num_threads", "0", "1 to 1024", ErrConfig},
		{`num_threads: 1.5`, "num_threads", "1.5", "whole number", ErrConfig},
		{`zmq_port: 65536`, "zmq_port", "65536", "0 to 65535", ErrConfig},
		{`zmq_port: -1`, "zmq_port", "-1", "0 to 65535", ErrConfig},
		{`zmq_port: "${PORT}"`, "zmq_port", `"${PORT}"`, "PORT is not set", ErrConfig},
		{`zmq_port: "${connectors.c.x}"`, "zmq_port", `"${connectors.c.x}"`, "no variable", ErrConfig},
		{`sender_zmq_port: 0`, "sender_zmq_port", "0", "1 to 65535", ErrConfig},
		{`sender_host: auto`, "sender_host", `"auto"`, "the producer's host", ErrConfig},
		{`sender_host: "10.0.0.1:80"`, "sender_host", `"10.0.0.1:80"`, "without a port", ErrConfig},
		{`sender_host: 10`, "sender_host", "10", "in quotes", ErrConfig},
		{`backends: []`, "backends", "[]", "leave it out", ErrConfig},
		{`backends: "UCX,GDS"`, "backends", `"UCX,GDS"`, "such as [UCX]", ErrConfig},
		{`backends: [UCX, UCX]`, "backends[1]", `"UCX"`, "twice", ErrConfig},
		{`backends: [4]`, "backends[0]", "4", "give text", ErrConfig},
		{`memory_type: HBM`, "memory_type", `"HBM"`, "DRAM or VRAM", ErrConfig},
		{`receive_device: GPU 1`, "receive_device", `"GPU 1"`, "cuda:0", ErrConfig},
		{`receive_device: 1`, "receive_device", "1", "in quotes", ErrConfig},
		{`role: producer`, "role", `"producer"`, "sender or receiver", ErrConfig},
		{`outgoing: 5`, "outgoing", "5", "host and zmq_port", ErrConfig},
		{`outgoing: {zmq_prot: 5}`, "outgoing.zmq_prot", "5", "did you mean zmq_port?", ErrUnknownKey},
		{`outgoing: {from_stage: 16}`, "outgoing.from_stage", "16", "0 to 15", ErrConfig},
		{`lease_second: 5`, "lease_second", "5", "did you mean lease_seconds?", ErrUnknownKey},
		{`x.zmq_port: 5`, "x.zmq_port", "5", "did you mean zmq_port?", ErrUnknownKey},
		{`planes: [mapped]`, "planes", "[mapped]", "did you mean", ErrUnknownKey},
	} {
		_, err := load(t, nixl(c.extra))
		var e *Error
		if !errors.As(err, &e) {
			t.Errorf("%s: %v", c.extra, err)
			continue
		}
		if e.Key != "connectors.c.extra."+c.key || e.Value != c.value || !strings.Contains(e.Text, c.fix) || !strings.HasSuffix(e.File, "main.yaml") {
			t.Errorf("%s: %v", c.extra, err)
		}
		for _, part := range []string{e.File, e.Key, e.Value, e.Text} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v", c.extra, err)
			}
		}
		if !errors.Is(err, ErrConfig) || !errors.Is(err, c.is) {
			t.Errorf("%s: %v is not %v", c.extra, err, c.is)
		}
	}
}

func TestAllThatIsWrongIsSaidAtOnce(t *testing.T) {
	_, err := load(t, nixl("lease_seconds: 0, transfer_timeout_s: -1, backends: []"))
	for _, key := range []string{"lease_seconds", "transfer_timeout_s", "backends"} {
		if err == nil || !strings.Contains(err.Error(), "extra."+key) {
			t.Errorf("no %s in %v", key, err)
		}
	}
}

func TestWhatIsWrittenAroundConnectorsIsCheckedToo(t *testing.T) {
	const two = "\nstages: [{stage_id: 0}, {stage_id: 1}]"
	for yaml, want := range map[string]string{
		`stages: {a: 1}`:                                                                       `stages: map[a:1]: give a list`,
		`stages: [1]`:                                                                          `stages[0]: 1: give its stage_id`,
		`stages: [{stage_id: "0"}]`:                                                            `stages[0].stage_id: "0": give a whole number`,
		`stages: [{stage_id: -1}]`:                                                             `stages[0].stage_id: -1: give a whole number`,
		`stages: [{stage_id: 0}, {stage_id: 0}]`:                                               `stage_id 0 stands twice`,
		`stages: [{stage_id: 0, num_replicas: 0}]`:                                             `stages[0].num_replicas: 0: `,
		`stages: [{stage_id: 0, output_connector: {}}]`:                                        `did you mean output_connectors?`,
		`stages: [{stage_id: 0, input_connectors: [a]}]`:                                       `stages[0].input_connectors: [a]: give from_stage_N`,
		`stages: [{stage_id: 0, output_connectors: {stage_1: a}}, {stage_id: 1}]`:              `stage_1: "a": did you mean to_stage_N`,
		`stages: [{stage_id: 0, output_connectors: {to_stage_1: a}}]`:                          `there is no stage 1`,
		`stages: [{stage_id: 0, output_connectors: {to_stage_0: a}}]`:                          `that is the stage itself`,
		`stages: [{stage_id: 0, output_connectors: {to_stage_1: a}}, {stage_id: 1}]`:           `stages[0].output_connectors.to_stage_1: "a": there is no such connector`,
		`stages: [{stage_id: 0, output_connectors: {to_stage_1: 5}}, {stage_id: 1}]`:           `to_stage_1: 5: give text`,
		`stages: [{stage_id: 0, output_connectors: {to_stage_1: {extra: {}}}}, {stage_id: 1}]`: `to_stage_1: map[extra:map[]]: give its name`,
		`connectors: [a]` + two:                                                                `connectors: [a]: give connectors by their names`,
		`connectors: {a: b}` + two:                                                             `connectors.a: "b": give a name`,
		`connectors: {a: {name: NixlConnector, extras: {}}}` + two:                             `connectors.a.extras: map[]: did you mean extra?`,
		`connectors: {a: {name: NixlConnector, extra: 5}}` + two:                               `connectors.a.extra: 5: give keys`,
		`conectors: {}` + two:                                                                  `did you mean connectors?`,
		`stage_args: []`:                                                                       `the layout of before`,
		`runtime: {connectors: {}}` + two:                                                      `the layout of before`,
		`edges: 5` + two:                                                                       `edges: 5: give a list`,
		`edges: [{from: 0}]` + two:                                                             `edges[0]: map[from:0]: give from and to`,
		`edges: [{from: 0, to: 9}]` + two:                                                      `edges[0].to: 9: there is no stage 9`,
		`[1, 2]`:                                                                               `main.yaml`,
		"a: 1\na: 2":                                                                           `already defined`,
	} {
		_, err := load(t, []string{"main.yaml", yaml})
		if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n%v\nwant %s", yaml, err, want)
		}
	}
	if _, err := Load("/nonexistent/deploy.yaml", environment()); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "/nonexistent/deploy.yaml") {
		t.Error(err)
	}
}

func TestWhatIsTheEnginesIsLeftAlone(t *testing.T) {
	d := mustLoad(t, []string{"main.yaml", `
pipeline: p
async_chunk: false
trust_remote_code: true
platforms: {npu: {stages: [{stage_id: 0, input_connectors: nonsense}]}}
duplex_session: {a: 1}
whatever: "${not.ours}"
stages:
  - {stage_id: 0, devices: "0,1", hf_overrides: {1: "$X"}, engine_args: {tensor_parallel_size: 2}, tensor_parallel_size: 4, num_replicas: 3}
  - {stage_id: 1, parallel_config: {tensor_parallel_size: 2}, runtime: {num_replicas: 2}, num_replicas: 1, omni_kv_config: {need_send_cache: true}}
`})
	want := []StageInfo{{ID: 0, Replicas: 3, Ranks: 2}, {ID: 1, Replicas: 2, Ranks: 2, SendsKV: true}}
	if diff := cmp.Diff(want, d.Stages, cmpopts.IgnoreUnexported(StageInfo{})); diff != "" {
		t.Error(diff)
	}
	if d := mustLoad(t, []string{"main.yaml", "connectors:\nstages:\n"}); d.Stages != nil {
		t.Error(d.Stages)
	}
}

func TestTheEnvironmentWinsOverTheFile(t *testing.T) {
	for _, entry := range []string{"NixlConnector", "FerryConnector"} {
		files := pair("{name: " + entry + ", extra: {host: auto, lease_seconds: 300, transfer_timeout_s: 20}}")
		for _, c := range []struct {
			env             []string
			lease, transfer time.Duration
		}{
			{nil, 300 * time.Second, 20 * time.Second},
			{[]string{envLease + "=", envTransfer + "="}, 300 * time.Second, 20 * time.Second},
			{[]string{envLease + "=7200.5"}, 7200500 * time.Millisecond, 20 * time.Second},
			{[]string{envLease + "=60", envTransfer + "= 2"}, time.Minute, 2 * time.Second},
		} {
			s := mustStage(t, mustLoad(t, files, c.env...), 0, Place{}).Outgoing[0]
			if s.Lease != c.lease || s.Transfer != c.transfer {
				t.Errorf("%v: %v, %v", c.env, s.Lease, s.Transfer)
			}
		}
		for _, name := range []string{envLease, envTransfer} {
			for _, value := range []string{"0", "-1", "nan", "inf", "1h"} {
				_, err := load(t, files, name+"="+value)
				var e *Error
				if !errors.As(err, &e) || e.File != "environment" || e.Key != name || !strings.Contains(strings.ToLower(e.Value), value) {
					t.Errorf("%s=%s: %v", name, value, err)
				}
			}
		}
	}
	// Who has no connector that looks at it is not bothered.
	mustLoad(t, pair("{name: SharedMemoryConnector}"), envLease+"=0")
}

func TestAConnectorThatIsNotOursStopsOnlyTheStagesThatUseIt(t *testing.T) {
	d := mustLoad(t, []string{"main.yaml", `
connectors:
  rdma: {name: MooncakeTransferEngineConnector, extra: {protocol: rdma, zmq_port: -5}}
  shm: {name: SharedMemoryConnector, extra: {codec_chunk_frames: 25, a_key_of_a_model_to_come: 1}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: rdma}}
  - {stage_id: 1, output_connectors: {to_stage_2: shm}}
  - {stage_id: 2}
`})
	for id := range 2 {
		_, err := d.Stage(id, Place{})
		if !errors.Is(err, ErrConnector) {
			t.Fatal(id, err)
		}
		for _, part := range []string{"connectors.rdma.name", "MooncakeTransferEngineConnector", "NixlConnector", "SharedMemoryConnector", "FerryConnector"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("no %s in %v", part, err)
			}
		}
	}
	want := []Incoming{{From: 1, Settings: usual(SharedMemory, "shm")}}
	if diff := cmp.Diff(want, mustStage(t, d, 2, Place{}).Incoming); diff != "" {
		t.Error(diff)
	}
}

func TestFerryConnectorHasPlanesToo(t *testing.T) {
	d := mustLoad(t, pair("{name: FerryConnector, extra: {host: auto, planes: [mapped, tcp], codec_streaming: true, lease_seconds: 5}}"))
	want := usual(Ferry, "c")
	want.Planes, want.Lease = []string{"mapped", "tcp"}, 5*time.Second
	if diff := cmp.Diff(want, mustStage(t, d, 1, Place{}).Incoming[0].Settings); diff != "" {
		t.Error(diff)
	}
	for _, planes := range []string{"[rdma]", "[]", "[tcp, tcp]", "5"} {
		if _, err := load(t, pair("{name: FerryConnector, extra: {planes: "+planes+"}}")); !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", planes, err)
		}
	}
}

func TestEdgesWithoutAConnectorGoThroughSharedMemory(t *testing.T) {
	d := mustLoad(t, []string{"main.yaml", `
connectors: {n: {name: NixlConnector, extra: {host: auto}}}
edges: [{from: 0, to: 1, window_size: -1, max_inflight: 1}, {from: 1, to: 2}]
stages:
  - {stage_id: 0}
  - {stage_id: 1, input_connectors: {from_stage_0: n}}
  - {stage_id: 2, engine_input_source: [0, 1]}
`})
	s := mustStage(t, d, 2, Place{})
	want := []Incoming{{From: 0, Settings: usual(SharedMemory, "")}, {From: 1, Settings: usual(SharedMemory, "")}}
	if diff := cmp.Diff(want, s.Incoming); diff != "" {
		t.Error(diff)
	}
	if s := mustStage(t, d, 1, Place{}); s.Incoming[0].Kind != NIXL || s.Outgoing[0].Kind != SharedMemory {
		t.Errorf("%+v", s)
	}
}

func TestBothEndsOfAnEdgeAgree(t *testing.T) {
	const file = `
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: {name: NixlConnector, extra: {host: 10.0.0.1}}}}
  - {stage_id: 1, input_connectors: {from_stage_0: {name: %, extra: {host: 10.0.0.1}}}}
`
	d := mustLoad(t, []string{"main.yaml", strings.Replace(file, "%", "NixlConnector", 1)})
	if len(d.Warnings) > 0 {
		t.Error(d.Warnings)
	}
	_, err := load(t, []string{"main.yaml", strings.Replace(file, "%", "FerryConnector", 1)})
	if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "give both the same connector") {
		t.Error(err)
	}
	d = mustLoad(t, []string{"main.yaml", strings.Replace(file, "%, extra: {", "NixlConnector, extra: {zmq_port: 1, ", 1)})
	if s := mustStage(t, d, 1, Place{}); len(d.Warnings) != 1 || s.Incoming[0].Sender.Port != 50051 {
		t.Errorf("%v, %+v", d.Warnings, s)
	}
}

func TestARoleThatIsNotTheEdgesIsRefusedWhereItCounts(t *testing.T) {
	d := mustLoad(t, nixl("role: Sender"))
	mustStage(t, d, 0, Place{})
	_, err := d.Stage(1, Place{})
	if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "stage 1 is the receiver of edge 0 to 1; leave role out") {
		t.Error(err)
	}
}

func TestWarningsNameWhatMayNotDoWhatWasMeant(t *testing.T) {
	for extra, want := range map[string]string{
		`{zmq_port: 50061}`:                                 "set host",
		`{host: auto, num_threads: 2, backends: [GDS]}`:     "counts for UCX alone",
		`{host: 10.0.0.1, num_threads: 2, backends: [UCX]}`: "",
		`{sender_host: 10.0.0.1}`:                           "",
	} {
		d := mustLoad(t, pair("{name: NixlConnector, extra: "+extra+"}"))
		switch {
		case want == "" && len(d.Warnings) > 0:
			t.Errorf("%s: %v", extra, d.Warnings)
		case want != "" && (len(d.Warnings) != 1 || !strings.Contains(d.Warnings[0].String(), want)):
			t.Errorf("%s: %v", extra, d.Warnings)
		}
	}
}
