package deploy

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// peersPython is a Python that has vLLM-Omni. Without PEERS_PYTHON (see interop/peers/setup.sh) the test is skipped, or fails where
// FERRY_INTEROP_REQUIRED is set.
func peersPython(t *testing.T) string {
	t.Helper()
	python := os.Getenv("PEERS_PYTHON")
	if python == "" {
		const text = "PEERS_PYTHON is not set: set it to the last line that interop/peers/setup.sh prints"
		if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	return python
}

// peersFiles are the deployment files that vLLM-Omni's wheel has.
func peersFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(filepath.Dir(peersPython(t)), "../lib/python3*/site-packages/vllm_omni/deploy/*.yaml"))
	if err != nil || len(files) < 50 {
		t.Fatalf("%d files beside %s: %v", len(files), os.Getenv("PEERS_PYTHON"), err)
	}
	return files
}

func TestThePeersOwnFilesAreReadAsTheyAre(t *testing.T) {
	uses := make(map[Kind]int)
	for _, file := range peersFiles(t) {
		d, err := Load(file, environment())
		if err != nil {
			t.Error(err)
			continue
		}
		if err := d.CheckPorts(nil); err != nil {
			t.Error(err)
		}
		for _, info := range d.Stages {
			s, err := d.Stage(info.ID, Place{})
			if err != nil && !errors.Is(err, ErrConnector) {
				t.Error(err)
			}
			if err != nil {
				uses["others"]++
				continue
			}
			for _, e := range append(edgeSettings(s.Incoming), edgeSettings(s.Outgoing)...) {
				uses[e.Kind]++
			}
		}
		for _, w := range d.Warnings {
			t.Errorf("%v", w)
		}
		if strings.HasSuffix(file, "minimax_h3_disaggregated_nixl.yaml") {
			// The base has shared memory, and two ranks for the encoders.
			s := mustStage(t, d, 0, Place{Rank: 1})
			if d.Stages[0].Ranks != 2 || len(s.Outgoing) != 1 || s.Outgoing[0].Kind != NIXL || s.Outgoing[0].Bind.Port != 50071+16 {
				t.Errorf("%+v, %+v", d.Stages, s)
			}
		}
	}
	t.Log(uses)
	if uses[NIXL] < 4 || uses[SharedMemory] < 100 || uses["others"] < 3 {
		t.Error(uses)
	}
}

// theirs runs vLLM-Omni's own code over what input has: files as their loader merges them, each worker's connector as their resolver
// leaves it, and ports. Modules of theirs that need a whole engine are not imported: the functions that are asked for are taken out.
const theirs = `
import ast, json, os, sys
sys.path.insert(0, sys.argv[1])
import omni_boot
from pathlib import Path
from typing import Any
from unittest import mock
from vllm_omni.config.yaml_util import load_yaml_config, to_dict
from vllm_omni.distributed.omni_connectors.utils import initialization as init, config as names
def functions(file, want, scope):
    source = open(os.path.join(sys.modules["vllm_omni"].__path__[0], file)).read()
    for n in ast.parse(source).body:
        if isinstance(n, ast.FunctionDef) and n.name in want or isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in want:
            exec(compile(ast.Module([n], []), file, "exec"), scope)
    return scope
merge = functions("config/stage_config.py", {"resolve_deploy_yaml", "_merge_connectors", "_merge_platforms", "_merge_stage_lists",
    "_get_recursively_merged_dict", "_deep_merge_stage", "_DEEP_MERGE_KEYS"},
    dict(Path=Path, Any=Any, load_yaml_config=load_yaml_config, to_dict=to_dict, logger=mock.Mock()))
specs = functions("engine/stage_init_utils.py", {"get_stage_connector_spec"}, dict(Any=Any, TRANSFER_ENGINE_CONNECTOR_NAMES=names.TRANSFER_ENGINE_CONNECTOR_NAMES))
input = json.load(open("in"))
out = {"Ports": [], "Files": {}}
for base, purpose, replica, rank, stage in input["Ports"]:
    try:
        out["Ports"].append(init.compute_connector_zmq_port(base, purpose=purpose, from_stage=stage, local_rank=rank, replica_id=replica))
    except ValueError:
        out["Ports"].append(0)
for file in input["Files"]:
    config = init.load_omni_transfer_config(config_dict=merge["resolve_deploy_yaml"](file))
    workers = out["Files"][file] = {"Edges": sorted("%s %s %s" % (a, b, c.name) for (a, b), c in config.connectors.items()), "Workers": {}}
    for stage in sorted({int(s) for edge in config.connectors for s in edge}):
        spec = specs["get_stage_connector_spec"](config, stage, False)
        if spec["name"] != "NixlConnector":
            continue
        for replica, rank in (0, 0), (1, 2):
            x = init.resolve_connector_spec(init.ConnectorSpec(**spec), stage_id=stage, role=spec["extra"]["role"], local_rank=rank, replica_id=replica).extra
            ends = workers["Workers"]["%d/%d/%d" % (stage, replica, rank)] = []
            if x["role"] == "receiver":
                ends.append("from %s at %s:%s" % (x["from_stage"], x["sender_host"], x["sender_zmq_port"]))
            if "zmq_port" in x:
                ends.append("bind %s:%s" % (x.get("host", "auto"), x["zmq_port"]))
json.dump(out, open("out", "w"))
os._exit(0)
`

