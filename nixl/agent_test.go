package nixl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// world is what a test of agents runs in: the fake or the real library.
type world struct {
	library *Library
	fake    *Fake // nil for the real one
}

func eachWorld(t *testing.T, test func(t *testing.T, w world)) {
	t.Run("fake", func(t *testing.T) {
		f := NewFake()
		t.Cleanup(func() { // after the agents' own
			if left := f.Objects(); left != (FakeObjects{}) {
				t.Errorf("left behind: %+v", left)
			}
		})
		test(t, world{f.Library(), f})
	})
	t.Run("real", func(t *testing.T) { test(t, world{library: realLibrary(t)}) })
}

// pair is a producer whose source a consumer can read.
type pair struct {
	producer, consumer  *Agent
	peer                *Peer // the producer, at the consumer
	source, destination []byte
	registration        *Registration // of the source
}

var names struct {
	sync.Mutex
	n int
}

func uniqueName(what string) string {
	names.Lock()
	defer names.Unlock()
	names.n++
	return fmt.Sprintf("%s-%d", what, names.n)
}

func (w world) agent(t *testing.T, name string, memory []byte) (*Agent, *Registration) {
	t.Helper()
	a, err := w.library.NewAgent(name, AgentConfig{})
	must(t, err)
	t.Cleanup(func() { must(t, a.Close()) })
	_, err = a.CreateBackend("UCX", nil)
	must(t, err)
	r, err := a.Register(DRAM, []Range{RangeOf(memory)})
	must(t, err)
	return a, r
}

func (w world) pair(t *testing.T, n int) *pair {
	t.Helper()
	p := &pair{source: mapped(t, n), destination: mapped(t, n)}
	for i := range p.source {
		p.source[i] = byte(i*7 + i>>8)
	}
	p.producer, p.registration = w.agent(t, uniqueName("producer"), p.source)
	p.consumer, _ = w.agent(t, uniqueName("consumer"), p.destination)
	p.peer = add(t, p.consumer, p.producer)
	return p
}

func add(t testing.TB, consumer, producer *Agent) *Peer {
	t.Helper()
	md, err := producer.LocalMetadata()
	must(t, err)
	peer, err := consumer.AddPeer(md)
	must(t, err)
	if peer.Name() != producer.Name() {
		t.Fatalf("peer is called %q, not %q", peer.Name(), producer.Name())
	}
	return peer
}

// read is a request for n bytes at offset.
func (p *pair) read(offset, n int, o RequestOptions) (*Request, error) {
	return p.consumer.NewRequest(Read, Descs{DRAM, []Range{RangeOf(p.destination[offset : offset+n])}},
		Descs{DRAM, []Range{RangeOf(p.source[offset : offset+n])}}, p.peer, o)
}

func run(t *testing.T, r *Request) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if done, err := r.Post(); done || err != nil {
		return err
	}
	return r.Wait(ctx)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func waitNotifications(t *testing.T, a *Agent, want int) (got []Notification) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for len(got) < want {
		n, err := a.Notifications()
		must(t, err)
		got = append(got, n...)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d notifications came: %v", len(got), want, got)
		}
	}
	return got
}

func TestReadMovesBytesAndNotifiesOnce(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 1<<20)
		r, err := p.read(0, 1<<20, RequestOptions{Notification: []byte("session:hash")})
		must(t, err)
		must(t, run(t, r))
		if !bytes.Equal(p.source, p.destination) {
			t.Fatal("bytes differ")
		}
		got := waitNotifications(t, p.producer, 1)
		if len(got) != 1 || got[0].Peer != p.consumer.Name() || string(got[0].Message) != "session:hash" {
			t.Fatalf("notifications %v", got)
		}
		r.Release()
		r.Release()
		if _, err := r.Status(); !errors.Is(err, ErrClosed) {
			t.Fatalf("status of a released request: %v", err)
		}
	})
}

