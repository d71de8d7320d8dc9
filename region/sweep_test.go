package region

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// sweep gives the reasons of what was reaped and what was not, by name.
func sweep(t *testing.T, o SweepOptions) (reaped, left map[string]string) {
	t.Helper()
	got, err := Sweep(o)
	if err != nil {
		t.Fatal(err)
	}
	reaped, left = map[string]string{}, map[string]string{}
	for _, s := range got {
		if s.Reaped {
			reaped[filepath.Base(s.Path)] = s.Reason
		} else {
			left[filepath.Base(s.Path)] = s.Reason
		}
	}
	return reaped, left
}

func TestSweepReapsWhatNobodyOwnsAndNothingElse(t *testing.T) {
	dir := shmDir(t)
	name := func(instance string) string { return "ferry_" + instance + "_0123456789ab_r0.region" }
	dead := func(instance string, keep bool) string {
		o := keptOptions(dir)
		o.Identity.Instance = instance
		if !keep {
			o.Keep = 0
		}
		r := must(Create(t.Context(), o))
		must(0, r.Close(false))
		return r.Path()
	}
	live := smallOptions(dir)
	live.Identity.Instance = "live"
	mustCreate(t, live)
	dead("dead", false)
	dead("waits", true)
	must(0, os.Truncate(dead("short", true), 50_000))
	must(0, os.Truncate(dead("emptied", true), 0))
	must(0, os.Truncate(dead("half", true), headerBytes/2))
	must(0, os.Rename(dead("renamed", false), filepath.Join(dir, name("odd"))))
	must(0, os.WriteFile(filepath.Join(dir, name("text")), []byte("not a region"), 0o600))
	must(0, os.WriteFile(filepath.Join(dir, "ferry_mine.region"), nil, 0o600))
	must(0, os.Symlink(filepath.Join(dir, name("dead")), filepath.Join(dir, name("link"))))
	must(0, unix.Mkfifo(filepath.Join(dir, name("fifo")), 0o600))
	must(0, os.WriteFile(filepath.Join(dir, "."+name("killed")+".claim"), nil, 0o600))
	must(0, os.WriteFile(filepath.Join(dir, "."+name("killed")+".new"), make([]byte, 8192), 0o600))
	later := dead("later", true)
	f := must(os.OpenFile(later, os.O_RDWR, 0))
	page := must(readPage(f))
	order.PutUint32(page[offVersion:], headerVersion+1)
	h := must(decodeHeader(must(readPage(f)), 64<<10+16*4096))
	clear(page)
	h.encode(page)
	order.PutUint32(page[offVersion:], headerVersion+1)
	order.PutUint64(page[constLen:], sumOf(page[:constLen]))
	must(f.WriteAt(page, 0))
	must(0, f.Close())
	if os.Geteuid() == 0 {
		must(0, os.Chown(dead("foreign", false), 12345, -1))
	}
	creating := startChild(t, "create", nil, dir)
	if got := creating.hear(); got != "creating" {
		t.Fatal(got)
	}

	wantReaped := map[string]string{
		name("dead"):                    "is dead",
		name("short"):                   "is dead",
		name("emptied"):                 "cut to 0 bytes",
		name("half"):                    "cut to 2048 bytes",
		"." + name("killed") + ".claim": "killed",
		"." + name("killed") + ".new":   "killed",
	}
	wantLeft := map[string]string{
		name("live"):               strconv.Itoa(os.Getpid()),
		name("waits"):              "waits for the restart",
		name("odd"):                "another name",
		name("text"):               "not a region",
		name("link"):               "symbolic link",
		name("fifo"):               "not a regular file",
		name("later"):              "version 2",
		"." + smallName + ".claim": strconv.Itoa(creating.cmd.Process.Pid),
	}
	if os.Geteuid() == 0 {
		wantLeft[name("foreign")] = "uid 12345"
	}
	check := func(what string, got, want map[string]string) {
		t.Helper()
		for n, text := range want {
			if why, ok := got[n]; !ok || !strings.Contains(why, text) {
				t.Errorf("%s %s: %t, %q; want %q", what, n, ok, why, text)
			}
		}
		for n, why := range got {
			if _, ok := want[n]; !ok {
				t.Errorf("%s %s: %s", what, n, why)
			}
		}
	}
	before := must(os.ReadDir(dir))
	reaped, left := sweep(t, SweepOptions{Dir: dir, DryRun: true})
	check("would be reaped", reaped, wantReaped)
	check("would be left", left, wantLeft)
	if after := must(os.ReadDir(dir)); len(after) != len(before) {
		t.Fatalf("a dry run changed %d names to %d", len(before), len(after))
	}
	reaped, left = sweep(t, SweepOptions{Dir: dir})
	check("reaped", reaped, wantReaped)
	check("left", left, wantLeft)
	for n := range wantReaped {
		if _, err := os.Lstat(filepath.Join(dir, n)); !os.IsNotExist(err) {
			t.Errorf("%s is still there", n)
		}
	}
	for n := range wantLeft {
		if _, err := os.Lstat(filepath.Join(dir, n)); err != nil {
			t.Errorf("%s is gone", n)
		}
	}
	reaped, _ = sweep(t, SweepOptions{Dir: dir, Force: true})
	check("by force", reaped, map[string]string{name("waits"): "is dead"})
}

