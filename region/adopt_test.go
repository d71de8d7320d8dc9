package region

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func keptOptions(dir string) Options {
	o := smallOptions(dir)
	o.Keep = time.Hour
	return o
}

// childKeep DIR: owns a region that waits for a restart, with a ready entry "a", a filling one "b" of client 7 with half of its
// bytes written, and a torn one; then waits to be killed.
func childKeep(args []string) {
	r := must(Take(context.Background(), keptOptions(args[0])))
	r.SetPort(4711)
	must(0, r.Clients().Set(3, Client{ID: 7, Process: 70, Namespace: 700}))
	t, pool := r.Slots(), r.Pool()
	must(t.Fill(2, &Slot{Key: "a", Dtype: "torch.bfloat16", Shape: []int64{2, 2048}, Bytes: 8192, Extents: []Extent{{4, 2}}}))
	copy(pool[4*4096:], bytes.Repeat([]byte("a"), 8192))
	t.Ready(2, 99, true)
	t.SetHolds(2, 3)
	t.SetPins(2, 2)
	must(t.Fill(5, &Slot{Key: "b", Bytes: 4096, Extents: []Extent{{9, 1}}, Owner: 7}))
	copy(pool[9*4096:], bytes.Repeat([]byte("b"), 2000))
	gen := must(t.Fill(6, &Slot{Key: "torn", Bytes: 4096, Extents: []Extent{{10, 1}}}))
	atomic.StoreUint64(&t.slot(6)[wordSum], gen) // as between two of Fill's stores
	fmt.Println(r.Path(), r.Epoch(), gen)
	bufio.NewScanner(os.Stdin).Scan()
}

// deadRegion is what a killed childKeep leaves.
func deadRegion(t *testing.T, dir string) (path string, epoch, gen uint64, pid int) {
	t.Helper()
	c := startChild(t, "keep", nil, dir)
	if _, err := fmt.Sscan(c.hear(), &path, &epoch, &gen); err != nil {
		t.Fatal(err)
	}
	c.kill()
	return path, epoch, gen, c.cmd.Process.Pid
}

