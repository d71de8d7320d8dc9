package shm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
	"golang.org/x/sys/unix"
)

func init() {
	children["full"] = childFull
	children["rlimit"] = childRlimit
}

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

// Over a limit on file sizes the system would send a signal that ends the process.
func TestALimitOnFileSizesIsAnError(t *testing.T) {
	c := startChild(t, "rlimit", shmDir(t))
	if text := c.hear(); text != "ok" {
		t.Error(text)
	}
}

// childRlimit DIR: puts under a limit of 64 KiB.
func childRlimit(args []string) {
	must(0, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 64 << 10, Max: 64 << 10}))
	c := must(Open(Options{Dir: args[0]}))
	if _, err := c.Put(context.Background(), "k", value("k", 64<<10), stage.PutOptions{}); !errors.Is(err, stage.ErrFull) {
		say("%v", err)
	}
	must(c.Put(context.Background(), "k", value("k", 60<<10), stage.PutOptions{}))
	must(0, c.Cleanup("k"))
	say("ok")
}

func TestThousandsOfPayloadsLeaveNothing(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	root := value("k", mapMin)
	count := func() (n int) {
		fds := must(os.ReadDir("/proc/self/fd"))
		maps := strings.Count(string(must(os.ReadFile("/proc/self/maps"))), dir)
		return len(fds) + maps
	}
	before := 0
	for i := range 3000 {
		key := fmt.Sprintf("k_%d", i%5)
		mustPut(t, c, key, root)
		if i%3 == 2 {
			c.Abort(key, "for a reason")
			continue
		}
		if err := mustGet(t, c, stage.Request{Key: key, InPlace: i%2 == 0}).Release(); err != nil {
			t.Fatal(err)
		}
		if i == 10 {
			before = count()
		}
	}
	wantFiles(t, dir)
	if after := count(); after > before {
		t.Errorf("%d descriptors and mappings, %d before", after, before)
	}
	if slots := c.record.len; slots > 20 {
		t.Errorf("the record has %d slots, of at most 5 payloads", slots)
	}
}
