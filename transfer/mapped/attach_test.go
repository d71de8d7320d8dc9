package mapped

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// offer registers memory of n bytes on a plane of dir.
func offer(t *testing.T, dir string, n int) (transfer.Memory, location) {
	t.Helper()
	p := newPlane(t, dir)
	m, free := transfertest.NewMemory(t, dir, n)
	reg, err := p.Register(t.Context(), m, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = reg.Close()
		_ = p.Close()
		free()
	})
	l, err := decodeLocation(reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	return m, l
}

func TestAPeerThatIsNotReachedByItsFileIsUnreachable(t *testing.T) {
	dir := transfertest.Dir(t)
	m, good := offer(t, dir, 8192)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(m.Path, link); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(dir, "other")
	if err := os.WriteFile(other, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(dir, "foreign")
	if err := os.WriteFile(foreign, make([]byte, 1<<20), 0o666); err != nil {
		t.Fatal(err)
	}
	consumer := newPlane(t, dir)
	defer consumer.Close()
	cases := map[string]func(l *location){
		"another boot":         func(l *location) { l.boot = "11111111-2222-3333-4444-555555555555" },
		"no such file":         func(l *location) { l.path = filepath.Join(dir, "gone") },
		"another directory":    func(l *location) { l.path = "/etc/passwd" },
		"a path with dots":     func(l *location) { l.path = dir + "/../" + filepath.Base(dir) + "/" + filepath.Base(l.path) },
		"a relative path":      func(l *location) { l.path = filepath.Base(l.path) },
		"a directory":          func(l *location) { l.path = dir },
		"a symbolic link":      func(l *location) { l.path = link },
		"a FIFO":               func(l *location) { l.path = fifo },
		"another file":         func(l *location) { l.path = other },
		"another inode":        func(l *location) { l.file.ino++ },
		"another file system":  func(l *location) { l.file.dev++ },
		"more than is there":   func(l *location) { l.length += 1 << 20 },
		"beyond the end":       func(l *location) { l.offset += 1 << 20 },
		"a region that is not": func(l *location) { l.isRegion = true },
	}
	if err := os.Chown(foreign, 12345, -1); err == nil {
		cases["another user's file"] = func(l *location) {
			st, err := os.Stat(foreign)
			if err != nil {
				t.Fatal(err)
			}
			l.path, l.file = foreign, fileOf(st)
		}
	}
	for name, change := range cases {
		l := good
		change(&l)
		if p, err := consumer.AddPeer(t.Context(), l.encode()); !errors.Is(err, transfer.ErrUnreachable) {
			if err == nil {
				_ = p.Close()
			}
			t.Errorf("%s: %v, want ErrUnreachable", name, err)
		}
	}
	if n := len(consumer.mappings); n != 0 {
		t.Errorf("%d mappings are left", n)
	}
	p, err := consumer.AddPeer(t.Context(), good.encode())
	if err != nil {
		t.Fatalf("the peer itself: %v", err)
	}
	_ = p.Close()
}

// maps counts the mappings of path in this process.
func maps(t *testing.T, path string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Count(string(b), path)
}

func TestAFileIsAttachedOnceAndUntilTheLastUser(t *testing.T) {
	dir := transfertest.Dir(t)
	m, l := offer(t, dir, 1<<20)
	consumer := newPlane(t, dir)
	defer consumer.Close()
	own := maps(t, m.Path)
	var peers []transfer.Peer
	for range 5 {
		p, err := consumer.AddPeer(t.Context(), l.encode())
		if err != nil {
			t.Fatal(err)
		}
		peers = append(peers, p)
	}
	if n := maps(t, m.Path) - own; n != 1 {
		t.Errorf("5 peers made %d mappings", n)
	}
	_, release, err := peers[4].(transfer.Viewer).View(nil, []region.Span{{Length: 100}})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range peers {
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if n := maps(t, m.Path) - own; n != 1 {
		t.Errorf("with a view there are %d mappings", n)
	}
	release()
	if n := maps(t, m.Path) - own; n != 0 {
		t.Errorf("at the end there are %d mappings", n)
	}
}

func TestAnUnlinkedFileStaysReadableForItsPeers(t *testing.T) {
	dir := transfertest.Dir(t)
	m, l := offer(t, dir, 1<<20)
	consumer := newPlane(t, dir)
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), l.encode())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(m.Path); err != nil {
		t.Fatal(err)
	}
	if _, err := consumer.AddPeer(t.Context(), l.encode()); !errors.Is(err, transfer.ErrUnreachable) {
		t.Errorf("adding it again: %v", err)
	}
	dst := make([]byte, len(m.Bytes))
	if err := readWhole(t, p, dst); err != nil || !bytes.Equal(dst, m.Bytes) {
		t.Errorf("READ: %v or wrong bytes", err)
	}
}

func readWhole(t *testing.T, p transfer.Peer, dst []byte) error {
	t.Helper()
	rd, err := p.Read(t.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: int64(len(dst))}}, Local: [][]byte{dst}})
	if err != nil {
		return err
	}
	<-rd.Done()
	return rd.Err()
}

