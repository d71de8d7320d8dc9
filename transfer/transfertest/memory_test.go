package transfertest

import (
	"testing"

	"github.com/tensorferry/tensorferry/transfer"
)

func TestMemoryPlaneConforms(t *testing.T) {
	Run(t, func(t *testing.T, _ string) (producer, consumer transfer.Plane) {
		var f Fabric
		return f.Plane(), f.Plane()
	})
}
