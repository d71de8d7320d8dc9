package shm

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

// S1: of 2,000 puts with keys used again and again, from several writers at once, each that was acknowledged is read once.
func TestEveryAcknowledgedPutIsReadExactlyOnce(t *testing.T) {
	const writers, readers, puts = 4, 3, 500
	dir := shmDir(t)
	keys := []string{"a", "b"}
	ctx := within(t, 5*patience)
	var mu sync.Mutex
	acked, got := make(map[string]int), make(map[string]int)
	var writing, reading sync.WaitGroup
	for w := range writers {
		c := open(t, Options{Dir: dir})
		writing.Go(func() {
			for i := range puts {
				id, key := fmt.Sprintf("%d-%d", w, i), keys[i%len(keys)]
				taken := c.watch(key)
				for {
					p, err := c.Put(ctx, key, value(id, i%9*9000), stage.PutOptions{})
					if errors.Is(err, ErrTaken) && taken.wait(ctx) { // by another writer
						continue
					}
					if err != nil {
						t.Errorf("put of %s: %v", id, err)
						return
					}
					mu.Lock()
					acked[id]++
					mu.Unlock()
					select {
					case <-p.Released():
					case <-ctx.Done():
						t.Errorf("%s was never read", id)
						return
					}
					if p.Outcome() != stage.Read {
						t.Errorf("%s: outcome %d", id, p.Outcome())
					}
					break
				}
				taken.close()
			}
		})
	}
	end, stop := context.WithCancel(ctx)
	for r := range readers {
		c := open(t, Options{Dir: dir})
		reading.Go(func() {
			for i := 0; ; i++ {
				short, cancel := context.WithTimeout(end, 50*time.Millisecond)
				g, err := c.Get(short, stage.Request{Key: keys[(i+r)%len(keys)], Wait: true, InPlace: i%2 == 0})
				cancel()
				if end.Err() != nil && err != nil {
					return
				}
				if errors.Is(err, context.DeadlineExceeded) {
					continue
				}
				if err != nil {
					t.Errorf("get: %v", err)
					return
				}
				id := string(g.Root.(tensor.Map).Get("id").(tensor.String))
				var w, n int
				fmt.Sscanf(id, "%d-%d", &w, &n)
				if !tensor.Equal(g.Root, value(id, n%9*9000)) {
					t.Errorf("%s: other bytes", id)
				}
				if err := g.Release(); err != nil {
					t.Error(err)
				}
				mu.Lock()
				got[id]++
				mu.Unlock()
			}
		})
	}
	writing.Wait()
	stop()
	reading.Wait()
	if len(acked) != writers*puts || len(got) != len(acked) {
		t.Errorf("%d acknowledged, %d read, want %d", len(acked), len(got), writers*puts)
	}
	for id, n := range got {
		if n != 1 || acked[id] != 1 {
			t.Errorf("%s was acknowledged %d times and read %d times", id, acked[id], n)
		}
	}
	wantFiles(t, dir)
}
