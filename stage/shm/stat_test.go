package shm

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/tensorferry/tensorferry/stage"
)

func TestStatIsTheSizeOfWhatIsThere(t *testing.T) {
	dir := t.TempDir()
	for name, content := range map[string]string{"k": "12345", "making": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("k", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]error{"k": nil, "making": stage.ErrNotFound, "none": stage.ErrNotFound, "link": ErrForeign, "a/b": ErrKey} {
		n, err := Stat(dir, key)
		if !errors.Is(err, want) || want == nil && n != 5 {
			t.Errorf("%s: %d, %v, want %v", key, n, err, want)
		}
	}
}
