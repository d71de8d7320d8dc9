package nixl

import (
	"bytes"
	"fmt"
	"os"
	"testing"
)

// Peers that come and go leave no endpoint behind in the agent that reads from them.
func TestAThousandRealPeersThatComeAndGoLeaveNoDescriptors(t *testing.T) {
	o := processes(t)
	consumer := newPlane(t, o)
	destination := shared(t, 64<<10)
	_ = register(t, consumer, destination)
	var after100 int
	for i := range 1000 {
		source := newPlane(t, Options{Library: o.Library, Name: "the-same"})
		m := shared(t, 4096)
		reg, err := source.Register(t.Context(), m, nil)
		must(t, err)
		c, err := consumer.AddPeer(t.Context(), reg.Metadata())
		must(t, err)
		must(t, pull(t, c, destination.Bytes[:4096]))
		if !bytes.Equal(destination.Bytes[:4096], m.Bytes) {
			t.Fatalf("peer %d: other bytes", i)
		}
		must(t, c.Close())
		must(t, reg.Close())
		must(t, source.Close())
		if i == 99 {
			after100 = descriptorsOf(t, consumer.fetchPID())
		}
	}
	if n := descriptorsOf(t, consumer.fetchPID()); n > after100+32 {
		t.Errorf("%d descriptors, %d after the first 100 peers", n, after100)
	}
}

func descriptorsOf(t *testing.T, pid int) int {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	return len(fds)
}
