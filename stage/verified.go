package stage

import (
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
)

// maxVerified is how many claims that ended by Verify are remembered: some 10 MB of records. At RetryGrace's default that is 2,000
// a second; beyond, the oldest are forgotten early.
const maxVerified = 1 << 16

// verified remembers claims that ended by Verify, so that a reader whose answer was lost with its connection can ask again. Guarded by
// the store's lock.
type verified struct {
	keep  time.Duration
	until map[claimName]time.Time
	order []verifiedClaim // the oldest first; those that are not in until any more included
}

type claimName struct{ generation, id wire.ID }

type verifiedClaim struct {
	name  claimName
	until time.Time
}

// add remembers a claim, and says until when.
func (v *verified) add(c Claim, now time.Time) time.Time {
	v.forget(now)
	for len(v.order) >= maxVerified {
		v.drop()
	}
	name, until := claimName{c.Generation, c.ID}, now.Add(v.keep)
	v.until[name] = until
	v.order = append(v.order, verifiedClaim{name, until})
	return until
}

// has says whether a claim is remembered.
func (v *verified) has(c Claim, now time.Time) bool {
	until, ok := v.until[claimName{c.Generation, c.ID}]
	return ok && now.Before(until)
}

// again forgets a claim whose id is used for another one.
func (v *verified) again(generation, id wire.ID) { delete(v.until, claimName{generation, id}) }

// forget drops what is over, and says when the next is: the zero time is never.
func (v *verified) forget(now time.Time) time.Time {
	for len(v.order) > 0 && !now.Before(v.order[0].until) {
		v.drop()
	}
	if len(v.order) == 0 {
		if v.order != nil { // let go of what they had grown to
			v.order, v.until = nil, make(map[claimName]time.Time)
		}
		return time.Time{}
	}
	return v.order[0].until
}

// drop forgets the oldest, unless it was remembered anew.
func (v *verified) drop() {
	oldest := v.order[0]
	v.order = v.order[1:]
	if v.until[oldest.name].Equal(oldest.until) {
		delete(v.until, oldest.name)
	}
}
