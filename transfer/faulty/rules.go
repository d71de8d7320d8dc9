package faulty

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// ErrInjected is wrapped by every error that a rule without an error of its own makes.
var ErrInjected = errors.New("faulty: injected")

// Op is something that a plane does.
type Op uint8

// The operations. The comment says what a rule does to each.
const (
	Register          Op = iota // fails, or waits
	AddPeer                     // fails, or waits
	PlaneClose                  // closes, then fails; or waits
	Grant                       // fails, or waits
	Revoke                      // waits; Drop: the grant lives on
	RegistrationClose           // closes, then fails; or waits
	Notify                      // is delivered late, never (Drop) or twice (Duplicate); an error is as Drop
	Read                        // the posting fails, or waits
	Complete                    // the READ's end: another outcome, later, or never (Drop) but by Cancel or Close
	Cancel                      // Drop: nothing is canceled
	PeerClose                   // closes, then fails; or waits
	View                        // fails, or waits
	numOps
)

var opNames = [numOps]string{
	"Register", "AddPeer", "PlaneClose", "Grant", "Revoke", "RegistrationClose", "Notify", "Read", "Complete", "Cancel", "PeerClose", "View",
}

// String gives the operation's name.
func (o Op) String() string {
	if o >= numOps {
		return fmt.Sprintf("Op(%d)", uint8(o))
	}
	return opNames[o]
}

// Ops lists all operations.
func Ops() []Op {
	out := make([]Op, numOps)
	for i := range out {
		out[i] = Op(i)
	}
	return out
}

// Every as an Index means each occurrence.
const Every = -1

// Rule says what happens to one operation. The effects of one rule happen in the order of its fields.
type Rule struct {
	Op    Op
	Index int // which occurrence on this Plane, from 0; Every: all

	Hit       func()          // called when the rule is met; it must not call the plane
	Hold      <-chan struct{} // the operation waits until it is closed, or until the operation's context ends if it has one
	Err       error           // the operation's outcome
	Fail      bool            // its outcome is ErrInjected, unless Err is set
	Drop      bool            // see the operation
	Duplicate bool            // of Notify
}

// err is the outcome that the rule forces, or nil.
func (r *Rule) err() error {
	switch {
	case r == nil:
		return nil
	case r.Err != nil:
		return r.Err
	case r.Fail:
		return fmt.Errorf("%w: %s", ErrInjected, r.Op)
	}
	return nil
}

// wait is the rule's delay.
func (r *Rule) wait(ctx context.Context) error {
	if r == nil || r.Hold == nil {
		return nil
	}
	select {
	case <-r.Hold:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// book counts operations and finds the rule for each.
type book struct {
	mu     sync.Mutex
	rules  []Rule
	counts [numOps]int
}

// meet counts one occurrence and gives its rule, the first that fits, or nil.
func (b *book) meet(op Op) *Rule {
	b.mu.Lock()
	i := b.counts[op]
	b.counts[op]++
	var met *Rule
	for j := range b.rules {
		if r := b.rules[j]; r.Op == op && (r.Index == Every || r.Index == i) {
			met = &r
			break
		}
	}
	b.mu.Unlock()
	if met != nil && met.Hit != nil {
		met.Hit()
	}
	return met
}
