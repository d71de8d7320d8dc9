package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
)

const (
	testBlocks = 8
	testBlock  = 1024
)

var testSpec = ec.Spec{Dtype: "torch.uint8", Shape: []int64{1, testBlock}, Bytes: testBlock}

func testContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// fakeNode is the other end of one connection, which the test plays by hand.
type fakeNode struct {
	t       *testing.T
	path    string
	listen  *net.UnixListener
	region  *region.Region
	welcome api.Welcome
	conn    *api.Conn
}

func newFakeNode(t *testing.T) *fakeNode {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "ferry-test-")
	if err != nil {
		t.Skipf("no /dev/shm to work in: %v", err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r, err := region.Create(testContext(t), region.Options{
		Dir: dir, Identity: region.Identity{Instance: "fake", Group: "ab"}, Geometry: region.Geometry{BlockBytes: testBlock, Blocks: testBlocks},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close(true) })
	f := &fakeNode{t: t, path: filepath.Join(t.TempDir(), "s"), region: r}
	f.welcome = api.Welcome{Version: 1, Node: "fake", Epoch: 1, Pool: api.PoolInfo{BlockBytes: testBlock, Blocks: testBlocks}}
	if f.listen, err = net.ListenUnix("unix", &net.UnixAddr{Name: f.path}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.listen.Close() })
	return f
}

// accept takes the connection and the hello.
func (f *fakeNode) accept() error {
	sock, err := f.listen.AcceptUnix()
	if err != nil {
		return err
	}
	f.t.Cleanup(func() { _ = sock.Close() })
	if f.conn, err = api.NewConn(sock, api.ConnOptions{InLimit: api.MaxRequestFrame, Backlog: 1 << 20}); err != nil {
		return err
	}
	m, err := f.conn.Receive()
	if h, ok := m.(*api.Hello); err == nil && (!ok || h.Version != api.Version) {
		err = fmt.Errorf("first came %+v", m)
	}
	return err
}

// unread takes a connection and drops it with the hello unread, which resets it.
func (f *fakeNode) unread() error {
	sock, err := f.listen.AcceptUnix()
	if err != nil {
		return err
	}
	raw, err := sock.SyscallConn()
	if err != nil {
		return err
	}
	peeked := raw.Read(func(fd uintptr) bool {
		_, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK)
		return !errors.Is(err, unix.EAGAIN)
	})
	return errors.Join(peeked, err, sock.Close())
}

func (f *fakeNode) greet() error {
	if err := f.accept(); err != nil {
		return err
	}
	file, err := f.region.Reopen(true)
	if err != nil {
		return err
	}
	defer func() { _ = file.Close() }()
	return f.conn.SendWithFile(&f.welcome, api.MaxReplyFrame, file, time.Minute)
}

// dial connects a client to it.
func (f *fakeNode) dial() *Client {
	f.t.Helper()
	greeted := make(chan error, 1)
	go func() { greeted <- f.greet() }()
	c, err := Dial(testContext(f.t), f.path, Options{Name: "test", Once: true})
	if err := errors.Join(err, <-greeted); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = c.Close() })
	return c
}

// request takes the next request.
func (f *fakeNode) request() *api.Request {
	f.t.Helper()
	if err := f.conn.SetReceiveDeadline(time.Now().Add(time.Minute)); err != nil {
		f.t.Fatal(err)
	}
	m, err := f.conn.Receive()
	r, ok := m.(*api.Request)
	if err != nil || !ok {
		f.t.Fatalf("%+v, %v; want a request", m, err)
	}
	return r
}

func (f *fakeNode) send(m api.Message) {
	f.t.Helper()
	if err := f.conn.Send(api.MaxReplyFrame, m); err != nil {
		f.t.Fatal(err)
	}
}

