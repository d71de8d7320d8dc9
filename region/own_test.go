package region

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestLiveOwnersFileIsNeverReaped(t *testing.T) {
	dir := shmDir(t)
	c := startChild(t, "hold", nil, dir)
	path := c.hear()
	_, err := Create(t.Context(), smallOptions(dir))
	if pid := strconv.Itoa(c.cmd.Process.Pid); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), path+", pid "+pid) {
		t.Fatalf("error %v does not name %s and %s", err, path, pid)
	}
	m, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if m.OwnerPID() != c.cmd.Process.Pid {
		t.Errorf("owner %d, want %d", m.OwnerPID(), c.cmd.Process.Pid)
	}
	m.Close()
	c.say("remove")
	c.hear()
	wantFiles(t, dir)
}

func TestDeadOwnersFileIsReapedAndItsEpochAndGenerationsGoOn(t *testing.T) {
	dir := shmDir(t)
	for round := range 3 {
		c := startChild(t, "hold", nil, dir)
		path := c.hear()
		m, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		if want := uint64(2*round + 1); m.Epoch() != want {
			t.Fatalf("epoch %d, want %d", m.Epoch(), want)
		}
		c.kill()
		wantFiles(t, dir, smallName)
		r := mustCreate(t, smallOptions(dir))
		replaced, _ := r.Replaced()
		if r.Epoch() != m.Epoch()+1 || replaced != c.cmd.Process.Pid || r.header.gen < m.header.gen {
			t.Fatalf("epoch %d after %d, replaced %d, generations from %d after %d",
				r.Epoch(), m.Epoch(), replaced, r.header.gen, m.header.gen)
		}
		if m.Pool()[0] != 0 { // the old mapping is still good
			t.Fatal("byte of the old region changed")
		}
		wantFiles(t, dir, smallName)
		r.Close(false)
	}
	os.Remove(filepath.Join(dir, smallName))
}

func TestGenerationsNeverStartAgainEvenIfTheFileWasRemoved(t *testing.T) {
	o := smallOptions(t.TempDir())
	s := Slot{Key: "k"}
	last := uint64(0)
	for range 5 {
		r := mustCreate(t, o)
		gen := mustFill(t, r.Slots(), 0, s)
		if gen <= last || gen >= 1<<53 {
			t.Fatalf("generation %d after %d", gen, last)
		}
		last = gen
		r.Close(true)
	}
	if got := firstGen(100, time.Unix(-5, 0)); got != 100 {
		t.Errorf("first generation %d with a clock before the epoch", got)
	}
}

func TestWhatIsNotOursIsLeftAlone(t *testing.T) {
	region := func(t *testing.T, dir string, change func(f *os.File)) {
		r, err := Create(t.Context(), smallOptions(dir))
		if err != nil {
			t.Fatal(err)
		}
		r.Close(false)
		f, err := os.OpenFile(r.Path(), os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		change(f)
	}
	for name, c := range map[string]struct {
		lay  func(t *testing.T, dir, path string)
		want error
	}{
		"symbolic link": {func(t *testing.T, dir, path string) {
			other := t.TempDir()
			region(t, other, func(*os.File) {})
			must(0, os.Symlink(filepath.Join(other, smallName), path))
		}, ErrForeign},
		"dangling link": {func(t *testing.T, dir, path string) { must(0, os.Symlink("/nowhere", path)) }, ErrForeign},
		"directory":     {func(t *testing.T, dir, path string) { must(0, os.Mkdir(path, 0o700)) }, ErrForeign},
		"fifo":          {func(t *testing.T, dir, path string) { must(0, unix.Mkfifo(path, 0o600)) }, ErrForeign},
		"another user's region": {func(t *testing.T, dir, path string) {
			if os.Geteuid() != 0 {
				t.Skip("needs root to give a file away")
			}
			region(t, dir, func(f *os.File) { must(0, f.Chown(12345, -1)) })
		}, ErrForeign},
		"short file": {func(t *testing.T, dir, path string) { must(0, os.WriteFile(path, []byte("FERRY"), 0o600)) }, ErrExists},
		"other file": {func(t *testing.T, dir, path string) {
			must(0, os.WriteFile(path, bytes.Repeat([]byte("x"), 10000), 0o600))
		}, ErrExists},
		"damaged header": {func(t *testing.T, dir, path string) {
			region(t, dir, func(f *os.File) { must(f.WriteAt([]byte{1}, offBlocks)) })
		}, ErrExists},
		"region whose header was cleared": {func(t *testing.T, dir, path string) {
			region(t, dir, func(f *os.File) { must(f.WriteAt(make([]byte, headerBytes), 0)) })
		}, ErrExists},
		"another user's empty file": {func(t *testing.T, dir, path string) {
			must(0, os.WriteFile(path, nil, 0o600))
			if err := os.Chown(path, 12345, -1); err != nil {
				t.Skip("needs root to give a file away")
			}
		}, ErrForeign},
		"region of another identity": {func(t *testing.T, dir, path string) {
			o := smallOptions(dir)
			o.Identity.Rank = 7
			r := must(Create(t.Context(), o))
			r.Close(false)
			must(0, os.Rename(r.Path(), path))
		}, ErrExists},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, smallName)
			c.lay(t, dir, path)
			before, err := os.Lstat(path)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := Create(t.Context(), smallOptions(dir)); !errors.Is(err, c.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("Create: %v, want %v", err, c.want)
			}
			if _, err := Open(path); c.want == ErrForeign && !errors.Is(err, ErrForeign) {
				t.Errorf("Open: %v", err)
			}
			after, err := os.Lstat(path)
			if err != nil || !os.SameFile(before, after) {
				t.Errorf("it was touched: %v", err)
			}
			wantFiles(t, dir, smallName)
		})
	}
}

