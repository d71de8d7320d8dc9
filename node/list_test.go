package node

import (
	"testing"

	"github.com/tensorferry/tensorferry/ec"
	"github.com/tensorferry/tensorferry/node/internal/api"
)

func ask(t *testing.T, c *api.Conn, id uint64, ops ...api.Op) []api.Result {
	t.Helper()
	if err := c.Send(api.MaxRequestFrame, &api.Request{ID: id, Ops: ops}); err != nil {
		t.Fatal(err)
	}
	m, err := c.Receive()
	if err != nil {
		t.Fatal(err)
	}
	r, ok := m.(*api.Reply)
	if !ok || r.ID != id {
		t.Fatalf("%T %+v; want the reply to %d", m, m, id)
	}
	return r.Results
}

// A listing holds all that it has to say for as long as its engine does not read: thousands that did so at once could take any amount of memory.
func TestListingsOfAConnectionTakeTheirTurn(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	c := dial(t, n)
	_, conn := byHand(t, n)
	n.engines.mu.Lock()
	s := n.engines.sessions[n.engines.next]
	n.engines.mu.Unlock()
	s.listing <- struct{}{} // one is under way
	if r := ask(t, conn, 1, api.Op{Kind: api.OpList, Ref: 1}, api.Op{Kind: api.OpList, Ref: 2}); r[0].Code != api.CodeOK || r[1].Code != api.CodeOK {
		t.Fatalf("%+v", r)
	}
	if r := ask(t, conn, 2, api.Op{Kind: api.OpCancel, Ref: 2}); r[0].Code != api.CodeOK {
		t.Fatalf("%+v", r)
	}
	listed := func(ref uint64) *api.Push {
		t.Helper()
		m, err := conn.Receive()
		p, ok := m.(*api.Push)
		if err != nil || !ok || p.Ref != ref || p.Event != api.EventListed || !p.Last {
			t.Fatalf("%+v, %v", m, err)
		}
		return p
	}
	if p := listed(2); p.Code != api.CodeCanceled || len(p.Entries) != 0 {
		t.Errorf("canceled while it waits: %+v", p)
	}
	put(t, c, "k", 1, 1) // after the listing was asked for, before its turn
	<-s.listing
	if p := listed(1); p.Code != api.CodeOK || len(p.Entries) != 1 || p.Entries[0].Key != "k" {
		t.Errorf("%+v", p)
	}
}

func TestListingsOfAllConnectionsTakeTheirTurn(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	c := dial(t, n)
	_, conn := byHand(t, n)
	for range maxListings { // of engines that do not read
		n.engines.listings <- struct{}{}
	}
	if r := ask(t, conn, 1, api.Op{Kind: api.OpList, Ref: 1}); r[0].Code != api.CodeOK {
		t.Fatalf("%+v", r)
	}
	put(t, c, "k", 1, 1) // after the listing was asked for, before its turn
	for range maxListings {
		<-n.engines.listings
	}
	m, err := conn.Receive()
	if p, ok := m.(*api.Push); err != nil || !ok || p.Ref != 1 || !p.Last || len(p.Entries) != 1 || p.Entries[0].Key != "k" {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestAResumeOfWhatWasCommittedSaysWhatIsThere(t *testing.T) {
	n := startNode(t, testConfig(t, 16))
	_, conn := byHand(t, n)
	sp := spec(2)
	r := ask(t, conn, 1, api.Op{Kind: api.OpReserve, Key: "k", Dtype: sp.Dtype, Shape: sp.Shape, Bytes: sp.Bytes})
	if r[0].Code != api.CodeOK {
		t.Fatalf("%+v", r)
	}
	gen := r[0].Info.Gen
	if r := ask(t, conn, 2, api.Op{Kind: api.OpCommit, Handle: r[0].Handle}); r[0].Code != api.CodeOK {
		t.Fatalf("%+v", r)
	}
	r = ask(t, conn, 3, api.Op{Kind: api.OpResume, Key: "k", Gen: gen})
	if r[0].Code != api.CodeHeld || r[0].Message == "" || r[0].Handle != 0 {
		t.Fatalf("%+v", r)
	}
	if i := r[0].Info; i == nil || i.Key != "k" || i.Gen != gen || i.State != ec.Ready || i.Spec.Bytes != sp.Bytes {
		t.Errorf("info %+v", i)
	}
}