func TestAHandshakeThatIsNotOursEndsInAnError(t *testing.T) {
	for _, c := range []struct {
		name string
		play func(f *fakeNode) error
		want error
	}{
		{"refused", func(f *fakeNode) error {
			return errors.Join(f.accept(), f.conn.Send(api.MaxReplyFrame, &api.Refused{Code: api.CodeNoPool, Message: "no"}))
		}, ErrNoPool},
		{"no file", func(f *fakeNode) error { return errors.Join(f.accept(), f.conn.Send(api.MaxReplyFrame, &f.welcome)) }, ErrProtocol},
		{"a later version", func(f *fakeNode) error { f.welcome.Version = 2; return f.greet() }, ErrVersion},
		{"another pool than the file's", func(f *fakeNode) error { f.welcome.Pool.Blocks++; return f.greet() }, ErrProtocol},
		{"no welcome", func(f *fakeNode) error { return errors.Join(f.accept(), f.conn.Send(api.MaxReplyFrame, &api.Bye{})) }, ErrProtocol},
	} {
		f := newFakeNode(t)
		played := make(chan error, 1)
		go func() { played <- c.play(f) }()
		_, err := Dial(testContext(t), f.path, Options{})
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		if err := <-played; err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestDialOutlastsANodeThatIsRestartedInTheHandshake(t *testing.T) {
	f := newFakeNode(t)
	played := make(chan error, 1)
	go func() {
		played <- errors.Join(
			f.accept(), f.conn.Close(), // killed after the hello
			f.accept(), f.conn.Send(api.MaxReplyFrame, &api.Refused{Code: api.CodeClosing, Message: "ending"}), f.conn.Close(),
			f.unread(), // killed before it read the hello
			f.greet(),
		)
	}()
	c, err := Dial(testContext(t), f.path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := <-played; err != nil {
		t.Error(err)
	}
}

func TestDialOutlastsTheSocketOfADeadNode(t *testing.T) {
	f := newFakeNode(t)
	f.listen.SetUnlinkOnClose(false)
	if err := f.listen.Close(); err != nil { // from here on nobody listens
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	tried := make(chan error, 1)
	go func() {
		_, err := Dial(ctx, f.path, Options{})
		tried <- err
	}()
	select {
	case err := <-tried:
		t.Errorf("it gave up: %v", err)
	case <-time.After(10 * firstPause):
	}
	cancel()
	if err := <-tried; !errors.Is(err, context.Canceled) || !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("%v; want why it ended, and what was wrong", err)
	}
}

func TestASocketThatDoesNotExistIsAnErrorAtOnce(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := Dial(ctx, filepath.Join(t.TempDir(), "none"), Options{}); !errors.Is(err, os.ErrNotExist) || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v; want ErrNotExist", err)
	}
}

func TestDialHeedsItsContextWhenTheNodeIsSilent(t *testing.T) {
	f := newFakeNode(t)
	go func() { _ = f.accept() }()
	ctx, cancel := context.WithTimeout(testContext(t), 20*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, f.path, Options{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}

func TestWhatIsGrantedTooLateIsGivenBack(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	ctx, cancel := context.WithCancel(testContext(t))
	got := make(chan error, 1)
	go func() {
		_, err := c.Batch(ctx, ReserveOp("a", testSpec), MapOp("b"), ReserveOp("c", testSpec), LookupOp("d"))
		got <- err
	}()
	r := f.request()
	cancel()
	if err := <-got; !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
	info := ec.Info{Key: "a", Spec: testSpec, Extents: []region.Extent{{Count: 1}}}
	f.send(&api.Reply{ID: r.ID, Results: []api.Result{{Handle: 11, Info: &info}, {Handle: 12, Info: &info}, {Code: api.CodeFull}, {Info: &info}}})
	back := f.request()
	if len(back.Ops) != 2 || back.Ops[0].Kind != api.OpDiscard || back.Ops[0].Handle != 11 || back.Ops[1].Kind != api.OpRelease || back.Ops[1].Handle != 12 {
		t.Errorf("%+v", back.Ops)
	}
}

func TestACommitThatIsGivenUpIsEndedEitherWay(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	info := ec.Info{Key: "a", Spec: testSpec, Extents: []region.Extent{{Count: 1}}}
	reserved := make(chan *Reservation, 1)
	go func() {
		r, err := c.Reserve(testContext(t), "a", testSpec)
		if err != nil {
			t.Error(err)
		}
		reserved <- r
	}()
	f.send(&api.Reply{ID: f.request().ID, Results: []api.Result{{Handle: 5, Info: &info}}})
	r := <-reserved

	ctx, cancel := context.WithCancel(testContext(t))
	committed := make(chan error, 1)
	go func() { committed <- r.Commit(ctx) }()
	if got := f.request(); got.Ops[0].Kind != api.OpCommit || got.Ops[0].Handle != 5 {
		t.Fatalf("%+v", got)
	}
	cancel()
	if err := <-committed; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if got := f.request(); got.Ops[0].Kind != api.OpDiscard || got.Ops[0].Handle != 5 {
		t.Fatalf("%+v", got)
	}
	if err := r.Discard(testContext(t)); !errors.Is(err, ec.ErrStale) {
		t.Errorf("%v", err)
	}
}

// Who cleans up does so with the context that has just ended. What then stayed reserved or pinned would keep a key, and the memory of a node
// that is gone, for as long as the engine lives.
func TestWhatIsEndedWithAContextThatIsOverIsOver(t *testing.T) {
	ended, cancel := context.WithCancel(testContext(t))
	cancel()
	for name, end := range map[string]func(c *Client, r *Reservation, m *Mapped) error{
		"commit":  func(_ *Client, r *Reservation, m *Mapped) error { m.Release(); return r.Commit(ended) },
		"discard": func(_ *Client, r *Reservation, m *Mapped) error { m.Release(); return r.Discard(ended) },
		"batch": func(c *Client, r *Reservation, m *Mapped) error {
			_, err := c.Batch(ended, ReleaseOp(m), CommitOp(r))
			return err
		},
	} {
		f := newFakeNode(t)
		c := f.dial()
		r := granted(f, func() (*Reservation, error) { return c.Reserve(testContext(t), "r", testSpec) }, api.Result{Handle: 5, Info: info("r", 1, 1)})
		m := granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "m") }, api.Result{Handle: 6, Info: info("m", 2, 2)})
		if err := end(c, r, m); !errors.Is(err, context.Canceled) {
			t.Errorf("%s: %v", name, err)
		}
		var ops []api.Op
		for len(ops) < 2 {
			ops = append(ops, f.request().Ops...)
		}
		if ops[0].Kind != api.OpRelease || ops[0].Handle != 6 || ops[1].Kind != api.OpDiscard || ops[1].Handle != 5 {
			t.Errorf("%s: %+v", name, ops)
		}
		c.mu.Lock()
		if c.mapping.uses != 0 || len(c.filled) != 0 || len(c.pinned) != 0 {
			t.Errorf("%s: %d uses, %d reservations, %d pins are left", name, c.mapping.uses, len(c.filled), len(c.pinned))
		}
		c.mu.Unlock()
		if err := r.Commit(testContext(t)); !errors.Is(err, ec.ErrStale) {
			t.Errorf("%s: once more: %v", name, err)
		}
	}
}

func TestImpossibleExtentsAreAnErrorAndNoFault(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	for _, info := range []ec.Info{
		{Spec: testSpec, Extents: []region.Extent{{Start: testBlocks, Count: 1}}},
		{Spec: testSpec, Extents: []region.Extent{{Start: 1 << 31, Count: 1 << 31}}},
		{Spec: testSpec},
		{Spec: testSpec, Extents: []region.Extent{{Count: 1}, {Start: 1, Count: 1}}},
		{Spec: ec.Spec{Bytes: 2 * testBlock}, Extents: []region.Extent{{Count: 1}}},
	} {
		got := make(chan error, 1)
		go func() {
			_, err := c.Map(testContext(t), "k")
			got <- err
		}()
		f.send(&api.Reply{ID: f.request().ID, Results: []api.Result{{Handle: 3, Info: &info}}})
		if back := f.request(); back.Ops[0].Kind != api.OpRelease || back.Ops[0].Handle != 3 {
			t.Errorf("%+v", back)
		}
		if err := <-got; !errors.Is(err, ErrProtocol) {
			t.Errorf("%+v: %v; want ErrProtocol", info.Extents, err)
		}
	}
}

func TestANodeThatMakesNoSenseLosesTheConnection(t *testing.T) {
	for name, m := range map[string]api.Message{
		"a reply to nothing":   &api.Reply{ID: 99},
		"a request":            &api.Request{},
		"a reply of two":       &api.Reply{ID: 1, Results: make([]api.Result, 2)},
		"a refusal: it closes": &api.Refused{Code: api.CodeClosing},
	} {
		f := newFakeNode(t)
		c := f.dial()
		got := make(chan error, 1)
		go func() {
			_, err := c.Lookup(testContext(t), "k")
			got <- err
		}()
		f.request()
		f.send(m)
		if err := <-got; !errors.Is(err, ErrClosed) {
			t.Errorf("%s: %v; want ErrClosed", name, err)
		}
		<-c.Done()
		if err := c.WaitReady(testContext(t), "k"); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: then %v", name, err)
		}
	}
}

