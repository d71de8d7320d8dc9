package nixl

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// pair is a plane that serves and one that reads, in this process, over a fake.
type pair struct {
	t                *testing.T
	fake             *binding.Fake
	producer, reader *Plane
}

func newPair(t *testing.T, o Options) *pair {
	t.Helper()
	p := &pair{t: t, fake: binding.NewFake()}
	o.Loaded = p.fake.Library()
	p.producer, p.reader = newPlane(t, o), newPlane(t, o)
	return p
}

func register(t testing.TB, p *Plane, m transfer.Memory) *Registration {
	t.Helper()
	reg, err := p.Register(t.Context(), m, nil)
	must(t, err)
	t.Cleanup(func() { must(t, reg.Close()) })
	return reg.(*Registration)
}

func add(t testing.TB, p *Plane, metadata []byte) transfer.Peer {
	t.Helper()
	c, err := p.AddPeer(t.Context(), metadata)
	must(t, err)
	t.Cleanup(func() { must(t, c.Close()) })
	return c
}

// pull reads the first bytes of a peer's memory.
func pull(t testing.TB, c transfer.Peer, dst []byte) error {
	t.Helper()
	rd, err := c.Read(t.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: int64(len(dst))}}, Local: [][]byte{dst}})
	if err != nil {
		return err
	}
	return wait(t, rd)
}

func wait(t testing.TB, rd transfer.Read) error {
	t.Helper()
	select {
	case <-rd.Done():
		return rd.Err()
	case <-time.After(transfertest.Patience):
		t.Fatal("a READ does not end")
		return nil
	}
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: error %v, want %v", what, err, want)
	}
}

// agentName of a registration whose agent is in this process.
func (r *Registration) agentName() string { return r.cur.Load().agent.(*engine).o.Name }

func TestEndpointsStayBoundedOverAThousandReconnects(t *testing.T) {
	p := newPair(t, Options{IdlePeers: 8})
	m := shared(t, 4096)
	dst := make([]byte, 4096)
	for i := range 1000 {
		reg, err := p.producer.Register(t.Context(), m, nil)
		must(t, err)
		c, err := p.reader.AddPeer(t.Context(), reg.Metadata())
		must(t, err)
		if i%10 == 0 {
			must(t, pull(t, c, dst))
		}
		must(t, c.Close())
		must(t, reg.Close())
		if _, _, requests, peers := p.fake.Live(); peers > 8 || requests > 0 {
			t.Fatalf("after %d reconnects %d peers and %d requests are left", i+1, peers, requests)
		}
	}
}

func TestAPeerThatComesBackIsStillKnown(t *testing.T) {
	p := newPair(t, Options{})
	reg := register(t, p.producer, shared(t, 4096))
	for range 3 {
		c, err := p.reader.AddPeer(t.Context(), reg.Metadata())
		must(t, err)
		must(t, c.Close())
	}
	// Loading anew would fail now.
	p.fake.Fail(binding.FakeAddPeer, 0, binding.StatusBackend)
	must(t, pull(t, add(t, p.reader, reg.Metadata()), make([]byte, 4096)))
}

func TestADeadAgentIsATypedErrorAndIsNotTriedAgainAtOnce(t *testing.T) {
	p := newPair(t, Options{})
	reg := register(t, p.producer, shared(t, 4096))
	c := add(t, p.reader, reg.Metadata())
	must(t, pull(t, c, make([]byte, 4096)))
	p.fake.Kill(reg.agentName())
	wantErr(t, "READ", pull(t, c, make([]byte, 4096)), transfer.ErrPeerLost)
	wantErr(t, "READ of a peer that has failed", pull(t, c, make([]byte, 4096)), transfer.ErrPeerLost)
	_, err := p.reader.AddPeer(t.Context(), reg.Metadata())
	wantErr(t, "adding it anew", err, transfer.ErrPeerLost)
	_, err = p.reader.AddPeer(t.Context(), reg.Metadata())
	wantErr(t, "adding it at once again", err, transfer.ErrPeerLost)
	if err == nil || !bytes.Contains([]byte(err.Error()), []byte("next try")) {
		t.Errorf("no back-off: %v", err)
	}
	other := register(t, p.producer, shared(t, 4096))
	must(t, pull(t, add(t, p.reader, other.Metadata()), make([]byte, 4096)))
}

// C65: what failed once is not kept for ever.
func TestAPeerWhoseReadFailedIsLoadedAnew(t *testing.T) {
	p := newPair(t, Options{})
	reg := register(t, p.producer, shared(t, 4096))
	first := add(t, p.reader, reg.Metadata())
	p.fake.Fail(binding.FakePost, 0, binding.StatusBackend)
	wantErr(t, "READ", pull(t, first, make([]byte, 4096)), transfer.ErrPeerLost)
	second := add(t, p.reader, reg.Metadata())
	must(t, pull(t, second, make([]byte, 4096)))
	must(t, first.Close())
	must(t, pull(t, second, make([]byte, 4096)))
}

