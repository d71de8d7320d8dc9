package nixl

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"sync"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
)

// Back-off of adding a peer whose agent could not be added: each attempt costs endpoints on both sides. A restarted peer has other
// metadata, so nothing of this holds it up.
const (
	addBackoffFirst = 50 * time.Millisecond
	addBackoffMost  = 5 * time.Second
	maxAddFailures  = 1024 // remembered
)

// A plain peer's metadata lists what it has registered, so it is another one for each payload. NIXL takes it for an agent that it
// knows, and keeps what it lists beside what earlier ones listed: no connection is made (over 2,000 payloads, with 1.3.2, no descriptor
// more at either end; to forget and load anew for each costs two at each over tcp). What it keeps grows, so after maxLoads it is all
// forgotten once, when nobody uses the peer.
const (
	maxKeys  = 8
	maxLoads = 10_000
)

// remote is a peer's agent as an engine knows it. All users of the same metadata share it.
type remote struct {
	id     uint64
	keys   [][sha256.Size]byte // of its metadata, the last maxKeys: more than one if it registered more since
	loads  int                 // of metadata
	peer   *binding.Peer
	users  int  // by add and drop
	flying int  // READs
	failed bool // it is not found any more, and gone when nobody uses it
}

// peerTable is the peers of one engine. Those that nobody uses are kept, the newest IdlePeers of them, so that coming back costs
// nothing; those that failed are not.
type peerTable struct {
	agent *binding.Agent
	keep  int

	adding sync.Mutex // one load at a time: it may take long, and two of one peer must not race
	mu     sync.Mutex
	next   uint64
	byID   map[uint64]*remote
	byKey  map[[sha256.Size]byte]*remote
	idle   []*remote // users == 0, the oldest first
	failed map[[sha256.Size]byte]addFailure
}

type addFailure struct {
	times int
	until time.Time
}

func (t *peerTable) init(a *binding.Agent, keep int) {
	t.agent, t.keep = a, keep
	t.byID, t.byKey, t.failed = map[uint64]*remote{}, map[[sha256.Size]byte]*remote{}, map[[sha256.Size]byte]addFailure{}
}

// add finds or loads a peer.
func (t *peerTable) add(metadata []byte) (uint64, error) {
	t.adding.Lock()
	defer t.adding.Unlock()
	name, err := binding.AgentName(metadata)
	if err != nil {
		return 0, classify(fmt.Errorf("nixl: add an agent: %w", err), transfer.ErrBadRequest)
	}
	key := sha256.Sum256(metadata)
	t.mu.Lock()
	if r := t.byKey[key]; r != nil {
		t.take(r)
		t.mu.Unlock()
		return r.id, nil
	}
	failure := t.failed[key]
	for _, r := range t.byID {
		if !r.failed || r.peer.Name() != name {
			continue
		}
		if r.flying > 0 {
			t.mu.Unlock()
			return 0, fmt.Errorf("%w: nixl: this agent failed, and READs from it have not ended yet", transfer.ErrPeerLost)
		}
		_ = r.peer.Close() // else the load below would only refresh it
	}
	t.mu.Unlock()
	if wait := time.Until(failure.until); wait > 0 {
		return 0, fmt.Errorf("%w: nixl: adding this agent failed %d times, the next try is in %v", transfer.ErrPeerLost, failure.times, wait.Round(time.Millisecond))
	}
	peer, err := t.agent.AddPeer(metadata)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil {
		t.addFailed(key, failure.times)
		return 0, classify(fmt.Errorf("nixl: add an agent: %w", err), transfer.ErrPeerLost)
	}
	delete(t.failed, key)
	for _, r := range t.byID {
		if r.peer == peer && !r.failed { // the agent of before, which has registered more
			r.loads++
			r.keys = append(r.keys, key)
			t.byKey[key] = r
			if len(r.keys) > maxKeys {
				delete(t.byKey, r.keys[0])
				r.keys = slices.Delete(r.keys, 0, 1)
			}
			t.take(r)
			return r.id, nil
		}
	}
	t.next++
	r := &remote{id: t.next, keys: [][sha256.Size]byte{key}, peer: peer, users: 1}
	t.byID[r.id], t.byKey[key] = r, r
	return r.id, nil
}

// take counts a user.
func (t *peerTable) take(r *remote) {
	if r.users++; r.users == 1 {
		t.idle = slices.DeleteFunc(t.idle, func(o *remote) bool { return o == r })
	}
}

func (t *peerTable) addFailed(key [sha256.Size]byte, times int) {
	if len(t.failed) >= maxAddFailures {
		now := time.Now()
		for k, f := range t.failed {
			if len(t.failed) >= maxAddFailures || f.until.Before(now) {
				delete(t.failed, k)
			}
		}
	}
	wait := min(addBackoffFirst<<min(times, 10), addBackoffMost)
	t.failed[key] = addFailure{times + 1, time.Now().Add(wait)}
}

func (t *peerTable) drop(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.byID[id]
	if r == nil || r.users == 0 {
		return
	}
	if r.users--; r.users > 0 {
		return
	}
	t.settle(r)
	switch {
	case r.failed:
	case r.loads >= maxLoads && r.flying == 0:
		t.forget(r)
	default:
		t.idle = append(t.idle, r)
	}
	for len(t.idle) > t.keep {
		oldest := t.idle[0]
		t.idle = t.idle[1:]
		t.forget(oldest)
	}
}

// use counts a READ; nil if the peer is gone or failed.
func (t *peerTable) use(id uint64) *remote {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.byID[id]
	if r == nil || r.failed {
		return nil
	}
	r.flying++
	return r
}

func (t *peerTable) unuse(r *remote, failed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	r.flying--
	if failed && !r.failed {
		// Whoever adds it again loads it anew.
		r.failed = true
		for _, key := range r.keys {
			delete(t.byKey, key)
		}
		t.idle = slices.DeleteFunc(t.idle, func(o *remote) bool { return o == r })
	}
	t.settle(r)
}

// settle lets go of a failed peer that nothing uses.
func (t *peerTable) settle(r *remote) {
	if r.failed && r.users == 0 && r.flying == 0 {
		t.forget(r)
	}
}

// forget takes its endpoints away. The library forgets by name, which a newer peer may have by now: the binding sees to that.
func (t *peerTable) forget(r *remote) {
	delete(t.byID, r.id)
	for _, key := range r.keys {
		if t.byKey[key] == r {
			delete(t.byKey, key)
		}
	}
	_ = r.peer.Close() // all it can say is that the library has forgotten already
}
