package ec

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tensorferry/tensorferry/control"
	"github.com/tensorferry/tensorferry/ec/wire"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func TestAReadThatTimesOutIsQuarantinedUntilItEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		rd := newHeldRead()
		p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
			if n > 0 {
				return in.Read(bg, r)
			}
			return rd, nil
		}
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchTimedOut)
		if r.Elapsed != 20*time.Second {
			t.Errorf("ended after %v", r.Elapsed)
		}
		select {
		case <-rd.canceled:
		default:
			t.Error("the READ was not canceled")
		}
		if s := p.ccache.Stats(); s.QuarantinedBlocks != 4 {
			t.Errorf("%d blocks in quarantine", s.QuarantinedBlocks)
		}

		// The key is free meanwhile, the memory is not.
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		wantBytes(t, p.ccache, "img")
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if s := p.ccache.Stats(); s.QuarantinedBlocks != 4 {
			t.Errorf("a clock freed memory that a READ may write: %d blocks in quarantine", s.QuarantinedBlocks)
		}
		if s := p.consumer.Stats(); s.Overdue != 1 || p.clog.lines("stays in quarantine", "img") != 1 {
			t.Errorf("%d overdue", s.Overdue)
		}
		rd.end(transfer.ErrCanceled)
		synctest.Wait()
		p.wantIdle()
		if _, open := p.plane.counts(); open != 0 {
			t.Errorf("%d peers open on the plane, the one that hung should have been closed", open)
		}
	})
}

func TestAPeerThatFallsWhileReadingDoesNotFreeTheDestination(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		rd := newHeldRead()
		p.plane.read = func(int, transfer.Peer, transfer.ReadRequest) (transfer.Read, error) { return rd, nil }
		got := make(chan Result, 1)
		go func() { got <- p.consumer.Fetch(bg, "img", announced(4), 1) }()
		synctest.Wait()
		p.host.fall()
		time.Sleep(10 * time.Second)
		if s := p.ccache.Stats(); s.FillingBlocks != 4 {
			t.Errorf("%d blocks being filled", s.FillingBlocks)
		}
		wantOutcome(t, <-got, FetchTimedOut)

		ended := make(chan error, 1)
		go func() { ended <- p.consumer.Close() }()
		synctest.Wait()
		if _, open := p.plane.counts(); open != 0 {
			t.Error("Close did not ask the plane to give the READ up")
		}
		select {
		case err := <-ended:
			t.Errorf("Close returned %v while a READ may write the pool", err)
		default:
		}
		rd.end(transfer.ErrPeerLost)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if s := p.ccache.Stats(); s.FreeBlocks != s.Blocks {
			t.Errorf("%d of %d blocks free", s.FreeBlocks, s.Blocks)
		}
	})
}

// C65.
func TestAFailedReadIsTriedAgainOnAFreshPeerAndDeliversNothing(t *testing.T) {
	for _, err := range []error{transfer.ErrPeerLost, transfer.ErrDenied, errors.New("NIXL_ERR_REMOTE_DISCONNECT")} {
		for _, posted := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v, posted %v", err, posted), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					p := newPair(t, pairOptions{})
					save(t, p.pcache, "img", 4)
					p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
						if n >= 2 {
							return in.Read(bg, r)
						}
						if !posted {
							return nil, err
						}
						for _, b := range r.Local {
							clear(b)
						}
						rd := newHeldRead()
						rd.end(err)
						return rd, nil
					}
					wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
					wantBytes(t, p.ccache, "img")
					synctest.Wait()
					p.wantIdle()
					opened := 3
					if errors.Is(err, transfer.ErrDenied) {
						opened = 1 // that is about the grant
					}
					if p.plane.opened != opened {
						t.Errorf("the peer was added %d times, want %d", p.plane.opened, opened)
					}
					if s := p.producer.Stats(); s.Granted != 3 || s.LetGo != 2 {
						t.Errorf("%d grants, %d given up", s.Granted, s.LetGo)
					}
				})
			})
		}
	}
}

