package region

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const smallName = "ferry_node-1_0123456789ab_r0.region"

func TestCreatedRegionIsWholeAndNamedAfterItsIdentity(t *testing.T) {
	for _, dir := range []string{t.TempDir(), shmDir(t)} {
		o := smallOptions(dir)
		o.Identity.Rank = 3
		o.Geometry.Slots = 0
		r := mustCreate(t, o)
		if want := filepath.Join(dir, "ferry_node-1_0123456789ab_r3.region"); r.Path() != want {
			t.Errorf("path %s, want %s", r.Path(), want)
		}
		want := Geometry{BlockBytes: 4096, Blocks: 16, Slots: 16}
		replaced, why := r.Replaced()
		if r.Geometry() != want || r.Identity() != o.Identity || r.Epoch() != 1 || replaced != 0 || why != "" {
			t.Errorf("%+v %+v epoch %d replaced %d %q", r.Geometry(), r.Identity(), r.Epoch(), replaced, why)
		}
		if len(r.Pool()) != 16*4096 || r.Slots().Len() != 16 || r.PoolOffset() != 64<<10 {
			t.Errorf("pool of %d bytes at %d, %d slots", len(r.Pool()), r.PoolOffset(), r.Slots().Len())
		}
		if !bytes.Equal(r.Pool(), make([]byte, 16*4096)) {
			t.Error("a new pool is not zero")
		}
		st, err := os.Stat(r.Path())
		if err != nil {
			t.Fatal(err)
		}
		if st.Mode() != 0o600 || st.Size() != 64<<10+16*4096 {
			t.Errorf("mode %s, %d bytes", st.Mode(), st.Size())
		}
		if reserved := st.Sys().(*syscall.Stat_t).Blocks * 512; reserved < st.Size() {
			t.Errorf("only %d bytes are reserved", reserved)
		}
		wantFiles(t, dir, filepath.Base(r.Path()))
		if err := r.Close(true); err != nil {
			t.Fatal(err)
		}
		wantFiles(t, dir)
		if r.Pool() != nil || r.Slots() != nil {
			t.Error("memory after Close")
		}
		if _, err := r.Reopen(false); !errors.Is(err, ErrClosed) {
			t.Errorf("Reopen after Close: %v", err)
		}
		r.SetPort(1)
	}
}

