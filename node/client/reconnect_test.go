package client

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
	"github.com/tensorferry/tensorferry/region"
)

// logged collects what a client says.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) lines() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Split(strings.TrimSpace(l.b.String()), "\n")
}

// dialAgain connects a client that connects again.
func (f *fakeNode) dialAgain(wait time.Duration) (*Client, *logged) {
	f.t.Helper()
	log := &logged{}
	f.welcome.Token = []byte("token of 16 byte")
	greeted := make(chan error, 1)
	go func() { greeted <- f.greet() }()
	c, err := Dial(testContext(f.t), f.path, Options{Name: "test", Wait: wait, Log: slog.New(slog.NewTextHandler(log, nil))})
	if err := errors.Join(err, <-greeted); err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = c.Close() })
	return c, log
}

// regreet loses the connection and takes the next; ops are what is restated, which answer answers.
func (f *fakeNode) regreet(answer func(op *api.Op) api.Result) (ops []api.Op) {
	f.t.Helper()
	_ = f.conn.Close()
	f.welcome.Epoch++
	if err := f.greet(); err != nil {
		f.t.Fatal(err)
	}
	r := f.request()
	reply := &api.Reply{ID: r.ID, Results: make([]api.Result, len(r.Ops))}
	for i := range r.Ops {
		reply.Results[i] = answer(&r.Ops[i])
	}
	f.send(reply)
	return r.Ops
}

func info(key string, gen uint64, block uint32) *ec.Info {
	return &ec.Info{Key: key, Spec: testSpec, Gen: gen, State: ec.Filling, Extents: []region.Extent{{Start: block, Count: 1}}}
}

// granted has the node grant one operation.
func granted[T any](f *fakeNode, call func() (T, error), r api.Result) T {
	f.t.Helper()
	type outcome struct {
		v   T
		err error
	}
	got := make(chan outcome, 1)
	go func() {
		v, err := call()
		got <- outcome{v, err}
	}()
	f.send(&api.Reply{ID: f.request().ID, Results: []api.Result{r}})
	o := <-got
	if o.err != nil {
		f.t.Fatal(o.err)
	}
	return o.v
}

func TestAClientRestatesWhatItHasAndGoesOn(t *testing.T) {
	f := newFakeNode(t)
	c, log := f.dialAgain(time.Minute)
	reserve := func(key string, gen uint64) *Reservation {
		return granted(f, func() (*Reservation, error) { return c.Reserve(testContext(t), key, testSpec) }, api.Result{Handle: gen, Info: info(key, gen, uint32(gen))})
	}
	pin := func(key string, gen uint64) *Mapped {
		return granted(f, func() (*Mapped, error) { return c.Map(testContext(t), key) }, api.Result{Handle: gen, Info: info(key, gen, uint32(gen))})
	}
	r1, r2, r3 := reserve("r1", 1), reserve("r2", 2), reserve("r3", 3)
	m1, m2, gone := pin("m1", 4), pin("m2", 5), pin("gone", 6)
	gone.Release()
	f.released(6)

	commit := make(chan error, 1)
	go func() { commit <- r2.Commit(testContext(t)) }() // under way when the node dies, which had done it
	f.request()
	want := map[string]uint64{"resume r1": 1, "resume r2": 2, "resume r3": 3, "repin m1": 4, "repin m2": 5, "restated ": 0}
	ops := f.regreet(func(op *api.Op) api.Result {
		what := op.Kind.String() + " " + op.Key
		if gen, ok := want[what]; !ok || gen != op.Gen {
			t.Errorf("restated %s of generation %d", what, op.Gen)
		}
		switch what {
		case "resume r1":
			return api.Result{Handle: 1001, Info: info("r1", 1, 1)}
		case "resume r2":
			i := info("r2", 2, 2)
			i.State = ec.Ready
			return api.Result{Code: api.CodeHeld, Info: i}
		case "repin m1":
			return api.Result{Handle: 1004, Info: info("m1", 4, 4)}
		case "restated ":
			return api.Result{}
		}
		return api.Result{Code: api.CodeStale}
	})
	if len(ops) != len(want) || ops[len(ops)-1].Kind != api.OpRestated {
		t.Errorf("%d operations: %+v", len(ops), ops)
	}
	if err := <-commit; err != nil {
		t.Errorf("the commit under way: %v", err)
	}
	if c.Pool().Epoch != f.welcome.Epoch || c.Err() != nil {
		t.Errorf("epoch %d, %v", c.Pool().Epoch, c.Err())
	}
	if err := r3.Commit(testContext(t)); !errors.Is(err, ec.ErrStale) {
		t.Errorf("what could not be restated: %v; want ErrStale", err)
	}
	done := make(chan error, 1)
	go func() { done <- r1.Commit(testContext(t)) }()
	r := f.request()
	if r.Ops[0].Kind != api.OpCommit || r.Ops[0].Handle != 1001 {
		t.Errorf("%+v; want the commit of the new handle", r.Ops)
	}
	f.send(&api.Reply{ID: r.ID, Results: []api.Result{{Info: info("r1", 1, 1)}}})
	if err := <-done; err != nil {
		t.Error(err)
	}
	m2.Release() // nobody knows it
	m1.Release()
	f.released(1004)
	if got := log.lines(); len(got) != 2 || !strings.Contains(got[0], "connecting again") || !strings.Contains(got[1], "again") || !strings.Contains(got[1], "lost=2") {
		t.Errorf("it said:\n%s", strings.Join(got, "\n"))
	}
}

