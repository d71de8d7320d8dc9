package region

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"testing"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

func sumOf(b []byte) uint64 { return xxh3.Hash(b) }

func TestAttachersShareThePoolAndReadWhatTheOwnerWrites(t *testing.T) {
	r := mustCreate(t, smallOptions(shmDir(t)))
	m, err := Open(r.Path())
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	f, err := r.Reopen(true)
	if err != nil {
		t.Fatal(err)
	}
	w, err := Attach(f, true)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	f.Close()
	if m.Geometry() != r.Geometry() || m.Identity() != r.Identity() || m.Epoch() != 1 || m.OwnerPID() != os.Getpid() ||
		m.PoolOffset() != r.PoolOffset() || m.Port() != 0 {
		t.Errorf("%+v", m.header)
	}
	r.SetPort(40123)
	if m.Port() != 40123 {
		t.Errorf("port %d", m.Port())
	}
	copy(w.Pool()[len(w.Pool())-5:], "hello")
	if !bytes.HasSuffix(m.Pool(), []byte("hello")) || !bytes.HasSuffix(r.Pool(), []byte("hello")) {
		t.Error("not one memory")
	}
	s := Slot{Key: "k", Dtype: "torch.float32", Shape: []int64{2, 3}, Bytes: 24, Extents: []Extent{{5, 1}}, Owner: 9}
	gen := mustFill(t, r.Slots(), 7, s)
	r.Slots().Ready(7, 0, false)
	s.State, s.Gen = SlotReady, gen
	for _, m := range []*Mapping{m, w} {
		wantSlot(t, m.Slots(), 7, s)
		if !m.Slots().Check(7, gen) {
			t.Error("not ready for an attacher")
		}
		mustFault(t, "slot table of an attacher", m.head)
	}
	mustFault(t, "pool of a reader", m.Pool())
	for range 2 {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}
	if m.Pool() != nil || m.Slots() != nil || m.Epoch() != 0 {
		t.Error("memory after Close")
	}
}

// mustFault stores into memory that must be read-only.
func mustFault(t *testing.T, what string, mem []byte) {
	t.Helper()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recover() == nil {
			t.Errorf("%s took a store", what)
		}
	}()
	mem[0] = 1
}

func TestWritableAttachNeedsAWritableDescriptor(t *testing.T) {
	r := mustCreate(t, smallOptions(t.TempDir()))
	f, err := r.Reopen(false)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := Attach(f, true); !errors.Is(err, os.ErrPermission) {
		t.Error(err)
	}
	m, err := Attach(f, false)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
}

func TestAttachRefusesWhatIsNotAWholeRegion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	valid := validPage()
	size := smallOptions("").Geometry.fileBytes()
	for name, c := range map[string]struct {
		size   int64
		change func(page []byte)
		raw    bool // leave the checksum as it was
	}{
		"empty":               {size: 0},
		"half a header":       {size: 100},
		"header only":         {size: headerBytes},
		"one byte short":      {size: size - 1},
		"one byte long":       {size: size + 1},
		"no magic":            {size, func(p []byte) { p[0] = 'X' }, false},
		"wrong checksum":      {size, func(p []byte) { p[offInstance]++ }, true},
		"other version":       {size, func(p []byte) { order.PutUint32(p[offVersion:], 2) }, false},
		"constant part short": {size, func(p []byte) { order.PutUint32(p[offConstLen:], 8) }, true},
		"constant part long":  {size, func(p []byte) { order.PutUint32(p[offConstLen:], math.MaxUint32) }, true},
		"size says less":      {size, func(p []byte) { order.PutUint64(p[offSize:], uint64(size-1)) }, false},
		"no blocks":           {size, func(p []byte) { order.PutUint64(p[offBlocks:], 0) }, false},
		"many blocks":         {size, func(p []byte) { order.PutUint64(p[offBlocks:], math.MaxUint64) }, false},
		"one block more":      {size, func(p []byte) { order.PutUint64(p[offBlocks:], 17) }, false},
		"no slots":            {size, func(p []byte) { order.PutUint64(p[offSlots:], 0) }, false},
		"many slots":          {size, func(p []byte) { order.PutUint64(p[offSlots:], math.MaxUint64/512+1) }, false},
		"slots over the pool": {size, func(p []byte) { order.PutUint64(p[offSlots:], 1000) }, false},
		"no block bytes":      {size, func(p []byte) { order.PutUint64(p[offBlockBytes:], 0) }, false},
		"product overflows": {size, func(p []byte) {
			order.PutUint64(p[offBlockBytes:], 1<<40)
			order.PutUint64(p[offBlocks:], 1<<31)
		}, false},
		"table elsewhere": {size, func(p []byte) { order.PutUint64(p[offTable:], 0) }, false},
		"pool elsewhere":  {size, func(p []byte) { order.PutUint64(p[offPool:], 4096) }, false},
		"bad instance":    {size, func(p []byte) { p[offInstance] = '/' }, false},
		"bad rank":        {size, func(p []byte) { order.PutUint32(p[offRank:], math.MaxUint32) }, false},
		"generation over": {size, func(p []byte) { order.PutUint64(p[offGen:], math.MaxUint64) }, false},
	} {
		page := bytes.Clone(valid)
		if c.change != nil {
			c.change(page)
		}
		if !c.raw {
			order.PutUint64(page[constLen:], sumOf(page[:constLen]))
		}
		f := layFile(t, path, page, c.size)
		if m, err := Attach(f, false); !errors.Is(err, ErrFormat) || m != nil {
			t.Errorf("%s: %v", name, err)
		}
		f.Close()
		if _, err := Open(path); !errors.Is(err, ErrFormat) {
			t.Errorf("%s: Open: %v", name, err)
		}
	}
	f := layFile(t, path, valid, size)
	m, err := Attach(f, false)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	f.Close()

	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if _, err := Attach(dir, false); !errors.Is(err, ErrForeign) {
		t.Errorf("directory: %v", err)
	}
}

