package shm

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

func TestPayloadsOfAllSizesArriveInEveryWay(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	for _, n := range []int{0, 1, 4096, 16 << 10, 64<<10 - 200, 64 << 10, 1 << 20, 9<<20 + 1} {
		for _, inPlace := range []bool{false, true} {
			for _, metadata := range []bool{false, true} {
				want := value("k", n)
				p := mustPut(t, c, "k", want)
				r := stage.Request{Key: "k", InPlace: inPlace}
				if metadata {
					r.Metadata = p.Metadata
				}
				g := mustGet(t, c, r)
				if !tensor.Equal(g.Root, want) || g.Key != "k" || g.Kind != wire.Object || g.Plane != "shm" || g.Size != p.Size {
					t.Errorf("%d bytes, in place %v: got %v of %d", n, inPlace, g.Kind, g.Size)
				}
				if data := g.Root.(tensor.Map).Get("t").(tensor.Tensor).Data(); !inPlace && n > 0 {
					data[n-1]++ // it is the reader's
				}
				wantOutcome(t, p, stage.Read)
				wantFiles(t, dir)
				if err := errors.Join(g.Release(), g.Release()); err != nil {
					t.Error(err)
				}
			}
		}
	}
	// C54: what is empty arrives as well.
	for _, v := range []tensor.Node{tensor.Map{}, tensor.Null{}, tensor.List{}, tensor.String("")} {
		mustPut(t, c, "empty", v)
		if g := mustGet(t, c, stage.Request{Key: "empty"}); !tensor.Equal(g.Root, v) {
			t.Errorf("got %v, want %v", g.Root, v)
		}
	}
	wantFiles(t, dir)
}

