package shm

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
	"golang.org/x/sys/unix"
)

func TestOnlyRegularFilesOfThisUserAreTouched(t *testing.T) {
	victim := filepath.Join(t.TempDir(), "victim")
	whole, err := wire.AppendObject(nil, value("k", 100), wire.ObjectOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(victim, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, at := range map[string]func(path string) error{
		"link":     func(p string) error { return os.Symlink(victim, p) },
		"loop":     func(p string) error { return os.Symlink(p, p) },
		"dangling": func(p string) error { return os.Symlink(filepath.Join(filepath.Dir(p), "made"), p) },
		"fifo":     func(p string) error { return unix.Mkfifo(p, 0o600) },
		"folder":   func(p string) error { return os.Mkdir(p, 0o700) },
		"socket": func(p string) error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Bind(fd, &unix.SockaddrUnix{Name: p})
		},
		"two names": func(p string) error {
			return errors.Join(os.WriteFile(p, whole, 0o600), os.Link(p, filepath.Join(filepath.Dir(p), "other")))
		},
		"another's": func(p string) error { return errors.Join(os.WriteFile(p, whole, 0o666), os.Chown(p, 12345, 12345)) },
	} {
		t.Run(name, func(t *testing.T) {
			if name == "another's" && os.Geteuid() != 0 {
				t.Skip("only root can make another user's file")
			}
			for _, part := range []string{"k", lockName("k")} {
				dir := shmDir(t)
				c := open(t, Options{Dir: dir, Lease: time.Nanosecond}) // age is no reason to touch it
				if err := at(filepath.Join(dir, part)); err != nil {
					t.Fatal(err)
				}
				if part != "k" {
					if err := os.WriteFile(filepath.Join(dir, "k"), whole, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				before := files(t, dir)
				if _, err := c.Get(within(t, patience), stage.Request{Key: "k", Wait: true}); !errors.Is(err, ErrForeign) {
					t.Errorf("get with a %s as %s: %v", name, part, err)
				}
				if _, err := c.Put(within(t, patience), "k", value("k", 1), stage.PutOptions{}); !errors.Is(err, ErrForeign) {
					t.Errorf("put with a %s as %s: %v", name, part, err)
				}
				if err := c.Cleanup("k"); err != nil {
					t.Error(err)
				}
				if part == "k" { // a put made the lock, and left it
					before = append(before, lockName("k"))
				}
				wantFiles(t, dir, before...)
			}
		})
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != string(whole) {
		t.Error("the victim was written to")
	}
}

// S4: junk is no payload, and stays for whoever made it.
func TestJunkIsNotConsumed(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir, MaxPayload: 1 << 20})
	path := filepath.Join(dir, "k")
	for name, x := range map[string]struct {
		b   []byte
		err error
	}{
		"text":      {[]byte("hello"), wire.ErrMalformed},
		"a pickle":  {[]byte("\x80\x04N."), wire.ErrMalformed},
		"truncated": {must(wire.AppendObject(nil, value("k", 1000), wire.ObjectOptions{}))[:500], wire.ErrMalformed},
		"and more":  {append(must(wire.AppendObject(nil, value("k", 1000), wire.ObjectOptions{})), 0), wire.ErrMalformed},
		"deep":      {[]byte(strings.Repeat("\x91", 1000)), wire.ErrLimit},
		"large":     {make([]byte, 1<<20+1), ErrForeign},
	} {
		if err := os.WriteFile(path, x.b, 0o600); err != nil {
			t.Fatal(err)
		}
		for _, lock := range []bool{false, true} {
			if lock {
				if err := os.WriteFile(lockPath(dir, "k"), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := c.Get(within(t, patience), stage.Request{Key: "k", Wait: true}); !errors.Is(err, x.err) {
				t.Errorf("%s: %v, want %v", name, err, x.err)
			}
			if b, err := os.ReadFile(path); err != nil || string(b) != string(x.b) {
				t.Errorf("%s was consumed", name)
			}
			os.Remove(lockPath(dir, "k"))
		}
	}
}

// A writer that was killed over its segment leaves one of full size without its last pages.
func TestASegmentThatWasNeverFinishedIsNotReadAndMakesWay(t *testing.T) {
	dir := shmDir(t)
	whole := must(wire.AppendObject(nil, value("k", 1<<20), wire.ObjectOptions{}))
	for _, n := range []int{0, 1, 100, page, 1 << 19} {
		f := must(os.Create(filepath.Join(dir, "k")))
		if err := errors.Join(f.Truncate(int64(len(whole))), f.Close()); err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			f = must(os.OpenFile(filepath.Join(dir, "k"), os.O_RDWR, 0))
			_, err := f.Write(whole[:n])
			if err := errors.Join(err, f.Close()); err != nil {
				t.Fatal(err)
			}
		}
		c := open(t, Options{Dir: dir})
		if _, err := c.Get(t.Context(), stage.Request{Key: "k"}); !errors.Is(err, stage.ErrNotFound) {
			t.Errorf("%d bytes written: %v", n, err)
		}
		mustPut(t, c, "k", value("k", 3))
		if g := mustGet(t, c, stage.Request{Key: "k"}); !tensor.Equal(g.Root, value("k", 3)) {
			t.Errorf("%d bytes written: another value", n)
		}
		wantFiles(t, dir)
	}
}

// A segment that somebody may still write to is not mapped, and without its lock not read.
func TestWhatIsOpenForWritingIsNotTrusted(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	want := value("k", 1<<20)
	mustPut(t, c, "k", want)
	writer := must(os.OpenFile(filepath.Join(dir, "k"), os.O_RDWR, 0))
	s := must(c.dir.openSegment("k"))
	if s.sealed {
		t.Error("taken for sealed")
	}
	s.close()
	if err := os.Remove(lockPath(dir, "k")); err != nil {
		t.Fatal(err)
	}
	other := open(t, Options{Dir: dir})
	other.dir.giveLock("k") // the watcher of c does it too, some time
	g := mustGet(t, other, stage.Request{Key: "k", InPlace: true})
	if err := writer.Truncate(0); err != nil {
		t.Fatal(err)
	}
	if !tensor.Equal(g.Root, want) { // SIGBUS, if it were a mapping
		t.Error("other bytes")
	}
	writer.Close()

	if err := os.WriteFile(filepath.Join(dir, "j"), must(wire.AppendObject(nil, want, wire.ObjectOptions{})), 0o600); err != nil {
		t.Fatal(err)
	}
	writer = must(os.OpenFile(filepath.Join(dir, "j"), os.O_RDWR, 0))
	if _, err := other.Get(t.Context(), stage.Request{Key: "j"}); !errors.Is(err, stage.ErrNotFound) {
		t.Error(err)
	}
	done := make(chan *stage.Got)
	go func() {
		g, err := other.Get(within(t, patience), stage.Request{Key: "j", Wait: true})
		if err != nil {
			t.Error(err)
		}
		done <- g
	}()
	writer.Close()
	if g := <-done; g == nil || !tensor.Equal(g.Root, want) {
		t.Error("other bytes")
	}
	wantFiles(t, dir)
}

// S4: an unread payload is not overwritten by another connector.
func TestAKeyOfAnotherLiveConnectorIsTaken(t *testing.T) {
	dir := shmDir(t)
	a, b := open(t, Options{Dir: dir}), open(t, Options{Dir: dir})
	mustPut(t, a, "k", value("k", 1))
	if _, err := b.Put(t.Context(), "k", value("k", 2), stage.PutOptions{}); !errors.Is(err, ErrTaken) || !strings.Contains(err.Error(), filepath.Join(dir, "k")) {
		t.Error(err)
	}
	if err := b.Cleanup("k"); err != nil {
		t.Error(err)
	}
	b.Abort("k", "")
	if g := mustGet(t, a, stage.Request{Key: "k"}); !tensor.Equal(g.Root, value("k", 1)) {
		t.Error("overwritten")
	}
	// A plain connector's is known by nothing but its age.
	if err := os.WriteFile(filepath.Join(dir, "p"), []byte{0xc0}, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Put(t.Context(), "p", value("p", 2), stage.PutOptions{}); !errors.Is(err, ErrTaken) {
		t.Error(err)
	}
	old := time.Now().Add(-2 * stage.DefaultLease)
	if err := os.Chtimes(filepath.Join(dir, "p"), old, old); err != nil {
		t.Fatal(err)
	}
	mustPut(t, b, "p", value("p", 2))
	if g := mustGet(t, a, stage.Request{Key: "p"}); !tensor.Equal(g.Root, value("p", 2)) {
		t.Error("not replaced")
	}
	wantFiles(t, dir)
}

// S1: a plain reader deletes the lock file late, by its name, when the key is used again.
func TestAPutThatLosesItsLockFileIsGivenOne(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	p := mustPut(t, c, "k", value("k", 1))
	for range 3 {
		if err := os.Remove(lockPath(dir, "k")); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the lock file is back", func() bool {
			_, err := os.Stat(lockPath(dir, "k"))
			return err == nil
		})
	}
	mustGet(t, c, stage.Request{Key: "k"})
	wantOutcome(t, p, stage.Read)
	wantFiles(t, dir)
}

// S2 and C54: what deletes a segment without its lock file was no reader; the lock file does not stay.
func TestALockFileWithoutASegmentGoes(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	p := mustPut(t, c, "k", value("k", 1))
	if err := os.Remove(filepath.Join(dir, "k")); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, p, stage.Read)
	c.watcher.mu.Lock()
	for i := range c.watcher.lingering {
		c.watcher.lingering[i].since = time.Now().Add(-lingerTime)
	}
	c.watcher.mu.Unlock()
	eventually(t, "the lock file goes", func() bool { return len(files(t, dir)) == 0 })
}

func TestWithoutEventsTheDirectoryIsPolled(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	w := &watcher{c: c, stop: make(chan struct{}), done: make(chan struct{}), waiters: make(map[string]map[*waiter]struct{})}
	c.watcher = w
	go w.poll()
	p := mustPut(t, c, "k", value("k", 1))
	other := open(t, Options{Dir: dir})
	mustGet(t, other, stage.Request{Key: "k"})
	wantOutcome(t, p, stage.Read)
	done := make(chan error, 1)
	go func() {
		_, err := c.Get(within(t, patience), stage.Request{Key: "j", Wait: true})
		done <- err
	}()
	mustPut(t, other, "j", value("j", 1))
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func FuzzGet(f *testing.F) {
	f.Add(must(wire.AppendObject(nil, value("k", 10), wire.ObjectOptions{})), []byte(nil))
	f.Add([]byte{0xc0}, must(appendMetadata("k", 1)))
	f.Add([]byte("\x80\x04N."), []byte{0x81, 0xa3, 's', 'h', 'm', 0x80})
	f.Add([]byte{}, []byte{0x80})
	dir := shmDir(f)
	c := open(f, Options{Dir: dir})
	f.Fuzz(func(t *testing.T, b, metadata []byte) {
		path := filepath.Join(dir, "k")
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		g, err := c.Get(t.Context(), stage.Request{Key: "k", Metadata: metadata})
		left, readErr := os.ReadFile(path)
		if err != nil {
			if readErr != nil || string(left) != string(b) {
				t.Errorf("a get that failed (%v) consumed the segment", err)
			}
			return
		}
		if readErr == nil {
			t.Error("the segment was not removed")
		}
		want, err := wire.DecodeObject(b)
		if err != nil || !tensor.Equal(g.Root, want) {
			t.Errorf("%v, want %v (%v)", g.Root, want, err)
		}
		if err := g.Release(); err != nil {
			t.Error(err)
		}
	})
}