func TestDeadRegionOfAnotherFormatVersionIsReaped(t *testing.T) {
	o := smallOptions(t.TempDir())
	r := mustCreate(t, o)
	r.Close(false)
	page := make([]byte, headerBytes) // a longer constant part with a layout that only its version knows
	copy(page, headerMagic)
	order.PutUint32(page[offVersion:], 9)
	order.PutUint32(page[offConstLen:], 2000)
	order.PutUint64(page[2000:], sumOf(page[:2000]))
	if err := os.WriteFile(r.Path(), page, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(r.Path()); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), "version 9") {
		t.Errorf("Open: %v", err)
	}
	if r := mustCreate(t, o); r.Epoch() != 1 {
		t.Errorf("epoch %d", r.Epoch())
	}
}

func TestClaimOfALiveCreatorIsRespectedAndOfADeadOneTaken(t *testing.T) {
	dir := t.TempDir()
	c := startChild(t, "create", nil, dir) // stands in the middle of Create
	c.hear()
	wantFiles(t, dir, "."+smallName+".claim")
	_, err := Create(t.Context(), smallOptions(dir))
	if pid := fmt.Sprint("created by pid ", c.cmd.Process.Pid); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), pid) {
		t.Errorf("%v does not say %q", err, pid)
	}
	c.kill()
	wantFiles(t, dir, "."+smallName+".claim")
	mustCreate(t, smallOptions(dir))
	wantFiles(t, dir, smallName)

	k := kernelCalls
	k.populate = func([]byte) error {
		_, err = Create(t.Context(), smallOptions(dir)) // the same process is refused as well
		return nil
	}
	os.Remove(filepath.Join(dir, smallName))
	r, cerr := create(t.Context(), smallOptions(dir), k)
	if cerr != nil || !errors.Is(err, ErrInUse) {
		t.Fatal(cerr, err)
	}
	r.Close(true)
	wantFiles(t, dir)
}

func TestClaimThatIsNotOursIsRefused(t *testing.T) {
	for name, lay := range map[string]func(path string){
		"symbolic link": func(path string) { must(0, os.Symlink("/etc/passwd", path)) },
		"fifo":          func(path string) { must(0, unix.Mkfifo(path, 0o600)) },
		"another user's": func(path string) {
			must(0, os.WriteFile(path, nil, 0o600))
			if err := os.Chown(path, 12345, -1); err != nil {
				t.Skip("needs root to give a file away")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := smallOptions(t.TempDir())
			path := filepath.Join(o.Dir, "."+smallName+".claim")
			lay(path)
			if _, err := Create(t.Context(), o); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), path) {
				t.Error(err)
			}
			wantFiles(t, o.Dir, filepath.Base(path))
		})
	}
}

