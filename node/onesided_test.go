package node

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/client"
)

// The producer, a process of its own, evicts and fills its blocks anew all the time, while readers look at its slot table and copy
// what that says. They are never right by luck: whatever comes out as ready has the bytes of its key.
func TestNoPullWithoutAskingEverDeliversWhatWasOverwritten(t *testing.T) {
	const keys, readers, blocks = 24, 3, 3000
	pulls := 400
	if testing.Short() {
		pulls = 100
	}
	conf, cb := testConfig(t, blocks), testConfig(t, blocks)
	cb.ShmDir = conf.ShmDir
	conf.Checksums, cb.Checksums = true, true // a second judge of what the slot table lets pass
	from := spawnNode(t, conf)
	defer from.end()
	to := startNode(t, cb)
	writer, err := client.Dial(testContext(t), from.ready.Socket, client.Options{Name: "writer"})
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	rows := func(i int) int { return 40 + 37*i } // all of them are four times the pool
	content := make([][]byte, keys)
	for i := range content {
		content[i] = payload(rows(i), uint64(i))
	}
	name := func(i int) string { return fmt.Sprint("img-", i) }

	var announced [keys]atomic.Pointer[ec.Params] // the last one, which may well be of an entry that is gone
	announce := func(i int) error {
		if _, err := writer.Put(t.Context(), name(i), spec(rows(i)), content[i]); err != nil {
			return err
		}
		p, err := writer.Announce(t.Context(), []client.AnnounceItem{{Key: name(i)}})
		if err == nil {
			announced[i].Store(&p)
		}
		return err
	}
	for i := range keys {
		if err := announce(i); err != nil {
			t.Fatal(err)
		}
	}
	var stop atomic.Bool
	var work sync.WaitGroup
	work.Go(func() {
		for i := 0; !stop.Load(); i++ {
			// A key that is there is removed first, so that something is always on its way out.
			if err := writer.Remove(t.Context(), name(i%keys)); err != nil && !errors.Is(err, ec.ErrMissing) && !errors.Is(err, ec.ErrPinned) {
				t.Error(err)
				return
			}
			if err := announce(i % keys); err != nil && !errors.Is(err, ec.ErrFull) {
				t.Error(err)
				return
			}
		}
	})

	stats := func() ec.ConsumerStats { return to.pools[0].consumer.Stats() }
	end := time.Now().Add(time.Minute)
	done := func() bool { return stats().OneSided >= uint64(pulls) || time.Now().After(end) || t.Failed() }
	for r := range readers {
		reader := dial(t, to)
		work.Go(func() {
			for n := r; !done(); n++ {
				i := n % keys
				ch, err := reader.FetchMap(t.Context(), *announced[i].Load(), 0)
				if err != nil {
					t.Error(err)
					return
				}
				for res := range ch {
					if res.Outcome != ec.FetchReady {
						continue // evicted: the engine would encode it itself
					}
					if got := bytes.Join(res.Mapped.Buffers(), nil); !bytes.Equal(got, content[i]) {
						t.Errorf("%q: %d bytes by plane %q are not the key's", res.Key, len(got), res.Plane)
					}
					res.Mapped.Release()
					_ = reader.Remove(t.Context(), res.Key) // pinned by another reader is fine too
				}
			}
			stop.Store(true)
		})
	}
	work.Wait()
	s := stats()
	t.Logf("%d pulls asked nobody, %d were overtaken, %d requests", s.OneSided, s.Overtaken, s.Requests)
	if s.OneSided < uint64(pulls) {
		t.Errorf("%d pulls that asked nobody in a minute, want %d", s.OneSided, pulls)
	}
	if s.ChecksumFailed != 0 {
		t.Errorf("%d pulls had a wrong checksum: the second look at the slot should have told", s.ChecksumFailed)
	}
}
