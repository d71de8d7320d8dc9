package shm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

func init() {
	children["put"] = childPut
	children["get"] = childGet
	children["hold"] = childHold
	children["offer"] = childOffer
}

// sizeOf is the size of the payload under a key of childPut: small ones, and some that take a while.
func sizeOf(key string) int {
	n, _ := strconv.Atoi(key[strings.LastIndexByte(key, '_')+1:])
	if n%7 == 3 {
		return 3 << 20
	}
	return 10 + n*1000
}

// childPut DIR PREFIX: puts payloads under new keys as fast as it can, and says each key when its put was acknowledged.
func childPut(args []string) {
	c := must(Open(Options{Dir: args[0]}))
	for i := range 200 {
		key := fmt.Sprintf("%s_%d", args[1], i)
		must(c.Put(context.Background(), key, value(key, sizeOf(key)), stage.PutOptions{}))
		say("%s", key)
	}
	select {}
}

// childGet DIR PREFIX N: gets the keys PREFIX_0 to PREFIX_N-1 and says which it got.
func childGet(args []string) {
	c := must(Open(Options{Dir: args[0]}))
	for i := range must(strconv.Atoi(args[2])) {
		key := fmt.Sprintf("%s_%d", args[1], i)
		g := must(c.Get(context.Background(), stage.Request{Key: key, Wait: true, InPlace: i%2 == 0}))
		if !tensor.Equal(g.Root, value(key, sizeOf(key))) {
			panic("other bytes under " + key)
		}
		must(0, g.Release())
		say("%s", key)
	}
	select {}
}

// childHold DIR KEY: has the key's lock.
func childHold(args []string) {
	must(must(openFolder(args[0])).tryLock(args[1]))
	say("locked")
	select {}
}

// childOffer DIR KEY LEASE: has put a payload.
func childOffer(args []string) {
	c := must(Open(Options{Dir: args[0]}))
	must(c.Put(context.Background(), args[1], value(args[1], 100), stage.PutOptions{Lease: must(time.ParseDuration(args[2]))}))
	say("put")
	select {}
}

// hearAll gives what a child says until it is killed, which happens after the first n lines and a random while.
func (c *child) hearAll(n int, more time.Duration) (lines []string) {
	for range n {
		lines = append(lines, c.hear())
	}
	t := time.AfterFunc(rand.N(more), func() { c.cmd.Process.Kill() })
	defer t.Stop()
	for {
		line, err := c.out.ReadString('\n')
		if err != nil {
			return lines
		}
		lines = append(lines, strings.TrimSpace(line))
	}
}

func TestWhatAKilledWriterHadPutIsReadable(t *testing.T) {
	dir := shmDir(t)
	for round := range 8 {
		prefix := "w" + strconv.Itoa(round)
		w := startChild(t, "put", dir, prefix)
		acked := make(map[string]bool)
		for _, key := range w.hearAll(1+round, 30*time.Millisecond) {
			acked[key] = true
		}
		w.kill()
		c := open(t, Options{Dir: dir}) // which reaps nothing that may still be read
		for i := range 200 {
			key := fmt.Sprintf("%s_%d", prefix, i)
			g, err := c.Get(t.Context(), stage.Request{Key: key, InPlace: true})
			switch {
			case err != nil && (acked[key] || !errors.Is(err, stage.ErrNotFound)):
				t.Errorf("%s, acknowledged %v: %v", key, acked[key], err)
			case err == nil && !tensor.Equal(g.Root, value(key, sizeOf(key))):
				t.Errorf("%s: other bytes", key)
			case err == nil:
				if err := g.Release(); err != nil {
					t.Error(err)
				}
			}
		}
	}
	// What is left is a lock file at most, of the put that was under way.
	for _, name := range files(t, dir) {
		if _, lock := keyOf(name); !lock {
			t.Errorf("%s is left", name)
		}
		old := time.Now().Add(-2 * lockAge)
		if err := os.Chtimes(filepath.Join(dir, name), old, old); err != nil {
			t.Error(err)
		}
	}
	if _, err := Sweep(dir, false); err != nil {
		t.Error(err)
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) > 0 {
		t.Errorf("%v are left: %v", names, err)
	}
}

// S2: a reader that is killed over a payload leaves it. (One that was killed after it took it off has got it.)
func TestAKilledReaderLosesNothing(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	for round := range 8 {
		prefix := "r" + strconv.Itoa(round)
		const n = 30
		for i := range n {
			key := fmt.Sprintf("%s_%d", prefix, i)
			mustPut(t, c, key, value(key, sizeOf(key)))
		}
		r := startChild(t, "get", dir, prefix, strconv.Itoa(n))
		got := make(map[string]bool)
		for _, key := range r.hearAll(1+round, 5*time.Millisecond) {
			got[key] = true
		}
		r.kill()
		missing := 0
		for i := range n {
			key := fmt.Sprintf("%s_%d", prefix, i)
			g, err := c.Get(t.Context(), stage.Request{Key: key})
			switch {
			case got[key] && err == nil:
				t.Errorf("%s was read twice", key)
			case !got[key] && err != nil:
				missing++
			case err == nil:
				if !tensor.Equal(g.Root, value(key, sizeOf(key))) {
					t.Errorf("%s: other bytes", key)
				}
				g.Release()
			}
		}
		if missing > 1 { // that it had got and could not say any more
			t.Errorf("%d payloads are lost", missing)
		}
	}
}