func TestCallsUnderWayAreRepeatedOnTheNextConnection(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	type outcome struct {
		r   []OpResult
		err error
	}
	batch := make(chan outcome, 1)
	go func() {
		r, err := c.Batch(testContext(t), ReserveOp("a", testSpec), RemoveOp("b"), LookupOp("c"))
		batch <- outcome{r, err}
	}()
	f.request()
	ok := func(*api.Op) api.Result { return api.Result{} }
	if ops := f.regreet(ok); len(ops) != 1 {
		t.Errorf("restated %+v; nothing was granted", ops)
	}
	r := f.request()
	if len(r.Ops) != 3 || r.Ops[0].Kind != api.OpReserve {
		t.Fatalf("%+v", r.Ops)
	}
	f.send(&api.Reply{ID: r.ID, Results: []api.Result{{Handle: 7, Info: info("a", 1, 1)}, {Code: api.CodeMissing}, {Info: info("c", 2, 2)}}})
	got := <-batch
	if got.err != nil || got.r[0].Reservation == nil || got.r[1].Err != nil || got.r[2].Info.Key != "c" {
		t.Errorf("%+v, %v", got.r, got.err)
	}

	waited := make(chan error, 1)
	go func() { waited <- c.WaitReady(testContext(t), "k") }()
	r = f.request()
	f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, 1)})
	ch, err := c.FetchMap(testContext(t), offered("x", "y"), 0)
	if err != nil {
		t.Fatal(err)
	}
	r = f.request()
	f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, 2)})
	f.send(ready(r.Ops[0].Ref, 9)) // x is there before the node goes
	x := <-ch
	if x.Key != "x" || x.Mapped == nil {
		t.Fatalf("%+v", x)
	}
	f.regreet(func(op *api.Op) api.Result { return api.Result{Handle: 20, Info: info(op.Key, op.Gen, 1)} })
	for range 2 { // in any order
		r := f.request()
		f.send(&api.Reply{ID: r.ID, Results: make([]api.Result, len(r.Ops))})
		switch op := r.Ops[0]; {
		case op.Kind == api.OpWait && op.Key == "k":
			f.send(&api.Push{Ref: op.Ref, Event: api.EventWaited, Last: true})
		case op.Kind == api.OpFetch && op.Key == "y" && len(r.Ops) == 1:
			f.send(ready(op.Ref, 11))
		default:
			t.Errorf("%+v", r.Ops)
		}
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	y, more := <-ch
	if !more || y.Key != "y" || y.Mapped == nil {
		t.Fatalf("%+v", y)
	}
	if _, more := <-ch; more {
		t.Error("a third result")
	}
	x.Mapped.Release()
	f.released(20)
	y.Mapped.Release()
	f.released(11)
}