func validPage() []byte {
	o := smallOptions("")
	page := make([]byte, headerBytes)
	h := header{geometry: o.Geometry, identity: o.Identity, epoch: 1, owner: 1, creator: 1, bootID: bootID()}
	h.encode(page)
	return page
}

// layFile makes a sparse file of that size that begins with page, or as much of it as fits.
func layFile(t testing.TB, path string, page []byte, size int64) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	layBytes(t, f, page, size)
	return f
}

func layBytes(t testing.TB, f *os.File, page []byte, size int64) {
	t.Helper()
	if _, err := f.WriteAt(page[:min(int64(len(page)), size)], 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
}

func TestHeaderSurvivesEncodeAndDecode(t *testing.T) {
	want := header{
		geometry: Geometry{BlockBytes: 7168, Blocks: 12345, Slots: 777},
		identity: Identity{Instance: "i", Group: groupA + groupA, Rank: 65535},
		bootID:   bootID(), created: -5, creator: 1 << 22, epoch: 3, owner: 1 << 22, port: 65535, gen: maxGen,
	}
	page := make([]byte, headerBytes)
	want.encode(page)
	got, err := decodeHeader(page, want.geometry.fileBytes())
	if err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
}

// One writer and three readers, in processes of their own; then the owner dies. What they see afterwards is the last state.
func TestAttachersOutliveTheirOwner(t *testing.T) {
	dir := shmDir(t)
	owner := startChild(t, "hold", nil, dir)
	path := owner.hear()
	var workers []*child
	for _, mode := range []string{"w", "r", "r", "r"} {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		c := startChild(t, "attach", []*os.File{f}, mode)
		f.Close()
		c.hear()
		workers = append(workers, c)
	}
	agree := func(want string) {
		t.Helper()
		for i, c := range workers {
			c.say("sum")
			if got := c.hear(); got != want {
				t.Fatalf("worker %d sees %s, want %s", i, got, want)
			}
		}
	}
	workers[0].say("a")
	agree(workers[0].hear())
	owner.kill()
	r := mustCreate(t, smallOptions(dir)) // takes the name; the old memory stays
	workers[0].say("b")
	sum := workers[0].hear()
	agree(sum)
	if got := strconv.FormatUint(sumOf(bytes.Repeat([]byte("b"), 16*4096)), 10); got != sum {
		t.Errorf("sum %s, want %s", sum, got)
	}
	if !bytes.Equal(r.Pool(), make([]byte, 16*4096)) {
		t.Error("the old memory is in the new region")
	}
}

// SIGKILL at a random instruction of a loop of Fill, Ready and Free; then every slot must be truthful.
func TestTableIsTruthfulAfterSIGKILLAtAnyInstruction(t *testing.T) {
	kills := 60
	if testing.Short() {
		kills = 5
	}
	dir := shmDir(t)
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 1))
	ready, filling := 0, 0
	for kill := range kills {
		c := startChild(t, "entries", nil, dir, strconv.FormatUint(seed+uint64(kill), 10))
		for range 1 + rnd.IntN(200) {
			if _, err := c.out.ReadByte(); err != nil {
				t.Fatal(err)
			}
		}
		c.kill()
		m, err := Open(filepath.Join(dir, smallName))
		if err != nil {
			t.Fatal(err)
		}
		used := NewAllocator(m.Geometry().Blocks)
		gens := map[uint64]bool{}
		for i := range m.Slots().Len() {
			s, err := m.Slots().Load(i)
			if err != nil {
				t.Fatalf("seed %d, kill %d, slot %d: %v", seed, kill, i, err)
			}
			if s.State == SlotFree {
				continue
			}
			if s.Gen == 0 || gens[s.Gen] || s.Gen > m.word(offGen) {
				t.Fatalf("seed %d, kill %d, slot %d: generation %d is not unique", seed, kill, i, s.Gen)
			}
			gens[s.Gen] = true
			if err := used.Take(s.Extents); err != nil {
				t.Fatalf("seed %d, kill %d, slot %d: blocks belong to two entries: %v", seed, kill, i, err)
			}
			if s.State == SlotFilling {
				filling++
				continue
			}
			ready++
			if !s.HasChecksum || extentsSum(m.Pool(), s.Extents, s.Bytes) != s.Checksum {
				t.Fatalf("seed %d, kill %d, slot %d: ready, but its bytes are not those of %+v", seed, kill, i, s)
			}
			for _, e := range s.Extents {
				if b := m.Pool()[int64(e.Start)*256]; b != byte(s.Gen) {
					t.Fatalf("seed %d, kill %d, slot %d: byte %d of generation %d", seed, kill, i, b, s.Gen)
				}
			}
		}
		m.Close()
	}
	if ready == 0 || filling == 0 {
		t.Errorf("%d ready and %d filling slots seen", ready, filling)
	}
	os.Remove(filepath.Join(dir, smallName))
}

