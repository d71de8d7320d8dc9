package node

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/region"
)

// A node that has no descriptors when it takes a region over must not keep what dead engines had pinned for as long as it lives.
func TestAnEngineThatCannotBeWatchedAtFirstIsWatchedLater(t *testing.T) {
	t.Cleanup(func() { openProcess = realOpenProcess })
	for _, c := range []struct {
		name  string
		fails error
	}{{"no descriptors", unix.EMFILE}, {"a kernel that refuses", unix.EINVAL}} {
		t.Run(c.name, func(t *testing.T) {
			r, err := region.Create(testContext(t), region.Options{
				Dir: shmDir(t), Identity: region.Identity{Instance: "n", Group: "0"}, Geometry: region.Geometry{BlockBytes: testBlock, Blocks: 8, Slots: 8},
			})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = r.Close(true) }()
			if err := r.Clients().Set(0, region.Client{ID: 5, Process: processOf(os.Getpid()), Namespace: pidNamespace()}); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				tries := 0
				openProcess = func(pid int) (*os.File, error) {
					if tries++; tries < 3 {
						return nil, c.fails
					}
					return nil, unix.ESRCH
				}
				cl := newClients(r, &ec.Adopted{}, 4, slog.New(slog.DiscardHandler))
				defer cl.close()
				if away, _, _ := cl.away(); away != 1 {
					t.Fatalf("%d clients before it is known that it is dead", away)
				}
				ctx, cancel := context.WithTimeout(t.Context(), 3*watchAgain)
				defer cancel()
				<-ctx.Done()
				synctest.Wait()
				if away, _, _ := cl.away(); away != 0 || tries != 3 {
					t.Errorf("%d clients after %d tries, the last of which found it dead", away, tries)
				}
			})
		})
	}
}

// A node that takes a region over waits for a process once, however many clients of it the region names.
func TestTheClientsOfAProcessAreWatchedTogether(t *testing.T) {
	r, err := region.Create(testContext(t), region.Options{
		Dir: shmDir(t), Identity: region.Identity{Instance: "n", Group: "0"}, Geometry: region.Geometry{BlockBytes: testBlock, Blocks: 8, Slots: 8},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close(true) }()
	own := processOf(os.Getpid())
	for row := range 3 {
		if err := r.Clients().Set(row, region.Client{ID: uint64(row) + 5, Process: own, Namespace: pidNamespace()}); err != nil {
			t.Fatal(err)
		}
	}
	before := openFiles(t)
	cl := newClients(r, &ec.Adopted{}, 4, slog.New(slog.DiscardHandler))
	cl.mu.Lock()
	if x := cl.exits[own]; x == nil || x.users != 3 || len(cl.exits) != 1 {
		t.Errorf("%+v of %d; want 1 that 3 clients wait for", x, len(cl.exits))
	}
	cl.mu.Unlock()
	if got := openFiles(t); got != before+1 {
		t.Errorf("%d descriptors for 3 clients of a process, want 1", got-before)
	}
	cl.close()
	if got := openFiles(t); got != before || len(cl.exits) != 0 {
		t.Errorf("%d descriptors and %d processes are left", got-before, len(cl.exits))
	}
}

// Without pidfds it can still be seen that a pid is another's by now.
func TestAPidThatWasGivenAgainIsSeenWithoutAPidfd(t *testing.T) {
	t.Cleanup(func() { openProcess = realOpenProcess })
	openProcess = func(int) (*os.File, error) { return nil, unix.EMFILE }
	own := processOf(os.Getpid())
	if own == 0 {
		t.Skip("no /proc")
	}
	for _, c := range []struct {
		name    string
		process uint64
		dead    bool
	}{{"the process itself", own, false}, {"another that had its pid", own - 100, true}, {"no process", 0, false}} {
		if f, dead := watchProcess(c.process); f != nil || dead != c.dead {
			t.Errorf("%s: dead %v, want %v", c.name, dead, c.dead)
		}
	}
}

var realOpenProcess = openProcess
