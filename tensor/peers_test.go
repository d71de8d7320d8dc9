package tensor

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// python runs code with the libraries that the peers use, in dir. Without PEERS_PYTHON (see interop/peers/setup.sh) the test is
// skipped, or fails where FERRY_INTEROP_REQUIRED is set.
func python(t *testing.T, dir, code string) string {
	t.Helper()
	path := os.Getenv("PEERS_PYTHON")
	if path == "" {
		const text = "PEERS_PYTHON is not set: set it to the last line that interop/peers/setup.sh prints"
		if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
			t.Fatal(text)
		}
		t.Skip(text)
	}
	c := exec.CommandContext(t.Context(), path, "-c", code)
	c.Dir = dir
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return string(out)
}

// Every dtype that torch and safetensors share: torch writes, we read and write again, the files are the same byte for byte, and
// torch reads ours.
func TestTorchAndSafetensorsAgreeWithUs(t *testing.T) {
	dir := t.TempDir()
	var names []string
	for _, d := range DTypes() {
		if dtypeTable[d].safetensors != "" {
			names = append(names, d.Name())
		}
	}
	list := fmt.Sprintf("%q", names)
	list = strings.ReplaceAll(list, " ", ",")
	python(t, dir, `
import torch
from safetensors.torch import save_file
T = {}
for i, d in enumerate(`+list+`):
    t = getattr(torch, d)
    b = torch.tensor([(i * 7 + k) % 251 for k in range(6 * t.itemsize)], dtype=torch.uint8)
    if d == "bool": b %= 2
    T["t.%d" % i] = b.view(t).reshape(2, 3)
T["scalar"] = torch.tensor(7)
T["empty"] = torch.empty((2, 0, 3), dtype=torch.float64)
save_file(T, "theirs.safetensors", {"k": "v \" \\ \n é"})
`)
	theirs, err := os.ReadFile(filepath.Join(dir, "theirs.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	named, text, err := ParseSafetensors(theirs)
	if err != nil {
		t.Fatal(err)
	}
	if len(named) != len(names)+2 {
		t.Fatalf("%d tensors, want %d", len(named), len(names)+2)
	}
	var ours bytes.Buffer
	if err := WriteSafetensors(&ours, named, text); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(theirs), ours.String()); d != "" {
		t.Errorf("our file differs from theirs:\n%s", d)
	}
	if err := os.WriteFile(filepath.Join(dir, "ours.safetensors"), ours.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	var want strings.Builder
	for _, n := range named {
		fmt.Fprintf(&want, "%s %v %v %x\n", n.Name, n.Tensor.DType(), n.Tensor.Shape(), n.Tensor.Data())
	}
	got := python(t, dir, `
import torch
from safetensors import safe_open
with safe_open("ours.safetensors", "pt") as f:
    for k in f.offset_keys():
        t = f.get_tensor(k)
        b = t.reshape(-1).view(torch.uint8).numpy().tobytes().hex() if t.numel() else ""
        print(k, t.dtype, str(list(t.shape)).replace(",", ""), b)
`)
	if d := cmp.Diff(want.String(), got); d != "" {
		t.Error(d)
	}
}

func TestNumpyAgreesWithUs(t *testing.T) {
	dir := t.TempDir()
	var codes []string
	for _, d := range DTypes() {
		if c := dtypeTable[d].numpy; c != "" {
			codes = append(codes, c)
			if dtypeTable[d].part > 1 {
				codes = append(codes, ">"+c[1:])
			}
		}
	}
	list := strings.ReplaceAll(fmt.Sprintf("%q", codes), " ", ",")
	out := python(t, dir, `
import numpy as np
for i, d in enumerate(`+list+`):
    for shape in (), (3,), (2, 3), (2, 0, 3), (3, 1, 2):
        for order in "CF":
            for version in (1, 0), (2, 0), (3, 0):
                n = int(np.prod(shape))
                a = (np.arange(n) % 2 if d == "|b1" else np.arange(n) * 3 + i).astype(d).reshape(shape)
                a = np.array(a, order=order)
                name = "%d%s%s%d.npy" % (i, order, "x".join(map(str, shape)), version[0])
                with open(name, "wb") as f: np.lib.format.write_array(f, a, version=version)
                little = np.ascontiguousarray(a).astype(a.dtype.newbyteorder("<")).reshape(shape)
                print(name, str(list(shape)).replace(",", ""), little.tobytes().hex() or "-")
                if order == "C" and version == (1, 0) and not d.startswith(">"):
                    with open(name + ".same", "w"): pass
`)
	files := 0
	for line := range strings.Lines(out) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		s, err := ParseNPY(b)
		if err != nil {
			t.Fatal(name, err)
		}
		x, err := s.Contiguous()
		if err != nil {
			t.Fatal(name, err)
		}
		data := fmt.Sprintf("%x", x.Data())
		if data == "" {
			data = "-"
		}
		if got := fmt.Sprintf("%v %s", x.Shape(), data); got != rest {
			t.Errorf("%s: %s, want %s", name, got, rest)
		}
		if _, err := os.Stat(filepath.Join(dir, name+".same")); err == nil {
			var ours bytes.Buffer
			if err := WriteNPY(&ours, x); err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(string(b), ours.String()); d != "" {
				t.Errorf("%s: our file differs from theirs:\n%s", name, d)
			}
		}
		files++
	}
	if files != len(codes)*30 {
		t.Errorf("%d files, want %d", files, len(codes)*30)
	}
}

func TestTorchNamesAndSizesAgreeWithUs(t *testing.T) {
	var code, want strings.Builder
	code.WriteString("import torch\n")
	for _, d := range DTypes() {
		fmt.Fprintf(&code, "d = torch.%s; print(d, d.itemsize, d.is_complex)\n", d.Name())
		b := "False"
		if d.Complex() {
			b = "True"
		}
		fmt.Fprintf(&want, "%v %d %s\n", d, d.Size(), b)
	}
	if d := cmp.Diff(want.String(), python(t, t.TempDir(), code.String())); d != "" {
		t.Error(d)
	}
}

// A conjugated tensor's storage, read with its flag, is what torch resolves it to.
func TestTorchResolvesConjugationAsWeDo(t *testing.T) {
	out := python(t, t.TempDir(), `
import torch
x = torch.tensor([[1+2j, 3-4j], [-5j, 0.5]], dtype=torch.complex64)
for y in x.T.conj(), x.conj(), x.conj().imag, x.conj().imag.T:
    s = torch.view_as_real(x).untyped_storage()
    r = y.resolve_conj().resolve_neg().contiguous()
    print(str(y.dtype), y.is_conj(), y.is_neg(), y.storage_offset(), *y.stride(), bytes(s).hex(),
          r.reshape(-1).view(torch.uint8).numpy().tobytes().hex())
`)
	lines := 0
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		var conj, neg bool
		var off int64
		var storage, want []byte
		d, err := ParseDType(f[0])
		if err != nil {
			t.Fatal(err)
		}
		conj, neg = f[1] == "True", f[2] == "True"
		if _, err := fmt.Sscan(f[3], &off); err != nil {
			t.Fatal(err)
		}
		strides := make([]int64, len(f)-6)
		shape := make(Shape, len(strides))
		for i := range strides {
			if _, err := fmt.Sscan(f[4+i], &strides[i]); err != nil {
				t.Fatal(err)
			}
			shape[i] = 2
		}
		if _, err := fmt.Sscanf(f[len(f)-2]+" "+f[len(f)-1], "%x %x", &storage, &want); err != nil {
			t.Fatal(err)
		}
		s := Strided{DType: d, Shape: shape, Strides: strides, Offset: off, Storage: storage, Conj: conj, Neg: neg}
		x, err := s.Contiguous()
		if err != nil || !bytes.Equal(x.Data(), want) {
			t.Errorf("%s: %x, want %x (%v)", strings.TrimSpace(line), x.Data(), want, err)
		}
		lines++
	}
	if lines != 4 {
		t.Error(out)
	}
}
