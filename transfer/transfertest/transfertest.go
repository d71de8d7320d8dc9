// Package transfertest is the conformance suite of data planes. Every plane's tests call Run; what a plane does not claim in its
// Capabilities is not asked of it. The package also has Fabric, an in-process plane for tests of what is built on planes.
package transfertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// Patience bounds every wait of the suite.
const Patience = 30 * time.Second

// NewPlanes makes the two planes of one test, which the suite closes. They may be one plane. Files of the memory that the suite
// registers are in dir.
type NewPlanes func(t *testing.T, dir string) (producer, consumer transfer.Plane)

// Run runs the suite.
func Run(t *testing.T, newPlanes NewPlanes) {
	cases := []struct {
		name string
		test func(t *testing.T, w *world)
	}{
		{"EverySizeArrivesWhole", testSizes},
		{"SpansAndSlicesMayBeCutDifferently", testCuts},
		{"ImpossibleRequestsAreRefused", testRefusals},
		{"MetadataIsConstantAndBounded", testMetadata},
		{"WrongMetadataIsAnError", testWrongMetadata},
		{"MemoryWithoutAFileWorksOrIsRefused", testNoFile},
		{"MemoryIsNotRegisteredTwice", testOverlap},
		{"GrantsAreNamedOnceAndMayBeNamedAgain", testGrantNames},
		{"AReadNeedsALiveGrantOfItsSpans", testTokens},
		{"ARevokedReadNeverSucceedsWithOtherBytes", testRevoke},
		{"AClosedRegistrationIsNotRead", testRegistrationClosed},
		{"ANotificationComesOnceWithItsGrant", testNotification},
		{"AFailedReadIsNotNotified", testNoNotification},
		{"ACanceledReadWritesNothingAfterDone", testCancel},
		{"ClosingAPeerEndsItsReads", testPeerClose},
		{"ClosingAPlaneEndsItsReads", testPlaneClose},
		{"ManyReadsAtOnce", testConcurrent},
		{"APeerMayBeAddedTwice", testTwoPeers},
		{"AnEndedContextPostsNothing", testContext},
		{"AViewStaysUntilReleased", testView},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, newPlanes)
			c.test(t, w)
			w.close()
		})
	}
}

// world is two planes, and what was made on them.
type world struct {
	t                  *testing.T
	dir                string
	producer, consumer transfer.Plane
	caps               transfer.Capabilities
	closers            []func()
	goroutines, fds    int
}

func newWorld(t *testing.T, newPlanes NewPlanes) *world {
	t.Helper()
	w := &world{t: t, dir: Dir(t), goroutines: runtime.NumGoroutine(), fds: openFiles(t)}
	w.producer, w.consumer = newPlanes(t, w.dir)
	w.caps = w.consumer.Capabilities()
	return w
}

// close closes everything, and checks that nothing is left behind.
func (w *world) close() {
	for len(w.closers) > 0 {
		last := len(w.closers) - 1
		w.closers[last]()
		w.closers = w.closers[:last]
	}
	for _, p := range []transfer.Plane{w.consumer, w.producer} {
		if err := p.Close(); err != nil {
			w.t.Errorf("closing plane %s: %v", p.Name(), err)
		}
	}
	Eventually(w.t, "goroutines and descriptors of the planes to be gone", func() bool {
		return runtime.NumGoroutine() <= w.goroutines && openFiles(w.t) <= w.fds
	})
}

// Eventually polls until ok, at most for Patience.
func Eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(Patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			buf := make([]byte, 1<<20)
			t.Fatalf("waited %s for %s; goroutines:\n%s", Patience, what, buf[:runtime.Stack(buf, true)])
		}
	}
}

