package region

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func reopened(t *testing.T, r *Region) *os.File {
	t.Helper()
	f, err := r.Reopen(false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func TestARegionWaitsForARestartUntilItsTimeIsOverOrItsNameIsGone(t *testing.T) {
	o := keptOptions(shmDir(t))
	r := mustTake(t, o)
	f := reopened(t, r)
	want := func(what string, epoch uint64, waits bool) {
		t.Helper()
		if e, left, err := Waiting(f); err != nil || e != epoch || left > 0 != waits {
			t.Errorf("%s: epoch %d, %v left, %v; want epoch %d, waiting: %v", what, e, left, err, epoch, waits)
		}
	}
	want("a new one", 1, true)
	if err := r.Close(false); err != nil {
		t.Fatal(err)
	}
	r = mustTake(t, o)
	want("adopted", 2, true)
	r.KeepFor(0)
	want("one that waits for nobody", 2, false)
	r.KeepFor(time.Hour)
	want("one that waits again", 2, true)
	if err := r.Unlink(); err != nil {
		t.Fatal(err)
	}
	want("one without a name", 2, false)
	r.ServeFor(time.Hour)
	want("one without a name that is to be served on", 2, true)
	if _, _, err := Waiting(os.Stdin); err == nil {
		t.Error("a file that is no region waits")
	}
}

func TestARegionIsReplacedOnceItsServersHaveEnded(t *testing.T) {
	o := keptOptions(shmDir(t))
	r := mustTake(t, o)
	server := reopened(t, r)
	if err := unix.FcntlFlock(server.Fd(), unix.F_OFD_SETLK, ServerLock(3, unix.F_RDLCK)); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(false); err != nil {
		t.Fatal(err)
	}
	ended := make(chan bool, 1)
	go func() { // as a server does
		for {
			if _, left, err := Waiting(server); err != nil || left == 0 {
				break
			}
			time.Sleep(time.Millisecond)
		}
		ended <- true
		_ = server.Close()
	}()
	o.Geometry.Blocks++
	if next := mustTake(t, o); next.Adopted() {
		t.Error("adopted with another geometry")
	}
	select {
	case <-ended:
	default:
		t.Error("the file was replaced beside a process that serves it")
	}
}

func TestTheGrantedMarkOfASlotEndsWithItsEntry(t *testing.T) {
	r := mustTake(t, keptOptions(shmDir(t)))
	table := r.Slots()
	slot := Slot{Key: "k", Dtype: "torch.bfloat16", Shape: []int64{1}, Bytes: 2, Extents: []Extent{{Start: 1, Count: 1}}}
	mustFill(t, table, 0, slot)
	table.Ready(0, 0, false)
	for _, want := range []bool{true, false, true} {
		table.SetGranted(0, want)
		if s, err := table.Load(0); err != nil || s.Granted != want {
			t.Errorf("%+v, %v", s, err)
		}
	}
	table.Free(0)
	mustFill(t, table, 0, slot)
	if s, err := table.Load(0); err != nil || s.Granted {
		t.Errorf("a new entry: %+v, %v", s, err)
	}
}

// An owner may have left its servers and then been killed before it took the name away; or a start did, before it found no room.
func TestServersOfAReplacedFileEndIfNothingIsGrantedOfIt(t *testing.T) {
	for _, granted := range []bool{false, true} {
		t.Run(fmt.Sprintf("granted=%v", granted), func(t *testing.T) {
			o := keptOptions(shmDir(t))
			r := mustTake(t, o)
			mustFill(t, r.Slots(), 0, Slot{Key: "k", Dtype: "torch.bfloat16", Shape: []int64{1}, Bytes: 2, Extents: []Extent{{Start: 1, Count: 1}}})
			r.Slots().Ready(0, 0, false)
			r.Slots().SetGranted(0, granted)
			server := reopened(t, r)
			if err := unix.FcntlFlock(server.Fd(), unix.F_OFD_SETLK, ServerLock(0, unix.F_RDLCK)); err != nil {
				t.Fatal(err)
			}
			r.ServeFor(time.Hour)
			if err := r.Close(false); err != nil {
				t.Fatal(err)
			}
			o.Geometry.Blocks++
			ctx, cancel := context.WithCancelCause(t.Context())
			stop := make(chan struct{})
			go func() { // as a server does
				defer close(stop)
				for ctx.Err() == nil {
					if _, left, err := Waiting(server); err != nil || left == 0 {
						_ = server.Close()
						return
					}
					time.Sleep(time.Millisecond)
				}
			}()
			mustTake(t, o)
			cancel(nil)
			<-stop
			_, left, err := Waiting(server)
			if serves := err == nil && left > 0; serves != granted {
				t.Errorf("it is served on: %v (%v, %v), want %v", serves, left, err, granted)
			}
		})
	}
}