func TestAFileThatIsCutShortFailsTheReadAndNotTheProcess(t *testing.T) {
	dir := transfertest.Dir(t)
	for _, n := range []int{64 << 10, 1 << 20, 16 << 20} {
		m, l := offer(t, dir, n)
		consumer := newPlane(t, dir)
		p, err := consumer.AddPeer(t.Context(), l.encode())
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(m.Path, m.FileOffset+int64(n)/2); err != nil {
			t.Fatal(err)
		}
		dst := make([]byte, n)
		if err := readWhole(t, p, dst); !errors.Is(err, transfer.ErrPeerLost) {
			t.Errorf("READ of %d bytes: %v", n, err)
		}
		if err := readWhole(t, p, dst[:n/2]); err != nil {
			t.Errorf("READ of what is left of %d bytes: %v", n, err)
		}
		_ = consumer.Close()
	}
}

func TestARegionIsReadWhileItIsTheSameRegion(t *testing.T) {
	dir := transfertest.Dir(t)
	r, err := region.Create(t.Context(), region.Options{
		Dir:      dir,
		Identity: region.Identity{Instance: "n1", Group: "abc", Rank: 2},
		Geometry: region.Geometry{BlockBytes: 4096, Blocks: 64},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close(true)
	transfertest.Fill(r.Pool(), 5)
	f, err := r.Reopen(false)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	plane := newPlane(t, dir)
	defer plane.Close()
	m := transfer.Memory{Bytes: r.Pool(), File: f, Path: r.Path(), FileOffset: r.PoolOffset()}
	reg, err := plane.Register(t.Context(), m, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Close()
	l, err := decodeLocation(reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	if !l.isRegion || l.identity != r.Identity() || l.epoch != r.Epoch() {
		t.Fatalf("the metadata says %+v", l)
	}
	p, err := plane.AddPeer(t.Context(), reg.Metadata())
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	dst := make([]byte, len(r.Pool()))
	if err := readWhole(t, p, dst); err != nil || !bytes.Equal(dst, r.Pool()) {
		t.Errorf("READ: %v or wrong bytes", err)
	}
	witnessed(t, r, p)
	for name, change := range map[string]func(l *location){
		"another epoch":  func(l *location) { l.epoch++ },
		"another group":  func(l *location) { l.identity.Group = "abd" },
		"another rank":   func(l *location) { l.identity.Rank = 0 },
		"another length": func(l *location) { l.length -= 4096 },
		"another offset": func(l *location) { l.offset -= 4096 },
	} {
		other := l
		change(&other)
		if p, err := plane.AddPeer(t.Context(), other.encode()); !errors.Is(err, transfer.ErrUnreachable) {
			if err == nil {
				_ = p.Close()
			}
			t.Errorf("%s: %v, want ErrUnreachable", name, err)
		}
	}
}

func TestMemoryWithAnotherFilesPathIsRefused(t *testing.T) {
	dir := transfertest.Dir(t)
	m, free := transfertest.NewMemory(t, dir, 4096)
	defer free()
	p := newPlane(t, dir)
	defer p.Close()
	for _, path := range []string{"", filepath.Join(dir, "gone"), "/etc/passwd"} {
		m.Path = path
		if _, err := p.Register(t.Context(), m, nil); !errors.Is(err, transfer.ErrBadRequest) {
			t.Errorf("path %q: %v", path, err)
		}
	}
}

func FuzzMetadata(f *testing.F) {
	plain := location{boot: "b", file: file{1, 2}, path: "/dev/shm/x", offset: 4096, length: 1 << 30}
	reg := plain
	reg.isRegion, reg.identity, reg.epoch = true, region.Identity{Instance: "i", Group: "g", Rank: 1}, 3
	f.Add(plain.encode())
	f.Add(reg.encode())
	f.Add(reg.encode()[:30])
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := decodeLocation(b)
		if err == nil && !bytes.Equal(l.encode(), b) {
			t.Errorf("%x is taken for %+v", b, l)
		}
	})
}

// witnessed checks what a peer says of the region's first slot as an entry comes and goes.
func witnessed(t *testing.T, r *region.Region, p transfer.Peer) {
	t.Helper()
	want := func(when string, gen uint64, holds bool) {
		t.Helper()
		if got := p.(transfer.Witness).Holds(0, gen); got != holds {
			t.Errorf("%s: generation %d is held: %v", when, gen, got)
		}
	}
	fill := func() uint64 {
		gen, err := r.Slots().Fill(0, &region.Slot{Key: "k", Dtype: "d", Shape: []int64{1}, Bytes: 1, Extents: []region.Extent{{Count: 1}}})
		if err != nil {
			t.Fatal(err)
		}
		return gen
	}
	gen := fill()
	want("filling", gen, false)
	r.Slots().Ready(0, 0, false)
	want("ready", gen, true)
	want("ready", gen+1, false)
	if p.(transfer.Witness).Holds(1<<31, gen) {
		t.Error("a slot that does not exist is held")
	}
	r.Slots().Free(0)
	want("free", gen, false)
	next := fill()
	r.Slots().Ready(0, 0, false)
	want("another entry", gen, false)
	want("another entry", next, true)
}
