package nixl

import (
	"errors"
	"fmt"
	"math"
	"testing"
)

func TestWhatTheLibraryWouldNotSurviveIsRefusedBefore(t *testing.T) {
	a, err := NewFake().Library().NewAgent("a", AgentConfig{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	ranges := []Range{{Addr: 4096, Len: 4096}}
	refused := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, ErrBadArgument) {
			t.Errorf("%s: %v, want ErrBadArgument", what, err)
		}
	}
	peer := &Peer{agent: a, name: "b"}
	for _, typ := range []MemoryType{-1, File + 1, math.MaxInt32, math.MinInt32} {
		bad, good := Descs{typ, ranges}, Descs{DRAM, ranges}
		_, err := a.Register(typ, ranges)
		refused(fmt.Sprint("register ", typ), err)
		_, err = a.Prepare(nil, bad)
		refused(fmt.Sprint("prepare ", typ), err)
		_, err = a.NewRequest(Read, bad, good, peer, RequestOptions{})
		refused(fmt.Sprint("local ", typ), err)
		_, err = a.NewRequest(Read, good, bad, peer, RequestOptions{})
		refused(fmt.Sprint("remote ", typ), err)
		refused(fmt.Sprint("knows ", typ), peer.Knows(bad))
		refused(fmt.Sprint("knows nothing of ", typ), peer.Knows(Descs{Type: typ}))
	}
	for _, op := range []Operation{-1, Write + 1, math.MaxInt32} {
		d := Descs{DRAM, ranges}
		_, err := a.NewRequest(op, d, d, peer, RequestOptions{})
		refused(fmt.Sprint("operation ", op), err)
		_, err = a.NewPreparedRequest(op, &Prepared{agent: a}, []int32{0}, &Prepared{agent: a, peer: peer}, []int32{0}, RequestOptions{})
		refused(fmt.Sprint("prepared operation ", op), err)
	}
	for _, n := range []string{"-5", "0", "abc", "", "1.5", "257", "99999", "99999999999999999999"} {
		_, err := a.CreateBackend("UCX", map[string]string{"num_workers": n})
		refused("num_workers "+n, err)
	}
	for _, n := range []string{"1", "256"} {
		if _, err := a.CreateBackend("UCX", map[string]string{"num_workers": n}); err != nil {
			t.Errorf("num_workers %s: %v", n, err)
		}
	}
}