// FuzzAttach gives Attach any header in a file of any size: a mapping that is usable to its last byte, or ErrFormat.
func FuzzAttach(f *testing.F) {
	size := smallOptions("").Geometry.fileBytes()
	f.Add(validPage(), size, false)
	f.Add(validPage()[:100], int64(100), false)
	f.Add(bytes.Repeat([]byte{0xff}, headerBytes), size, true)
	big := validPage()
	order.PutUint64(big[offBlocks:], 1<<32-1)
	f.Add(big, size, true)
	f.Fuzz(func(t *testing.T, page []byte, size int64, fixSum bool) {
		if size < 0 || size > 1<<30 {
			return
		}
		if fixSum && len(page) >= constLen+8 {
			copy(page, headerMagic)
			order.PutUint32(page[offVersion:], headerVersion)
			order.PutUint32(page[offConstLen:], constLen)
			order.PutUint64(page[constLen:], sumOf(page[:constLen]))
		}
		fd, err := unix.MemfdCreate("region", unix.MFD_CLOEXEC) // a disk would flush for each input
		if err != nil {
			t.Skip(err)
		}
		file := os.NewFile(uintptr(fd), "region")
		defer file.Close()
		layBytes(t, file, page, size)
		m, err := Attach(file, true)
		if err != nil {
			if !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
			return
		}
		defer m.Close()
		m.Pool()[0], m.Pool()[len(m.Pool())-1] = 1, 2
		for _, i := range []int{0, m.Slots().Len() - 1} {
			if _, err := m.Slots().Load(i); err != nil && !errors.Is(err, ErrFormat) {
				t.Fatal(err)
			}
		}
		if _, err := m.Identity().FileName(); err != nil {
			t.Fatal(err)
		}
	})
}

func TestAnAttacherOfAFileThatIsCutGoesOn(t *testing.T) {
	o := smallOptions(shmDir(t))
	o.Geometry.Slots = 256 // the first is in another page than the last
	r := mustCreate(t, o)
	last := o.Geometry.Slots - 1
	var gens []uint64
	for i := range 2 {
		gens = append(gens, mustFill(t, r.Slots(), i*last, Slot{Key: "k", Bytes: 1, Extents: []Extent{{uint32(i), 1}}}))
		r.Slots().Ready(i*last, 0, false)
	}
	must(0, r.Clients().Set(0, Client{ID: 7}))
	m := must(Open(r.Path()))
	defer m.Close()
	look := func() (first, second error, checks [2]bool, client bool) {
		_, first = m.Slots().Load(0)
		_, second = m.Slots().Load(last)
		_, client = m.Clients().Load(0)
		return first, second, [2]bool{m.Slots().Check(0, gens[0]), m.Slots().Check(last, gens[1])}, client
	}
	if a, b, checks, client := look(); a != nil || b != nil || checks != [2]bool{true, true} || !client || m.Epoch() != 1 {
		t.Fatal(a, b, checks, client, m.Epoch())
	}
	must(0, os.Truncate(r.Path(), tableOffset+SlotBytes))
	if a, b, checks, client := look(); a != nil || !errors.Is(b, ErrFormat) || checks != [2]bool{true, false} || !client || m.Epoch() != 1 {
		t.Error(a, b, checks, client, m.Epoch())
	}
	must(0, os.Truncate(r.Path(), 0))
	if a, b, checks, client := look(); !errors.Is(a, ErrFormat) || !errors.Is(b, ErrFormat) || checks != [2]bool{} || client || m.Epoch() != 0 {
		t.Error(a, b, checks, client, m.Epoch())
	}
	if a := m.Slots().Audit(); len(a.Problems) != maxProblems {
		t.Errorf("%d problems", len(a.Problems))
	}
}
