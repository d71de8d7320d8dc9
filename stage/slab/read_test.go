package slab

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/faulty"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// faultyPair is a producer, and a consumer whose plane has faults, in synthetic time.
func faultyPair(t *testing.T, test func(t *testing.T, producer, consumer *Slab, faults *faulty.Plane)) {
	dir := transfertest.Dir(t)
	leaks(t, dir)
	synctest.Test(t, func(t *testing.T) {
		var f transfertest.Fabric
		faults := faulty.New(f.Plane())
		producer, err := New(t.Context(), Options{Dir: dir, Name: "a", Bytes: 1 << 20, Planes: []transfer.Plane{f.Plane()}})
		must(t, err)
		consumer, err := New(t.Context(), Options{Dir: dir, Name: "b", Bytes: 1 << 20, Planes: []transfer.Plane{faults}})
		must(t, err)
		test(t, producer, consumer, faults)
		must(t, consumer.Close(t.Context()))
		must(t, producer.Close(t.Context()))
		must(t, faults.Close())
	})
}

func TestAReadThatFailsLeavesTheBufferIdleAndThePeerIsAddedAnew(t *testing.T) {
	for name, c := range map[string]struct {
		rule faulty.Rule
		want error
		adds int // after one more READ
	}{
		"lost in the middle":     {faulty.Rule{Op: faulty.Complete, Err: transfer.ErrPeerLost}, transfer.ErrPeerLost, 2},
		"denied":                 {faulty.Rule{Op: faulty.Complete, Err: transfer.ErrDenied}, transfer.ErrDenied, 1},
		"not posted":             {faulty.Rule{Op: faulty.Read, Fail: true}, faulty.ErrInjected, 1},
		"lost when it is posted": {faulty.Rule{Op: faulty.Read, Err: transfer.ErrPeerLost}, transfer.ErrPeerLost, 2},
		"cannot be added":        {faulty.Rule{Op: faulty.AddPeer, Fail: true}, ErrNoPlane, 2},
	} {
		t.Run(name, func(t *testing.T) {
			faultyPair(t, func(t *testing.T, producer, consumer *Slab, faults *faulty.Plane) {
				p := put(t, producer, 4, 100_000, 3)
				m, err := offer(t, p, "1", 0, transfertest.MemoryName)
				must(t, err)
				faults.Add(c.rule)
				b, err := consumer.Alloc(t.Context(), []int64{100_000, 3})
				must(t, err)
				if _, err := consumer.Read(t.Context(), m, b); !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				select {
				case <-b.Idle():
				default:
					t.Error("the buffer is not idle")
				}
				_, err = consumer.Read(t.Context(), m, b)
				must(t, err)
				compare(t, b.Slices(), 4)
				b.Free()
				if n := faults.Count(faulty.AddPeer); n != c.adds {
					t.Errorf("added %d times, want %d", n, c.adds)
				}
				must(t, p.Withdraw(t.Context(), "1", true))
				p.Release()
				if n := consumer.Used() + producer.Used(); n != 0 {
					t.Errorf("%d bytes used", n)
				}
			})
		})
	}
}

func TestAReadThatWasGivenUpKeepsItsBufferUntilItIsOver(t *testing.T) {
	faultyPair(t, func(t *testing.T, producer, consumer *Slab, faults *faulty.Plane) {
		p := put(t, producer, 4, 100_000)
		m, err := offer(t, p, "1", 0, transfertest.MemoryName)
		must(t, err)
		hold := make(chan struct{})
		faults.Add(faulty.Rule{Op: faulty.Complete, Hold: hold}, faulty.Rule{Op: faulty.Cancel, Drop: true})
		b, err := consumer.Alloc(t.Context(), []int64{100_000})
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := consumer.Read(ctx, m, b); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		idle := b.Idle()
		b.Free()
		synctest.Wait()
		select {
		case <-idle:
			t.Error("idle, and the READ is not over")
		default:
		}
		if consumer.Used() == 0 {
			t.Error("free, and the READ is not over")
		}
		close(hold)
		<-idle
		synctest.Wait()
		if consumer.Used() != 0 {
			t.Error("not free after the READ")
		}
		must(t, p.Withdraw(t.Context(), "1", false))
		p.Release()
	})
}