func TestReadsThatGoOnFailingEndTheFetch(t *testing.T) {
	tests := []struct {
		err     error
		outcome Outcome
		reads   int
	}{
		{transfer.ErrPeerLost, FetchUnreachable, maxRetries + 1},
		{transfer.ErrDenied, FetchFailed, maxRetries + 1},
		{transfer.ErrBadRequest, FetchFailed, 1},
	}
	for _, tt := range tests {
		t.Run(tt.err.Error(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, pairOptions{})
				save(t, p.pcache, "img", 4)
				p.plane.read = func(int, transfer.Peer, transfer.ReadRequest) (transfer.Read, error) {
					rd := newHeldRead()
					rd.end(tt.err)
					return rd, nil
				}
				r := p.consumer.Fetch(bg, "img", announced(4), 1)
				wantOutcome(t, r, tt.outcome)
				if !errors.Is(r.Err, tt.err) {
					t.Errorf("error %v", r.Err)
				}
				if reads, _ := p.plane.counts(); reads != tt.reads {
					t.Errorf("%d READs, want %d", reads, tt.reads)
				}
				synctest.Wait()
				p.wantIdle()
			})
		})
	}
}

// twoPlanes gives the consumer, and the producer, a plane "first" over another fabric beside the usual one.
func twoPlanes(t *testing.T, first func(p *hookPlane)) (*pair, *hookPlane) {
	other := &transfertest.Fabric{}
	extra := &hookPlane{Plane: other.Plane(), name: "first"}
	first(extra)
	p := newPair(t, pairOptions{
		planes: func(_ *transfertest.Fabric, p *hookPlane) []transfer.Plane { return []transfer.Plane{extra, p} },
		producer: func(o *ProducerOptions) {
			o.Pools[0].Planes = append(o.Pools[0].Planes, &hookPlane{Plane: other.Plane(), name: "first"})
		},
	})
	return p, extra
}

func TestAPlaneThatCannotReachThePeerIsPassedOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tries := 0
		p, _ := twoPlanes(t, func(p *hookPlane) {
			p.add = func() error { tries++; return fmt.Errorf("another machine: %w", transfer.ErrUnreachable) }
		})
		for i := range 3 {
			key := fmt.Sprint("img-", i)
			save(t, p.pcache, key, 4)
			r := p.consumer.Fetch(bg, key, announced(4), 1)
			wantOutcome(t, r, FetchReady)
			if r.Plane != transfertest.MemoryName {
				t.Errorf("plane %q", r.Plane)
			}
		}
		if tries != 1 {
			t.Errorf("a plane that cannot reach the peer was tried %d times in a moment", tries)
		}
		if p.host.requests() != 3 {
			t.Errorf("%d requests for 3 keys: another plane needs no other grant", p.host.requests())
		}
		synctest.Wait()
		p.wantIdle()
	})
}

func TestAfterAFailedReadTheOtherPlaneIsNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, first := twoPlanes(t, func(p *hookPlane) {
			p.read = func(int, transfer.Peer, transfer.ReadRequest) (transfer.Read, error) {
				return nil, transfer.ErrPeerLost
			}
		})
		save(t, p.pcache, "img", 4)
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchReady)
		if reads, _ := first.counts(); reads != 1 || r.Plane != transfertest.MemoryName {
			t.Errorf("plane %q after %d READs of the first", r.Plane, reads)
		}
	})
}

func TestNoPlaneThatReachesThePeerIsUnreachable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		p.plane.add = func() error { return transfer.ErrUnreachable }
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchUnreachable)
		synctest.Wait()
		p.wantIdle()
	})
}

