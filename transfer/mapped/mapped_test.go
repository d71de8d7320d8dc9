package mapped

import (
	"testing"
	"time"

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

func TestABurstIsPastTheCachesAfterItsFirstBytes(t *testing.T) {
	var b burst
	now := time.Now()
	for i, step := range []struct {
		pause time.Duration
		bytes int64
		past  bool
	}{
		{0, 2 << 20, false},
		{0, 6 << 20, false},
		{burstPause, 1, true},
		{burstPause, 2 << 20, true},
		{burstPause + 1, 2 << 20, false},
		{0, parallelBytes, false},
		{0, 1, true},
	} {
		now = now.Add(step.pause)
		if past := b.add(now, step.bytes); past != step.past {
			t.Errorf("READ %d of %d bytes after %v: past the caches is %t, want %t", i, step.bytes, step.pause, past, step.past)
		}
	}
}
