package demo

import (
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

func TestWhatAKilledDemoLeftIsRemovedByTheNextAndNothingElse(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	log := slog.New(slog.DiscardHandler)
	live, err := newTempDir(log)
	if err != nil {
		t.Fatal(err)
	}
	killed := filepath.Join(os.TempDir(), tempPrefix+"123")  // the kernel ends locks with their process
	early := filepath.Join(os.TempDir(), tempPrefix+"early") // killed before it had locked it
	young := filepath.Join(os.TempDir(), tempPrefix+"young") // about to lock it
	long := time.Now().Add(-2 * tempYoung)
	elsewhere := t.TempDir()
	kept := []string{live.path, young, filepath.Join(os.TempDir(), "other"), elsewhere, filepath.Join(os.TempDir(), tempPrefix+"file")}
	for _, err := range []error{
		os.MkdirAll(filepath.Join(killed, "deep"), 0o700), os.WriteFile(filepath.Join(killed, tempLock), nil, 0o600),
		os.Mkdir(early, 0o700), os.Chtimes(early, long, long), os.Mkdir(young, 0o700),
		os.Mkdir(kept[2], 0o700), os.WriteFile(kept[4], nil, 0o600), os.Symlink(elsewhere, filepath.Join(os.TempDir(), tempPrefix+"link")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	next, err := newTempDir(log)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{killed, early} {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is still there", path)
		}
	}
	for _, path := range append(kept, next.path) {
		if _, err := os.Lstat(path); err != nil {
			t.Error(err)
		}
	}
	for _, d := range []*tempDir{live, next} {
		if err := d.remove(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(d.path); !os.IsNotExist(err) {
			t.Errorf("%s is still there", d.path)
		}
	}
}

func TestDemosThatStartAtOnceLeaveEachOtherTheirFolders(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 50 {
				d, err := newTempDir(slog.New(slog.DiscardHandler))
				if err != nil {
					t.Error(err)
					return
				}
				if err := os.WriteFile(filepath.Join(d.path, "log"), nil, 0o600); err != nil {
					t.Error(err)
				}
				if err := d.remove(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
