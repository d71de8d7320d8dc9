package ec

import (
	"bytes"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// plainPair is a consumer of a plain peer that answers at once, from a pool of one entry, "img" of 3 blocks.
func plainPair(t *testing.T, timeouts Timeouts) (p *pair) {
	plane := &agents{}
	served := newTestCache(t, 64, 64, CacheOptions{})
	reg, err := plane.Register(bg, transfer.Memory{Bytes: served.pool}, func(transfer.Notification) {})
	if err != nil {
		t.Fatal(err)
	}
	p = newPair(t, pairOptions{timeouts: timeouts, consumer: func(o *ConsumerOptions) { o.Planes = []transfer.Plane{plane} }})
	save(t, served, "img", 3)
	p.host.listen(newAnswers(p.host, func(r *wire.Request) []*wire.Ack {
		info, _ := served.Lookup(r.Key)
		a := &wire.Ack{Key: r.Key, Session: r.Session, AgentMetadata: reg.Metadata(), MemDescriptor: wire.AppendMemDescriptor(nil, 4096, 64, testBlock)}
		for _, e := range info.Extents {
			for b := e.Start; b < e.Start+e.Count; b++ {
				a.Blocks = append(a.Blocks, b)
			}
		}
		return []*wire.Ack{a}
	}))
	return p
}

// V1, with us as the reader: a plain peer reuses what it granted 30 s after its ack, and cannot be asked whether it has.
func TestAReadOnAnOldPlainGrantIsNotDelivered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := plainPair(t, Timeouts{})
		p.host.set(14500*time.Millisecond, nil) // each way: the ack is 29 s old at most, in truth 14.5 s; which, nobody can tell
		time.AfterFunc(28*time.Second, func() { p.host.set(0, nil) })
		r := p.consumer.Fetch(bg, "img", announced(3), 1)
		wantOutcome(t, r, FetchReady)
		if n := p.host.requests(); n != 2 {
			t.Errorf("%d requests, want a second one for a grant that is young enough", n)
		}
		wantBytes(t, p.ccache, "img")
	})
}

func TestALateAckOfAnEndedPullDoesNotPassForAYoungOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := plainPair(t, Timeouts{AckPlain: 5 * time.Second, Item: 9 * time.Second})
		slow := &heldAnswers{RouterHandler: p.host.handler}
		p.host.listen(slow)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(3), 1), FetchTimedOut)
		time.Sleep(31 * time.Second)
		// The answers to the first pull, whose memory the peer may have reused since, come first while the second one waits.
		time.AfterFunc(time.Second, slow.release)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(3), 1), FetchReady)
		wantBytes(t, p.ccache, "img")
		// One or both of the old acks are acted on, whichever find the pull waiting for one.
		if n := p.consumer.Stats().VerifyFailed; n != 1 && n != 2 {
			t.Errorf("%d READs refused, want those on the old grants", n)
		}
	})
}

func TestARequestThatWasLostWithItsConnectionAgesNoLaterAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := plainPair(t, Timeouts{Item: 3 * time.Second, Idle: time.Hour})
		serving := p.host.handler
		p.host.listen(silent{})
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(3), 1), FetchTimedOut)
		wantOutcome(t, p.consumer.Fetch(bg, "never again", announced(3), 1), FetchTimedOut)
		p.host.fall()
		time.Sleep(time.Minute)
		p.host.listen(serving)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(3), 1), FetchReady)
		if n := p.consumer.Stats().VerifyFailed; n != 0 {
			t.Errorf("%d READs refused as too old", n)
		}
		for _, peer := range p.consumer.peers {
			if peer.unanswered != 0 || len(peer.asked) != 0 {
				t.Errorf("%d requests of the connection before wait for an answer: %v", peer.unanswered, peer.asked)
			}
		}
	})
}

// heldAnswers is a peer that is stuck until release, and then answers in order.
type heldAnswers struct {
	control.RouterHandler
	mu   sync.Mutex
	held []func()
	free bool
}

