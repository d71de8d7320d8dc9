package mapped

import (
	"testing"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func newPlane(t *testing.T, dirs ...string) *Plane {
	t.Helper()
	p, err := New(Options{Dirs: dirs})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestMappedPlaneConforms(t *testing.T) {
	transfertest.Run(t, func(t *testing.T, dir string) (producer, consumer transfer.Plane) {
		return newPlane(t, dir), newPlane(t, dir)
	})
}
