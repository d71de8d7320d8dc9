package nixl

import (
	"bytes"
	"errors"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
)

// watched is a fake that stops inside of chosen calls, and counts what is given back meanwhile.
type watched struct {
	*fakeCalls
	inside  chan struct{} // a value when a call stops
	resume  chan struct{}
	held    atomic.Bool // the next status, or makeRequest, stops
	busy    atomic.Int32
	creates func() // run inside of createRequest
	load    func(metadata []byte) (Status, bool)

	released, unprepared, invalidated, overtaken atomic.Int32
}

func watch(f *Fake) (*watched, *Library) {
	w := &watched{fakeCalls: (*fakeCalls)(f), inside: make(chan struct{}), resume: make(chan struct{})}
	return w, &Library{c: w}
}

func (w *watched) stop() {
	if w.held.Swap(false) {
		w.inside <- struct{}{}
		<-w.resume
	}
}

func (w *watched) status(agent, request handle) Status {
	w.stop()
	return w.fakeCalls.status(agent, request)
}

func (w *watched) makeRequest(agent handle, r preparedArgs) (handle, Status) {
	w.stop()
	return w.fakeCalls.makeRequest(agent, r)
}

func (w *watched) createRequest(agent handle, r requestArgs) (handle, Status) {
	w.busy.Add(1)
	defer w.busy.Add(-1)
	if w.creates != nil {
		w.creates()
	}
	return w.fakeCalls.createRequest(agent, r)
}

func (w *watched) loadPeer(agent handle, metadata []byte) (string, Status) {
	if w.load != nil {
		if s, ok := w.load(metadata); ok {
			return "", s
		}
	}
	return w.fakeCalls.loadPeer(agent, metadata)
}

func (w *watched) invalidatePeer(agent handle, name string) Status {
	if w.busy.Load() > 0 {
		w.overtaken.Add(1)
	}
	w.invalidated.Add(1)
	return w.fakeCalls.invalidatePeer(agent, name)
}

func (w *watched) releaseRequest(agent, request handle) bool {
	w.released.Add(1)
	return w.fakeCalls.releaseRequest(agent, request)
}

func (w *watched) releasePrepared(agent, prepared handle) {
	w.unprepared.Add(1)
	w.fakeCalls.releasePrepared(agent, prepared)
}

func TestReleaseBesideACallWaitsForItsEnd(t *testing.T) {
	f := NewFake()
	w, l := watch(f)
	p := world{l, f}.pair(t, 4096)
	r, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	_, err = r.Post()
	must(t, err)
	w.held.Store(true)
	var done bool
	finished := make(chan error)
	go func() {
		var err error
		done, err = r.Status()
		finished <- err
	}()
	<-w.inside
	r.Release()
	r.Release()
	if n := w.released.Load(); n != 0 {
		t.Errorf("the request was freed %d times under a call", n)
	}
	if _, err := r.Post(); !errors.Is(err, ErrClosed) {
		t.Errorf("post after release: %v", err)
	}
	w.resume <- struct{}{}
	if err := <-finished; err != nil || !done {
		t.Errorf("status: %v %v", done, err)
	}
	if n := w.released.Load(); n != 1 {
		t.Errorf("the request was freed %d times", n)
	}
}

func (p *pair) lists(t *testing.T) (mine, theirs *Prepared) {
	t.Helper()
	mine, err := p.consumer.Prepare(nil, Descs{DRAM, []Range{RangeOf(p.destination)}})
	must(t, err)
	theirs, err = p.consumer.Prepare(p.peer, Descs{DRAM, []Range{RangeOf(p.source)}})
	must(t, err)
	return mine, theirs
}

