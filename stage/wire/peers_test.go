package wire

import (
	"encoding/hex"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/tensorferry/tensorferry/tensor"
)

// peer runs code with vLLM-Omni's own connectors in scope (Nixl, Shm, Ser, and payloads of interop/peers/omni). The code reads
// input as JSON and leaves its answer, JSON too, in `out`. Without PEERS_PYTHON (see interop/peers/setup.sh) the test is skipped, or
// fails where FERRY_INTEROP_REQUIRED is set.
func peer(t *testing.T, code string, input, out any) {
	t.Helper()
	python := os.Getenv("PEERS_PYTHON")
	if python == "" {
		const text = "PEERS_PYTHON is not set: set it to the last line that interop/peers/setup.sh prints"
		if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	dir := t.TempDir()
	b, err := json.Marshal(input)
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
	// os._exit: NIXL's library may crash in an exit handler on machines without RDMA.
	c := exec.CommandContext(t.Context(), python, "-c", `
import json, os, sys
sys.path.insert(0, sys.argv[1])
import omni_boot, payloads, msgspec, torch
Nixl, Shm, Ser = omni_boot.load()
input = json.load(open("in"))
`+code+`
json.dump(out, open("out", "w"))
os._exit(0)
`, scripts)
	c.Dir = dir
	if text, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	b, err = os.ReadFile(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, out); err != nil {
		t.Fatal(err)
	}
}

// The peers' own code judges ours, all at once: starting it takes seconds.
func TestThePeersThemselvesAgree(t *testing.T) {
	var in struct{ Objects, Exact, Metadata map[string]string }
	var out struct {
		Objects, Exact, Refused map[string]string
		Skeletons               map[string]struct {
			Header string
			Leaves int
		}
	}
	in.Objects, in.Exact, in.Metadata = peerObjectsIn(t), peerExactIn(t), make(map[string]string)
	odd := oddMetadata(t)
	for name, b := range odd {
		in.Metadata[name] = hex.EncodeToString(b)
	}
	peer(t, `
out = {"Refused": {}, "Skeletons": {}}
out["Objects"] = {k: Ser.serialize(Ser.deserialize(bytes.fromhex(v))).hex() for k, v in input["Objects"].items()}
x = torch.tensor([1.0, 8.0])
out["Exact"] = {k: repr(Nixl._restore_tensor_leaves(Nixl.deserialize_obj(bytes.fromhex(v)), [x, x])) for k, v in input["Exact"].items()}
for case in "nested", "noncontig", "dtypes", "struct", "fifty":
    skeleton, leaves = Nixl._extract_tensor_leaves(payloads.build(case))
    out["Skeletons"][case] = {"Header": Nixl.serialize_obj(skeleton).hex(), "Leaves": len(leaves)}
for k, v in input["Metadata"].items():
    try:
        m = msgspec.msgpack.decode(bytes.fromhex(v))
        if m.get("schema_version") != 1 or not isinstance(m.get("tensor_specs"), list): raise RuntimeError("get")
        Nixl._validated_descriptor_groups(m, m["tensor_specs"])
    except Exception as e:
        out["Refused"][k] = repr(e)
`, in, &out)

	t.Run("they read what we serialize, and write it as the same bytes", func(t *testing.T) {
		if d := cmp.Diff(in.Objects, out.Objects); d != "" {
			t.Error(d)
		}
	})
	t.Run("exact payloads come back as they were put", func(t *testing.T) {
		want := map[string]string{"list of one": "[tensor([1., 8.])]", "tuple": "(tensor([1., 8.]), tensor([1., 8.]))", "tuples": "{'a': (1, ())}"}
		if d := cmp.Diff(want, out.Exact); d != "" {
			t.Error(d)
		}
	})
	t.Run("their skeletons are ours byte for byte", func(t *testing.T) {
		for name, c := range out.Skeletons {
			b := must(hex.DecodeString(c.Header))(t)
			n := must(DecodeSkeleton(b))(t)
			if d := cmp.Diff(b, must(AppendSkeleton(nil, n, ObjectOptions{}))(t)); d != "" {
				t.Errorf("%s: %s", name, d)
			}
			leaves := make([]tensor.Tensor, c.Leaves)
			for i := range leaves {
				leaves[i] = fill[uint8](t, i, 1)
			}
			if _, err := tensor.Join(n, leaves); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
	t.Run("what their check refuses, ours does", func(t *testing.T) { compareChecks(t, odd, out.Refused) })
}

// peerObjectsIn are values as we serialize them.
func peerObjectsIn(t *testing.T) map[string]string {
	in := make(map[string]string)
	for name, o := range goldenObjects(t) {
		if name == "pil_rgb_2x1" || o.peer {
			continue // PIL's mode argument is deprecated there; the peers' own objects are not compared
		}
		in[name] = hex.EncodeToString(encode(t, o.in))
	}
	for i, d := range tensor.DTypes() {
		data := make([]byte, 6*d.Size())
		for j := range data {
			data[j] = byte((i + j) % 2)
		}
		in[d.Name()] = hex.EncodeToString(encode(t, list{raw(t, d, tensor.Shape{2, 3}, data...)}))
	}
	for name, n := range map[string]tensor.Node{
		"datetime":  tensor.Ext{Type: -1, Data: []byte{0, 0, 0, 1}},
		"extension": list{tensor.Ext{Type: 5, Data: make([]byte, 3)}, tensor.Ext{Type: -9, Data: make([]byte, 300)}, tensor.Ext{Type: 1, Data: make([]byte, 16)}},
		"keys": dict{{Key: tensor.Null{}, Value: num(1)}, {Key: tensor.Flag(true), Value: num(2)}, {Key: tensor.Float(0.5), Value: num(3)},
			{Key: tensor.Bytes("x"), Value: num(4)}},
	} {
		in[name] = hex.EncodeToString(encode(t, n))
	}
	return in
}

// peerExactIn are the skeletons of payloads of which the peers' own put would lose something.
func peerExactIn(t *testing.T) map[string]string {
	x := fill[float32](t, 1, 2)
	in := make(map[string]string)
	for name, n := range map[string]tensor.Node{"list of one": list{x}, "tuple": tuple{x, x}, "tuples": dict{field("a", tuple{num(1), tuple{}})}} {
		p := must(Pack(n, PackOptions{Exact: true}))(t)
		in[name] = hex.EncodeToString(p.Tensors[0].Data())
	}
	return in
}

// compareChecks says whether ours refuses all that theirs does; what ours refuses in addition is listed.
func compareChecks(t *testing.T, odd map[string][]byte, refused map[string]string) {
	if len(refused) < 20 || len(refused) == len(odd) {
		t.Fatalf("%d of %d refused", len(refused), len(odd))
	}
	stricter := map[string]bool{
		"no tensor": true, "size in all": true, "no agent": true, "object of two tensors": true, "skeleton in floats": true, "skeleton of no bytes": true,
		"an address past the end": true, "kind pages": true, "kind as a number": true, "no kind": true, "size of floats": true, "port 65536": true,
		"generation of an array": true, "size of all over 2^63": true,
	}
	for name, b := range odd {
		_, err := DecodeMetadata(b)
		switch why, no := refused[name]; {
		case no && err == nil:
			t.Errorf("%s: the peers refuse it: %s", name, why)
		case !no && err != nil && !stricter[name]:
			t.Errorf("%s: only we refuse it: %v", name, err)
		}
	}
}