// C71, V1: the grant ends while the READ is under way and its blocks are used for another entry. What was read is not delivered.
func TestBytesReadUnderALapsedGrantAreNeverDelivered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{blocks: 4, timeouts: Timeouts{GrantLease: 5 * time.Second}})
		save(t, p.pcache, "img", 4)
		p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
			if n > 0 {
				return in.Read(bg, r)
			}
			rd := newHeldRead()
			p.host.set(0, func(m wire.Message) bool { _, renewal := m.(*wire.Request); return !renewal })
			go func() { // a plane without tokens, and a reader too slow to renew its grant
				time.Sleep(6 * time.Second)
				save(t, p.pcache, "cuckoo", 4)
				copy(r.Local[0], p.pcache.pool)
				p.host.set(0, nil)
				rd.end(nil)
			}()
			return rd, nil
		}
		r := p.consumer.Fetch(bg, "img", announced(4), 1)
		wantOutcome(t, r, FetchMissing) // it was evicted
		if s := p.consumer.Stats(); s.VerifyFailed != 1 {
			t.Errorf("%d failed verifications", s.VerifyFailed)
		}
		if _, state := p.ccache.Lookup("img"); state != Absent {
			t.Errorf("the entry is %v", state)
		}
		synctest.Wait()
		p.wantIdle()
	})
}

// C23.
func TestAWrongChecksumIsReadAgainOnceAndThenFails(t *testing.T) {
	for _, bad := range []int{1, 2} {
		t.Run(fmt.Sprint(bad, " bad READs"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, pairOptions{verify: true})
				save(t, p.pcache, "img", 4)
				p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
					rd, err := in.Read(bg, r)
					if err == nil && n < bad {
						<-rd.Done()
						r.Local[0][5] ^= 1
					}
					return rd, err
				}
				r := p.consumer.Fetch(bg, "img", announced(4), 1)
				if bad == 1 {
					wantOutcome(t, r, FetchReady)
					wantBytes(t, p.ccache, "img")
				} else {
					wantOutcome(t, r, FetchFailed)
					if !errors.Is(r.Err, ErrChecksum) {
						t.Errorf("error %v", r.Err)
					}
				}
				synctest.Wait()
				p.wantIdle()
			})
		})
	}
}

func TestALostVerifyIsAskedAgainBeforeTheBytesAre(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		lost := 0
		p.host.set(0, func(m wire.Message) bool {
			if v, ok := m.(*wire.Verify); ok && !v.Failed && lost < maxVerifies-1 {
				lost++
				return false
			}
			return true
		})
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		if reads, _ := p.plane.counts(); reads != 1 {
			t.Errorf("%d READs", reads)
		}
	})
}

// seeing makes a peer a transfer.Witness that says what the test wants.
type seeing struct {
	transfer.Peer
	holds func(slot uint32, gen uint64) bool
	slot  func(slot uint32) (region.Slot, bool)
}

func (s seeing) Holds(slot uint32, gen uint64) bool { return s.holds(slot, gen) }
func (s seeing) Slot(slot uint32) (region.Slot, bool) {
	if s.slot == nil {
		return region.Slot{}, false
	}
	return s.slot(slot)
}

func TestAPlaneThatSeesTheSlotSparesTheWaitForVerify(t *testing.T) {
	for _, holds := range []bool{true, false} {
		t.Run(fmt.Sprint("it holds: ", holds), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, pairOptions{})
				save(t, p.pcache, "img", 4)
				info, _ := p.pcache.Lookup("img")
				p.plane.see = func(slot uint32, gen uint64) bool {
					if int(slot) != info.Slot || gen != info.Gen {
						t.Errorf("asked for slot %d in generation %d, the entry is in %d in %d", slot, gen, info.Slot, info.Gen)
					}
					return holds
				}
				verified := false
				p.host.set(0, func(m wire.Message) bool {
					_, answer := m.(*wire.Verified)
					verified = verified || answer
					return !answer
				})
				start := time.Now()
				wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), wantedOutcome(holds))
				if waited := time.Since(start) > 0; waited == holds { // on the bubble's clock, which stands unless all wait
					t.Errorf("waited for the answer: %v", waited)
				}
				time.Sleep(tellPause)
				synctest.Wait()
				if !verified {
					t.Error("the producer was not told")
				}
				if holds {
					wantBytes(t, p.ccache, "img")
					p.wantIdle()
				}
			})
		})
	}
}