// shmDir is a directory of its own on a tmpfs.
func shmDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp(DefaultDir, "ferry-test-")
	if err != nil {
		t.Skip("no tmpfs:", err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestRanksGroupsAndInstancesNeverShareAFile(t *testing.T) {
	dir := t.TempDir()
	paths := map[string]bool{}
	for _, instance := range []string{"a", "a_0", "A", "a.b-c_d", strings.Repeat("i", 64)} {
		for _, group := range []string{"0", groupA, strings.Repeat("f", 128)} {
			for rank := range 4 {
				o := smallOptions(dir)
				o.Identity = Identity{instance, group, rank}
				paths[mustCreate(t, o).Path()] = true
				if _, err := Create(t.Context(), o); !errors.Is(err, ErrInUse) {
					t.Fatalf("%+v opened twice: %v", o.Identity, err)
				}
			}
		}
	}
	if len(paths) != 5*3*4 {
		t.Errorf("%d files", len(paths))
	}
}

func TestBadOptionsAreRefusedBeforeAnythingIsMade(t *testing.T) {
	type set = func(*Options)
	for name, c := range map[string]struct {
		set  set
		want error
	}{
		"no instance":        {func(o *Options) { o.Identity.Instance = "" }, ErrName},
		"path in instance":   {func(o *Options) { o.Identity.Instance = "../x" }, ErrName},
		"zero byte":          {func(o *Options) { o.Identity.Instance = "a\x00" }, ErrName},
		"letter not ASCII":   {func(o *Options) { o.Identity.Instance = "ä" }, ErrName},
		"long instance":      {func(o *Options) { o.Identity.Instance = strings.Repeat("i", 65) }, ErrName},
		"no group":           {func(o *Options) { o.Identity.Group = "" }, ErrName},
		"group not hex":      {func(o *Options) { o.Identity.Group = "xyz" }, ErrName},
		"group upper case":   {func(o *Options) { o.Identity.Group = "ABCDEF012345" }, ErrName},
		"long group":         {func(o *Options) { o.Identity.Group = strings.Repeat("a", 129) }, ErrName},
		"negative rank":      {func(o *Options) { o.Identity.Rank = -1 }, ErrName},
		"large rank":         {func(o *Options) { o.Identity.Rank = 1 << 16 }, ErrName},
		"no blocks":          {func(o *Options) { o.Geometry.Blocks = 0 }, ErrOptions},
		"negative blocks":    {func(o *Options) { o.Geometry.Blocks = -1 }, ErrOptions},
		"too many blocks":    {func(o *Options) { o.Geometry.Blocks = math.MaxInt }, ErrOptions},
		"no block bytes":     {func(o *Options) { o.Geometry.BlockBytes = 0 }, ErrOptions},
		"large blocks":       {func(o *Options) { o.Geometry.BlockBytes = MaxBlockBytes + 1 }, ErrOptions},
		"overflow":           {func(o *Options) { o.Geometry.BlockBytes = MaxBlockBytes; o.Geometry.Blocks = 1 << 24 }, ErrOptions},
		"negative slots":     {func(o *Options) { o.Geometry.Slots = -1 }, ErrOptions},
		"too many slots":     {func(o *Options) { o.Geometry.Slots = MaxSlots + 1 }, ErrOptions},
		"mode not for owner": {func(o *Options) { o.Mode = 0o440 }, ErrOptions},
		"mode with x":        {func(o *Options) { o.Mode = 0o700 }, ErrOptions},
		"mode with setuid":   {func(o *Options) { o.Mode = 0o600 | fs.ModeSetuid }, ErrOptions},
		"no directory":       {func(o *Options) { o.Dir = filepath.Join(o.Dir, "none") }, fs.ErrNotExist},
	} {
		dir := t.TempDir()
		o := smallOptions(dir)
		c.set(&o)
		if _, err := Create(t.Context(), o); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		wantFiles(t, dir)
	}
}

func TestModeIsExactWhateverTheUmask(t *testing.T) {
	for _, umask := range []int{0, 0o077, 0o777} {
		for _, mode := range []fs.FileMode{0, 0o600, 0o640, 0o666} {
			for _, k := range []kernel{kernelCalls, withoutTmpfile()} {
				o := smallOptions(t.TempDir())
				o.Mode = mode
				old := syscall.Umask(umask)
				r, err := create(t.Context(), o, k)
				syscall.Umask(old)
				if err != nil {
					t.Fatal(err)
				}
				st, err := os.Stat(r.Path())
				if want := max(mode, o.Mode, 0o600); err != nil || st.Mode() != want {
					t.Errorf("umask %#o, mode %#o: %v, %v", umask, mode, st.Mode(), err)
				}
				r.Close(true)
			}
		}
	}
}

func withoutTmpfile() kernel {
	k := kernelCalls
	k.tmpfile = func(int) (int, error) { return -1, unix.EOPNOTSUPP }
	return k
}

func TestCreateWorksWithoutTheCallsOfNewKernels(t *testing.T) {
	for name, change := range map[string]func(*kernel){
		"no O_TMPFILE":           func(k *kernel) { *k = withoutTmpfile() },
		"no MADV_POPULATE_WRITE": func(k *kernel) { k.populate = func([]byte) error { return unix.EINVAL } },
		"no fallocate":           func(k *kernel) { k.fallocate = func(int, int64, int64) error { return unix.EOPNOTSUPP } },
		"interrupted calls": func(k *kernel) {
			var n atomic.Int64
			k.fallocate = func(fd int, off, size int64) error {
				if n.Add(1)%3 != 0 {
					return unix.EINTR
				}
				return kernelCalls.fallocate(fd, off, size)
			}
			k.populate = func(mem []byte) error {
				if n.Add(1)%3 != 0 {
					return unix.EINTR
				}
				return kernelCalls.populate(mem)
			}
		},
	} {
		k := kernelCalls
		change(&k)
		o := smallOptions(t.TempDir())
		o.Geometry = Geometry{BlockBytes: 1 << 20, Blocks: 70, Slots: 8} // several chunks
		// What a creator killed in the fallback leaves:
		left := filepath.Join(o.Dir, "."+smallName+".new")
		if name == "no O_TMPFILE" {
			if err := os.WriteFile(left, []byte("half"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		r, err := create(t.Context(), o, k)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		wantFiles(t, o.Dir, smallName)
		m, err := Open(r.Path())
		if err != nil {
			t.Fatal(err)
		}
		r.Pool()[len(r.Pool())-1] = 1
		if m.Pool()[len(m.Pool())-1] != 1 {
			t.Errorf("%s: not one memory", name)
		}
		st, _ := os.Stat(r.Path())
		if reserved := st.Sys().(*syscall.Stat_t).Blocks * 512; reserved < st.Size() {
			t.Errorf("%s: only %d of %d bytes are reserved", name, reserved, st.Size())
		}
		m.Close()
		r.Close(true)
		wantFiles(t, o.Dir)
	}
}

func TestCreateThatFailsLeavesNothingAndFreesTheName(t *testing.T) {
	boom := errors.New("boom")
	for _, base := range []kernel{kernelCalls, withoutTmpfile()} {
		for name, c := range map[string]struct {
			change func(*kernel, context.CancelCauseFunc)
			want   error
		}{
			"error of fallocate": {func(k *kernel, _ context.CancelCauseFunc) {
				k.fallocate = func(int, int64, int64) error { return unix.EIO }
			}, unix.EIO},
			"error of populate": {func(k *kernel, _ context.CancelCauseFunc) {
				k.populate = func([]byte) error { return unix.EFAULT }
			}, unix.EFAULT},
			"end of ctx while reserving": {func(k *kernel, stop context.CancelCauseFunc) {
				k.fallocate = func(fd int, off, n int64) error { stop(boom); return kernelCalls.fallocate(fd, off, n) }
			}, boom},
			"end of ctx while writing": {func(k *kernel, stop context.CancelCauseFunc) {
				k.fallocate = func(fd int, off, n int64) error { stop(boom); return unix.EOPNOTSUPP }
			}, boom},
			"end of ctx while pre-faulting": {func(k *kernel, stop context.CancelCauseFunc) {
				k.populate = func([]byte) error { stop(boom); return nil }
			}, boom},
		} {
			k := base
			ctx, stop := context.WithCancelCause(t.Context())
			c.change(&k, stop)
			o := smallOptions(t.TempDir())
			o.Geometry = Geometry{BlockBytes: 1 << 20, Blocks: 40, Slots: 8}
			if r, err := create(ctx, o, k); r != nil || !errors.Is(err, c.want) || !strings.Contains(err.Error(), o.Dir) {
				t.Errorf("%s: %v", name, err)
			}
			wantFiles(t, o.Dir)
			mustCreate(t, o).Close(true)
		}
	}
}
