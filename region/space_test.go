package region

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const mountsEnv = "FERRY_REGION_TEST_MOUNTS"

// inPrivateMounts runs the test once more in a process with mounts of its own, and reports whether this is that process. Where there
// can be no such process the test is skipped, or fails where FERRY_INTEROP_REQUIRED is set.
func inPrivateMounts(t *testing.T) bool {
	t.Helper()
	if os.Getenv(mountsEnv) != "" {
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root to mount a tmpfs")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), mountsEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EINVAL) {
		const why = "a process cannot have mounts of its own here (no CAP_SYS_ADMIN, or the root directory is no mount point, as in a chroot):"
		if os.Getenv("FERRY_INTEROP_REQUIRED") != "" {
			t.Fatal(why, err)
		}
		t.Skip(why, err)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: "+t.Name()) {
		t.Fatalf("%v\n%s", err, out)
	}
	return false
}

// mountTmpfs gives an empty tmpfs, or ends the test where that is not allowed.
func mountTmpfs(t *testing.T, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

func sized(dir string, blocks int) Options {
	o := smallOptions(dir)
	o.Geometry = Geometry{BlockBytes: 1 << 20, Blocks: blocks, Slots: 8}
	return o
}

func wantSpace(t *testing.T, err error, dir string, asked int64, words ...string) *SpaceError {
	t.Helper()
	var s *SpaceError
	if !errors.As(err, &s) {
		t.Fatalf("%v is no *SpaceError", err)
	}
	if s.Asked != asked {
		t.Errorf("asked %d, want %d", s.Asked, asked)
	}
	words = append(words, dir, fmt.Sprint(s.Asked), fmt.Sprint(s.Free))
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
	return s
}

func TestFullTmpfsIsASpaceErrorWithBothNumbersAndTheKnobAndNeverSIGBUS(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	knobs := []string{"--shm-size", "emptyDir", "sizeLimit", "tmpfs"}
	dir := mountTmpfs(t, "size=64m")
	s := wantSpace(t, func() error { _, err := Create(t.Context(), sized(dir, 200)); return err }(),
		dir, sized(dir, 200).Geometry.fileBytes(), append(knobs, "asked 200.1 MiB", "free 64.0 MiB")...)
	if s.Free != 64<<20 || s.Path != filepath.Join(dir, smallName) {
		t.Errorf("%+v", s)
	}
	wantFiles(t, dir)

	// The space goes away between the look and the reservation, in both ways of reserving, and after a part is reserved.
	for name, call := range map[string]func(fd int, off, n int64) error{
		"fallocate": kernelCalls.fallocate,
		"writing":   func(int, int64, int64) error { return unix.EOPNOTSUPP },
	} {
		for _, base := range []kernel{kernelCalls, withoutTmpfile()} {
			k := base
			hog := filepath.Join(dir, "hog")
			k.fallocate = func(fd int, off, n int64) error {
				if off == 0 {
					f := must(os.Create(hog))
					must(0, unix.Fallocate(int(f.Fd()), 0, 0, 30<<20))
					f.Close()
				}
				return call(fd, off, n)
			}
			_, err := create(t.Context(), sized(dir, 60), k)
			t.Log(name, err)
			wantSpace(t, err, dir, sized(dir, 60).Geometry.fileBytes(), knobs...)
			wantFiles(t, dir, "hog")
			os.Remove(hog)
		}
	}

	// What fits to the last page is made and can be written to the last byte.
	r := mustCreate(t, sized(dir, 63))
	for off := 0; off < len(r.Pool()); off += 1 << 20 {
		copy(r.Pool()[off:], bytes.Repeat([]byte{1}, 1<<20))
	}
	r.Close(true)
	wantFiles(t, dir)
}

func TestTmpfsWithoutInodesIsASpaceErrorThatSaysSo(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	dir := mountTmpfs(t, "size=64m,nr_inodes=2") // one for the root
	if err := os.WriteFile(filepath.Join(dir, "x"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Create(t.Context(), sized(dir, 1))
	wantSpace(t, err, dir, sized(dir, 1).Geometry.fileBytes(), "nr_inodes")
}

func TestTmpfsWithoutASizeHasNoLimitOfItsOwn(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	dir := must(openDir(mountTmpfs(t, "size=0")))
	defer dir.Close()
	if v := must(volumeOf(dir)); v.free != math.MaxInt64 || !v.memory {
		t.Errorf("%+v", v)
	}
	mustCreate(t, sized(dir.Name(), 4))
}

// A container that was killed finds its tmpfs as it left it, with room for one region only.
func TestLeakedRegionOfADeadOwnerDoesNotPreventTheRestart(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	o := smallOptions(mountTmpfs(t, fmt.Sprintf("size=%d", smallOptions("").Geometry.fileBytes())))
	for range 3 {
		c := startChild(t, "hold", nil, o.Dir)
		if path := c.hear(); path != filepath.Join(o.Dir, smallName) {
			t.Fatal(path)
		}
		// While it lives the next one must not even try: neither reap nor complain of space.
		if _, err := Create(t.Context(), o); !errors.Is(err, ErrInUse) {
			t.Fatal(err)
		}
		c.kill()
		wantFiles(t, o.Dir, smallName)
	}
	mustCreate(t, o)
}

// A restart with a wrong size must not cost the entries.
func TestARegionThatWaitsIsKeptIfTheOneThatWasAskedForWouldNotFitInItsPlace(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	small := keptOptions("")
	size := small.Geometry.fileBytes()
	small.Dir = mountTmpfs(t, fmt.Sprintf("size=%d", size+size/2))
	path, epoch, _, _ := deadRegion(t, small.Dir)
	large := small
	large.Geometry.Blocks *= 4
	for _, replace := range []bool{false, true} { // as Take and Create do it
		open := Take
		if large.Replace = replace; replace {
			open = Create
		}
		_, err := open(t.Context(), large)
		s := wantSpace(t, err, small.Dir, large.Geometry.fileBytes(), "is kept")
		if s.Free < size || s.Free >= s.Asked {
			t.Errorf("%d bytes are free, with the %d of the file that lies there", s.Free, size)
		}
		wantFiles(t, small.Dir, smallName)
	}
	r := mustTake(t, small)
	if r.Path() != path || r.Epoch() != epoch+1 || !r.Adopted() {
		t.Errorf("epoch %d of %s, adopted: %v; want the one that was there, of %d", r.Epoch(), r.Path(), r.Adopted(), epoch)
	}
	must(0, r.Close(false))
	fits := small
	fits.Geometry.Blocks = fits.Geometry.Blocks * 5 / 4 // not beside it, only in its place
	if r := mustTake(t, fits); r.Adopted() {
		t.Error("a region of another size was adopted")
	}
}

// A node was killed, and the next one has another model: its region has another name.
func TestFilesThatWaitForAnotherRestartAreNamedInTheSpaceError(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	size := smallOptions("").Geometry.fileBytes()
	o := smallOptions(mountTmpfs(t, fmt.Sprintf("size=%d", size+size/2)))
	o.Identity.Group = strings.Repeat("b", len(groupA))
	path, _, _, _ := deadRegion(t, o.Dir)
	words := []string{path + ", " + bytesText(size), "ferry sweep --force --dir " + o.Dir}
	_, err := Take(t.Context(), o)
	wantSpace(t, err, o.Dir, size, words...)
	_, err = CheckSpace(o.Dir, o.Geometry)
	wantSpace(t, err, o.Dir, size, words...)
	dir := must(openDir(o.Dir))
	defer dir.Close()
	wantSpace(t, spaceFrom(unix.ENOSPC, dir, filepath.Join(o.Dir, "f"), size), o.Dir, size, words...)
	wantFiles(t, o.Dir, smallName)
	must(Sweep(SweepOptions{Dir: o.Dir, Force: true}))
	r := mustTake(t, o)
	large := o
	large.Identity.Group, large.Geometry.Blocks = groupA, 64
	_, err = Create(t.Context(), large)
	if wantSpace(t, err, o.Dir, large.Geometry.fileBytes()); strings.Contains(err.Error(), "sweep") {
		t.Errorf("%v, and %s has a live owner", err, r.Path())
	}
}

func TestMemoryThatEnginesKeepOfAReapedRegionIsNamedInTheSpaceError(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	size := smallOptions("").Geometry.fileBytes()
	o := smallOptions(mountTmpfs(t, fmt.Sprintf("size=%d", size)))
	c := startChild(t, "hold", nil, o.Dir)
	m := must(Open(c.hear()))
	c.kill()
	_, err := Create(t.Context(), o)
	wantSpace(t, err, o.Dir, size, fmt.Sprintf("pid %d", c.cmd.Process.Pid), "still map it")
	m.Close()
	mustCreate(t, o)
}

// Two creators and room for one: had both reserved at the same time, both could fail.
func TestRacingCreatorsDoNotTakeTheSpaceFromEachOther(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	dir := mountTmpfs(t, fmt.Sprintf("size=%d", smallOptions("").Geometry.fileBytes()))
	a, b := startChild(t, "race", nil, dir), startChild(t, "race", nil, dir)
	for range 200 {
		a.say("x")
		b.say("x")
		if got := a.hear() + ", " + b.hear(); got != "won, in use" && got != "in use, won" {
			t.Fatal(got)
		}
		for _, c := range []*child{a, b} {
			c.say("close")
			c.hear()
		}
	}
	wantFiles(t, dir)
}

func TestLimitOnFileSizesIsASpaceErrorAndNotASignal(t *testing.T) {
	dir := t.TempDir()
	c := startChild(t, "rlimit", nil, dir)
	if got := c.hear(); !strings.HasPrefix(got, "true ") || !strings.Contains(got, "RLIMIT_FSIZE") || !strings.Contains(got, "ulimit -f") {
		t.Error(got)
	}
	wantFiles(t, dir)
}

// C52: what is asked beforehand is what the start asks.
func TestWhatFitsBeforehandIsWhatCanBeMade(t *testing.T) {
	dir := t.TempDir()
	g := smallOptions(dir).Geometry
	if asked, err := CheckSpace(dir, g, g); asked != 2*g.fileBytes() || err != nil {
		t.Errorf("%d bytes, %v; want %d", asked, err, 2*g.fileBytes())
	}
	g.Slots = 0
	if asked, err := CheckSpace(dir, g); asked != (Geometry{g.BlockBytes, g.Blocks, g.Blocks}).fileBytes() || err != nil {
		t.Errorf("%d bytes with the default number of slots, %v", asked, err)
	}
	if _, err := CheckSpace(dir, Geometry{BlockBytes: 1 << 20, Blocks: MaxBlocks + 1}); !errors.Is(err, ErrOptions) {
		t.Errorf("%v; want ErrOptions", err)
	}
	if _, err := CheckSpace(filepath.Join(dir, "none"), g); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v; want that of a directory that is not there", err)
	}
	if c := startChild(t, "rlimit", nil, dir); !strings.HasPrefix(c.hear(), "true ") || !strings.HasPrefix(c.hear(), "true ") {
		t.Error("the limit on file sizes was not seen beforehand")
	}
	if !inPrivateMounts(t) {
		return
	}
	o := sized(mountTmpfs(t, "size=64m"), 63)
	_, err := CheckSpace(o.Dir, o.Geometry)
	if err != nil {
		t.Errorf("%v, and it can be made", err)
	}
	o.Geometry.Slots = 4096 // 2 MiB more
	_, err = CheckSpace(o.Dir, o.Geometry)
	s := wantSpace(t, err, o.Dir, o.Geometry.fileBytes(), "--shm-size")
	_, made := Create(t.Context(), o)
	if w := wantSpace(t, made, o.Dir, o.Geometry.fileBytes()); w.Free != s.Free || w.Limit != s.Limit {
		t.Errorf("%v beforehand, then %v", err, made)
	}
	o.Dir = mountTmpfs(t, "size=0")
	if _, err := CheckSpace(o.Dir, sized(o.Dir, 4).Geometry); err != nil {
		t.Errorf("a tmpfs without a size: %v", err)
	}
}

func TestSystemErrorsOfSpaceBecomeASpaceErrorAndOthersStay(t *testing.T) {
	dir := must(openDir(t.TempDir()))
	defer dir.Close()
	for _, errno := range []error{unix.ENOSPC, unix.EDQUOT, unix.EFBIG, unix.ENOMEM} {
		wantSpace(t, spaceFrom(fmt.Errorf("x: %w", errno), dir, filepath.Join(dir.Name(), "f"), 5<<20), dir.Name(), 5<<20)
	}
	for _, err := range []error{nil, unix.EIO, errors.New("x")} {
		if got := spaceFrom(err, dir, "f", 1); got != err {
			t.Errorf("%v became %v", err, got)
		}
	}
}

// A tmpfs has room for one file, and processes serve one that lost its name.
func TestWhatIsServedWithoutItsNameGoesBeforeAStartFailsForItsMemory(t *testing.T) {
	if !inPrivateMounts(t) {
		return
	}
	for _, c := range []struct {
		name  string
		ended int
		fits  bool
	}{{"they end", 2, true}, {"there are none", 0, false}} {
		t.Run(c.name, func(t *testing.T) {
			size := smallOptions("").Geometry.fileBytes()
			o := keptOptions(mountTmpfs(t, fmt.Sprintf("size=%d", size)))
			r := mustTake(t, o)
			served := reopened(t, r)
			path := r.Path()
			must(0, r.Close(true))
			calls := 0
			o.Reclaim = func(_ context.Context, p string) int {
				calls++
				if p != path {
					t.Errorf("for %s, want %s", p, path)
				}
				if c.ended > 0 {
					_ = served.Close()
				}
				return c.ended
			}
			next, err := Take(t.Context(), o)
			if calls != 1 {
				t.Errorf("%d calls, want one", calls)
			}
			if !c.fits {
				wantSpace(t, err, o.Dir, size)
				return
			}
			must(0, err)
			if _, why := next.Replaced(); !strings.Contains(why, "were ended") {
				t.Errorf("it says %q", why)
			}
			must(0, next.Close(true))
		})
	}
}