func TestPreparedListsAreReadByIndex(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		const block, blocks = 2048, 32
		p := w.pair(t, block*blocks)
		var local, remote []Range
		for i := range blocks {
			local = append(local, RangeOf(p.destination[i*block:(i+1)*block]))
			remote = append(remote, RangeOf(p.source[i*block:(i+1)*block]))
		}
		mine, err := p.consumer.Prepare(nil, Descs{DRAM, local})
		must(t, err)
		defer mine.Close()
		theirs, err := p.consumer.Prepare(p.peer, Descs{DRAM, remote})
		must(t, err)
		defer theirs.Close()
		r, err := p.consumer.NewPreparedRequest(Read, mine, []int32{0, 1, 2}, theirs, []int32{31, 7, 8}, RequestOptions{})
		must(t, err)
		defer r.Release()
		must(t, run(t, r))
		for i, j := range []int{31, 7, 8} {
			if !bytes.Equal(p.destination[i*block:(i+1)*block], p.source[j*block:(j+1)*block]) {
				t.Errorf("block %d is not the source's %d", i, j)
			}
		}
		if bytes.Contains(p.destination[3*block:], p.source[:64]) {
			t.Error("bytes outside of the blocks asked for were written")
		}
		for _, bad := range [][2][]int32{{{0}, {32}}, {{-1}, {0}}, {{0, 1}, {0}}, {nil, nil}} {
			if _, err := p.consumer.NewPreparedRequest(Read, mine, bad[0], theirs, bad[1], RequestOptions{}); !errors.Is(err, ErrBadArgument) {
				t.Errorf("indices %v: %v", bad, err)
			}
		}
	})
}

func TestBadRequestsAreErrors(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 1<<16)
		outside := mapped(t, 1<<16)
		good := Descs{DRAM, []Range{RangeOf(p.source)}}
		for name, local := range map[string][]Range{
			"not registered": {RangeOf(outside)}, "empty": nil, "zero length": {{Addr: 1, Len: 0}}, "other length": {RangeOf(p.destination[:8])},
			"wraps around": {{Addr: ^uintptr(0) - 1, Len: 1 << 16}},
		} {
			if r, err := p.consumer.NewRequest(Read, Descs{DRAM, local}, good, p.peer, RequestOptions{}); err == nil {
				r.Release()
				t.Errorf("%s: no error", name)
			}
		}
		if _, err := p.producer.Register(DRAM, []Range{RangeOf(p.source[100:200])}); !errors.Is(err, ErrBadArgument) {
			t.Errorf("overlapping registration: %v", err)
		}
		if _, err := w.library.NewAgent("", AgentConfig{}); !errors.Is(err, ErrBadArgument) {
			t.Errorf("agent without a name: %v", err)
		}
		if _, err := p.consumer.CreateBackend("NOSUCH", nil); err == nil {
			t.Error("unknown backend: no error")
		}
	})
}

func TestForeignMetadataIsAnErrorNotACrash(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		md, err := p.producer.LocalMetadata()
		must(t, err)
		for n := range len(md) {
			if peer, err := p.consumer.AddPeer(md[:n]); err == nil {
				t.Fatalf("metadata cut at %d of %d gave peer %s", n, len(md), peer.Name())
			}
		}
		for _, foreign := range []string{"", "x", "AGENTMETA", "nixlSerDes|", "nixlSerDes|Agent\xff\xff\xff\xff\xff\xff\xff\xff", "\x80\x04\x95 pickle"} {
			if _, err := p.consumer.AddPeer([]byte(foreign)); !errors.Is(err, ErrBadArgument) {
				t.Errorf("%q: %v", foreign, err)
			}
		}
		r, err := p.read(0, 4096, RequestOptions{})
		if err != nil {
			t.Fatalf("after refused metadata the good peer still is there: %v", err)
		}
		r.Release()
	})
}

func TestPeerThatRestartedUnderItsNameIsANewPeer(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		name := p.producer.Name()
		must(t, p.producer.Close())
		again, err := w.library.NewAgent(name, AgentConfig{})
		must(t, err)
		defer again.Close()
		_, err = again.CreateBackend("UCX", nil)
		must(t, err)
		_, err = again.Register(DRAM, []Range{RangeOf(p.source)})
		must(t, err)
		old := p.peer
		p.peer = add(t, p.consumer, again)
		if _, err := p.consumer.NewRequest(Read, Descs{DRAM, []Range{RangeOf(p.destination)}}, Descs{DRAM, []Range{RangeOf(p.source)}}, old, RequestOptions{}); !errors.Is(err, ErrStalePeer) {
			t.Errorf("request to the old peer: %v", err)
		}
		must(t, old.Close()) // must not forget the new one
		r, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		defer r.Release()
		must(t, run(t, r))
		if !bytes.Equal(p.source, p.destination) {
			t.Fatal("bytes differ")
		}
	})
}