func (h *heldAnswers) Message(from control.Source, body []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.free {
		h.RouterHandler.Message(from, body)
		return
	}
	body = bytes.Clone(body)
	h.held = append(h.held, func() { h.RouterHandler.Message(from, body) })
}

func (h *heldAnswers) release() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.free = true
	for _, f := range h.held {
		f()
	}
}

// rawAnswers is a peer that answers with bytes of its own making.
type rawAnswers struct {
	host  *testHost
	reply func(r *wire.Request) []byte
}

func (a rawAnswers) Message(from control.Source, body []byte) {
	if m, err := wire.DecodeAtProducer(body, wire.Generation2); err == nil {
		if r, ok := m.(*wire.Request); ok {
			a.host.Send(from.ID, a.reply(r))
		}
	}
}

// V3: an ack that the decoder refuses ends the pull it is for at once, where its key can be read.
func TestAnUndecodableAckFailsItsKeyAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		h := p.net.host(7002)
		h.listen(rawAnswers{h, func(r *wire.Request) []byte {
			b := []byte{0x83, 0xa7}
			b = append(b, "mm_hash"...)
			b = append(b, 0xa0|byte(len(r.Key)))
			b = append(b, r.Key...)
			b = append(b, 0xa6)
			b = append(b, "status"...)
			b = append(b, 0x00, 0xb1)
			b = append(b, "src_block_indices"...)
			return append(b, 0x91, 0xff) // [-1]
		}})
		a := announced(4)
		a.PeerPort = 7002
		r := p.consumer.Fetch(bg, "img", a, 1)
		if r.Outcome != FetchFailed || r.Elapsed > time.Second {
			t.Errorf("%v after %v (%v)", r.Outcome, r.Elapsed, r.Err)
		}
		synctest.Wait()
		p.wantIdle()
	})
}

// A descriptor of 4-byte triples was decoded into 24 bytes each before the first was looked at.
func TestAPlainDescriptorThatIsWrongCostsNoMemory(t *testing.T) {
	p := newPair(t, pairOptions{})
	const blocks = 1 << 20
	small := append([]byte{0xdd, 0, 16, 0, 0}, bytes.Repeat([]byte{0x93, 1, 1, 0}, blocks)...)
	late := wire.AppendMemDescriptor(nil, 1<<40, blocks, testBlock)
	late[len(late)-1] = 1 // the last is on device 1
	for name, b := range map[string][]byte{"size": small, "device": late, "cut": late[:len(late)-1]} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		addrs, err := p.consumer.plainBlocks(b)
		runtime.ReadMemStats(&after)
		if err == nil || addrs != nil {
			t.Errorf("%s: %d blocks, %v", name, len(addrs), err)
		}
		if n := after.TotalAlloc - before.TotalAlloc; n > blocks {
			t.Errorf("%s: %d bytes for %d of descriptor", name, n, len(b))
		}
	}
	addrs, err := p.consumer.plainBlocks(wire.AppendMemDescriptor(nil, 1<<40, 3, testBlock))
	if want := []uint64{1 << 40, 1<<40 + testBlock, 1<<40 + 2*testBlock}; err != nil || !slices.Equal(addrs, want) {
		t.Errorf("%x, %v", addrs, err)
	}
}

func TestAPlainGrantWithoutAPlaneForItNamesTheOneThatIsMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		p.host.listen(newAnswers(p.host, func(r *wire.Request) []*wire.Ack {
			return []*wire.Ack{{Key: r.Key, Session: r.Session, AgentMetadata: []byte("m"), Blocks: []uint32{1, 2, 3}}}
		}))
		r := p.consumer.Fetch(bg, "img", announced(3), 1)
		wantOutcome(t, r, FetchUnreachable)
		if !strings.Contains(r.Err.Error(), "it is an unmodified vLLM, which is read with nixl only") {
			t.Error(r.Err)
		}
		synctest.Wait()
		p.wantIdle()
	})
}
