package deploy

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// here is what detection finds in tests.
const here = "192.0.2.7"

// load reads the first of files; they are given as name, content, name, content... env is NAME=VALUE.
func load(t *testing.T, files []string, env ...string) (*Deployment, error) {
	t.Helper()
	dir := t.TempDir()
	for i := 0; i < len(files); i += 2 {
		path := filepath.Join(dir, files[i])
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(files[i+1]), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Load(filepath.Join(dir, files[0]), environment(env...))
	if d != nil {
		d.detect = func() (string, string) { return here, "" }
	}
	return d, err
}

func environment(env ...string) func(string) (string, bool) {
	m := make(map[string]string)
	for _, e := range env {
		name, value, _ := strings.Cut(e, "=")
		m[name] = value
	}
	return func(name string) (string, bool) {
		v, ok := m[name]
		return v, ok
	}
}

func mustLoad(t *testing.T, files []string, env ...string) *Deployment {
	t.Helper()
	d, err := load(t, files, env...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func mustStage(t *testing.T, d *Deployment, id int, p Place) *Stage {
	t.Helper()
	s, err := d.Stage(id, p)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// pair is a deployment of two stages, whose connector's entry is given in YAML's flow style.
func pair(entry string) []string {
	return []string{"main.yaml", `
connectors: {c: ` + entry + `}
stages:
  - {stage_id: 0, output_connectors: {to_stage_1: c}}
  - {stage_id: 1, input_connectors: {from_stage_0: c}}
`}
}

func nixl(extra string) []string {
	return pair("{name: NixlConnector, extra: {host: auto, " + extra + "}}")
}

// usual are the settings of a connector that says nothing.
func usual(kind Kind, name string) Settings {
	if kind == SharedMemory {
		return Settings{Kind: kind, Connector: name}
	}
	return Settings{
		Kind: kind, Connector: name, Backends: []string{"UCX"}, Threads: 4,
		Lease: time.Hour, Transfer: 5 * time.Minute, Poll: time.Millisecond, Handshake: 5 * time.Second, MetadataQuery: 10 * time.Millisecond,
	}
}
