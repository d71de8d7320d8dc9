package deploy

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// Whatever a file holds, reading it ends in a deployment or a typed error, and a deployment answers for its stages.
func FuzzLoad(f *testing.F) {
	f.Add([]byte(guide), []byte(""))
	f.Add([]byte("base_config: base.yaml\nstages: [{stage_id: 1, input_connectors: {from_stage_0: {name: FerryConnector, extra: {planes: tcp}}}}]"), []byte(guide))
	f.Add([]byte("base_config: top.yaml"), []byte(""))
	f.Add([]byte("stages: [{stage_id: 0, num_replicas: 4096, tensor_parallel_size: 4096, output_connectors: {to_stage_1: {name: NixlConnector}}}, {stage_id: 1}]"), []byte("a"))
	f.Add([]byte("a: &a [1]\nconnectors: {c: {name: NixlConnector, extra: {backends: *a, outgoing: {zmq_port: \"$X\"}}}}\nedges: [{from: .nan, to: 1e99}]"), []byte(""))
	f.Add([]byte("connectors: {x: &x {name: $X, extra: {lease_seconds: \"${oc.env:X,1}\"}}, y: {<<: *x}}\nstages: [{stage_id: 0, ? [1] : 2}]"), []byte(""))
	f.Fuzz(func(t *testing.T, top, base []byte) {
		dir := t.TempDir()
		path := filepath.Join(dir, "top.yaml")
		if os.WriteFile(path, top, 0o600) != nil || os.WriteFile(filepath.Join(dir, "base.yaml"), base, 0o600) != nil {
			t.Skip("no room")
		}
		d, err := Load(path, environment("X=50061"))
		if err != nil {
			if d != nil || !errors.Is(err, ErrConfig) && !errors.Is(err, ErrBase) {
				t.Fatal(err)
			}
			return
		}
		d.detect = func() (string, string) { return here, "" }
		if err := d.CheckPorts(nil); err != nil && !errors.Is(err, ErrCollision) && !errors.Is(err, ErrPort) {
			t.Fatal(err)
		}
		for _, s := range d.Stages {
			got, err := d.Stage(s.ID, Place{Rank: 1})
			if err != nil {
				if !errors.Is(err, ErrConfig) && !errors.Is(err, ErrPort) {
					t.Fatal(err)
				}
				continue
			}
			for _, e := range append(edgeSettings(got.Incoming), edgeSettings(got.Outgoing)...) {
				if e.Kind != SharedMemory && (e.Lease <= 0 || e.Transfer <= 0 || e.Poll <= 0 || e.Handshake <= 0 || e.MetadataQuery <= 0 || len(e.Backends) == 0 || e.Threads <= 0) {
					t.Fatalf("%+v", e)
				}
			}
		}
	})
}
