package ec

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/pebbe/zmq4"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// listening is a stand whose producer answers on a port.
func listening(t testing.TB, blocks, slots int) (s *stand, at string) {
	t.Helper()
	loop, err := control.NewLoop(control.Options{})
	if err != nil {
		t.Fatal(err)
	}
	cache := newTestCache(t, blocks, slots, CacheOptions{})
	s = newStand(t, 1, func(o *ProducerOptions) {
		o.Pools[0].Cache, o.Pools[0].Memory.Bytes, o.Pools[0].Planes = cache, cache.pool, []transfer.Plane{&agents{}}
	})
	s.cache = cache
	router, err := loop.Listen(t.Context(), "127.0.0.1", 0, s.producer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := loop.Close(); err != nil {
			t.Error(err)
		}
	})
	return s, fmt.Sprint("127.0.0.1:", router.Port())
}

// answers are the acks that a dealer is sent.
type answersTo struct {
	up   chan struct{}
	acks chan *wire.Ack
}

func (a *answersTo) Up()        { close(a.up) }
func (a *answersTo) Down(error) {}
func (a *answersTo) Message(body []byte) {
	m, _ := wire.DecodeAtConsumer(body)
	ack, _ := m.(*wire.Ack)
	a.acks <- ack
}

// asker asks for a key, and waits for the answer.
func asker(t testing.TB, s *stand, at string) func(key string) *wire.Ack {
	t.Helper()
	loop, err := control.NewLoop(control.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = loop.Close() })
	a := &answersTo{make(chan struct{}), make(chan *wire.Ack, 1)}
	d, err := loop.Dial(t.Context(), at, a)
	if err != nil {
		t.Fatal(err)
	}
	<-a.up
	return func(key string) *wire.Ack {
		if err := d.Send(wire.AppendRequest(nil, s.plain(key), wire.Generation2)); err != nil {
			t.Fatal(err)
		}
		select {
		case ack := <-a.acks:
			return ack
		case <-time.After(20 * time.Second):
			t.Fatal("no answer within 20 s")
			return nil
		}
	}
}

// V10.
func TestTheDescriptorOfALargePoolIsSentWithoutACopyForEachPeer(t *testing.T) {
	const blocks = 16 << 10
	s, at := listening(t, blocks, 64)
	save(t, s.cache, "img", 3)
	for range 3 {
		ack := asker(t, s, at)("img")
		if ack == nil || ack.Status != wire.OK || len(ack.Blocks) != 3 || string(ack.AgentMetadata) != "agent-0" {
			t.Fatalf("ack %.300v", ack)
		}
		d, err := wire.DecodeMemDescriptor(ack.MemDescriptor, blocks)
		if err != nil || len(d) != blocks {
			t.Fatalf("a descriptor of %d blocks, %v", len(d), err)
		}
		for i, b := range d {
			if want := (wire.Descriptor{Addr: 4096 + uint64(i)*testBlock, Size: testBlock}); b != want {
				t.Fatalf("block %d is %+v, want %+v", i, b, want)
			}
		}
	}
	if d := s.producer.order[0].agent.descriptor; d.shared == nil || d.bytes != nil {
		t.Error("it is not shared")
	}
}

// F3: how long others wait for a NACK while 60 peers that never read are acked with the descriptor of a pool of 1 GiB in blocks of 7 KiB.
func BenchmarkNackBesideDescriptors(b *testing.B) {
	const blocks, peers = 512 << 10, 60
	for _, way := range []string{"alone", "copied", "shared"} {
		b.Run(way, func(b *testing.B) {
			s, at := listening(b, blocks, 64)
			save(b, s.cache, "img", 3)
			ask := asker(b, s, at)
			ask("img")
			if way == "copied" {
				s.producer.mu.Lock()
				agent := s.producer.order[0].agent
				agent.descriptor = descriptor{bytes: wire.AppendMemDescriptor(nil, 4096, blocks, testBlock)}
				s.producer.mu.Unlock()
			}
			request := func(i int) []byte {
				r := s.plain("img")
				r.Session = fmt.Sprint("silent-", i)
				return wire.AppendRequest(nil, r, wire.Generation2)
			}
			var took []time.Duration
			for b.Loop() {
				var silent []*zmq4.Socket
				for i := range peers {
					z, err := zmq4.NewSocket(zmq4.DEALER)
					if err != nil {
						b.Fatal(err)
					}
					silent = append(silent, z)
					_ = z.SetLinger(0)
					_ = z.SetRcvhwm(1)
					if err := z.Connect("tcp://" + at); err != nil {
						b.Fatal(err)
					}
					if way == "alone" {
						continue
					}
					if _, err := z.SendMessage("", request(i)); err != nil {
						b.Fatal(err)
					}
				}
				for range 200 {
					start := time.Now()
					if ack := ask("absent"); ack == nil || ack.Status != wire.NackMissing {
						b.Fatalf("%+v", ack)
					}
					took = append(took, time.Since(start))
					time.Sleep(time.Millisecond)
				}
				for _, z := range silent {
					_ = z.Close()
				}
			}
			slices.Sort(took)
			at99 := took[len(took)*99/100]
			b.ReportMetric(took[len(took)/2].Seconds()*1e3, "p50-ms")
			b.ReportMetric(at99.Seconds()*1e3, "p99-ms")
			b.ReportMetric(took[len(took)-1].Seconds()*1e3, "longest-ms")
		})
	}
}