func TestACanceledReadIsOverSoon(t *testing.T) {
	faultyPair(t, func(t *testing.T, producer, consumer *Slab, faults *faulty.Plane) {
		p := put(t, producer, 4, 100_000)
		m, err := offer(t, p, "1", 0, transfertest.MemoryName)
		must(t, err)
		faults.Add(faulty.Rule{Op: faulty.Complete, Hold: make(chan struct{})}) // for ever, but for Cancel
		b, err := consumer.Alloc(t.Context(), []int64{100_000})
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		if _, err := consumer.Read(ctx, m, b); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		<-b.Idle()
		if waited := time.Since(start); waited != time.Second { // synthetic time
			t.Errorf("idle after %v", waited)
		}
		b.Free()
		must(t, p.Withdraw(t.Context(), "1", true))
		p.Release()
	})
}

func TestAReadThatNeverEndsIsEndedWithItsPeer(t *testing.T) {
	faultyPair(t, func(t *testing.T, producer, consumer *Slab, faults *faulty.Plane) {
		p := put(t, producer, 4, 100_000)
		m, err := offer(t, p, "1", 0, transfertest.MemoryName)
		must(t, err)
		faults.Add(faulty.Rule{Op: faulty.Complete, Drop: true}, faulty.Rule{Op: faulty.Cancel, Drop: true, Index: faulty.Every})
		b, err := consumer.Alloc(t.Context(), []int64{100_000})
		must(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		start := time.Now()
		_, err = consumer.Read(ctx, m, b)
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		<-b.Idle()
		if waited := time.Since(start); waited != time.Second+quarantine { // synthetic time
			t.Errorf("idle after %v", waited)
		}
		b.Free()
		get(t, consumer, m, 4) // the peer was added anew
		must(t, p.Withdraw(t.Context(), "1", true))
		p.Release()
	})
}

func TestCloseWaitsForBuffersAndKeepsWhatIsNotFree(t *testing.T) {
	dir := transfertest.Dir(t)
	synctest.Test(t, func(t *testing.T) {
		s, err := New(t.Context(), Options{Dir: dir, Name: "a", Bytes: 1 << 20})
		must(t, err)
		b, err := s.Alloc(t.Context(), []int64{1 << 20})
		must(t, err)
		waiter := make(chan error)
		go func() {
			_, err := s.Alloc(t.Context(), []int64{1})
			waiter <- err
		}()
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- s.Close(t.Context()) }()
		if err := <-waiter; !errors.Is(err, ErrClosed) {
			t.Errorf("who waited: %v", err)
		}
		synctest.Wait()
		select {
		case err := <-closed:
			t.Fatalf("closed with a buffer: %v", err)
		default:
		}
		b.Free()
		must(t, <-closed)
		if _, err := s.Alloc(t.Context(), []int64{1}); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}

		s, err = New(t.Context(), Options{Dir: dir, Name: "a", Bytes: 1 << 20})
		must(t, err)
		if b, err = s.Alloc(t.Context(), []int64{100}); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := s.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("closed with a buffer: %v", err)
		}
		b.Slices()[0][99] = 1 // still mapped
		b.Free()
		if err := s.Close(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("closed again: %v", err)
		}
	})
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestCloseIsBoundedWhateverAPlaneDoes(t *testing.T) {
	dir := transfertest.Dir(t)
	synctest.Test(t, func(t *testing.T) {
		var f transfertest.Fabric
		faults := faulty.New(f.Plane())
		hold := make(chan struct{})
		faults.Add(faulty.Rule{Op: faulty.RegistrationClose, Hold: hold})
		s, err := New(t.Context(), Options{Dir: dir, Name: "a", Bytes: 1 << 20, Planes: []transfer.Plane{faults}})
		must(t, err)
		start := time.Now()
		if err := s.Close(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		if waited := time.Since(start); waited != closePatience { // synthetic time
			t.Errorf("closed after %v", waited)
		}
		close(hold)
	})
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