func TestALockThatAKilledProcessHeldIsFree(t *testing.T) {
	dir := shmDir(t)
	h := startChild(t, "hold", dir, "k")
	h.hear()
	c := open(t, Options{Dir: dir})
	if _, err := c.Put(within(t, 50*time.Millisecond), "k", value("k", 1), stage.PutOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := c.Put(within(t, patience), "k", value("k", 1), stage.PutOptions{})
		done <- err
	}()
	h.kill()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func reaped(swept []region.Swept) (yes, no []string) {
	for _, s := range swept {
		if recordNames.MatchString(filepath.Base(s.Path)) {
			continue
		}
		if s.Reaped {
			yes = append(yes, filepath.Base(s.Path))
		} else {
			no = append(no, filepath.Base(s.Path))
		}
	}
	return yes, no
}

func TestOnlyWhatADeadConnectorPutAndNobodyReadInItsLeaseIsReaped(t *testing.T) {
	dir := shmDir(t)
	alive := startChild(t, "offer", dir, "alive", "1h")
	kept := startChild(t, "offer", dir, "kept", "1h")
	over := startChild(t, "offer", dir, "over", "1s")
	locked := startChild(t, "offer", dir, "locked", "1s")
	for _, c := range []*child{alive, kept, over, locked} {
		c.hear()
	}
	for _, c := range []*child{kept, over, locked} {
		c.kill()
	}
	if err := os.WriteFile(filepath.Join(dir, "plain"), []byte{0xc0}, 0o600); err != nil {
		t.Fatal(err)
	}
	d := must(openFolder(dir))
	defer d.close()
	reader := must(d.tryLock("locked"))
	var swept []region.Swept
	eventually(t, "the leases end", func() bool {
		swept = must(Sweep(dir, true))
		yes, _ := reaped(swept)
		return len(yes) == 2
	})
	before := files(t, dir)
	swept = must(Sweep(dir, false))
	if yes, no := reaped(swept); fmt.Sprint(yes) != "[over]" || len(no) != 2 {
		t.Errorf("reaped %q, not %q", yes, no)
	}
	for _, s := range swept {
		if s.Reason == "" || s.Bytes == 0 || !strings.HasPrefix(s.Path, dir) {
			t.Errorf("%+v", s)
		}
	}
	if len(files(t, dir)) != len(before)-2 {
		t.Errorf("%q are left of %q", files(t, dir), before)
	}
	reader.close()
	c := open(t, Options{Dir: dir}) // reaps too
	wantFiles(t, dir, "alive", lockName("alive"), "kept", lockName("kept"), "plain")
	for _, key := range []string{"alive", "kept"} {
		if g := mustGet(t, c, stage.Request{Key: key}); !tensor.Equal(g.Root, value(key, 100)) {
			t.Errorf("%s: other bytes", key)
		}
	}
	must(Sweep(dir, false))
	wantFiles(t, dir, "plain")
	if names := must(d.records()); len(names) != 1 {
		t.Errorf("records %q, want the live child's alone", names)
	}
}

// A key that was used again by another is another's, whatever the record says.
func TestARecordIsAboutItsOwnSegmentsOnly(t *testing.T) {
	dir := shmDir(t)
	w := startChild(t, "offer", dir, "k", "1ns")
	w.hear()
	w.kill()
	if err := os.Remove(filepath.Join(dir, "k")); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "k"), []byte{0xc0}, 0o600); err != nil {
		t.Fatal(err)
	}
	must(Sweep(dir, false))
	if _, err := os.Stat(filepath.Join(dir, "k")); err != nil {
		t.Error(err)
	}
}

func TestAPutTakesThePlaceOfWhatAKilledConnectorPut(t *testing.T) {
	dir := shmDir(t)
	w := startChild(t, "offer", dir, "k", "1h")
	w.hear()
	c := open(t, Options{Dir: dir})
	if _, err := c.Put(t.Context(), "k", value("k", 1), stage.PutOptions{}); !errors.Is(err, ErrTaken) {
		t.Fatal(err)
	}
	w.kill()
	mustPut(t, c, "k", value("k", 1))
	if g := mustGet(t, c, stage.Request{Key: "k"}); !tensor.Equal(g.Root, value("k", 1)) {
		t.Error("the old one was read")
	}
	must(Sweep(dir, false))
	wantFiles(t, dir)
}

func TestAForeignOrBrokenRecordReapsNothing(t *testing.T) {
	dir := shmDir(t)
	if err := os.WriteFile(filepath.Join(dir, "k"), []byte{0xc0}, 0o600); err != nil {
		t.Fatal(err)
	}
	for i, b := range []string{"", "junk", recordMagic, recordMagic + strings.Repeat("\x00", slotBytes), recordMagic + strings.Repeat("\xff", 3*slotBytes)} {
		name := fmt.Sprintf("ferry_stage_%016x.puts", i)
		if err := os.WriteFile(filepath.Join(dir, name), []byte(b), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("k", filepath.Join(dir, "ferry_stage_00000000000000aa.puts")); err != nil {
		t.Fatal(err)
	}
	must(Sweep(dir, false))
	wantFiles(t, dir, "k")
	if _, err := os.Lstat(filepath.Join(dir, "ferry_stage_00000000000000aa.puts")); err != nil {
		t.Error(err)
	}
}

func FuzzRecord(f *testing.F) {
	dir := shmDir(f)
	c := open(f, Options{Dir: dir})
	mustPut(f, c, "k", tensor.Null{})
	b := must(os.ReadFile(filepath.Join(dir, c.record.name)))
	f.Add(b)
	f.Add(b[:len(b)-1])
	f.Fuzz(func(t *testing.T, b []byte) {
		puts, err := readRecord(strings.NewReader(string(b)), int64(len(b)))
		if err != nil && puts != nil {
			t.Error("both an error and slots")
		}
		for _, p := range puts {
			if err := checkKey(p.key); err != nil {
				t.Error(err)
			}
		}
	})
}
