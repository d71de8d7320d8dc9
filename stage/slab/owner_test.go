package slab

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// own is a process with a slab in dir, with buffers in use, until it is killed.
func own(dir string) {
	p, err := mapped.New(mapped.Options{Dirs: []string{dir}})
	if err == nil {
		var s *Slab
		if s, err = New(context.Background(), Options{Dir: dir, Name: "killed", Bytes: 1 << 20, Planes: []transfer.Plane{p}}); err == nil {
			_, err = s.Alloc(context.Background(), []int64{1000})
		}
	}
	fmt.Println("ready", err)
	time.Sleep(transfertest.Patience)
}

func killed(t *testing.T, dir string) {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), ownerEnv+"="+dir)
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	if line != "ready <nil>\n" {
		t.Error(line)
	}
	must(t, c.Process.Kill())
	_ = c.Wait() // it says that it was killed
	if left := files(t, dir); len(left) != 1 {
		t.Fatalf("%v", left)
	}
}

func files(t *testing.T, dir string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "*"))
	must(t, err)
	return all
}

func TestWhatAKilledOwnerLeftIsReapedAtTheNextStartOrBySweep(t *testing.T) {
	dir := transfertest.Dir(t)
	killed(t, dir)
	s, err := New(patient(t), Options{Dir: dir, Name: "killed", Bytes: 2 << 20})
	must(t, err)
	if s.Bytes() != 2<<20 || s.Used() != 0 {
		t.Errorf("%d of %d bytes are used", s.Used(), s.Bytes())
	}
	if swept, err := region.Sweep(region.SweepOptions{Dir: dir}); err != nil || len(swept) != 1 || swept[0].Reaped {
		t.Errorf("of a live one: %+v, %v", swept, err)
	}
	must(t, s.Close(patient(t)))
	killed(t, dir)
	if swept, err := region.Sweep(region.SweepOptions{Dir: dir}); err != nil || len(swept) != 1 || !swept[0].Reaped {
		t.Errorf("%+v, %v", swept, err)
	}
	if left := files(t, dir); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