// wantedOutcome of a pull whose verify is never answered.
func wantedOutcome(seen bool) Outcome {
	if seen {
		return FetchReady
	}
	return FetchTimedOut
}

// V3: whatever an ack says, that key fails and nothing else happens.
func TestAnAckThatMakesNoSenseFailsItsKeyOnly(t *testing.T) {
	good := func(r *wire.Request) *wire.Ack {
		return &wire.Ack{Key: r.Key, Session: r.Session, Ferry: &wire.FerryAck{
			V: 1, Try: r.Ferry.Try, Node: "other", Gen: 1, Grant: "g", Bytes: 4 * testBlock, Extents: [][2]uint32{{0, 4}},
			Planes: []wire.PlaneOffer{{Name: transfertest.MemoryName, Metadata: []byte("m")}},
		}}
	}
	tests := []struct {
		name   string
		change func(a *wire.Ack)
	}{
		{"a block too few", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{0, 3}} }},
		{"a block too many", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{0, 4}, {6, 1}} }},
		{"no extents", func(a *wire.Ack) { a.Ferry.Extents = nil }},
		{"an empty extent", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{0, 4}, {9, 0}} }},
		{"extents that overlap", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{0, 2}, {1, 2}} }},
		{"extents that descend", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{8, 2}, {0, 2}} }},
		{"an extent past the last block number", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{1<<32 - 2, 4}} }},
		{"extents whose sum overflows", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{0, 1 << 31}, {1 << 31, 1<<31 - 1}} }},
		{"out of the pool", func(a *wire.Ack) { a.Ferry.Extents = [][2]uint32{{61, 4}} }},
		{"other bytes", func(a *wire.Ack) { a.Ferry.Bytes-- }},
		{"negative bytes", func(a *wire.Ack) { a.Ferry.Bytes = -a.Ferry.Bytes }},
		{"no grant", func(a *wire.Ack) { a.Ferry.Grant = "" }},
		{"no plane", func(a *wire.Ack) { a.Ferry.Planes = nil }},
		{"a plane never heard of", func(a *wire.Ack) { a.Ferry.Planes[0].Name = "warp" }},
		{"a plain ack with 3 block numbers for 4", func(a *wire.Ack) { a.Ferry, a.Blocks, a.AgentMetadata = nil, []uint32{1, 2, 3}, []byte("m") }},
		{"a plain ack without an agent", func(a *wire.Ack) { a.Ferry, a.Blocks = nil, []uint32{1, 2, 3, 4} }},
		{"a plain ack that no plane can act on", func(a *wire.Ack) { a.Ferry, a.Blocks, a.AgentMetadata = nil, []uint32{1, 2, 3, 4}, []byte("m") }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPair(t, pairOptions{})
				reg, err := p.fabric.Plane().Register(bg, transfer.Memory{Bytes: make([]byte, 64*testBlock)}, nil)
				if err != nil {
					t.Fatal(err)
				}
				defer reg.Close()
				token, err := reg.Grant("g", []region.Span{{Offset: 0, Length: 64 * testBlock}})
				if err != nil {
					t.Fatal(err)
				}
				evil := p.net.host(7001)
				h := newAnswers(evil, func(r *wire.Request) []*wire.Ack {
					a := good(r)
					a.Ferry.Planes[0].Metadata, a.Ferry.Planes[0].Token = reg.Metadata(), token
					if r.Key == "img" {
						tt.change(a)
					}
					return []*wire.Ack{a}
				})
				evil.listen(h)
				a := announced(4)
				a.PeerPort = 7001
				r := p.consumer.Fetch(bg, "img", a, 1)
				if r.Outcome != FetchFailed && r.Outcome != FetchUnreachable || r.Err == nil || r.Elapsed > p.consumer.t.AckPlain {
					t.Errorf("%v after %v (%v)", r.Outcome, r.Elapsed, r.Err)
				}
				wantOutcome(t, p.consumer.Fetch(bg, "good", a, 1), FetchReady)
				synctest.Wait()
				p.wantIdle()
			})
		})
	}
}