func openFiles(t *testing.T) int {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// Dir makes a directory in shared memory, or anywhere if there is none, that the test's end removes.
func Dir(t *testing.T) string {
	dir, err := os.MkdirTemp("/dev/shm", "transfertest-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// NewMemory makes memory of n bytes in a file in dir, filled by Fill with seed 1. free unmaps it and closes the file.
func NewMemory(t *testing.T, dir string, n int) (m transfer.Memory, free func()) {
	t.Helper()
	const lead = 4096 // as a region's header: the memory does not start with its file
	f, err := os.Create(filepath.Join(dir, fmt.Sprintf("pool-%d", rand.Uint64())))
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(lead + int64(n)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), lead, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	Fill(b, 1)
	return transfer.Memory{Bytes: b, File: f, Path: f.Name(), FileOffset: lead}, func() {
		_ = unix.Munmap(b)
		_ = f.Close()
	}
}

// Fill writes a pattern that differs for every seed and every 8 bytes.
func Fill(b []byte, seed uint64) {
	x := seed * 0x9e3779b97f4a7c15
	i := 0
	for ; i+8 <= len(b); i += 8 {
		x += 0x9e3779b97f4a7c15
		z := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		binary.LittleEndian.PutUint64(b[i:], z)
	}
	for ; i < len(b); i++ {
		b[i] = byte(seed) + byte(i)
	}
}

// offer is a registration, its memory and a peer that sees it.
type offer struct {
	memory transfer.Memory
	reg    transfer.Registration
	peer   transfer.Peer

	mu    sync.Mutex
	notes []transfer.Notification
}

func (w *world) offer(n int) *offer {
	w.t.Helper()
	m, free := NewMemory(w.t, w.dir, n)
	w.closers = append(w.closers, free)
	o := &offer{memory: m}
	o.reg = w.register(m, o.notify)
	o.peer = w.peer(o.reg)
	return o
}

func (w *world) register(m transfer.Memory, notify func(transfer.Notification)) transfer.Registration {
	w.t.Helper()
	reg, err := w.producer.Register(w.t.Context(), m, notify)
	if err != nil {
		w.t.Fatalf("register: %v", err)
	}
	w.closers = append(w.closers, func() {
		if err := reg.Close(); err != nil {
			w.t.Errorf("closing a registration: %v", err)
		}
	})
	return reg
}

func (w *world) peer(reg transfer.Registration) transfer.Peer {
	w.t.Helper()
	p, err := w.consumer.AddPeer(w.t.Context(), reg.Metadata())
	if err != nil {
		w.t.Fatalf("add peer: %v", err)
	}
	w.closers = append(w.closers, func() {
		if err := p.Close(); err != nil {
			w.t.Errorf("closing a peer: %v", err)
		}
	})
	return p
}

func (o *offer) notify(n transfer.Notification) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.notes = append(o.notes, n)
}

func (o *offer) notified() []transfer.Notification {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]transfer.Notification(nil), o.notes...)
}

// whole is the whole memory.
func (o *offer) whole() []region.Span { return []region.Span{{Length: int64(len(o.memory.Bytes))}} }

func (w *world) grant(o *offer, id string, spans ...region.Span) []byte {
	w.t.Helper()
	token, err := o.reg.Grant(id, spans)
	if err != nil {
		w.t.Fatalf("grant: %v", err)
	}
	if (token != nil) != w.caps.Tokens {
		w.t.Fatalf("grant gave the token %x on a plane with Tokens = %v", token, w.caps.Tokens)
	}
	return token
}

// read does a READ and gives its outcome.
func (w *world) read(p transfer.Peer, r transfer.ReadRequest) error {
	w.t.Helper()
	rd, err := p.Read(w.t.Context(), r)
	if err != nil {
		return err
	}
	return w.wait(rd)
}

func (w *world) wait(rd transfer.Read) error {
	w.t.Helper()
	select {
	case <-rd.Done():
		return rd.Err()
	case <-time.After(Patience):
		w.t.Fatalf("a READ did not end within %s", Patience)
		return nil
	}
}

// known says whether err is one of the contract's.
func known(err error) bool {
	for _, k := range []error{transfer.ErrUnreachable, transfer.ErrDenied, transfer.ErrBadRequest, transfer.ErrPeerLost, transfer.ErrCanceled, transfer.ErrClosed} {
		if errors.Is(err, k) {
			return true
		}
	}
	return false
}

func (w *world) wantErr(what string, err, want error) {
	w.t.Helper()
	if !errors.Is(err, want) {
		w.t.Errorf("%s: got error %v, want %v", what, err, want)
	}
}

func (w *world) wantBytes(what string, got, want []byte) {
	w.t.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range got {
		if got[i] != want[i] {
			w.t.Fatalf("%s: byte %d of %d is %#x, want %#x", what, i, len(got), got[i], want[i])
		}
	}
	w.t.Fatalf("%s: %d bytes, want %d", what, len(got), len(want))
}

func ended(ctx context.Context) context.Context {
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	return ctx
}
