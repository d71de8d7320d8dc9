package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
	"golang.org/x/sys/unix"
)

// S1: of 2,000 puts with keys used again and again, from several writers at once, each that was acknowledged is read once.
func TestEveryAcknowledgedPutIsReadExactlyOnce(t *testing.T) {
	const writers, readers, puts = 4, 3, 500
	dir := shmDir(t)
	keys := []string{"a", "b"}
	ctx := within(t, 5*patience)
	var mu sync.Mutex
	acked, got := make(map[string]int), make(map[string]int)
	var writing, reading sync.WaitGroup
	for w := range writers {
		c := open(t, Options{Dir: dir})
		writing.Go(func() {
			for i := range puts {
				id, key := fmt.Sprintf("%d-%d", w, i), keys[i%len(keys)]
				taken := c.watch(key)
				for {
					p, err := c.Put(ctx, key, value(id, i%9*9000), stage.PutOptions{})
					if errors.Is(err, ErrTaken) && taken.wait(ctx) { // by another writer
						continue
					}
					if err != nil {
						t.Errorf("put of %s: %v", id, err)
						return
					}
					mu.Lock()
					acked[id]++
					mu.Unlock()
					select {
					case <-p.Released():
					case <-ctx.Done():
						t.Errorf("%s was never read", id)
						return
					}
					if p.Outcome() != stage.Read {
						t.Errorf("%s: outcome %d", id, p.Outcome())
					}
					break
				}
				taken.close()
			}
		})
	}
	end, stop := context.WithCancel(ctx)
	for r := range readers {
		c := open(t, Options{Dir: dir})
		reading.Go(func() {
			for i := 0; ; i++ {
				short, cancel := context.WithTimeout(end, 50*time.Millisecond)
				g, err := c.Get(short, stage.Request{Key: keys[(i+r)%len(keys)], Wait: true, InPlace: i%2 == 0})
				cancel()
				if end.Err() != nil && err != nil {
					return
				}
				if errors.Is(err, context.DeadlineExceeded) {
					continue
				}
				if err != nil {
					t.Errorf("get: %v", err)
					return
				}
				id := string(g.Root.(tensor.Map).Get("id").(tensor.String))
				var w, n int
				fmt.Sscanf(id, "%d-%d", &w, &n)
				if !tensor.Equal(g.Root, value(id, n%9*9000)) {
					t.Errorf("%s: other bytes", id)
				}
				if err := g.Release(); err != nil {
					t.Error(err)
				}
				mu.Lock()
				got[id]++
				mu.Unlock()
			}
		})
	}
	writing.Wait()
	stop()
	reading.Wait()
	if len(acked) != writers*puts || len(got) != len(acked) {
		t.Errorf("%d acknowledged, %d read, want %d", len(acked), len(got), writers*puts)
	}
	for id, n := range got {
		if n != 1 || acked[id] != 1 {
			t.Errorf("%s was acknowledged %d times and read %d times", id, acked[id], n)
		}
	}
	wantFiles(t, dir)
}

func init() { children["full"] = childFull }

// S3 and C48: a full /dev/shm is an error, and costs nothing that was acknowledged.
func TestAFullDirectoryIsAnError(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a tmpfs")
	}
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], dir)
	cmd.Env = append(os.Environ(), childEnv+"=full")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.EPERM) {
		t.Skipf("no mount namespace is to be had: %v", err)
	}
	if text := strings.TrimSpace(string(out)); err != nil || text != "ok" {
		t.Errorf("%v: %s", err, text)
	}
}

// childFull DIR: puts into a tmpfs of 4 MiB, which only this process sees, until it is full.
func childFull(args []string) {
	dir := args[0]
	must(0, unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""))
	must(0, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=4m"))
	c := must(Open(Options{Dir: dir, MaxBytes: 64 << 20}))
	ctx := context.Background()
	wantFull := func(err error) {
		if !errors.Is(err, stage.ErrFull) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "--shm-size") {
			say("error %v is no clear ErrFull", err)
		}
	}
	_, err := c.Put(ctx, "large", value("k", 5<<20), stage.PutOptions{})
	wantFull(err)
	// The look beforehand can be too early: then the write fails.
	d := must(unix.Openat(c.dir.fd, ".", unix.O_TMPFILE|unix.O_RDWR, 0o600))
	err = c.dir.writeParts(ctx, d, [][]byte{make([]byte, 5<<20)})
	wantFull(c.dir.full(err, 5<<20))
	unix.Close(d)

	var acked []string
	for i := 0; ; i++ {
		key := fmt.Sprintf("k_%d", i)
		if _, err := c.Put(ctx, key, value(key, 10_000), stage.PutOptions{}); err != nil {
			wantFull(err)
			break
		}
		acked = append(acked, key)
	}
	if n := len(must(os.ReadDir(dir))); n != 2*len(acked)+1 || len(acked) < 200 {
		say("%d files of %d puts", n, len(acked))
	}
	for _, key := range acked {
		if g, err := c.Get(ctx, stage.Request{Key: key}); err != nil || !tensor.Equal(g.Root, value(key, 10_000)) {
			say("%s: %v", key, err)
		}
	}
	must(c.Put(ctx, "again", value("again", 1<<20), stage.PutOptions{}))
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	must(0, c.Close(short))
	if left := must(os.ReadDir(dir)); len(left) > 0 {
		say("%v are left", left)
	}
	say("ok")
}