// C16.
func TestAcksOfEarlierTriesAndOtherSessionsAreNotActedOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		if err := p.ccache.Remove("img"); err != nil {
			t.Fatal(err)
		}
		reads, _ := p.plane.counts()
		h := newAnswers(p.host, func(r *wire.Request) []*wire.Ack {
			stale := &wire.Ack{Key: r.Key, Session: r.Session, Ferry: &wire.FerryAck{
				V: 1, Try: 1, Gen: 1, Grant: "old", Bytes: 4 * testBlock, Extents: [][2]uint32{{0, 4}},
				Planes: []wire.PlaneOffer{{Name: transfertest.MemoryName}},
			}}
			foreign := *stale
			foreign.Session, foreign.Ferry = "another", &wire.FerryAck{V: 1, Try: r.Ferry.Try, Grant: "x"}
			staleNack := &wire.Ack{Key: r.Key, Status: wire.NackMissing, Ferry: &wire.FerryAck{V: 1, Try: 1}}
			other := *stale
			other.Key = "nobody asked"
			return []*wire.Ack{stale, &foreign, staleNack, &other, {Key: r.Key, Status: wire.NackNotReady, Ferry: &wire.FerryAck{V: 1, Try: r.Ferry.Try}}}
		})
		p.host.listen(h)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchNotReady)
		if now, _ := p.plane.counts(); now != reads {
			t.Errorf("%d READs by acks of earlier tries", now-reads)
		}
		v := <-h.saw
		if v.Key != "nobody asked" || !v.Failed || v.Grant != "old" {
			t.Errorf("the grant that nobody asked for was answered %+v", v)
		}
	})
}

func TestAGrantThatComesTooLateIsGivenBackAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{timeouts: Timeouts{Item: 2 * time.Second}})
		save(t, p.pcache, "img", 4)
		p.host.set(1500*time.Millisecond, nil)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchTimedOut)
		time.Sleep(5 * time.Second)
		synctest.Wait()
		p.wantIdle()
		if s := p.producer.Stats(); s.LetGo != 1 || s.LeaseExpiries != 0 {
			t.Errorf("%d given back, %d lapsed", s.LetGo, s.LeaseExpiries)
		}
	})
}

// C70.
func TestAReadLongerThanTheLeaseRenewsItsGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{timeouts: Timeouts{GrantLease: 3 * time.Second}})
		save(t, p.pcache, "img", 4)
		p.plane.read = func(n int, in transfer.Peer, r transfer.ReadRequest) (transfer.Read, error) {
			rd := newHeldRead()
			go func() {
				time.Sleep(15 * time.Second)
				real, err := in.Read(bg, r)
				if err == nil {
					<-real.Done()
					err = real.Err()
				}
				rd.end(err)
			}()
			return rd, nil
		}
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		wantBytes(t, p.ccache, "img")
		if s := p.producer.Stats(); s.Granted != 1 || s.LeaseExpiries != 0 {
			t.Errorf("%d grants, %d lapsed", s.Granted, s.LeaseExpiries)
		}
		synctest.Wait()
		p.wantIdle()
	})
}

func TestAFloodOfAcksReadsOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		p.host.set(0, nil)
		router := &flood{to: p.host}
		p.producer.serve(router)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		wantBytes(t, p.ccache, "img")
		if reads, _ := p.plane.counts(); reads != 1 {
			t.Errorf("%d READs", reads)
		}
		synctest.Wait()
		p.wantIdle()
	})
}

