package stage

import (
	"bytes"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// The producer ends a claim by its Verify, and forgets nothing of that when the connection is lost before the answer.
func TestAVerifyWhoseAnswerIsLostIsRepeated(t *testing.T) {
	for name, then := range map[string][]wire.Status{
		"held":      {wire.Held},
		"in a bit":  {wire.NotFound, wire.NotFound, wire.Held},
		"lost":      {wire.Lost},
		"lost late": {wire.NotFound, wire.Lost},
	} {
		t.Run(name, func(t *testing.T) {
			p := newProducer(t, false)
			p.put("k", full(100_000))
			held := then[len(then)-1] == wire.Held
			p.onAsk(func(q asked) bool {
				n := len(p.asked(wire.Verify)) - 1
				if q.Op != wire.Verify || n > len(then) {
					return false
				}
				p.mu.Lock()
				defer p.mu.Unlock()
				if n > 0 { // the first is not answered
					q.answer(wire.Reply{Status: then[n-1]})
				} else {
					delete(p.claims, q.Claim)
				}
				return true
			})
			c := newClient(t, ClientOptions{Answer: time.Second}) // long enough for an answer that does come
			g, err := c.Get(within(t, patience), Request{Key: "k", From: p.endpoint()})
			if err != nil {
				t.Fatal(err)
			}
			releaseAs(t, g, full(100_000))
			all := p.asked(wire.Verify)[:1+len(then)]
			for _, q := range all[1:] {
				if q.from.ID == all[0].from.ID || q.Claim != all[0].Claim || q.Generation != all[0].Generation {
					t.Errorf("asked again as %+v, first as %+v", q.Request, all[0].Request)
				}
			}
			if gets := len(p.asked(wire.Get)); held && gets != 1 || !held && gets != 2 {
				t.Errorf("%d claims", gets)
			}
			if n := c.Stats().Reverified; n != uint64(len(then)) {
				t.Errorf("%d verifies were repeated, want %d", n, len(then))
			}
			c.sweepIdle()
			p.free()
		})
	}
}

// forward passes connections on to a producer, until one has brought it a Verify: that one is lost once the producer has ended the claim.
func forward(t testing.TB, to Endpoint, ended <-chan struct{}) Endpoint {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	var cut atomic.Bool
	all.Go(func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", hostPort(to.Host, to.Port))
			if err != nil {
				t.Error(err)
				return
			}
			t.Cleanup(func() { _, _ = in.Close(), out.Close() })
			var passes sync.Mutex // held while answers may not pass
			all.Go(func() {
				b := make([]byte, 64<<10)
				for {
					n, err := out.Read(b)
					if err != nil {
						_ = in.Close()
						return
					}
					passes.Lock()
					_, _ = in.Write(b[:n])
					passes.Unlock()
				}
			})
			all.Go(func() {
				b := make([]byte, 64<<10)
				for {
					n, err := in.Read(b)
					if err != nil {
						_ = out.Close()
						return
					}
					if bytes.Contains(b[:n], []byte("ferry_verify")) && cut.CompareAndSwap(false, true) {
						passes.Lock()
						_, _ = out.Write(b[:n])
						select {
						case <-ended:
						case <-time.After(patience):
							t.Error("the claim does not end")
						}
						_, _ = in.Close(), out.Close()
						passes.Unlock()
						return
					}
					_, _ = out.Write(b[:n])
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		all.Wait()
	})
	at := l.Addr().(*net.TCPAddr)
	return Endpoint{"127.0.0.1", at.Port}
}

func TestAConnectionThatIsLostBetweenAVerifyAndItsAnswerDoesNotUseThePayloadUp(t *testing.T) {
	from, to := newLink(t, 4<<20, noInline, impatient), newLink(t, 4<<20, noInline, onlyGets)
	v := bytesOf(t, 100_000, 1)
	p := mustPut(t, from, "k", v, PutOptions{})
	at := forward(t, from.Endpoint(), p.Released())
	got := mustGet(t, to, Request{Key: "k", From: at})
	if !tensor.Equal(got.Root, v) {
		t.Error("other bytes")
	}
	if err := got.Release(); err != nil {
		t.Error(err)
	}
	if receive(t, p.Released()); p.Outcome() != Read {
		t.Errorf("outcome %v", p.Outcome())
	}
	if st := to.Stats().Client; st.Reverified == 0 || st.Retries != 0 || from.Stats().Store.Granted != 1 {
		t.Errorf("%+v, %+v", st, from.Stats().Store)
	}
}