// What the quarantine of a destination relies on.
func TestClosingAPeerEndsReadsThatAFrozenAgentWouldKeepForEver(t *testing.T) {
	p := newPair(t, Options{Drain: 20 * time.Millisecond})
	frozen, healthy := register(t, p.producer, shared(t, 4096)), register(t, p.producer, shared(t, 4096))
	m := shared(t, 4096)
	register(t, p.reader, m)
	clear(m.Bytes)
	c, other := add(t, p.reader, frozen.Metadata()), add(t, p.reader, healthy.Metadata())
	p.fake.Freeze(frozen.agentName())
	rd, err := c.Read(t.Context(), transfer.ReadRequest{Remote: []region.Span{{Length: 4096}}, Local: [][]byte{m.Bytes}})
	must(t, err)
	select {
	case <-rd.Done():
		t.Fatalf("a frozen READ ended: %v", rd.Err())
	case <-time.After(50 * time.Millisecond):
	}
	must(t, c.Close())
	wantErr(t, "the READ", wait(t, rd), transfer.ErrPeerLost)
	p.fake.Thaw(frozen.agentName())
	must(t, pull(t, other, make([]byte, 4096)))
	if !bytes.Equal(m.Bytes, make([]byte, 4096)) {
		t.Error("the destination was written after Done")
	}
}

func TestRotationLeavesTheFormerAgentToThoseWhoKnowIt(t *testing.T) {
	p := newPair(t, Options{})
	m := shared(t, 4096)
	reg := register(t, p.producer, m)
	known := add(t, p.reader, reg.Metadata())
	before, base, gone := reg.Agent()
	end, err := reg.Rotate(t.Context())
	must(t, err)
	after, newBase, newGone := reg.Agent()
	if bytes.Equal(before, after) || newBase != base {
		t.Error("the new incarnation has the metadata of the former one, or another base in this process")
	}
	dst := make([]byte, 4096)
	must(t, pull(t, known, dst))
	must(t, pull(t, add(t, p.reader, reg.Metadata()), dst))
	select {
	case <-gone:
		t.Error("the former one is gone before its end")
	default:
	}
	end()
	end()
	<-gone
	select {
	case <-newGone:
		t.Error("the new one is gone")
	default:
	}
	wantErr(t, "READ from the former one", pull(t, known, dst), transfer.ErrPeerLost)
	must(t, pull(t, add(t, p.reader, reg.Metadata()), dst))
}

func TestNotificationsComeWhileAGrantIsToldOf(t *testing.T) {
	p := newPair(t, Options{})
	notes := make(chan transfer.Notification, 1)
	reg, err := p.producer.Register(t.Context(), shared(t, 4096), func(n transfer.Notification) { notes <- n })
	must(t, err)
	defer reg.Close()
	reg.(*Registration).Agent()
	rd, err := add(t, p.reader, reg.Metadata()).Read(t.Context(), transfer.ReadRequest{
		Remote: []region.Span{{Length: 10}}, Local: [][]byte{make([]byte, 10)}, Notification: []byte("session:key"),
	})
	must(t, err)
	must(t, wait(t, rd))
	select {
	case n := <-notes:
		if string(n.Message) != "session:key" {
			t.Errorf("%q", n.Message)
		}
	case <-time.After(transfertest.Patience):
		t.Fatal("no notification")
	}
}

func TestAPlainPeersBlocksMayLieAnywhere(t *testing.T) {
	p := newPair(t, Options{})
	m := shared(t, 64<<10)
	reg := register(t, p.producer, m)
	md, base, _ := reg.Agent()
	order := []int{7, 3, 4, 5, 0, 15}
	blocks := make([]uint64, len(order))
	var want []byte
	for i, b := range order {
		blocks[i] = base + uint64(b)*4096
		want = append(want, m.Bytes[b*4096:(b+1)*4096]...)
	}
	c, err := p.reader.AddPlainPeer(t.Context(), md, blocks, 4096)
	must(t, err)
	defer c.Close()
	got := make([]byte, len(want)-100)
	must(t, pull(t, c, got))
	if !bytes.Equal(got, want[:len(got)]) {
		t.Error("wrong bytes")
	}
	wantErr(t, "more than it has", pull(t, c, make([]byte, len(want)+1)), transfer.ErrBadRequest)
}

func TestImpossiblePlainPeersAreRefused(t *testing.T) {
	p := newPair(t, Options{})
	md, base, _ := register(t, p.producer, shared(t, 4096)).Agent()
	for _, c := range []struct {
		name     string
		metadata []byte
		blocks   []uint64
		size     int64
	}{
		{"no blocks", md, nil, 4096},
		{"blocks of nothing", md, []uint64{base}, 0},
		{"blocks of less than nothing", md, []uint64{base}, -1},
		{"a block at 0", md, []uint64{base, 0}, 4096},
		{"a block that wraps", md, []uint64{1<<64 - 100}, 4096},
		{"sizes that overflow", md, []uint64{base, base}, 1 << 62},
		{"garbage", []byte("garbage"), []uint64{base}, 4096},
		{"metadata cut short", md[:len(md)-1], []uint64{base}, 4096},
		{"too much metadata", bytes.Repeat(md, transfer.MaxMetadata/len(md)+1), []uint64{base}, 4096},
	} {
		_, err := p.reader.AddPlainPeer(t.Context(), c.metadata, c.blocks, c.size)
		wantErr(t, c.name, err, transfer.ErrBadRequest)
	}
}

