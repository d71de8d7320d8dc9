package stage

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// Producers and readers on the same few keys, all at once: every memory is released once, none while it is offered (fakeMemory).
func TestManyReadersAndProducersLeaveNothingBehind(t *testing.T) {
	const producers, readers, rounds, keys = 4, 8, 300, 3
	s := newStore(t, Options{MaxBytes: 64, RetryGrace: time.Hour})
	var all []*fakeMemory
	var mu sync.Mutex
	var wg sync.WaitGroup
	for w := range producers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(w)))
			for range rounds {
				room, err := s.Reserve(t.Context(), 1)
				if err != nil {
					t.Error(err)
					return
				}
				m := newMemory(t)
				_, err = s.Put(Put{Key: strconv.Itoa(r.IntN(keys)), Memory: m, Room: room, Metadata: wire.Metadata{Size: 1}})
				if err != nil {
					room.Close()
					if !errors.Is(err, ErrClaimed) {
						t.Error(err)
					}
					continue
				}
				mu.Lock()
				all = append(all, m)
				mu.Unlock()
			}
		})
	}
	for w := range readers {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(2, uint64(w)))
			owner := []string{"", "own" + strconv.Itoa(w)}[w%2]
			for i := range rounds {
				c := Claim{Key: strconv.Itoa(r.IntN(keys)), ID: wire.TextID(strconv.Itoa(w) + "." + strconv.Itoa(i)), Owner: owner}
				md, err := s.Claim(t.Context(), c)
				if err != nil {
					if !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrFailed) {
						t.Error(err)
					}
					continue
				}
				c.Generation = md.Generation
				switch r.IntN(4) {
				case 0:
					if !s.Fail(c) {
						t.Error("a claim was lost")
					}
				case 1:
					if owner != "" {
						s.Drop(owner)
						break
					}
					fallthrough
				default:
					if !s.Done(c) {
						t.Error("a claim was lost")
					}
				}
				if r.IntN(50) == 0 {
					s.Abort(c.Key, "reason")
				}
			}
		})
	}
	wg.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := s.Close(ctx, time.Minute); err != nil {
		t.Fatal(err)
	}
	for i, m := range all {
		if !m.isReleased() {
			t.Errorf("memory %d of %d is left", i, len(all))
		}
	}
	st := s.Stats()
	if st.Puts != st.Released || st.Bytes != 0 || st.Granted != st.Done+st.Failed+st.Lapsed {
		t.Errorf("%+v", st)
	}
}

// nullMemory costs nothing.
type nullMemory struct{}

func (nullMemory) Offer(context.Context, string, *wire.FerryRequest, *wire.Metadata) error {
	return nil
}
func (nullMemory) Withdraw(context.Context, string, bool) error { return nil }
func (nullMemory) Release()                                     {}

// BenchmarkPutClaimDone is the bookkeeping of one payload, with 1,000 others published.
func BenchmarkPutClaimDone(b *testing.B) {
	s, err := NewStore(Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = s.Close(context.Background(), time.Second) }()
	for i := range 1000 {
		if _, err := s.Put(Put{Key: "other" + strconv.Itoa(i), Memory: nullMemory{}}); err != nil {
			b.Fatal(err)
		}
	}
	c := Claim{Key: "k", ID: wire.TextID("c")}
	b.ReportAllocs()
	for b.Loop() {
		g, err := s.Put(Put{Key: "k", Memory: nullMemory{}})
		if err != nil {
			b.Fatal(err)
		}
		c.Generation = g
		if _, err := s.Claim(context.Background(), c); err != nil {
			b.Fatal(err)
		}
		if !s.Done(c) {
			b.Fatal("lost")
		}
	}
}

// BenchmarkPutClaimVerify is the same by own readers, beside 10,000 payloads, when what was verified is forgotten as fast as more comes.
func BenchmarkPutClaimVerify(b *testing.B) {
	s, err := NewStore(Options{RetryGrace: 10 * time.Millisecond, MaxPayloads: 20_000})
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = s.Close(context.Background(), time.Second) }()
	for i := range 10_000 {
		if _, err := s.Put(Put{Key: "other" + strconv.Itoa(i), Memory: nullMemory{}}); err != nil {
			b.Fatal(err)
		}
	}
	c := Claim{Key: "k", ID: wire.TextID("c"), Owner: "o"}
	b.ReportAllocs()
	for b.Loop() {
		g, err := s.Put(Put{Key: "k", Memory: nullMemory{}})
		if err != nil {
			b.Fatal(err)
		}
		c.Generation = g
		if _, err := s.Claim(context.Background(), c); err != nil {
			b.Fatal(err)
		}
		if !s.Verify(c) {
			b.Fatal("lost")
		}
	}
}