// The node answers and dies: whether the caller or the reader is first to see its part of that, the call is carried out.
func TestAnAnswerThatTheConnectionsEndOvertakesIsAskedForAgain(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	over := make(chan error, 1)
	var answered atomic.Int64
	go func() {
		for handle := uint64(1); ; handle++ {
			m, err := f.conn.Receive()
			r, ok := m.(*api.Request)
			if err == nil && ok {
				reply := &api.Reply{ID: r.ID, Results: make([]api.Result, len(r.Ops))}
				asked := 0
				for i, o := range r.Ops {
					switch o.Kind {
					case api.OpReserve, api.OpMap:
						asked++
						reply.Results[i] = api.Result{Handle: handle<<8 + uint64(i), Info: info(o.Key, 1, 1)}
					case api.OpRelease, api.OpDiscard:
					default: // of a restatement
						reply.Results[i] = api.Result{Handle: handle<<8 + uint64(i), Info: info(o.Key, o.Gen, 1)}
					}
				}
				if err = f.conn.Send(api.MaxReplyFrame, reply); asked == 0 && err == nil {
					continue
				}
				answered.Add(int64(asked))
			}
			_ = f.conn.Close()
			if err := f.greet(); err != nil {
				over <- err
				return
			}
		}
	}()
	const rounds = 300
	for range rounds {
		r, err := c.Batch(testContext(t), MapOp("a"), ReserveOp("b", testSpec))
		if err != nil {
			t.Fatal(err)
		}
		for i := range r {
			if r[i].Err != nil {
				t.Fatalf("operation %d: %v", i, r[i].Err)
			}
		}
		r[0].Mapped.Release()
		r[1].Reservation.drop()
	}
	if err := f.listen.Close(); err != nil {
		t.Fatal(err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	<-over
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.filled) != 0 || len(c.pinned) != 0 {
		t.Errorf("%d reservations and %d pins are kept", len(c.filled), len(c.pinned))
	}
	t.Logf("%d operations answered, %d asked for again", answered.Load(), answered.Load()-2*rounds)
}

func TestWithoutANodeCallsEndInATypedErrorInTime(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(-1)
	_ = f.listen.Close()
	_ = f.conn.Close()
	for c.Err() == nil {
		_, _ = c.Lookup(testContext(t), "k")
	}
	if _, err := c.Lookup(testContext(t), "k"); !errors.Is(err, ErrDisconnected) || errors.Is(err, ErrClosed) {
		t.Errorf("%v; want ErrDisconnected", err)
	}
	if err := c.WaitReady(testContext(t), "k"); !errors.Is(err, ErrDisconnected) {
		t.Errorf("%v; want ErrDisconnected", err)
	}
	ch, err := c.Fetch(testContext(t), offered("k"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if r := <-ch; r.Outcome != ec.FetchFailed || !strings.Contains(r.Reason, "connecting again") {
		t.Errorf("%+v", r)
	}
	select {
	case <-c.Done():
		t.Error("it is not over")
	default:
	}
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	<-c.Done()
	if _, err := c.Lookup(testContext(t), "k"); !errors.Is(err, ErrClosed) {
		t.Errorf("%v; want ErrClosed", err)
	}
}

func TestACallWaitsForTheNodeAsLongAsItWasTold(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(20 * time.Millisecond)
	_ = f.listen.Close()
	_ = f.conn.Close()
	if _, err := c.Lookup(testContext(t), "k"); !errors.Is(err, ErrDisconnected) || !strings.Contains(err.Error(), "waited 20ms") {
		t.Errorf("%v", err)
	}
}

func TestANodeThatRefusesForGoodEndsTheClient(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	_ = f.conn.Close()
	if err := f.accept(); err != nil {
		t.Fatal(err)
	}
	f.send(&api.Refused{Code: api.CodeNoPool, Message: "no such pool any more"})
	<-c.Done()
	if err := c.Err(); !errors.Is(err, ErrClosed) || !errors.Is(err, ErrNoPool) {
		t.Errorf("%v; want ErrClosed and ErrNoPool", err)
	}
}

func TestABusyNodeIsAskedAgain(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	for range 3 {
		_ = f.conn.Close()
		if err := f.accept(); err != nil {
			t.Fatal(err)
		}
		f.send(&api.Refused{Code: api.CodeLimit, Message: "an earlier connection is still ending"})
	}
	f.regreet(func(*api.Op) api.Result { return api.Result{} })
	found := make(chan error, 1)
	go func() {
		_, err := c.Lookup(testContext(t), "k")
		found <- err
	}()
	f.send(&api.Reply{ID: f.request().ID, Results: []api.Result{{Info: info("k", 1, 1)}}})
	if err := <-found; err != nil {
		t.Error(err)
	}
}

func TestValidTellsIfTheBytesAreStillTheEntrys(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	slot := region.Slot{Key: "k", Dtype: testSpec.Dtype, Shape: testSpec.Shape, Bytes: testSpec.Bytes, Extents: []region.Extent{{Start: 1, Count: 1}}}
	gen, err := f.region.Slots().Fill(3, &slot)
	if err != nil {
		t.Fatal(err)
	}
	f.region.Slots().Ready(3, 0, false)
	i := info("k", gen, 1)
	i.Slot = 3
	m := granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "k") }, api.Result{Handle: 1, Info: i})
	if err := m.Valid(); err != nil {
		t.Error(err)
	}
	_ = f.conn.Close() // without a node, too
	if err := m.Valid(); err != nil {
		t.Error(err)
	}
	f.region.Slots().Free(3)
	if err := m.Valid(); !errors.Is(err, ec.ErrStale) {
		t.Errorf("evicted: %v; want ErrStale", err)
	}
	m.Release()
	if err := m.Valid(); !errors.Is(err, ec.ErrStale) {
		t.Errorf("released: %v; want ErrStale", err)
	}
	_ = c.Close()
	if err := m.Valid(); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v; want ErrClosed", err)
	}
}

// What is given up while it is being restated must not stay filled for ever: the node was told of it again.
func TestWhatIsGivenUpWhileItIsRestatedIsEnded(t *testing.T) {
	f := newFakeNode(t)
	c, _ := f.dialAgain(time.Minute)
	r := granted(f, func() (*Reservation, error) { return c.Reserve(testContext(t), "r", testSpec) }, api.Result{Handle: 1, Info: info("r", 1, 1)})
	m := granted(f, func() (*Mapped, error) { return c.Map(testContext(t), "m") }, api.Result{Handle: 2, Info: info("m", 2, 2)})
	f.regreet(func(op *api.Op) api.Result {
		switch op.Kind {
		case api.OpResume:
			r.drop()
			return api.Result{Handle: 11, Info: info("r", 1, 1)}
		case api.OpRepin:
			m.Release()
			return api.Result{Handle: 12, Info: info("m", 2, 2)}
		}
		return api.Result{}
	})
	var got []string
	for _, op := range f.request().Ops {
		got = append(got, fmt.Sprint(op.Kind, " ", op.Handle))
	}
	if want := []string{"discard 11", "release 12"}; !slices.Equal(got, want) {
		t.Errorf("the node is told %q, want %q", got, want)
	}
}