func TestPushesOfALaterNodeAreUnderstoodAsFarAsTheyGo(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	var p ec.Params
	p.Set("k", &ec.Announcement{Metadata: []byte("{}"), PeerHost: "h", PeerPort: 1, SizeBytes: testBlock})
	p.Set("no address", &ec.Announcement{Metadata: []byte("{}")})
	ch, err := c.Fetch(testContext(t), p, time.Microsecond)
	if err != nil {
		t.Fatal(err)
	}
	r := f.request()
	if len(r.Ops) != 1 || r.Ops[0].TimeoutMS != 1 {
		t.Fatalf("%+v", r.Ops)
	}
	f.send(&api.Push{Ref: 12345, Event: api.EventFetched, Last: true}) // of nobody
	f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, 1)})
	f.send(&api.Push{Ref: r.Ops[0].Ref, Event: api.EventFetched, Last: true, Outcome: "enchanted", Message: "why"})
	if got := <-ch; got.Outcome != ec.FetchFailed || got.Reason != "why" || got.Key != "k" {
		t.Errorf("%+v", got)
	}
	if _, more := <-ch; more {
		t.Error("a second result")
	}
}

func TestAFetchThatTheNodeRefusesHasItsOutcome(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	var p ec.Params
	p.Set("k", &ec.Announcement{Metadata: []byte("{}"), PeerHost: "h", PeerPort: 1, SizeBytes: testBlock})
	ch, err := c.Fetch(testContext(t), p, 0)
	if err != nil {
		t.Fatal(err)
	}
	f.send(&api.Reply{ID: f.request().ID, Results: []api.Result{{Code: api.CodeLimit, Message: "too many"}}})
	if got := <-ch; got.Outcome != ec.FetchFailed || got.Reason == "" {
		t.Errorf("%+v", got)
	}
}

func TestCloseSaysByeAfterThePoolIsUnmapped(t *testing.T) {
	f := newFakeNode(t)
	c := f.dial()
	for range 2 {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if m, err := f.conn.Receive(); err != nil {
		t.Fatal(err)
	} else if _, ok := m.(*api.Bye); !ok {
		t.Errorf("%+v", m)
	}
	if c.mapping != nil {
		t.Error("still mapped")
	}
	if err := c.Err(); !errors.Is(err, ErrClosed) {
		t.Errorf("%v", err)
	}
}

func TestDialWaitsForANodeThatHasNotAcceptedForAWhile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	for { // fill it
		c, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = unix.Close(c) }()
		if err = unix.Connect(c, &unix.SockaddrUnix{Name: path}); errors.Is(err, unix.EAGAIN) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	dialled := make(chan error, 1)
	go func() {
		_, err := Dial(ctx, path, Options{Once: true})
		dialled <- err
	}()
	select {
	case err := <-dialled:
		t.Errorf("it did not wait: %v", err)
		return
	case <-time.After(100 * time.Millisecond): // a Dial that gives up does so at once
	}
	cancel()
	if err := <-dialled; !errors.Is(err, context.Canceled) {
		t.Errorf("%v; want the caller's end", err)
	}
}