func TestThePeersThemselvesReadFilesAndComputePortsTheSame(t *testing.T) {
	python := peersPython(t)
	dir := t.TempDir()
	var in struct {
		Ports [][5]any
		Files []string
	}
	var ports []int
	for _, base := range []int{-300, 0, 1, 50051, 50061, 64000, 65535, 70000} {
		for purpose := RequestForwarding; purpose <= Orchestrator; purpose++ {
			for _, replica := range []int{-1, 0, 1, 3, 15, 63, 64} {
				for _, rank := range []int{-1, 0, 1, 6, 7, 63, 64, 1000} {
					for _, stage := range []int{-1, 0, 1, 4, 15, 16} {
						port, err := Port(base, stage, Place{Replica: replica, Rank: rank, Purpose: purpose})
						if (port == 0) != (err != nil) {
							t.Fatal(port, err)
						}
						ports = append(ports, port)
						in.Ports = append(in.Ports, [5]any{base, purpose.String(), replica, rank, stage})
					}
				}
			}
		}
	}
	in.Files = peersFiles(t)
	for name, text := range peersExtraFiles {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		in.Files = append(in.Files, path)
	}

	var out struct {
		Ports []int
		Files map[string]peersView
	}
	b, err := json.Marshal(in)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "in"), b, 0o600); err != nil {
		t.Fatal(err)
	}
	scripts, err := filepath.Abs("../../interop/peers/omni")
	if err != nil {
		t.Fatal(err)
	}
	c := exec.CommandContext(t.Context(), python, "-c", theirs, scripts)
	c.Dir, c.Env = dir, append(os.Environ(), "FERRY_TEST_PORT=50081")
	if text, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if b, err = os.ReadFile(filepath.Join(dir, "out")); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &out); err != nil {
		t.Fatal(err)
	}

	if diff := cmp.Diff(out.Ports, ports); diff != "" {
		t.Error(diff)
	}
	for _, file := range in.Files {
		if diff := cmp.Diff(out.Files[file], viewOf(t, file)); diff != "" {
			t.Errorf("%s (- theirs, + ours):\n%s", file, diff)
		}
	}
}

// peersView is what a file means: its edges, and for each worker of a NIXL stage where it asks and binds.
type peersView struct {
	Edges   []string
	Workers map[string][]string
}

func viewOf(t *testing.T, file string) peersView {
	d, err := Load(file, environment("FERRY_TEST_PORT=50081"))
	if err != nil {
		t.Fatal(err)
	}
	d.detect = func() (string, string) { return "auto", "" }
	v := peersView{Edges: []string{}, Workers: map[string][]string{}}
	edges := make(map[string]bool)
	for _, e := range d.edges {
		edges[fmt.Sprintf("%d %d %s", e.from, e.to, e.kind)] = true
	}
	v.Edges = append(v.Edges, slices.Sorted(maps.Keys(edges))...)
	for _, info := range d.Stages {
		for _, p := range []Place{{}, {Replica: 1, Rank: 2}} {
			s, err := d.Stage(info.ID, p)
			if errors.Is(err, ErrConnector) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			var ends []string
			for _, in := range s.Incoming {
				if in.Kind == NIXL {
					ends = append(ends, fmt.Sprintf("from %d at %s:%d", in.From, in.Sender.Host, in.Sender.Port))
				}
			}
			for _, out := range s.Outgoing {
				if out.Kind == NIXL {
					ends = append(ends, fmt.Sprintf("bind %s:%d", out.Bind.Host, out.Bind.Port))
				}
			}
			if ends != nil {
				v.Workers[fmt.Sprintf("%d/%d/%d", info.ID, p.Replica, p.Rank)] = ends
			}
		}
	}
	return v
}

// peersExtraFiles have what the wheel's own files do not.
var peersExtraFiles = map[string]string{
	"guide.yaml": guide,
	"chain.yaml": `
connectors:
  a: {name: NixlConnector, extra: {host: 10.0.0.1, zmq_port: "${oc.env:FERRY_TEST_PORT}"}}
  b: {name: NixlConnector, extra: {zmq_port: $FERRY_TEST_PORT, sender_host: 10.0.0.3}}
  c: {name: NixlConnector, extra: {host: auto, sender_zmq_port: 7000}}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: a}}
  - {stage_id: 1, input_connectors: {from_stage_0: a}, output_connectors: {to_stage_2: b}}
  - {stage_id: 2, output_connectors: {to_stage_3: c}}
  - {stage_id: 3, input_connectors: {from_stage_2: c}}
`,
	"over.yaml": `
base_config: chain.yaml
connectors:
  a: {extra: {zmq_port: 41000}}
edges: [{from: 0, to: 3}]
stages:
  - {stage_id: 3, input_connectors: {from_stage_2: {name: NixlConnector, extra: {outgoing: {zmq_port: 42000}}}}}
  - {stage_id: 2, output_connectors: {}}
`,
}