// childSweep DIR: sweeps without a pause until it is killed.
func childSweep(args []string) {
	fmt.Println("sweeping")
	for {
		must(Sweep(SweepOptions{Dir: args[0]}))
	}
}

// Nodes that are restarted together sweep while others adopt.
func TestSweepsNeverCostARestartItsRegion(t *testing.T) {
	dir := shmDir(t)
	deadRegion(t, dir)
	startChild(t, "sweep", nil, dir).hear()
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
			if _, err := Sweep(SweepOptions{Dir: dir}); err != nil {
				ended <- err
				return
			}
		}
	}()
	for i := range 1000 {
		r, err := Take(t.Context(), keptOptions(dir))
		if err != nil {
			t.Fatalf("restart %d: %v", i, err)
		}
		if a := r.Slots().Audit(); !r.Adopted() || a.Ready != 1 {
			_, why := r.Replaced()
			t.Fatalf("restart %d: adopted: %t (%q), %+v", i, r.Adopted(), why, a)
		}
		must(0, r.Close(i == 999))
	}
	close(stop)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A sweep by force, or one of an older version, may have the lock for a moment.
func TestALockThatSomebodyElseHasNeverCostsARegionThatWaits(t *testing.T) {
	dir := shmDir(t)
	path, epoch, _, pid := deadRegion(t, dir)
	other := must(os.OpenFile(path, os.O_RDWR, 0))
	defer other.Close()
	fd := int(other.Fd())
	must(0, unix.Flock(fd, unix.LOCK_EX))
	_, err := Take(t.Context(), keptOptions(dir))
	if !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) ||
		strings.Contains(err.Error(), strconv.Itoa(pid)) {
		t.Fatalf("%v; want ErrInUse that names the file and who has it locked, not the dead owner %d", err, pid)
	}
	wantFiles(t, dir, smallName)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Take(ctx, keptOptions(dir)); !errors.Is(err, context.Canceled) {
		t.Errorf("%v; want the context's", err)
	}
	time.AfterFunc(patience/10, func() { _ = unix.Flock(fd, unix.LOCK_UN) })
	if r := mustTake(t, keptOptions(dir)); !r.Adopted() || r.Epoch() != epoch+1 {
		t.Errorf("adopted: %t, epoch %d after %d", r.Adopted(), r.Epoch(), epoch)
	}
}

func TestTheOwnerOfARegionIsFoundWithoutALock(t *testing.T) {
	dir := shmDir(t)
	c := startChild(t, "keep", nil, dir)
	path := strings.Fields(c.hear())[0]
	if pid, err := OwnerOf(path); err != nil || pid != c.cmd.Process.Pid {
		t.Errorf("%d, %v; want %d", pid, err, c.cmd.Process.Pid)
	}
	c.kill()
	if pid, err := OwnerOf(path); err != nil || pid != 0 {
		t.Errorf("%d, %v; it is dead", pid, err)
	}
}