func TestUseAfterCloseIsErrClosed(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		r, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		md, err := p.producer.LocalMetadata()
		must(t, err)
		must(t, p.consumer.Close())
		must(t, p.consumer.Close())
		for name, err := range map[string]error{
			"post":          second(r.Post()),
			"register":      second(p.consumer.Register(DRAM, []Range{RangeOf(p.destination)})),
			"metadata":      second(p.consumer.LocalMetadata()),
			"add peer":      second(p.consumer.AddPeer(md)),
			"notifications": second(p.consumer.Notifications()),
			"notify":        p.peer.Notify(nil),
			"request":       second(p.read(0, 1, RequestOptions{})),
		} {
			if !errors.Is(err, ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
		}
		r.Release()
		must(t, p.peer.Close())
		must(t, p.registration.Close())
		must(t, p.registration.Close())
	})
}

func second[T any](_ T, err error) error { return err }

func TestManyGoroutinesShareAnAgent(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		const workers, rounds, n = 8, 50, 4096
		p := w.pair(t, workers*n)
		var wg sync.WaitGroup
		for i := range workers {
			wg.Go(func() {
				for range rounds {
					r, err := p.read(i*n, n, RequestOptions{Notification: []byte{byte(i)}})
					if err != nil {
						t.Error(err)
						return
					}
					if err := run(t, r); err != nil {
						t.Error(err)
					}
					r.Release()
				}
			})
		}
		got := waitNotifications(t, p.producer, workers*rounds)
		wg.Wait()
		if len(got) != workers*rounds || !bytes.Equal(p.source, p.destination) {
			t.Fatalf("%d notifications for %d reads", len(got), workers*rounds)
		}
	})
}

func TestWaitEndsWithItsContextWhenThePeerIsFrozen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := NewFake()
		p := world{f.Library(), f}.pair(t, 4096)
		f.Freeze(p.producer.Name())
		r, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		defer r.Release()
		if done, err := r.Post(); done || err != nil {
			t.Fatalf("post: %v %v", done, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := r.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("wait: %v", err)
		}
		f.Thaw(p.producer.Name())
		must(t, r.Wait(t.Context()))
	})
}

func TestFakePeerThatDiedFailsTheRequest(t *testing.T) {
	f := NewFake()
	p := world{f.Library(), f}.pair(t, 4096)
	f.Freeze(p.producer.Name())
	r, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	defer r.Release()
	_, err = r.Post()
	must(t, err)
	f.Kill(p.producer.Name())
	if err := r.Wait(t.Context()); !errors.Is(err, StatusBackend) {
		t.Fatalf("wait: %v", err)
	}
	f.Fail(FakeCreate, 0, StatusInvalidState)
	if _, err := p.read(0, 1, RequestOptions{}); !errors.Is(err, StatusInvalidState) {
		t.Fatalf("injected fault: %v", err)
	}
}

func TestTelemetryTellsBytes(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 1<<16)
		a, err := w.library.NewAgent(uniqueName("measured"), AgentConfig{Telemetry: true})
		must(t, err)
		defer a.Close()
		_, err = a.CreateBackend("UCX", nil)
		must(t, err)
		memory := mapped(t, 1<<16)
		_, err = a.Register(DRAM, []Range{RangeOf(memory)})
		must(t, err)
		r, err := a.NewRequest(Read, Descs{DRAM, []Range{RangeOf(memory)}}, Descs{DRAM, []Range{RangeOf(p.source)}}, add(t, a, p.producer), RequestOptions{})
		must(t, err)
		defer r.Release()
		must(t, run(t, r))
		got, err := r.Telemetry()
		must(t, err)
		if got.Bytes != 1<<16 {
			t.Fatalf("telemetry %+v", got)
		}
	})
}