func TestAListThatIsClosedUnderACallLivesUntilItsEnd(t *testing.T) {
	f := NewFake()
	w, l := watch(f)
	p := world{l, f}.pair(t, 4096)
	mine, theirs := p.lists(t)
	w.held.Store(true)
	finished := make(chan error)
	var r *Request
	go func() {
		var err error
		r, err = p.consumer.NewPreparedRequest(Read, mine, []int32{0}, theirs, []int32{0}, RequestOptions{})
		finished <- err
	}()
	<-w.inside
	mine.Close()
	theirs.Close()
	theirs.Close()
	if n := w.unprepared.Load(); n != 0 {
		t.Errorf("%d lists were freed under a call", n)
	}
	w.resume <- struct{}{}
	must(t, <-finished)
	if n := w.unprepared.Load(); n != 2 {
		t.Errorf("%d lists were freed, not 2", n)
	}
	must(t, run(t, r))
	r.Release()
	if _, err := p.consumer.NewPreparedRequest(Read, mine, []int32{0}, theirs, []int32{0}, RequestOptions{}); !errors.Is(err, ErrClosed) {
		t.Errorf("request from closed lists: %v", err)
	}
}

// A request that is being made by a peer's name must not become one to the next agent of that name.
func TestAPeerIsNotReplacedWhileARequestToItIsMade(t *testing.T) {
	f := NewFake()
	w, l := watch(f)
	p := world{l, f}.pair(t, 4096)
	again, _ := world{l, f}.agent(t, p.producer.Name(), p.source)
	md, err := again.LocalMetadata()
	must(t, err)
	var wg sync.WaitGroup
	w.creates = func() {
		before := w.invalidated.Load()
		wg.Go(func() {
			_, err := p.consumer.AddPeer(md)
			if err != nil {
				t.Error(err)
			}
		})
		for i := 0; i < 10_000 && w.invalidated.Load() == before; i++ {
			runtime.Gosched()
		}
	}
	r, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	wg.Wait()
	if n := w.overtaken.Load(); n != 0 {
		t.Error("the peer was replaced while a request to it was being made")
	}
	if _, err := r.Post(); !errors.Is(err, ErrStalePeer) {
		t.Errorf("post of a request to the agent of before: %v", err)
	}
	r.Release()
}

func TestConcurrentUseAndRelease(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		closed := func(err error) bool { return err == nil || errors.Is(err, ErrClosed) }
		for range 100 {
			r, err := p.read(0, 4096, RequestOptions{})
			must(t, err)
			must(t, run(t, r))
			mine, theirs := p.lists(t)
			var wg sync.WaitGroup
			for range 2 {
				wg.Go(r.Release)
				wg.Go(mine.Close)
				wg.Go(theirs.Close)
				wg.Go(func() {
					if _, err := r.Status(); !closed(err) {
						t.Errorf("status: %v", err)
					}
				})
				wg.Go(func() {
					made, err := p.consumer.NewPreparedRequest(Read, mine, []int32{0}, theirs, []int32{0}, RequestOptions{})
					if !closed(err) {
						t.Errorf("prepared request: %v", err)
					}
					if err == nil {
						made.Release()
					}
				})
			}
			wg.Wait()
		}
	})
}