func TestSegmentAndMetadataAreByteEqualToThePeers(t *testing.T) {
	var golden struct {
		SHM struct {
			Put   []json.RawMessage `json:"put_return"`
			Files map[string]struct {
				Mode string
				Size int64
			}
			Segment string `json:"segment_hex"`
		} `json:"shm"`
	}
	b, err := os.ReadFile("../../interop/golden/omni.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &golden); err != nil {
		t.Fatal(err)
	}
	want, err := hex.DecodeString(golden.SHM.Segment)
	if err != nil {
		t.Fatal(err)
	}
	root, err := wire.DecodeObject(want)
	if err != nil {
		t.Fatal(err)
	}
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	p := mustPut(t, c, "gold_0_0", root)
	got, err := os.ReadFile(filepath.Join(dir, "gold_0_0"))
	if err != nil || string(got) != string(want) || p.Size != int64(len(want)) {
		t.Errorf("segment %x, want %x (%v)", got, want, err)
	}
	for name, f := range golden.SHM.Files {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil || st.Size() != f.Size || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	m, err := wire.DecodeObject(p.Metadata)
	if err != nil {
		t.Fatal(err)
	}
	text, err := tensor.AppendJSON(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Join(strings.Fields(string(golden.SHM.Put[2])), ""); string(text) != want {
		t.Errorf("metadata %s, want %s", text, want)
	}
}

func TestKeysThatAreNoNamesAreRefused(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	long := strings.Repeat("k", MaxKey)
	for _, key := range []string{"", ".", "..", "a/b", "/a", "../a", "a\x00", "\xff", long + "k", lockName("a"), "ferry_stage_0123456789abcdef.puts", ".ferry_x"} {
		if _, err := c.Put(t.Context(), key, tensor.Null{}, stage.PutOptions{}); !errors.Is(err, ErrKey) {
			t.Errorf("put of %q: %v", key, err)
		}
		if _, err := c.Get(t.Context(), stage.Request{Key: key}); !errors.Is(err, ErrKey) {
			t.Errorf("get of %q: %v", key, err)
		}
	}
	for _, key := range []string{long, "req_0_1", "KEY@0_1", "omni_a_to_b_kv_cache_r", "...", "ü", "-", "shm_", "a lockfile.lock", "sem.x"} {
		mustPut(t, c, key, value(key, 3))
		if g := mustGet(t, c, stage.Request{Key: key}); !tensor.Equal(g.Root, value(key, 3)) {
			t.Errorf("%q: got %v", key, g.Root)
		}
	}
	wantFiles(t, dir)
}

func TestOptionsThatCannotBeAreRefused(t *testing.T) {
	for _, o := range []Options{{Lease: -1}, {MaxBytes: -1}, {MaxPayload: -1}} {
		if _, err := Open(o); !errors.Is(err, stage.ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if _, err := Open(Options{Dir: "/nonexistent"}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	tuple := tensor.List{tensor.Map{tensor.Field("x", tensor.Tuple{})}}
	for _, o := range []stage.PutOptions{{Readers: 2}, {Readers: math.MaxInt}, {Readers: -1}, {Lease: -1}, {Pack: wire.PackOptions{Exact: true}}} {
		if _, err := c.Put(t.Context(), "k", tuple, o); !errors.Is(err, stage.ErrOptions) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if _, err := c.Put(t.Context(), "k", tensor.Map{tensor.Field("__tensor__", tensor.Int(1))}, stage.PutOptions{}); !errors.Is(err, wire.ErrMarker) {
		t.Error(err)
	}
	wantFiles(t, dir)
}

// S4: metadata of another key reads nothing, and a wrong size consumes nothing.
func TestMetadataCannotNameAnotherSegment(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	a, b := mustPut(t, c, "a", value("a", 5)), mustPut(t, c, "b", value("b", 6))
	encode := func(n tensor.Node) []byte { return must(wire.AppendObject(nil, n, wire.ObjectOptions{})) }
	handle := func(name tensor.Node, size tensor.Node) tensor.Node {
		return tensor.Map{tensor.Field("shm", tensor.Map{tensor.Field("name", name), tensor.Field("size", size)})}
	}
	for name, x := range map[string]struct {
		metadata []byte
		err      error
	}{
		"another's":           {b.Metadata, ErrKey},
		"a path":              {encode(handle(tensor.String("../a"), tensor.Int(1))), ErrKey},
		"another's, by key":   {encode(tensor.Map{tensor.Field("a", handle(tensor.String("b"), tensor.Int(1)))}), ErrKey},
		"no name":             {encode(handle(tensor.Int(1), tensor.Int(1))), ErrKey},
		"a handle of nothing": {encode(tensor.Map{tensor.Field("shm", tensor.Int(1))}), ErrKey},
		"a negative size":     {encode(handle(tensor.String("a"), tensor.Int(-1))), ErrKey},
		"a size that is text": {encode(handle(tensor.String("a"), tensor.String("9"))), ErrKey},
		"size 0":              {encode(handle(tensor.String("a"), tensor.Int(0))), ErrForeign},
		"a short size":        {encode(handle(tensor.String("a"), tensor.Int(a.Size-1))), ErrForeign},
		"a long size":         {encode(handle(tensor.String("a"), tensor.Int(a.Size+1))), ErrForeign},
		"junk":                {[]byte{0xc1}, wire.ErrMalformed},
	} {
		if _, err := c.Get(t.Context(), stage.Request{Key: "a", Metadata: x.metadata}); !errors.Is(err, x.err) {
			t.Errorf("%s: %v, want %v", name, err, x.err)
		}
	}
	// What is no metadata of this connector says nothing, as with the peers.
	for name, metadata := range map[string][]byte{
		"nil":           encode(tensor.Null{}),
		"an endpoint":   encode(tensor.Map{tensor.Field("source_host", tensor.String("h")), tensor.Field("source_port", tensor.Int(1))}),
		"of keys":       encode(tensor.Map{tensor.Field("a", handle(tensor.String("a"), tensor.Int(a.Size)))}),
		"of other keys": encode(tensor.Map{tensor.Field("z", tensor.Int(1))}),
	} {
		g, err := c.Get(t.Context(), stage.Request{Key: "a", Metadata: metadata})
		if err != nil || !tensor.Equal(g.Root, value("a", 5)) {
			t.Errorf("%s: %v", name, err)
		}
		mustPut(t, c, "a", value("a", 5))
	}
}

func TestWithoutWaitANotFoundIsToldAtOnce(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	if _, err := c.Get(t.Context(), stage.Request{Key: "k"}); !errors.Is(err, stage.ErrNotFound) {
		t.Error(err)
	}
	// One that is being made has 0 bytes.
	if err := os.WriteFile(filepath.Join(dir, "k"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Get(t.Context(), stage.Request{Key: "k"}); !errors.Is(err, stage.ErrNotFound) {
		t.Error(err)
	}
	wantFiles(t, dir, "k")
}

func TestAWaitingGetIsWokenByThePut(t *testing.T) {
	dir := shmDir(t)
	from, to := open(t, Options{Dir: dir}), open(t, Options{Dir: dir})
	type answer struct {
		g   *stage.Got
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		g, err := to.Get(within(t, patience), stage.Request{Key: "k", Wait: true})
		answers <- answer{g, err}
	}()
	eventually(t, "the get waits", func() bool {
		to.mu.Lock()
		defer to.mu.Unlock()
		return to.watcher != nil
	})
	p := mustPut(t, from, "k", value("k", 9))
	if a := <-answers; a.err != nil || !tensor.Equal(a.g.Root, value("k", 9)) {
		t.Fatalf("%+v", a)
	}
	wantOutcome(t, p, stage.Read)
	<-p.Claimed()
}

func TestAWaitEndsAtItsDeadlineWithWhatKeptIt(t *testing.T) {
	c := open(t, Options{Dir: shmDir(t)})
	_, err := c.Get(within(t, 20*time.Millisecond), stage.Request{Key: "k", Wait: true})
	if !errors.Is(err, stage.ErrNotFound) || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Get(ctx, stage.Request{Key: "k", Wait: true}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestAGetThatIsTooLateLeavesThePayload(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	mustPut(t, c, "k", value("k", 32<<20))
	for _, inPlace := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := c.Get(ctx, stage.Request{Key: "k", InPlace: inPlace}); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
	if g := mustGet(t, c, stage.Request{Key: "k", InPlace: true}); !tensor.Equal(g.Root, value("k", 32<<20)) {
		t.Error("other bytes")
	} else if err := g.Release(); err != nil {
		t.Error(err)
	}
	wantFiles(t, dir)
}

func TestAnAbortEndsWaitsOfTheSameConnector(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	errs := make(chan error, 1)
	go func() {
		_, err := c.Get(within(t, patience), stage.Request{Key: "k", Wait: true})
		errs <- err
	}()
	eventually(t, "the get waits", func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.watcher != nil
	})
	c.Abort("k", "out of paper")
	var failed *stage.FailedError
	if err := <-errs; !errors.As(err, &failed) || failed.Reason != "out of paper" {
		t.Error(err)
	}
	if _, err := c.Get(t.Context(), stage.Request{Key: "k"}); !errors.Is(err, stage.ErrFailed) {
		t.Error(err)
	}
	p := mustPut(t, c, "k", value("k", 1))
	c.Abort("k", "again")
	wantOutcome(t, p, stage.Aborted)
	wantFiles(t, dir)
	mustPut(t, c, "k", value("k", 2)) // which ends it
	mustGet(t, c, stage.Request{Key: "k"})
	for range 2 * maxFailures {
		c.Abort(string(wire.NewID().String()), "")
	}
	if n := len(c.failures); n > maxFailures {
		t.Errorf("%d keys are remembered", n)
	}
}

func TestWhatWasGotIsRepublishedOnceAndReleased(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	want := value("k", mapMin)
	mustPut(t, c, "k", want)
	got := mustGet(t, c, stage.Request{Key: "k", InPlace: true})
	if _, err := c.Republish(t.Context(), "again", got, stage.PutOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Republish(t.Context(), "twice", got, stage.PutOptions{}); !errors.Is(err, stage.ErrOptions) {
		t.Errorf("of what was released: %v", err)
	}
	g := mustGet(t, c, stage.Request{Key: "again"})
	if !tensor.Equal(g.Root, want) {
		t.Error("other bytes")
	}
	if err := g.Release(); err != nil {
		t.Error(err)
	}
	mustPut(t, c, "mapped", want)
	got = mustGet(t, c, stage.Request{Key: "mapped", InPlace: true})
	if _, err := c.Republish(t.Context(), "k", got, stage.PutOptions{Readers: 2}); !errors.Is(err, stage.ErrOptions) {
		t.Errorf("with two readers: %v", err)
	}
	if maps := string(must(os.ReadFile("/proc/self/maps"))); strings.Contains(maps, dir) {
		t.Error("a mapping is left")
	}
}

func TestOutcomesSayHowAPayloadEnded(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir})
	first := mustPut(t, c, "k", value("k1", 1))
	second := mustPut(t, c, "k", value("k2", 2))
	wantOutcome(t, first, stage.Replaced)
	if err := c.Cleanup("k"); err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, second, stage.CleanedUp)
	if err := c.Cleanup("k"); err != nil {
		t.Error(err)
	}
	// C56: nobody comes.
	expired, err := c.Put(t.Context(), "k", value("k", 1), stage.PutOptions{Lease: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	wantOutcome(t, expired, stage.Expired)
	select {
	case <-expired.Claimed():
		t.Error("an expired payload was claimed")
	default:
	}
	wantFiles(t, dir)
	if len(c.entries) != 0 || len(c.record.free) != c.record.len-1 {
		t.Errorf("%d entries, %d of %d slots free", len(c.entries), len(c.record.free), c.record.len)
	}
}

func TestAPayloadThatIsBeingReadIsLeftToItsReader(t *testing.T) {
	dir := shmDir(t)
	c, d := open(t, Options{Dir: dir}), must(openFolder(dir))
	defer d.close()
	p, err := c.Put(t.Context(), "k", value("k", 1), stage.PutOptions{Lease: 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	reader := must(d.tryLock("k"))
	if err := c.Cleanup("k"); !errors.Is(err, stage.ErrClaimed) {
		t.Error(err)
	}
	c.Abort("k", "no matter")
	// S3: a put waits for a lock until its deadline, not for ever.
	if _, err := c.Put(within(t, 200*time.Millisecond), "k", value("k", 2), stage.PutOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	wantFiles(t, dir, "k", lockName("k"))
	select {
	case <-p.Released():
		t.Error("released under its reader")
	default:
	}
	reader.close()
	wantOutcome(t, p, stage.Expired) // its lease ended meanwhile
	wantFiles(t, dir)
}

func TestAPutWaitsForTheLockAndIsWoken(t *testing.T) {
	dir := shmDir(t)
	c, d := open(t, Options{Dir: dir}), must(openFolder(dir))
	defer d.close()
	lock := must(d.tryLock("k"))
	done := make(chan error, 1)
	go func() {
		_, err := c.Put(within(t, patience), "k", value("k", 1), stage.PutOptions{})
		done <- err
	}()
	eventually(t, "the put waits", func() bool {
		c.mu.Lock()
		w := c.watcher
		c.mu.Unlock()
		if w == nil {
			return false
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.waiters["k"]) == 1
	})
	lock.close()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// C51: a slow consumer holds its producer back.
func TestUnreadBytesNeverExceedTheCap(t *testing.T) {
	dir := shmDir(t)
	c := open(t, Options{Dir: dir, MaxBytes: 4 * page})
	if _, err := c.Put(t.Context(), "large", value("k", 4*page), stage.PutOptions{}); !errors.Is(err, stage.ErrFull) {
		t.Error(err)
	}
	for _, key := range []string{"a", "b", "c", "d"} {
		mustPut(t, c, key, value(key, 1))
	}
	_, err := c.Put(within(t, 20*time.Millisecond), "e", value("e", 1), stage.PutOptions{})
	if !errors.Is(err, stage.ErrFull) || !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	mustPut(t, c, "a", value("a2", 1)) // takes its own place
	done := make(chan error, 1)
	go func() {
		_, err := c.Put(within(t, patience), "e", value("e", 1), stage.PutOptions{})
		done <- err
	}()
	mustGet(t, c, stage.Request{Key: "b"})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	wantFiles(t, dir, "a", "c", "d", "e", lockName("a"), lockName("c"), lockName("d"), lockName("e"))
}

func TestCloseWaitsForReadersAndRemovesWhatNobodyRead(t *testing.T) {
	dir := shmDir(t)
	c, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	other := open(t, Options{Dir: dir})
	read, unread := mustPut(t, c, "read", value("k", 100<<10)), mustPut(t, c, "unread", value("k", 1))
	waits := make(chan error, 1)
	go func() {
		_, err := c.Get(within(t, patience), stage.Request{Key: "none", Wait: true})
		waits <- err
	}()
	closed := make(chan error, 1)
	ctx, stop := context.WithCancel(t.Context())
	go func() { closed <- c.Close(ctx) }()
	if err := <-waits; !errors.Is(err, stage.ErrClosing) {
		t.Error(err)
	}
	if c.Healthy() {
		t.Error("healthy")
	}
	if _, err := c.Put(t.Context(), "k", tensor.Null{}, stage.PutOptions{}); !errors.Is(err, stage.ErrClosing) {
		t.Error(err)
	}
	g := mustGet(t, other, stage.Request{Key: "read", InPlace: true})
	wantOutcome(t, read, stage.Read)
	stop()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	wantOutcome(t, unread, stage.Closed)
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
	wantFiles(t, dir)
	if names, err := os.ReadDir(dir); err != nil || len(names) != 0 {
		t.Errorf("%v are left: %v", names, err)
	}
	if !tensor.Equal(g.Root, value("k", 100<<10)) {
		t.Error("what was got did not outlive its producer")
	}
	if err := g.Release(); err != nil {
		t.Error(err)
	}
}

func TestCloseIsBoundedByAReaderThatDoesNotEnd(t *testing.T) {
	dir := shmDir(t)
	c, err := Open(Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	d := must(openFolder(dir))
	defer d.close()
	mustPut(t, c, "k", value("k", 1))
	reader := must(d.tryLock("k"))
	if err := c.Close(within(t, time.Millisecond)); !errors.Is(err, stage.ErrBusy) {
		t.Error(err)
	}
	reader.close()
	wantFiles(t, dir, "k", lockName("k"))
	// It is a dead connector's now: readable until its lease ends.
	if g := mustGet(t, open(t, Options{Dir: dir}), stage.Request{Key: "k"}); !tensor.Equal(g.Root, value("k", 1)) {
		t.Error("other bytes")
	}
}
