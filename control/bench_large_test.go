package control

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"
)

// A whole-region descriptor of 1 GiB in blocks of 7 KiB, with which a plain peer is acked first, and how many ask for it at once.
const (
	descriptorSize = 7_300_000
	headSize       = 500
	askers         = 60
)

// describer answers "large" with a descriptor and all else with a few bytes.
type describer struct {
	r          *Router
	descriptor []byte
	shared     *Shared // nil: it is copied
}

func (s *describer) Serve(r *Router) { s.r = r }
func (s *describer) Message(from Source, body []byte) {
	head := make([]byte, headSize)
	switch {
	case string(body) != "large":
		s.r.Send(from.ID, head)
	case s.shared != nil:
		s.r.SendShared(from.ID, head, s.shared)
	default:
		s.r.Send(from.ID, append(head, s.descriptor...))
	}
}

func serveDescriber(l *Loop, way string) error {
	s := &describer{descriptor: make([]byte, descriptorSize)}
	if way == "shared" {
		var err error
		if s.shared, err = NewShared(s.descriptor); err != nil {
			return err
		}
	}
	r, err := l.Listen(context.Background(), "127.0.0.1", 0, s)
	if err != nil {
		return err
	}
	fmt.Println("ready", r.Port())
	<-l.Done()
	return l.Err()
}

// How long a small answer takes while other peers are sent a large one each: the longest of all rounds.
func BenchmarkSmallAnswerBesideLarge(b *testing.B) {
	for _, way := range []string{"copied", "shared"} {
		b.Run(way, func(b *testing.B) {
			at := "127.0.0.1:" + startPeer(b, "describer", way).port
			var round sync.WaitGroup
			var peers []zmtp
			for range askers {
				z := dialZMTP(b, at)
				peers = append(peers, z)
				go func() {
					buf := make([]byte, 1<<20)
					for got := 0; ; {
						n, err := z.Read(buf)
						if err != nil {
							return
						}
						if got += n; got >= headSize+descriptorSize { // what is more is libzmq's, less than another message
							got -= headSize + descriptorSize
							round.Done()
						}
					}
				}()
			}
			c := &caller{make(chan struct{}), make(chan struct{}, 1)}
			d, err := newTestLoop(b, Options{}).Dial(b.Context(), at, c)
			if err != nil {
				b.Fatal(err)
			}
			<-c.up
			ask := func() time.Duration {
				start := time.Now()
				d.Send([]byte("small"))
				<-c.answers
				return time.Since(start)
			}
			ask()
			var longest time.Duration
			for b.Loop() {
				round.Add(askers)
				for _, z := range peers {
					z.write(append(frame(1, nil), frame(0, []byte("large"))...))
				}
				all := make(chan struct{})
				go func() { round.Wait(); close(all) }()
				for busy := true; busy; {
					longest = max(longest, ask())
					select {
					case <-all:
						busy = false
					case <-time.After(time.Millisecond):
					}
				}
			}
			b.ReportMetric(longest.Seconds()*1e3, "longest-ms")
		})
	}
}