func TestCloseOfAnAgentBesideCalls(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		var wg sync.WaitGroup
		began := make(chan struct{}, 4)
		for range 4 {
			wg.Go(func() {
				for i := 0; ; i++ {
					r, err := p.read(0, 4096, RequestOptions{})
					if err == nil {
						err = run(t, r)
						r.Release()
					}
					if i == 0 {
						began <- struct{}{}
					}
					if errors.Is(err, ErrClosed) {
						return
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		for range 4 {
			<-began
		}
		must(t, p.consumer.Close())
		wg.Wait()
	})
}

// descriptor replaces the metadata of the first range by change of it.
func damage(t *testing.T, md []byte, change func(descriptor []byte) []byte) []byte {
	t.Helper()
	mark := append([]byte("n\x08\x00\x00\x00\x00\x00\x00\x00"), 1, 0, 0, 0, 0, 0, 0, 0, '|')
	i := bytes.Index(md, mark)
	if i < 0 {
		t.Fatalf("no list of one range in %q", md)
	}
	i += len(mark)
	f := fields{md[i:]}
	d, err := f.next("")
	must(t, err)
	return append(appendField(slices.Clone(md[:i]), "", change(slices.Clone(d))), f.rest...)
}

func TestDamagedMetadataOfAKnownNameLeavesThePeer(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		before, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		defer before.Release()
		md, err := p.producer.LocalMetadata()
		must(t, err)
		for name, bad := range map[string][]byte{
			"range cut short": damage(t, md, func(d []byte) []byte { return d[:20] }),
			"no key":          damage(t, md, func(d []byte) []byte { return d[:24] }),
			"key too short":   damage(t, md, func(d []byte) []byte { return append(d[:24], 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0) }),
			"memory type":     bytes.Replace(md, []byte("t\x04\x00\x00\x00\x00\x00\x00\x00\x00"), []byte("t\x04\x00\x00\x00\x00\x00\x00\x00\xff"), 1),
			"key's type":      damage(t, md, func(d []byte) []byte { d[32] = 0xff; return d }),
			"tag":             bytes.Replace(md, []byte("|bknd"), []byte("|bkne"), 1),
			"list":            bytes.Replace(md, []byte("nixlSDList"), []byte("nixlSDLisu"), 1),
			"mark":            bytes.Replace(md, []byte("MemSection"), []byte("MemSectiom"), 1),
			"bar":             bytes.Replace(md, []byte("MemSection|"), []byte("MemSection/"), 1),
			"trailing":        append(slices.Clone(md), 'x'),
		} {
			if _, err := p.consumer.AddPeer(bad); !errors.Is(err, ErrBadArgument) {
				t.Errorf("%s: %v", name, err)
			}
		}
		clear(p.destination)
		must(t, run(t, before))
		if !bytes.Equal(p.source, p.destination) {
			t.Error("bytes differ")
		}
		must(t, p.peer.Knows(Descs{DRAM, []Range{RangeOf(p.source)}}))
	})
}

// Metadata of an agent that is dead, or of another that took the name and is damaged, is tried under another name first.
func TestAnIncarnationThatCannotBeLoadedLeavesThePeer(t *testing.T) {
	f := NewFake()
	w, l := watch(f)
	p := world{l, f}.pair(t, 4096)
	before, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	defer before.Release()
	other, err := l.NewAgent(p.producer.Name(), AgentConfig{})
	must(t, err)
	_, err = other.CreateBackend("UCX", nil)
	must(t, err)
	md, err := other.LocalMetadata()
	must(t, err)
	must(t, other.Close())
	if _, err := p.consumer.AddPeer(md); !errors.Is(err, StatusBackend) {
		t.Errorf("metadata of a dead agent: %v", err)
	}
	must(t, run(t, before))

	// The real one fails between the trial and the load.
	again, _ := world{l, f}.agent(t, p.producer.Name(), p.source)
	md, err = again.LocalMetadata()
	must(t, err)
	w.load = func(b []byte) (Status, bool) { return StatusBackend, bytes.Equal(b, md) }
	_, err = p.consumer.AddPeer(md)
	if !errors.Is(err, StatusBackend) {
		t.Errorf("load that fails: %v", err)
	}
	w.load = nil
	if _, err := before.Post(); !errors.Is(err, ErrStalePeer) {
		t.Errorf("post of a request of before the peer was loaded again: %v", err)
	}
	r, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	must(t, run(t, r))
	r.Release()
}

func TestARefreshThatTheLibraryFailsSaysThatThePeerIsLost(t *testing.T) {
	f := NewFake()
	p := world{f.Library(), f}.pair(t, 4096)
	mine, theirs := p.lists(t)
	defer mine.Close()
	defer theirs.Close()
	md, err := p.producer.LocalMetadata()
	must(t, err)
	f.Fail(FakeAddPeer, 0, StatusBackend)
	if _, err := p.consumer.AddPeer(md); !errors.Is(err, StatusBackend) || !bytes.Contains([]byte(err.Error()), []byte("lost")) {
		t.Errorf("refresh: %v", err)
	}
	if _, err := p.read(0, 4096, RequestOptions{}); !errors.Is(err, ErrStalePeer) {
		t.Errorf("request to a lost peer: %v", err)
	}
	if _, err := p.consumer.NewPreparedRequest(Read, mine, []int32{0}, theirs, []int32{0}, RequestOptions{}); !errors.Is(err, ErrStalePeer) {
		t.Errorf("request by a list of a lost peer: %v", err)
	}
}

// With RDMA the same memory, registered again, has another key, which NIXL refuses over the one that it knows.
func TestMemoryThatWasRegisteredAnewIsANewPeer(t *testing.T) {
	f := NewFake()
	f.FreshKeys()
	p := world{f.Library(), f}.pair(t, 4096)
	must(t, p.registration.Close())
	_, err := p.producer.Register(DRAM, []Range{RangeOf(p.source)})
	must(t, err)
	old := p.peer
	if p.peer = add(t, p.consumer, p.producer); p.peer == old {
		t.Fatal("the same peer, with a key that the library refuses")
	}
	if err := old.Notify(nil); !errors.Is(err, ErrStalePeer) {
		t.Errorf("notify of the old peer: %v", err)
	}
	r, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	must(t, run(t, r))
	r.Release()
}

func TestARequestOfMemoryThatWasWithdrawnIsNotPosted(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		more := mapped(t, 4096)
		registration, err := p.consumer.Register(DRAM, []Range{RangeOf(more)})
		must(t, err)
		local, remote := Descs{DRAM, []Range{RangeOf(more)}}, Descs{DRAM, []Range{RangeOf(p.source)}}
		r, err := p.consumer.NewRequest(Read, local, remote, p.peer, RequestOptions{})
		must(t, err)
		defer r.Release()
		list, err := p.consumer.Prepare(nil, local)
		must(t, err)
		defer list.Close()
		_, theirs := p.lists(t)
		defer theirs.Close()
		stays, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		defer stays.Release()
		must(t, run(t, r))
		must(t, registration.Close())
		_, err = p.consumer.Register(DRAM, []Range{RangeOf(more)}) // the same again is not what the request points to
		must(t, err)
		if _, err := r.Post(); !errors.Is(err, ErrClosed) {
			t.Errorf("post: %v", err)
		}
		if _, err := p.consumer.NewPreparedRequest(Read, list, []int32{0}, theirs, []int32{0}, RequestOptions{}); !errors.Is(err, ErrClosed) {
			t.Errorf("prepared request: %v", err)
		}
		must(t, run(t, stays))
	})
}

