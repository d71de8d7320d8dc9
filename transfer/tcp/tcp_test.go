package tcp

import (
	"testing"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func newPlane(t *testing.T, o Options) *Plane {
	t.Helper()
	p, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestTCPPlaneConforms(t *testing.T) {
	transfertest.Run(t, func(t *testing.T, _ string) (producer, consumer transfer.Plane) {
		return newPlane(t, Options{}), newPlane(t, Options{})
	})
}
