package client

import (
	"errors"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
)

// file names a file that may lose its name.
func file(t *testing.T, path string) (ino uint64) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// mappings counts this process's mappings and descriptors of a file, those of the fake node too.
func mappings(t *testing.T, ino uint64) (n int) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == strconv.FormatUint(ino, 10) {
			n++
		}
	}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		var st unix.Stat_t
		if unix.Stat("/proc/self/fd/"+fd.Name(), &st) == nil && st.Ino == ino && st.Mode&unix.S_IFMT == unix.S_IFREG {
			n++
		}
	}
	return n
}

func gone(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// A tmpfs may have room for one pool only: engines that kept the last node's memory kept the next node from starting, for ever.
func TestMemoryOfANodeThatIsGoneForGoodIsLetGoBeforeThereIsAnother(t *testing.T) {
	f := newFakeNode(t)
	pool := file(t, f.region.Path())
	nodes := mappings(t, pool)
	c, _ := f.dialAgain(time.Minute)
	m := granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "k") }, api.Result{Handle: 1, Info: info("k", 1, 1)})
	f.region.Pool()[testBlock] = 42

	// A node that died may come back to the file.
	_ = f.listen.Close()
	_ = f.conn.Close()
	<-c.link.gone
	c.shed()
	if n := mappings(t, pool); n == nodes {
		t.Error("a file that still has its name was unmapped")
	}

	if err := f.region.Unlink(); err != nil {
		t.Fatal(err)
	}
	c.shed()
	if b := m.Buffers()[0]; b[0] != 42 {
		t.Errorf("%d", b[0])
	}
	m.Release()
	gone(t, "the memory is free", func() bool { return mappings(t, pool) == nodes })
	if err := m.Valid(); err == nil {
		t.Error("valid, and unmapped")
	}
}

func TestMemoryOfEarlierNodesGoesWithTheLastUseOfIt(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	old := file(t, f.region.Path())
	m := granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "k") }, api.Result{Handle: 1, Info: info("k", 1, 1)})
	r := granted(f, func() (*Reservation, error) { return c.Reserve(testContext(t), "r", testSpec) }, api.Result{Handle: 2, Info: info("r", 2, 2)})
	if err := f.region.Close(true); err != nil {
		t.Fatal(err)
	}
	next, err := region.Create(testContext(t), region.Options{
		Dir: t.TempDir(), Identity: region.Identity{Instance: "next", Group: "ab"}, Geometry: region.Geometry{BlockBytes: testBlock, Blocks: testBlocks},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = next.Close(true) }()
	f.region = next
	if ops := f.regreet(func(*api.Op) api.Result { return api.Result{} }); len(ops) != 1 {
		t.Errorf("restated of another file: %+v", ops)
	}
	found := granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "k") }, api.Result{Handle: 1, Info: info("k", 1, 1)})
	r.Buffers()[0][0] = 1 // harms nobody
	r.drop()
	if mappings(t, old) == 0 {
		t.Error("unmapped with a pin in it")
	}
	if m.Buffers()[0][0] != 0 {
		t.Error("it has changed")
	}
	m.Release()
	if n := mappings(t, old); n != 0 {
		t.Errorf("%d mappings left", n)
	}
	found.Release()
	f.released(1)
	if n := mappings(t, file(t, next.Path())); n == 0 {
		t.Error("the file in use was unmapped")
	}
}

func TestWhatIsOverKeepsNoMemoryThatIsNotInUse(t *testing.T) {
	for _, used := range []bool{false, true} {
		f := newFakeNode(t)
		pool := file(t, f.region.Path())
		nodes := mappings(t, pool)
		c := f.dial() // once
		var m *Mapped
		if used {
			m = granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "k") }, api.Result{Handle: 1, Info: info("k", 1, 1)})
			f.region.Pool()[testBlock] = 42
		}
		_ = f.conn.Close()
		<-c.Done()
		c.mu.Lock() // the end is under it
		c.mu.Unlock()
		if used {
			if b := m.Buffers()[0]; b[0] != 42 {
				t.Errorf("%d", b[0])
			}
			m.Release()
		}
		if n := mappings(t, pool); n != nodes {
			t.Errorf("used %t: %d mappings and descriptors are left", used, n-nodes)
		}
	}
}

func TestWhatKeepsTheMemoryOfANodeThatIsGoneIsSaidOnce(t *testing.T) {
	f := newFakeNode(t)
	c, log := f.dialAgain(time.Minute)
	m := granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "k") }, api.Result{Handle: 1, Info: info("k", 1, 1)})
	defer m.Release()
	_ = f.listen.Close()
	if err := f.region.Unlink(); err != nil {
		t.Fatal(err)
	}
	_ = f.conn.Close()
	<-c.current().gone
	c.shed()
	c.shed()
	said := 0
	for _, line := range log.lines() {
		if strings.Contains(line, "is kept") {
			said++
			if !strings.Contains(line, "bytes="+strconv.Itoa(testBlock*testBlocks)) || !strings.Contains(line, "in_use=1") {
				t.Error(line)
			}
		}
	}
	if said != 1 {
		t.Errorf("said %d times:\n%s", said, strings.Join(log.lines(), "\n"))
	}
}

// A reply may be read, and its connection lost and made again before the caller gets to it. By then the blocks are free.
func TestWhatWasGrantedOnALostConnectionAndNotRestatedIsNotHandedOut(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	l := c.current()
	f.regreet(func(*api.Op) api.Result { return api.Result{} })
	<-l.gone
	if r, err := c.reserved(l, 7, *info("k", 7, 1)); !errors.Is(err, ErrDisconnected) {
		t.Errorf("reserved: %v, %v", r, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if m, err := c.mapped(l, 8, *info("k", 8, 1)); !errors.Is(err, ErrDisconnected) {
		t.Errorf("mapped: %v, %v", m, err)
	}
}

// current is the connection to use now. It may be lost already: then sending says so.
func (c *Client) current() *link {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.link
}