func mustTake(t *testing.T, o Options) *Region {
	t.Helper()
	r, err := Take(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(true); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestARestartedOwnerGoesOnWithItsFile(t *testing.T) {
	dir := shmDir(t)
	path, epoch, gen, _ := deadRegion(t, dir)
	m, err := Open(path) // an engine that stays
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r := mustTake(t, keptOptions(dir))
	if !r.Adopted() || r.Epoch() != epoch+1 || r.Port() != 4711 || r.Path() != path {
		t.Fatalf("adopted %t, epoch %d after %d, port %d", r.Adopted(), r.Epoch(), epoch, r.Port())
	}
	if m.Epoch() != epoch+1 || m.OwnerPID() != os.Getpid() || m.Port() != 4711 {
		t.Errorf("who had it mapped sees epoch %d, owner %d, port %d", m.Epoch(), m.OwnerPID(), m.Port())
	}
	a := r.Slots().Audit()
	if a.Ready != 1 || a.Filling != 1 || a.Torn != 1 || a.Free != 5 || a.Bytes != 8192 || a.Blocks != 3 || len(a.Problems) != 0 {
		t.Errorf("%+v", a)
	}
	s, err := r.Slots().Load(2)
	if err != nil || s.State != SlotReady || s.Key != "a" || s.Checksum != 99 || !s.HasChecksum || s.Holds != 3 || s.Pins != 2 {
		t.Errorf("%+v, %v", s, err)
	}
	if !bytes.Equal(r.Pool()[4*4096:6*4096], bytes.Repeat([]byte("a"), 8192)) {
		t.Error("bytes of the ready entry changed")
	}
	if c, ok := r.Clients().Load(3); !ok || c != (Client{7, 70, 700}) {
		t.Errorf("client %+v, %t", c, ok)
	}
	if s, err := r.Slots().Load(5); err != nil || s.State != SlotFilling || s.Owner != 7 {
		t.Errorf("%+v, %v", s, err)
	}
	if got := mustFill(t, r.Slots(), 0, Slot{Key: "c"}); got <= gen {
		t.Errorf("generation %d after %d", got, gen)
	}
	if !m.Slots().Check(2, s.Gen) {
		t.Error("who had it mapped does not see the same entry")
	}
	wantFiles(t, dir, smallName)
}

// C49: pre-faulting by touching must not change what is there.
func TestAdoptingChangesNoByteOnAKernelThatCannotPopulate(t *testing.T) {
	dir := shmDir(t)
	path, epoch, _, _ := deadRegion(t, dir)
	f := must(os.OpenFile(path, os.O_RDWR, 0))
	want := bytes.Repeat([]byte{0xa5}, 16*4096)
	must(f.WriteAt(want, 64<<10)) // the pool, from its first byte
	must(0, f.Close())
	before := must(os.ReadFile(path))
	k := kernelCalls
	k.populate = func([]byte) error { return unix.EINVAL }
	r, err := open(t.Context(), keptOptions(dir), k, true)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close(true)
	if !r.Adopted() || r.Epoch() != epoch+1 {
		t.Fatalf("adopted: %t, epoch %d after %d", r.Adopted(), r.Epoch(), epoch)
	}
	after := must(os.ReadFile(path))
	for _, off := range []int{offEpoch, offOwner, offAdoptUntil} { // what an adoption is to change
		clear(before[off:][:8])
		clear(after[off:][:8])
	}
	for i := range before {
		if before[i] != after[i] {
			t.Fatalf("byte %d was %#x and is %#x", i, before[i], after[i])
		}
	}
}

func TestWhatCannotBeAdoptedIsReapedForAReason(t *testing.T) {
	header := func(off int, v uint64) func(*testing.T, string, *Options) {
		return func(t *testing.T, path string, _ *Options) { patch(t, path, int64(off), v) }
	}
	for name, c := range map[string]struct {
		change func(t *testing.T, path string, o *Options)
		why    string
	}{
		"its time is over":     {header(offAdoptUntil, 1), "until"},
		"it was not to wait":   {header(offAdoptUntil, 0), "no restart"},
		"other block size":     {func(_ *testing.T, _ string, o *Options) { o.Geometry.BlockBytes = 8192 }, "wanted are 16 of 8192"},
		"other number":         {func(_ *testing.T, _ string, o *Options) { o.Geometry.Blocks = 20 }, "wanted are 20 of 4096"},
		"cut short":            {func(t *testing.T, path string, _ *Options) { must(0, os.Truncate(path, 70000)) }, "70000 bytes"},
		"cut to nothing":       {func(t *testing.T, path string, _ *Options) { must(0, os.Truncate(path, 0)) }, "0 bytes"},
		"cut in its header":    {func(t *testing.T, path string, _ *Options) { must(0, os.Truncate(path, 100)) }, "100 bytes"},
		"a record is damaged":  {header(tableOffset+2*SlotBytes+wordRecord*8, 1), "damaged"},
		"an impossible state":  {header(tableOffset, 3), "state 3"},
		"before the last boot": {func(t *testing.T, path string, _ *Options) { otherBoot(t, path) }, "booted"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := shmDir(t)
			path, epoch, gen, pid := deadRegion(t, dir)
			o := keptOptions(dir)
			c.change(t, path, &o)
			r := mustTake(t, o)
			replaced, why := r.Replaced()
			if r.Adopted() || !strings.Contains(why, c.why) {
				t.Fatalf("adopted %t, because %q; want %q", r.Adopted(), why, c.why)
			}
			if !strings.HasPrefix(name, "cut") && (replaced != pid || r.Epoch() != epoch+1) {
				t.Errorf("replaced %d, epoch %d after %d", replaced, r.Epoch(), epoch)
			}
			if got := mustFill(t, r.Slots(), 0, Slot{Key: "c"}); got <= gen {
				t.Errorf("generation %d after %d", got, gen)
			}
			if a := r.Slots().Audit(); a.Free != 7 || a.Filling != 1 {
				t.Errorf("%+v", a)
			}
			wantFiles(t, dir, smallName)
		})
	}
}

// patch writes a word of a file that nobody owns.
func patch(t *testing.T, path string, off int64, v uint64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(order.AppendUint64(nil, v), off); err != nil {
		t.Fatal(err)
	}
}

// otherBoot makes the file one that a disk kept over a reboot.
func otherBoot(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page, err := readPage(f)
	if err != nil {
		t.Fatal(err)
	}
	h, err := decodeHeader(page, 64<<10+16*4096)
	if err != nil {
		t.Fatal(err)
	}
	h.bootID = strings.Repeat("0", bootIDBytes)
	clear(page)
	h.encode(page)
	if _, err := f.WriteAt(page, 0); err != nil {
		t.Fatal(err)
	}
}

func TestTwoSlotsThatShareABlockAreDamage(t *testing.T) {
	dir := shmDir(t)
	r := mustCreate(t, keptOptions(dir))
	mustFill(t, r.Slots(), 1, Slot{Key: "x", Bytes: 1, Extents: []Extent{{0, 4}}})
	mustFill(t, r.Slots(), 4, Slot{Key: "y", Bytes: 1, Extents: []Extent{{3, 1}, {7, 1}}})
	a := r.Slots().Audit()
	if len(a.Problems) != 1 || !errors.Is(a.Problems[0], ErrFormat) || !strings.Contains(a.Problems[0].Error(), "slots 1 and 4 share block 3") {
		t.Fatalf("%+v", a)
	}
	if err := r.Close(false); err != nil {
		t.Fatal(err)
	}
	if _, why := mustTake(t, keptOptions(dir)).Replaced(); !strings.Contains(why, "share block 3") {
		t.Errorf("%q", why)
	}
}

func TestAFileThatWaitsIsNotReapedUnlessTold(t *testing.T) {
	dir := shmDir(t)
	path, _, _, pid := deadRegion(t, dir)
	if _, err := Create(t.Context(), smallOptions(dir)); !errors.Is(err, ErrWaits) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), strconv.Itoa(pid)) {
		t.Fatalf("%v; want ErrWaits that names file and pid", err)
	}
	wantFiles(t, dir, smallName)
	o := smallOptions(dir)
	o.Replace = true
	r := mustCreate(t, o)
	if got, _ := r.Replaced(); r.Adopted() || got != pid {
		t.Errorf("adopted %t, replaced %d", r.Adopted(), got)
	}
}

