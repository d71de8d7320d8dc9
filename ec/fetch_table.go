package ec

// The pull of one key is a small state machine. Its whole behaviour is the table below: what each event does in each state, and
// what becomes of the destination and of the grant. The code that enters a state is in fetch.go.

type state uint8

const (
	queued     state = iota // an engine of this machine is filling the key; wait for that
	connecting              // the peer is not connected
	asking                  // a request is out, its ack is awaited
	pausing                 // before asking again
	opening                 // the peer is being added to a data plane
	reading                 // a READ may write the destination
	verifying               // the READ is complete; is what was read what was granted?
	done
	states = done // those of the table
)

var stateNames = [...]string{
	queued:     "an engine of this machine that fills the key",
	connecting: "a connection",
	asking:     "an ack",
	pausing:    "the next try",
	opening:    "a data plane to reach the peer",
	reading:    "a READ",
	verifying:  "the verification of a READ",
	done:       "nothing",
}

func (s state) String() string { return stateNames[s] }

type event uint8

const (
	evReserved    event = iota // the destination is ours
	evLocal                    // the entry is ready in the pool
	evChanged                  // whoever filled the key has ended
	evUp                       // the peer is connected
	evDown                     // it is not, or has been lost meanwhile
	evGranted                  // an OK ack that makes sense
	evNotReady                 // NACK_NOT_READY
	evRefused                  // any other NACK, a bad ack, or no way to ask at all
	evNotSent                  // the outgoing queue is full
	evOpened                   // a data plane reaches the peer
	evBeyond                   // this one does not; there may be another
	evRead                     // the READ is complete
	evReadFailed               // it ended with an error, or could not be posted: nothing writes the destination
	evVerified                 // the bytes are those granted
	evNotVerified              // they may not be
	evGaveUp                   // too many failures
	evTimeout                  // the state's own wait is over
	evBudget                   // the item's wait over all tries is over
	evAbandoned                // nobody waits for the key any more, or the consumer is closed
	events
	evNone = events // nothing happened: wait
)

// fate of the destination.
type fate uint8

const (
	keep       fate = iota // as it is
	free                   // back to the pool at once: no READ can write it
	quarantine             // a READ may still write it: back to the pool when that has ended
	commit                 // the entry is ready
)

// move is what an event does.
type move struct {
	kind  moveKind
	to    state
	dest  fate
	letGo bool // tell the producer that the grant is not needed any more
}

type moveKind uint8

const (
	undefined moveKind = iota
	stays              // the event means nothing here; a grant that came with it is let go
	never              // the event is not raised in this state; treated as stays
	goes
)

var (
	s__ = move{kind: stays}
	xxx = move{kind: never}
	que = move{kind: goes, to: queued}
	con = move{kind: goes, to: connecting}
	ask = move{kind: goes, to: asking}
	pau = move{kind: goes, to: pausing}
	pal = move{kind: goes, to: pausing, letGo: true}
	ope = move{kind: goes, to: opening}
	rea = move{kind: goes, to: reading}
	ver = move{kind: goes, to: verifying}
	end = move{kind: goes, to: done}
	fre = move{kind: goes, to: done, dest: free}
	frl = move{kind: goes, to: done, dest: free, letGo: true}
	qua = move{kind: goes, to: done, dest: quarantine, letGo: true}
	com = move{kind: goes, to: done, dest: commit}
)

// In pausing, an OK ack of an earlier, slow try is as good as one of the next.
var table = [states][events]move{
	//            reserved local changed up down granted notReady refused notSent opened beyond read failed verified not gaveUp timeout budget abandoned
	queued:     {con, end, que, xxx, xxx, xxx, xxx, end, xxx, xxx, xxx, xxx, xxx, xxx, xxx, xxx, xxx, end, end},
	connecting: {xxx, xxx, xxx, ask, s__, s__, s__, fre, xxx, xxx, xxx, xxx, xxx, s__, s__, xxx, fre, fre, fre},
	asking:     {xxx, xxx, xxx, s__, con, ope, pau, fre, pau, xxx, xxx, xxx, xxx, s__, s__, xxx, con, fre, fre},
	pausing:    {xxx, xxx, xxx, s__, s__, ope, s__, fre, xxx, xxx, xxx, xxx, xxx, s__, s__, xxx, con, fre, fre},
	opening:    {xxx, xxx, xxx, s__, s__, s__, s__, s__, xxx, rea, ope, xxx, pal, s__, s__, frl, xxx, frl, frl},
	reading:    {xxx, xxx, xxx, s__, s__, s__, s__, s__, xxx, xxx, ope, ver, pal, s__, s__, frl, qua, qua, qua},
	verifying:  {xxx, xxx, xxx, s__, s__, s__, s__, s__, xxx, xxx, xxx, xxx, xxx, com, pal, frl, ver, frl, frl},
}
