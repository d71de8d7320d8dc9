package nixl

import (
	"bytes"
	"errors"
	"testing"
)

func TestNotifyOutsideOfARequest(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		must(t, p.peer.Notify([]byte("hello\x00there")))
		got := waitNotifications(t, p.producer, 1)
		if len(got) != 1 || got[0].Peer != p.consumer.Name() || string(got[0].Message) != "hello\x00there" {
			t.Errorf("got %v", got)
		}
	})
}

func TestWriteMovesBytesToThePeer(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 1<<16)
		for i := range p.destination {
			p.destination[i] = byte(i * 3)
		}
		r, err := p.consumer.NewRequest(Write, Descs{DRAM, []Range{RangeOf(p.destination[:1<<15])}}, Descs{DRAM, []Range{RangeOf(p.source[1<<15:])}},
			p.peer, RequestOptions{Notification: []byte("written")})
		must(t, err)
		defer r.Release()
		want := append(bytes.Clone(p.source[:1<<15]), p.destination[:1<<15]...)
		must(t, run(t, r))
		if got := waitNotifications(t, p.producer, 1); string(got[0].Message) != "written" {
			t.Errorf("got %v", got)
		}
		if !bytes.Equal(p.source, want) {
			t.Error("bytes differ")
		}
	})
}

func TestBackendParametersAreThoseAskedFor(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		a, err := w.library.NewAgent(uniqueName("parameters"), AgentConfig{})
		must(t, err)
		defer a.Close()
		b, err := a.CreateBackend("UCX", map[string]string{"num_workers": "2"})
		must(t, err)
		params, err := b.Params()
		must(t, err)
		if params["num_workers"] != "2" || b.Kind() != "UCX" {
			t.Errorf("%s has %v", b.Kind(), params)
		}
		for _, bad := range []map[string]string{{"": "x"}, {"a\x00b": "x"}, {"a": "x\x00"}} {
			if _, err := a.CreateBackend("UCX", bad); !errors.Is(err, ErrBadArgument) {
				t.Errorf("parameters %q: %v", bad, err)
			}
		}
		must(t, a.Close())
		if _, err := b.Params(); !errors.Is(err, ErrClosed) {
			t.Errorf("parameters after the agent's end: %v", err)
		}
	})
}

func TestAgentsOfEachConfiguration(t *testing.T) {
	for name, c := range map[string]AgentConfig{"no progress thread": {NoProgressThread: true}, "one owner": {Sync: SyncOneOwner}} {
		t.Run(name, func(t *testing.T) {
			eachWorld(t, func(t *testing.T, w world) {
				p := w.pair(t, 4096)
				a, err := w.library.NewAgent(uniqueName("configured"), c)
				must(t, err)
				defer a.Close()
				_, err = a.CreateBackend("UCX", nil)
				must(t, err)
				memory := mapped(t, 4096)
				_, err = a.Register(DRAM, []Range{RangeOf(memory)})
				must(t, err)
				r, err := a.NewRequest(Read, Descs{DRAM, []Range{RangeOf(memory)}}, Descs{DRAM, []Range{RangeOf(p.source)}}, add(t, a, p.producer), RequestOptions{})
				must(t, err)
				defer r.Release()
				must(t, run(t, r))
				if !bytes.Equal(memory, p.source) {
					t.Error("bytes differ")
				}
			})
		})
	}
	if _, err := NewFake().Library().NewAgent("a", AgentConfig{Sync: 7}); !errors.Is(err, ErrBadArgument) {
		t.Errorf("unknown Sync: %v", err)
	}
}

func TestAPeerThatWasClosedIsErrClosed(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		r, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		defer r.Release()
		must(t, p.peer.Close())
		must(t, p.peer.Close())
		for name, err := range map[string]error{
			"post":    second(r.Post()),
			"request": second(p.read(0, 1, RequestOptions{})),
			"prepare": second(p.consumer.Prepare(p.peer, Descs{DRAM, []Range{RangeOf(p.source)}})),
			"notify":  p.peer.Notify(nil),
			"connect": p.peer.Connect(),
			"knows":   p.peer.Knows(Descs{}),
		} {
			if !errors.Is(err, ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
		}
		old := p.peer
		if p.peer = add(t, p.consumer, p.producer); p.peer == old {
			t.Fatal("the peer that was closed is back")
		}
		if _, err := r.Post(); !errors.Is(err, ErrClosed) {
			t.Errorf("post of a request of the closed peer: %v", err)
		}
		again, err := p.read(0, 4096, RequestOptions{})
		must(t, err)
		defer again.Release()
		must(t, run(t, again))
	})
}

func TestWhatAPeerKnowsAndWhatMovesARequest(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 1<<16)
		must(t, p.peer.Connect())
		must(t, p.peer.Knows(Descs{}))
		must(t, p.peer.Knows(Descs{DRAM, []Range{RangeOf(p.source[100:200])}}))
		if err := p.peer.Knows(Descs{DRAM, []Range{RangeOf(p.destination)}}); err == nil {
			t.Error("the peer has this agent's memory")
		}
		more := mapped(t, 4096)
		_, err := p.producer.Register(DRAM, []Range{RangeOf(more)})
		must(t, err)
		if err := p.peer.Knows(Descs{DRAM, []Range{RangeOf(more)}}); err == nil {
			t.Error("the peer's newer memory is known without its newer metadata")
		}
		if add(t, p.consumer, p.producer) != p.peer {
			t.Error("a refresh gave another peer")
		}
		must(t, p.peer.Knows(Descs{DRAM, []Range{RangeOf(more)}}))

		r, err := p.read(0, 1<<16, RequestOptions{})
		must(t, err)
		defer r.Release()
		moves, err := r.Backend()
		must(t, err)
		if moves.Kind() != "UCX" || moves.agent != p.consumer {
			t.Errorf("moved by %+v", moves)
		}
		e, err := r.Estimate()
		must(t, err)
		if e.Duration <= 0 {
			t.Errorf("estimate %+v", e)
		}
	})
}