func TestACleanEndLeavesTheFileForARestartIfTold(t *testing.T) {
	dir := shmDir(t)
	r := mustTake(t, keptOptions(dir))
	mustFill(t, r.Slots(), 0, Slot{Key: "k"})
	r.Slots().Ready(0, 0, false)
	r.KeepFor(time.Minute)
	if err := r.Close(false); err != nil {
		t.Fatal(err)
	}
	r = mustTake(t, keptOptions(dir))
	if a := r.Slots().Audit(); !r.Adopted() || a.Ready != 1 {
		t.Fatalf("adopted %t, %+v", r.Adopted(), a)
	}
	r.KeepFor(0)
	if err := r.Close(false); err != nil {
		t.Fatal(err)
	}
	if r = mustTake(t, keptOptions(dir)); r.Adopted() {
		t.Error("adopted though it was not to wait")
	}
}

func TestTakeMeetsALiveOwnerAsCreateDoes(t *testing.T) {
	dir := shmDir(t)
	c := startChild(t, "keep", nil, dir)
	c.hear()
	if _, err := Take(t.Context(), keptOptions(dir)); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), strconv.Itoa(c.cmd.Process.Pid)) {
		t.Fatalf("%v; want ErrInUse", err)
	}
	c.kill()
}

func TestAKilledAdoptionCanBeAdoptedAgain(t *testing.T) {
	dir := shmDir(t)
	_, epoch, _, _ := deadRegion(t, dir)
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	k := kernelCalls
	k.populate = func([]byte) error { cancel(enough); return nil }
	if _, err := open(ctx, keptOptions(dir), k, true); !errors.Is(err, enough) {
		t.Fatalf("%v; want the context's cause", err)
	}
	wantFiles(t, dir, smallName)
	if r := mustTake(t, keptOptions(dir)); !r.Adopted() || r.Epoch() != epoch+1 {
		t.Errorf("adopted %t, epoch %d", r.Adopted(), r.Epoch())
	}
}