func TestARequestThatIsNotReleasedIsTriedAgain(t *testing.T) {
	f := NewFake()
	p := world{f.Library(), f}.pair(t, 4096)
	f.Fail(FakeRelease, 0, StatusBackend)
	for i, want := range []int{1, 0} {
		r, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		r.Release()
		if n := f.Objects().Requests; n != want {
			t.Errorf("after %d releases %d requests are there, not %d", i+1, n, want)
		}
	}
}

func TestAFailedRequestOfSeveralRangesIsNotSettled(t *testing.T) {
	f := NewFake()
	p := world{f.Library(), f}.pair(t, 4096)
	request := func(pieces int) *Request {
		var local, remote []Range
		for i := range pieces {
			local = append(local, RangeOf(p.destination[i*64:][:64]))
			remote = append(remote, RangeOf(p.source[i*64:][:64]))
		}
		r, err := p.consumer.NewRequest(Read, Descs{DRAM, local}, Descs{DRAM, remote}, p.peer, RequestOptions{})
		must(t, err)
		t.Cleanup(r.Release)
		return r
	}
	for _, c := range []struct {
		name   string
		pieces int
		call   FakeCall
		want   bool
	}{{"one, post fails", 1, FakePost, true}, {"two, post fails", 2, FakePost, false}, {"one, status fails", 1, FakeStatus, true}, {"two, status fails", 2, FakeStatus, false}} {
		r := request(c.pieces)
		if !r.Settled() {
			t.Errorf("%s: not settled before it was posted", c.name)
		}
		f.Fail(c.call, 0, StatusBackend)
		if err := run(t, r); !errors.Is(err, StatusBackend) {
			t.Errorf("%s: %v", c.name, err)
		}
		if r.Settled() != c.want {
			t.Errorf("%s: settled %v", c.name, r.Settled())
		}
	}
	r := request(2)
	must(t, run(t, r))
	if !r.Settled() {
		t.Error("a request that succeeded is not settled")
	}
	f.Freeze(p.producer.Name())
	r = request(1)
	_, err := r.Post()
	must(t, err)
	must(t, p.peer.Close())
	f.Kill(p.producer.Name())
	if _, err := r.Status(); !errors.Is(err, StatusBackend) || r.Settled() {
		t.Errorf("error after the peer was closed: %v, settled %v", err, r.Settled())
	}
}