// The name may go or change between the open and the lock; what was locked then is nobody's.
func TestLockOnAFileThatLostItsNameCountsForNothing(t *testing.T) {
	o := smallOptions(t.TempDir())
	dir := must(openDir(o.Dir))
	defer dir.Close()
	c := must(takeClaim(t.Context(), dir, smallName, 0, 0))
	late := must(os.OpenFile(filepath.Join(o.Dir, c.name), os.O_RDWR, 0))
	defer late.Close()
	must(0, c.drop(dir))
	if got, err := lockClaim(dir, c.name, smallName, late); got || err != nil {
		t.Errorf("claim: %t, %v", got, err)
	}

	mustCreate(t, o).Close(false)
	old := must(openOwn(dir, smallName, unix.O_RDWR))
	defer old.Close()
	next := mustCreate(t, o)
	if _, done, err := reapOpen(t.Context(), dir, smallName, next.Path(), old, o, 0); done || err != nil {
		t.Errorf("reaped: %t, %v", done, err)
	}
	wantFiles(t, o.Dir, smallName)
}

func TestNameTakenByAProcessOutsideTheProtocolIsNotOverwritten(t *testing.T) {
	o := smallOptions(t.TempDir())
	k := kernelCalls
	k.populate = func(mem []byte) error { return os.WriteFile(filepath.Join(o.Dir, smallName), []byte("mine"), 0o600) }
	if _, err := create(t.Context(), o, k); !errors.Is(err, ErrExists) {
		t.Error(err)
	}
	if b, err := os.ReadFile(filepath.Join(o.Dir, smallName)); string(b) != "mine" {
		t.Error(b, err)
	}
	wantFiles(t, o.Dir, smallName)
}

func TestCloseAndUnlinkLeaveAnotherFileOfThatNameAlone(t *testing.T) {
	o := smallOptions(t.TempDir())
	r := mustCreate(t, o)
	if err := os.Remove(r.Path()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(r.Path(), []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Unlink(); err != nil {
		t.Error(err)
	}
	if err := r.Close(true); err != nil {
		t.Error(err)
	}
	wantFiles(t, o.Dir, smallName)
}

func TestUnlinkedRegionStillServesAndLeavesNothing(t *testing.T) {
	dir := shmDir(t)
	r := mustCreate(t, smallOptions(dir))
	for range 2 {
		if err := r.Unlink(); err != nil {
			t.Fatal(err)
		}
	}
	wantFiles(t, dir)
	f, err := r.Reopen(true)
	if err != nil {
		t.Fatal(err)
	}
	c := startChild(t, "attach", []*os.File{f}, "w")
	f.Close()
	c.hear()
	c.say("x")
	c.hear()
	if r.Pool()[0] != 'x' {
		t.Error("not one memory")
	}
	r.Close(true)
	if err := r.Unlink(); !errors.Is(err, ErrClosed) {
		t.Errorf("Unlink after Close: %v", err)
	}
}

func TestChildrenAndAttachersDoNotInheritTheLock(t *testing.T) {
	dir := shmDir(t)
	owner := startChild(t, "parent", nil, dir)
	if got := owner.hear(); got != "attached" { // said by the owner's child, which has a reopened descriptor
		t.Fatal(got)
	}
	if _, err := Create(t.Context(), smallOptions(dir)); !errors.Is(err, ErrInUse) {
		t.Fatal(err)
	}
	owner.kill()
	if r := mustCreate(t, smallOptions(dir)); r.Epoch() != 2 {
		t.Errorf("epoch %d", r.Epoch())
	}
	owner.say("sum") // the owner's child lives on, with the old memory
	if got, want := owner.hear(), fmt.Sprint(sumOf(make([]byte, 16*4096))); got != want {
		t.Errorf("sum %s, want %s", got, want)
	}
}

// Two processes race for one name. Every other time a dead owner's file lies there already. A reader opens all the while.
func TestOfTwoRacingCreatorsExactlyOneWinsAndNoReaderSeesAHalfMadeFile(t *testing.T) {
	rounds := 1000
	if testing.Short() {
		rounds = 50
	}
	dir := shmDir(t)
	racers := []*child{startChild(t, "race", nil, dir), startChild(t, "race", nil, dir)}
	var path atomic.Pointer[string]
	seen := make(chan struct{}, 1)
	stop, readerErr := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(readerErr)
		for {
			select {
			case <-stop:
				return
			default:
			}
			p := path.Load()
			if p == nil {
				continue
			}
			m, err := Open(*p)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				readerErr <- err
				return
			}
			if p := m.Pool(); len(p) != 16*4096 || p[len(p)-1] != 0 || m.OwnerPID() == 0 || m.Epoch() == 0 {
				readerErr <- fmt.Errorf("half-made: %d bytes, owner %d, epoch %d", len(p), m.OwnerPID(), m.Epoch())
				return
			}
			m.Close()
			select {
			case seen <- struct{}{}:
			default:
			}
		}
	}()
	for round := range rounds {
		o := smallOptions(dir)
		o.Identity.Instance = "race-" + strconv.Itoa(round)
		name, _ := o.Identity.FileName()
		p := filepath.Join(dir, name)
		path.Store(&p)
		if round%2 == 1 {
			mustCreate(t, o).Close(false)
		}
		for _, c := range racers {
			c.say(o.Identity.Instance)
		}
		answers := racers[0].hear() + ", " + racers[1].hear()
		if answers != "won, in use" && answers != "in use, won" {
			t.Fatalf("round %d: %s", round, answers)
		}
		wantFiles(t, dir, name)
		for _, c := range racers {
			c.say("close")
			c.hear()
		}
		wantFiles(t, dir)
	}
	close(stop)
	if err := <-readerErr; err != nil {
		t.Fatal(err)
	}
	select {
	case <-seen:
	default:
		t.Error("the reader never saw a region")
	}
}