func TestAttachersOfAnAdoptedFileNeverGetTheLockedDescriptor(t *testing.T) {
	dir := shmDir(t)
	deadRegion(t, dir)
	r := mustTake(t, keptOptions(dir))
	f, err := r.Reopen(true)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	c := startChild(t, "attach", []*os.File{f}, "w")
	if got := c.hear(); got != "attached" {
		t.Fatal(got)
	}
	if err := r.Close(false); err != nil {
		t.Fatal(err)
	}
	// The lock is free although the attacher lives.
	if r = mustTake(t, keptOptions(dir)); !r.Adopted() {
		t.Error("not adopted")
	}
}

func TestClientRowsAreWholeOrFree(t *testing.T) {
	r := mustCreate(t, smallOptions(shmDir(t)))
	c := r.Clients()
	if c.Len() != MaxClients {
		t.Fatal(c.Len())
	}
	for _, i := range []int{0, 17, MaxClients - 1} {
		if _, ok := c.Load(i); ok {
			t.Errorf("row %d of a new file is taken", i)
		}
		if err := c.Set(i, Client{Process: 1}); !errors.Is(err, ErrSlot) {
			t.Errorf("a client without ID: %v", err)
		}
		want := Client{ID: uint64(i + 1), Process: 2, Namespace: 3}
		if err := c.Set(i, want); err != nil {
			t.Fatal(err)
		}
		if err := c.Set(i, want); !errors.Is(err, ErrSlot) {
			t.Errorf("a row that is taken: %v", err)
		}
		if got, ok := c.Load(i); !ok || got != want {
			t.Errorf("%+v, %t", got, ok)
		}
		c.Clear(i)
		if _, ok := c.Load(i); ok {
			t.Error("still there")
		}
	}
	if a := r.Slots().Audit(); a.Free != 8 {
		t.Errorf("rows reach into the slots: %+v", a)
	}
}

// childWrite: holds the lock of a process that writes descriptor 3 on its owner's behalf, until it is killed.
func childWrite([]string) {
	must(0, unix.FcntlFlock(3, unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_RDLCK, Len: 1}))
	fmt.Println("writing")
	bufio.NewScanner(os.Stdin).Scan()
}

func TestARestartWaitsForProcessesThatWroteForTheOwner(t *testing.T) {
	dir := shmDir(t)
	r := mustTake(t, keptOptions(dir))
	f := must(r.Reopen(true))
	writer := startChild(t, "write", []*os.File{f})
	f.Close() // the lock is the description's, which the child has as well
	writer.hear()
	if err := r.Close(false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if r, err := Take(ctx, keptOptions(dir)); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%v, %v", r, err)
	}
	wantFiles(t, dir, smallName)
	took := make(chan error, 1)
	go func() {
		r, err := Take(t.Context(), keptOptions(dir))
		if err == nil {
			if !r.Adopted() {
				err = errors.New("not adopted")
			}
			err = errors.Join(err, r.Close(true))
		}
		took <- err
	}()
	writer.kill()
	if err := <-took; err != nil {
		t.Error(err)
	}
}

// BenchmarkTake is a restart's part of this package, a GiB a run.
func BenchmarkTake(b *testing.B) {
	dir, err := os.MkdirTemp(DefaultDir, "ferry-test-")
	if err != nil {
		b.Skip("no tmpfs:", err)
	}
	defer os.RemoveAll(dir)
	o := keptOptions(dir)
	o.Geometry = Geometry{BlockBytes: 7168, Blocks: (1 << 30) / 7168}
	var st unix.Statfs_t
	if unix.Statfs(dir, &st) == nil && int64(st.Bavail)*st.Bsize < 2<<30 {
		b.Skip("no room for a GiB")
	}
	r, err := Take(b.Context(), o)
	if err != nil {
		b.Fatal(err)
	}
	b.SetBytes(1 << 30)
	for b.Loop() {
		if err := r.Close(false); err != nil {
			b.Fatal(err)
		}
		if r, err = Take(b.Context(), o); err != nil || !r.Adopted() {
			b.Fatal(err)
		}
	}
	if err := r.Close(true); err != nil {
		b.Fatal(err)
	}
}