func TestAPlaneReadsFromItself(t *testing.T) {
	p := newPlane(t, Options{Loaded: binding.NewFake().Library()})
	must(t, p.SelfTest(t.Context()))
	f := binding.NewFake()
	broken := newPlane(t, Options{Loaded: f.Library()})
	f.Fail(binding.FakePost, 0, binding.StatusBackend)
	if err := broken.SelfTest(t.Context()); err == nil {
		t.Error("a READ that fails passes")
	}
}

func TestAMissingLibraryIsSaidWithWhatToInstall(t *testing.T) {
	t.Setenv(binding.LibraryEnv, "")
	t.Setenv("VIRTUAL_ENV", "")
	t.Setenv("HOME", t.TempDir())
	if len(binding.Find()) > 0 {
		t.Skip("the system has a NIXL of its own")
	}
	for _, command := range [][]string{nil, {"agent"}} {
		_, err := New(Options{Command: command})
		wantErr(t, "New", err, ErrMissing)
		if err != nil && !bytes.Contains([]byte(err.Error()), []byte("pip install nixl")) {
			t.Errorf("no word of what to install: %v", err)
		}
	}
}

func TestANamedLibraryThatIsNotThereIsSaidWithWhatToInstall(t *testing.T) {
	const path = "/no/such/libnixl_capi.so"
	for _, command := range [][]string{nil, {"agent"}} {
		_, err := New(Options{Command: command, Library: path})
		wantErr(t, "New", err, ErrMissing)
		for _, word := range []string{path, "pip install nixl", binding.LibraryEnv} {
			if err != nil && !strings.Contains(err.Error(), word) {
				t.Errorf("no word of %q: %v", word, err)
			}
		}
	}
}

func TestNoTwoIncarnationsShareAName(t *testing.T) {
	p := newPair(t, Options{})
	reg := register(t, p.producer, shared(t, 4096))
	names := map[string]bool{}
	note := func() {
		t.Helper()
		i, ok := reg.Incarnation()
		if !ok {
			t.Fatal("nothing serves")
		}
		name, err := binding.AgentName(i.Agent)
		must(t, err)
		if names[name] {
			t.Errorf("the name %q comes again", name)
		}
		names[name] = true
	}
	note()
	for range 20 {
		end, err := reg.Rotate(t.Context())
		must(t, err)
		note()
		end()
	}
	dead, _ := reg.Incarnation()
	reg.cur.Load().agent.end()
	transfertest.Eventually(t, "the next agent", func() bool {
		now, ok := reg.Incarnation()
		return ok && now.Gone != dead.Gone
	})
	note()
	if other := register(t, p.producer, shared(t, 4096)).agentName(); names[other] {
		t.Errorf("the name %q comes again", other)
	}
}

// Adding a dead agent costs endpoints at both ends, so it is tried ever less often.
func TestAddingAPeerThatFailsIsTriedEverLessOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := binding.NewFake()
		a := producer(t, f, "plain")
		md := metadataOf(t, a)
		e, err := newEngine(f.Library(), engineOptions{Name: "reader", Backends: []Backend{{Name: "UCX"}}, IdlePeers: 8}, nil)
		must(t, err)
		defer e.end()
		wait := addBackoffFirst
		for range 10 {
			f.Fail(binding.FakeAddPeer, 0, binding.StatusBackend)
			if _, err := e.addPeer(t.Context(), md); err == nil || strings.Contains(err.Error(), "next try") {
				t.Fatalf("a try: %v", err)
			}
			time.Sleep(wait - 1)
			_, err := e.addPeer(t.Context(), md)
			wantErr(t, "too soon", err, transfer.ErrPeerLost)
			if err != nil && !strings.Contains(err.Error(), "next try") {
				t.Fatalf("after %v: %v", wait-1, err)
			}
			time.Sleep(1)
			wait = min(2*wait, addBackoffMost)
		}
		if wait != addBackoffMost {
			t.Errorf("the longest wait is %v", wait)
		}
		_, err = e.addPeer(t.Context(), md)
		must(t, err)
	})
}

// UCX keeps what it knows of memory until it sees libc's munmap.
func TestMemoryOfThisProcessIsUnmappedByTheLibrary(t *testing.T) {
	f := binding.NewFake()
	for name, p := range map[string]*Plane{"in process": newPlane(t, Options{Loaded: f.Library()}), "processes": {}} {
		b, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
		must(t, err)
		must(t, p.Unmap(b))
		if err := unix.Madvise(b, unix.MADV_NORMAL); err == nil {
			t.Errorf("%s: it is still mapped", name)
		}
	}
}