// Two processes race for a name under which an empty file lies, and a sweep is after that too. Whoever opened it before it went has
// locked what is nobody's any more.
func TestOfTwoRacingCreatorsExactlyOneReplacesAnEmptyFile(t *testing.T) {
	rounds := 300
	if testing.Short() {
		rounds = 30
	}
	dir := shmDir(t)
	racers := []*child{startChild(t, "race", nil, dir), startChild(t, "race", nil, dir)}
	startChild(t, "sweep", nil, dir).hear()
	for round := range rounds {
		o := smallOptions(dir)
		o.Identity.Instance = "race-" + strconv.Itoa(round)
		name, _ := o.Identity.FileName()
		must(0, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
		for _, c := range racers {
			c.say(o.Identity.Instance)
		}
		answers := racers[0].hear() + ", " + racers[1].hear()
		if answers != "won, in use" && answers != "in use, won" {
			t.Fatalf("round %d: %s", round, answers)
		}
		m := must(Open(filepath.Join(dir, name)))
		if m.Epoch() != 1 || len(m.Pool()) != 16*4096 {
			t.Fatalf("round %d: epoch %d, %d bytes", round, m.Epoch(), len(m.Pool()))
		}
		must(0, m.Close())
		for _, c := range racers {
			c.say("close")
			c.hear()
		}
	}
}

func TestAnEmptiedFileIsReplacedOnceItsOwnerIsDead(t *testing.T) {
	for _, size := range []int64{0, 8, headerBytes - 1} {
		dir := shmDir(t)
		c := startChild(t, "hold", nil, dir)
		path := c.hear()
		must(0, os.Truncate(path, size))
		pid := strconv.Itoa(c.cmd.Process.Pid)
		if _, err := Create(t.Context(), smallOptions(dir)); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "pid "+pid) {
			t.Errorf("%d bytes: %v, its owner is pid %s", size, err, pid)
		}
		if _, left := sweep(t, SweepOptions{Dir: dir, Force: true}); !strings.Contains(left[smallName], pid) {
			t.Errorf("%d bytes: left %v, its owner is pid %s", size, left, pid)
		}
		c.kill()
		mustCreate(t, smallOptions(dir))
		wantFiles(t, dir, smallName)
	}
}

// waited is a context that tells when somebody waits for it for the first time.
type waited struct {
	context.Context
	first func()
}

func (w waited) Done() <-chan struct{} {
	w.first()
	return w.Context.Done()
}

// What a program that knows nothing of locks writes into an empty file, after that was judged and before it was locked, stays.
func TestAnEmptyFileThatIsWrittenMeanwhileIsLeftAlone(t *testing.T) {
	o := smallOptions(t.TempDir())
	path := filepath.Join(o.Dir, smallName)
	f := must(os.Create(path))
	must(0, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	ctx := waited{t.Context(), sync.OnceFunc(func() {
		must(f.WriteString("mine"))
		must(0, f.Close())
	})}
	if _, err := Create(ctx, o); !errors.Is(err, ErrExists) {
		t.Error(err)
	}
	if b, err := os.ReadFile(path); string(b) != "mine" {
		t.Errorf("%.20q, %v", b, err)
	}
}