// A peer that repeats its acks must not keep the answer that follows them out of the flight's box.
func TestOfMoreMessagesThanTheBoxHoldsTheNewestStay(t *testing.T) {
	p := &peer{c: &Consumer{}}
	f := &flight{box: make(chan incoming, boxSize)}
	const n = 3 * boxSize
	for i := range n {
		p.deliver(f, incoming{msg: &wire.Ack{Blocks: []uint32{uint32(i)}}})
	}
	p.deliver(f, incoming{msg: &wire.Verified{Key: "img"}})
	var first, acks, verified int
	for range boxSize {
		switch m := (<-f.box).msg.(type) {
		case *wire.Ack:
			if acks == 0 {
				first = int(m.Blocks[0])
			}
			acks++
		case *wire.Verified:
			verified++
		}
	}
	if first != n-boxSize+1 || acks != boxSize-1 || verified != 1 {
		t.Errorf("%d acks from number %d on, %d answers", acks, first, verified)
	}
	if late := p.c.Stats().LateAcks; late != n+1-boxSize {
		t.Errorf("%d counted as late", late)
	}
}

// flood says everything a thousand times.
type flood struct {
	small
	to messenger
}

func (f *flood) Send(id string, body []byte) error {
	for range 1000 {
		if err := f.to.Send(id, body); err != nil {
			return err
		}
	}
	return nil
}

func FuzzConsumerMessage(f *testing.F) {
	f.Add(wire.AppendAck(nil, &wire.Ack{Key: "img", Status: wire.NackNotReady}))
	f.Add(wire.AppendAck(nil, &wire.Ack{Key: "img", Blocks: []uint32{1, 2, 3, 4}, AgentMetadata: []byte("a")}))
	f.Add(wire.AppendAck(nil, &wire.Ack{Key: "img", Ferry: &wire.FerryAck{
		V: 1, Try: 1, Gen: 1, Grant: "g", Bytes: 4 * testBlock, Extents: [][2]uint32{{0, 4}}, Planes: []wire.PlaneOffer{{Name: transfertest.MemoryName}},
	}}))
	f.Add(wire.AppendVerified(nil, &wire.Verified{Key: "img", Grant: "g", Gen: 1, OK: true}))
	f.Fuzz(func(t *testing.T, body []byte) {
		synctest.Test(t, func(t *testing.T) {
			p := newPair(t, pairOptions{timeouts: Timeouts{Item: time.Second}})
			p.host.listen(silent{})
			got := make(chan Result, 1)
			go func() { got <- p.consumer.Fetch(bg, "img", announced(4), 1) }()
			synctest.Wait()
			p.consumer.mu.Lock()
			peer := p.consumer.peers[p.host.addr]
			p.consumer.mu.Unlock()
			// As if it were of this session, which cannot be known beforehand.
			if m, err := wire.DecodeAtConsumer(body); err == nil {
				switch m := m.(type) {
				case *wire.Ack:
					if m.Session == "" && m.Status == wire.OK {
						m.Session = peer.first.session
					}
					body = wire.AppendAck(nil, m)
				case *wire.Verified:
					m.Session = peer.first.session
					body = wire.AppendVerified(nil, m)
				}
			}
			peer.Message(body)
			if r := <-got; r.Outcome == FetchReady {
				t.Errorf("bytes from nowhere: %+v", r)
			}
			synctest.Wait()
			p.wantIdle()
		})
	})
}

// silent answers nothing.
type silent struct{}

func (silent) Message(control.Source, []byte) {}

func TestAnAnnouncementWithAnotherShapeOfTheSameSizeIsAConflictAndSpoilsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPair(t, pairOptions{})
		save(t, p.pcache, "img", 4)
		wrong := announced(4)
		wrong.Shape = []int{wrong.Shape[0] * 2, wrong.Shape[1] / 2}
		wantOutcome(t, p.consumer.Fetch(bg, "img", wrong, 1), FetchConflict)
		wantOutcome(t, p.consumer.Fetch(bg, "img", announced(4), 1), FetchReady)
		wantBytes(t, p.ccache, "img")
		synctest.Wait()
		p.wantIdle()
	})
}
