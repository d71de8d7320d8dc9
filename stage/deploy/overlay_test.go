package deploy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// Connectors are merged key by key, a stage's keys one by one, so an overlay need not repeat what it keeps.
func TestAnOverlayKeepsWhatItDoesNotName(t *testing.T) {
	d := mustLoad(t, []string{"over/top.yaml", `
base_config: ../base.yaml
connectors:
  n: {extra: {zmq_port: 50071}}
  own: {name: FerryConnector, extra: {host: 10.0.0.9}}
stages:
  - stage_id: 1
    output_connectors: {to_stage_2: own}
    engine_args: {max_model_len: 5}
  - stage_id: 2
`, "base.yaml", `
connectors:
  n: {name: NixlConnector, extra: {host: auto, zmq_port: 50061, lease_seconds: 60}}
  shm: {name: SharedMemoryConnector}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: n}, tensor_parallel_size: 2}
  - {stage_id: 1, input_connectors: {from_stage_0: n}, engine_args: {tensor_parallel_size: 4}, num_replicas: 2}
`})
	want := []StageInfo{{ID: 0, Replicas: 1, Ranks: 2}, {ID: 1, Replicas: 2, Ranks: 4}, {ID: 2, Replicas: 1, Ranks: 1}}
	if diff := cmp.Diff(want, d.Stages, cmpopts.IgnoreUnexported(StageInfo{})); diff != "" {
		t.Error(diff)
	}
	s := mustStage(t, d, 1, Place{})
	in, out := usual(NIXL, "n"), usual(Ferry, "own")
	in.Lease = time.Minute
	if diff := cmp.Diff([]Incoming{{From: 0, Settings: in, Sender: Endpoint{here, 50071}}}, s.Incoming); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]Outgoing{{To: 2, Settings: out, Bind: Endpoint{"10.0.0.9", 50052}, AnyPort: true}}, s.Outgoing); diff != "" {
		t.Error(diff)
	}
}

// The edges of a stage are replaced as a whole: the connector of before is gone.
func TestAnOverlayReplacesAStagesConnectors(t *testing.T) {
	const base = `
connectors: {shm: {name: SharedMemoryConnector}}
edges: [{from: 0, to: 2}]
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: shm, to_stage_2: shm}}
  - {stage_id: 1}
  - {stage_id: 2}
`
	d := mustLoad(t, []string{"top.yaml", `
base_config: base.yaml
connectors: {n: {name: NixlConnector, extra: {host: auto}}}
edges: []
stages: [{stage_id: 0, output_connectors: {to_stage_1: n}}]
`, "base.yaml", base})
	s := mustStage(t, d, 0, Place{})
	if len(s.Outgoing) != 1 || s.Outgoing[0].Kind != NIXL || s.Outgoing[0].To != 1 {
		t.Errorf("%+v", s.Outgoing)
	}
	if s := mustStage(t, d, 2, Place{}); len(s.Incoming) > 0 {
		t.Errorf("%+v", s.Incoming)
	}
	// An overlay that names nothing changes nothing.
	d = mustLoad(t, []string{"top.yaml", "base_config: base.yaml\nconnectors:\nstages:\n", "base.yaml", base})
	if s := mustStage(t, d, 0, Place{}); len(s.Outgoing) != 2 || s.Outgoing[0].Kind != SharedMemory {
		t.Errorf("%+v", s.Outgoing)
	}
}

func TestAnErrorNamesTheFileThatHasTheValue(t *testing.T) {
	const base = "connectors: {n: {name: NixlConnector, extra: {lease_seconds: 0}}}\nstages: [{stage_id: 0}]"
	for name, c := range map[string]struct{ top, file string }{
		"of the base":    {"base_config: mid.yaml", "base.yaml"},
		"of the overlay": {"base_config: mid.yaml\nconnectors: {n: {extra: {lease_seconds: -1}}}", "top.yaml"},
	} {
		_, err := load(t, []string{"top.yaml", c.top, "mid.yaml", "base_config: base.yaml", "base.yaml", base})
		var e *Error
		if !errors.As(err, &e) || filepath.Base(e.File) != c.file {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestABaseThatCannotBeFollowedIsAnError(t *testing.T) {
	chain := []string{}
	for i := range maxOverlays + 1 {
		chain = append(chain, fmt.Sprintf("%d.yaml", i), fmt.Sprintf("base_config: %d.yaml", i+1))
	}
	for name, c := range map[string]struct {
		files []string
		want  string
	}{
		"missing":       {[]string{"top.yaml", "base_config: gone.yaml"}, `base_config: "gone.yaml": there is no `},
		"missing above": {[]string{"top.yaml", "base_config: mid.yaml", "mid.yaml", "base_config: gone.yaml"}, `mid.yaml: base_config: "gone.yaml": there is no `},
		"itself":        {[]string{"top.yaml", "base_config: ./top.yaml"}, "lies over itself"},
		"a circle":      {[]string{"top.yaml", "base_config: d/../mid.yaml", "mid.yaml", "base_config: top.yaml", "d/x", ""}, "lies over itself"},
		"too deep":      {chain, "more than 16 files"},
		"a number":      {[]string{"top.yaml", "base_config: 5"}, "base_config: 5: give text"},
		"unset":         {[]string{"top.yaml", "base_config: $BASE"}, "BASE is not set"},
		"a directory":   {[]string{"top.yaml", "base_config: d", "d/x", ""}, "give a YAML file"},
		"not a mapping": {[]string{"top.yaml", "base_config: mid.yaml", "mid.yaml", "[]"}, "mid.yaml"},
	} {
		_, err := load(t, c.files)
		if err == nil || !strings.Contains(err.Error(), c.want) || !errors.Is(err, ErrBase) && !errors.Is(err, ErrConfig) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestABaseMayComeFromTheEnvironment(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "b.yaml"), []byte(guide), 0o600); err != nil {
		t.Fatal(err)
	}
	d := mustLoad(t, []string{"top.yaml", `base_config: "${oc.env:DIR}/b.yaml"`}, "DIR="+dir)
	if len(d.Stages) != 2 {
		t.Errorf("%+v", d.Stages)
	}
}
