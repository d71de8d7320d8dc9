package nixl_test

import (
	"errors"
	"testing"

	"github.com/tensorferry/tensorferry/nixl"
)

func TestTheExampleRunsOnTheRealLibrary(t *testing.T) {
	library, err := nixl.Load() // another test may have opened the one that it names
	if errors.Is(err, nixl.ErrNotFound) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	got, err := readOnce(library, library.Unmap)
	if want := "an encoding; consumer says done"; err != nil || got != want {
		t.Errorf("%q, not %q: %v", got, want, err)
	}
}