func TestNilArgumentsAreErrors(t *testing.T) {
	p := world{library: NewFake().Library()}.pair(t, 4096)
	mine, theirs := p.lists(t)
	d := Descs{DRAM, []Range{RangeOf(p.source)}}
	request := func(local, remote *Prepared) error {
		return second(p.consumer.NewPreparedRequest(Read, local, []int32{0}, remote, []int32{0}, RequestOptions{}))
	}
	for name, err := range map[string]error{
		"request without a peer":   second(p.consumer.NewRequest(Read, Descs{DRAM, []Range{RangeOf(p.destination)}}, d, nil, RequestOptions{})),
		"register for nil":         second(p.consumer.Register(DRAM, d.Ranges, nil)),
		"prepare for nil":          second(p.consumer.Prepare(nil, Descs{DRAM, []Range{RangeOf(p.destination)}}, nil)),
		"connect by nil":           p.peer.Connect(nil),
		"no local list":            request(nil, theirs),
		"no remote list":           request(mine, nil),
		"lists in the wrong order": request(theirs, mine),
	} {
		if !errors.Is(err, ErrBadArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestOwnMetadataIsNoPeer(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		md, err := p.consumer.LocalMetadata()
		must(t, err)
		if _, err := p.consumer.AddPeer(md); !errors.Is(err, ErrBadArgument) {
			t.Error(err)
		}
	})
}

// A request stays good when the lists that it was made from are gone.
func TestListsMayGoBeforeTheirRequests(t *testing.T) {
	eachWorld(t, func(t *testing.T, w world) {
		p := w.pair(t, 4096)
		mine, theirs := p.lists(t)
		r, err := p.consumer.NewPreparedRequest(Read, mine, []int32{0}, theirs, []int32{0}, RequestOptions{})
		must(t, err)
		defer r.Release()
		mine.Close()
		theirs.Close()
		must(t, run(t, r))
		if !bytes.Equal(p.source, p.destination) {
			t.Error("bytes differ")
		}
	})
}

// What a caller of the library must reckon with, a caller of the fake meets too.
func TestTheFakeIsUnkind(t *testing.T) {
	f := NewFake()
	p := world{f.Library(), f}.pair(t, 4096)
	half := func() bool {
		return bytes.Equal(p.destination[:2048], p.source[:2048]) && bytes.Equal(p.destination[2048:], make([]byte, 2048))
	}
	r, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	if done, err := r.Post(); done || err != nil || !half() {
		t.Errorf("post: done %v, %v, half of the bytes are there: %v", done, err, half())
	}
	r.Release()
	if n := f.Objects().Orphans; n != 1 {
		t.Errorf("%d requests go on after their release", n)
	}
	_, err = p.consumer.Notifications()
	must(t, err)
	if !bytes.Equal(p.destination, p.source) {
		t.Error("a request that was released wrote nothing more")
	}

	f.Steps(0)
	clear(p.destination)
	r, err = p.read(0, 4096, RequestOptions{})
	must(t, err)
	defer r.Release()
	if done, err := r.Post(); !done || err != nil || !bytes.Equal(p.destination, p.source) {
		t.Errorf("post in one step: done %v, %v", done, err)
	}
	f.Freeze(p.producer.Name())
	_, err = r.Post()
	must(t, err)
	f.Kill(p.producer.Name())
	if _, err := r.Status(); !errors.Is(err, StatusBackend) || bytes.Equal(p.destination, p.source) {
		t.Errorf("after the death of the peer: %v; its bytes are whole", err)
	}
}

func TestFaultsOfTheFake(t *testing.T) {
	f := NewFake()
	p := world{f.Library(), f}.pair(t, 4096)
	more := mapped(t, 4096)
	d := Descs{DRAM, []Range{RangeOf(p.destination)}}
	for call, do := range map[FakeCall]func() error{
		FakeBackend:       func() error { return second(p.consumer.CreateBackend("UCX", nil)) },
		FakeRegister:      func() error { return second(p.consumer.Register(DRAM, []Range{RangeOf(more)})) },
		FakeMetadata:      func() error { return second(p.consumer.LocalMetadata()) },
		FakePrepare:       func() error { return second(p.consumer.Prepare(nil, d)) },
		FakeCreate:        func() error { return second(p.read(0, 1, RequestOptions{})) },
		FakeNotify:        func() error { return p.peer.Notify(nil) },
		FakeNotifications: func() error { return second(p.consumer.Notifications()) },
		FakeDeregister:    p.registration.Close,
	} {
		f.Fail(call, 0, StatusException)
		if err := do(); !errors.Is(err, StatusException) {
			t.Errorf("%s: %v", call, err)
		}
	}
}
