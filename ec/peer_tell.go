package ec

import (
	"time"

	"github.com/tensorferry/tensorferry/ec/wire"
)

// tellPause is how long the end of a pull that the producer need not answer waits before it is told, for others to come along. A pin or
// a hold that stays so much longer harms nobody; waking the producer for each pull, before the engine has its result, would cost as
// much as the pull.
const tellPause = 5 * time.Millisecond

// untold is what a producer has not been told yet. Under peer.mu.
type untold struct {
	pulls    []wire.PulledEntry // that asked nobody
	verifies []toldLater        // whose answers nobody waits for
}

type toldLater struct {
	via  *path
	body []byte
}

// pulled notes a pull that asked nobody.
func (p *peer) pulled(key string, gen uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tellLater()
	p.untold.pulls = append(p.untold.pulls, wire.PulledEntry{Key: key, Gen: gen})
}

// verifyLater notes the end of a grant that came by a path. If the message is lost, the lease ends it.
func (p *peer) verifyLater(via *path, v *wire.Verify) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tellLater()
	p.untold.verifies = append(p.untold.verifies, toldLater{via, wire.AppendVerify(nil, v)})
}

// tellLater is called with the lock held, before something is added.
func (p *peer) tellLater() {
	if len(p.untold.pulls)+len(p.untold.verifies) == 0 {
		time.AfterFunc(tellPause, p.tell)
	}
}

// tell sends what there is. What cannot be sent is lost.
func (p *peer) tell() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.endGrants()
	pulls := p.untold.pulls
	p.untold.pulls = nil
	via := p.bestLocked()
	for len(pulls) > 0 {
		n := min(len(pulls), wire.MaxPulled)
		if p.sendLocked(via, wire.AppendPulled(nil, &wire.Pulled{CompatHash: p.c.hash, Entries: pulls[:n]})) != nil {
			return
		}
		pulls = pulls[n:]
	}
}

// endGrants sends the verifies. It comes before every request: one that follows the end of a grant must not renew that grant. Called
// with the lock held.
func (p *peer) endGrants() {
	for _, v := range p.untold.verifies {
		_ = p.sendLocked(v.via, v.body)
	}
	p.untold.verifies = nil
}
