package file

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/tensor"
)

func of[T tensor.Element](t *testing.T, v []T, shape ...int64) tensor.Tensor {
	t.Helper()
	x, err := tensor.Of(v, shape...)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

func TestPayloadsComeBackFromTheirFiles(t *testing.T) {
	a, b, none := of(t, []float32{1, 2, 3, 4, 5, 6}, 2, 3), of(t, []int64{-7}), of(t, []uint8{}, 0, 4)
	half, err := tensor.New(tensor.BFloat16, tensor.Shape{2}, []byte{1, 2, 3, 4})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name      string
		root, got tensor.Node // got nil: as root
	}{
		{name: "map.safetensors", root: tensor.Map{tensor.Field("a", a), tensor.Field("half", half), tensor.Field("none", none), tensor.Field("b", b)}},
		{name: "empty.safetensors", root: tensor.Map{}},
		{name: "bare.safetensors", root: half, got: tensor.Map{tensor.Field("tensor", half)}},
		{name: "list.safetensors", root: tensor.List{a, half}, got: tensor.Map{tensor.Field("0", a), tensor.Field("1", half)}},
		{name: "tuple.safetensors", root: tensor.Tuple{b}, got: tensor.Map{tensor.Field("0", b)}},
		{name: "a.npy", root: a},
		{name: "scalar.npy", root: b},
		{name: "list.npy", root: tensor.List{a}, got: a},
		{name: "o.json", root: tensor.Map{tensor.Field("x", tensor.List{tensor.Int(1), tensor.Float(2), tensor.Null{}})}},
		{name: "any.msgpack", root: tensor.Map{tensor.Field("a", tensor.List{a, tensor.Bytes("b")}), {Key: tensor.Int(1), Value: half}}},
		{name: "tuple.json", root: tensor.Tuple{tensor.Flag(true)}, got: tensor.List{tensor.Flag(true)}},
	} {
		t.Run(c.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), c.name)
			if err := Save(path, c.root); err != nil {
				t.Fatal(err)
			}
			f, err := Open(path)
			if err != nil {
				t.Fatal(err)
			}
			want := c.got
			if want == nil {
				want = c.root
			}
			err = f.Use(func() error {
				if !same(f.Root, want) {
					t.Errorf("%v, want %v", f.Root, want)
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
			if err := f.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// same compares maps without their order, which a .safetensors file does not keep.
func same(got, want tensor.Node) bool {
	g, isMap := got.(tensor.Map)
	w, both := want.(tensor.Map)
	if !isMap || !both || tensor.Equal(got, want) {
		return tensor.Equal(got, want)
	}
	for _, e := range w {
		if v := g.Get(string(e.Key.(tensor.String))); v == nil || !tensor.Equal(v, e.Value) {
			return false
		}
	}
	return len(g) == len(w)
}

func TestPayloadsThatDoNotFitSayWhatDoes(t *testing.T) {
	a := of(t, []float32{1}, 1)
	half, err := tensor.New(tensor.BFloat16, tensor.Shape{1}, []byte{1, 2})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		root tensor.Node
		want string
	}{
		{"nested.safetensors", tensor.Map{tensor.Field("layers", tensor.List{a})}, `"layers" is a list`},
		{"key.safetensors", tensor.Map{{Key: tensor.Int(1), Value: a}}, "key 1 is no text"},
		{"object.safetensors", tensor.Int(3), "save it as .json"},
		{"complex.safetensors", of(t, []complex128{1}, 1), "complex128"},
		{"two.npy", tensor.List{a, a}, "save it as .safetensors"},
		{"map.npy", tensor.Map{}, "save it as .safetensors"},
		{"half.npy", half, "bfloat16"},
		{"tensor.json", tensor.List{a}, "$[0]"},
	} {
		dir := t.TempDir()
		if err := Save(filepath.Join(dir, c.name), c.root); !errors.Is(err, ErrUnfit) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %s", c.name, err, c.want)
		}
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("%s: %v was left", c.name, left)
		}
	}
	if err := Save(filepath.Join(t.TempDir(), "x.bin"), a); !errors.Is(err, ErrFormat) {
		t.Error(err)
	}
}

func TestFilesThatAreNoPayloadsAreRefused(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{
		"x.safetensors": "\x01\x00\x00\x00\x00\x00\x00\x00{", "x.npy": "\x93NUMPY\x01", "x.json": "{", "empty.npy": "", "empty.safetensors": "",
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(path); !errors.Is(err, tensor.ErrFile) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := Open(filepath.Join(dir, "x.bin")); !errors.Is(err, ErrFormat) {
		t.Error(err)
	}
	if _, err := Open(filepath.Join(dir, "none.npy")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "dir.npy"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(filepath.Join(dir, "dir.npy")); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Error(err)
	}
}

func TestAFileThatCannotBeSavedIsSaidBefore(t *testing.T) {
	dir := t.TempDir()
	if err := CanSave(filepath.Join(dir, "x.npy")); err != nil {
		t.Error(err)
	}
	if err := CanSave(filepath.Join(dir, "none", "x.npy")); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if err := CanSave(filepath.Join(dir, "x.bin")); !errors.Is(err, ErrFormat) {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "d.npy"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := CanSave(filepath.Join(dir, "d.npy")); err == nil {
		t.Error("a directory was taken for a file")
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Error(left)
	}
}

func TestAFIFOIsRefusedAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f.npy")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(path); err == nil || !strings.Contains(err.Error(), "not a regular file") {
		t.Error(err)
	}
}

func TestMetadataOfASafetensorsFileIsNamedAsDropped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "m.safetensors")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	named := []tensor.Named{{Name: "a", Tensor: of(t, []int8{1}, 1)}}
	if err := tensor.WriteSafetensors(f, named, []tensor.Text{{Key: "format", Value: "pt"}}); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	p, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	if len(p.Dropped) != 1 || p.Dropped[0] != "format" {
		t.Error(p.Dropped)
	}
}

func TestAFileThatIsCutWhileItIsReadIsAnError(t *testing.T) {
	path := filepath.Join(t.TempDir(), "big.npy")
	if err := Save(path, of(t, make([]uint8, 1<<20), 1<<20)); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	err = f.Use(func() error {
		sum := 0
		for _, b := range f.Root.(tensor.Tensor).Data() {
			sum += int(b)
		}
		t.Error("read all", sum)
		return nil
	})
	if !errors.Is(err, ErrChanged) || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
}
