package faulty

import (
	"bytes"
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/mapped"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

func TestAFaultyPlaneWithoutRulesConforms(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		transfertest.Run(t, func(t *testing.T, _ string) (producer, consumer transfer.Plane) {
			var f transfertest.Fabric
			return New(f.Plane()), New(f.Plane())
		})
	})
	t.Run("mapped", func(t *testing.T) {
		transfertest.Run(t, func(t *testing.T, dir string) (producer, consumer transfer.Plane) {
			return New(newMapped(t, dir)), New(newMapped(t, dir))
		})
	})
}

func newMapped(t *testing.T, dir string) *mapped.Plane {
	t.Helper()
	p, err := mapped.New(mapped.Options{Dirs: []string{dir}})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestEveryMethodOfThePlanesIsAnOperation fails when a method is added to the contract and not here.
func TestEveryMethodOfThePlanesIsAnOperation(t *testing.T) {
	ops := map[string]Op{
		"Plane.Register": Register, "Plane.AddPeer": AddPeer, "Plane.Close": PlaneClose,
		"Registration.Grant": Grant, "Registration.Revoke": Revoke, "Registration.Close": RegistrationClose,
		"Peer.Read": Read, "Peer.Close": PeerClose, "Viewer.View": View, "Read.Done": Complete, "Read.Cancel": Cancel,
	}
	passive := map[string]bool{ // cannot fail, wait or be lost
		"Plane.Name": true, "Plane.Capabilities": true, "Registration.Metadata": true, "Read.Err": true,
	}
	covered := map[Op]bool{Notify: true} // the callback of Register
	for _, typ := range []reflect.Type{
		reflect.TypeFor[transfer.Plane](), reflect.TypeFor[transfer.Registration](), reflect.TypeFor[transfer.Peer](),
		reflect.TypeFor[transfer.Read](), reflect.TypeFor[transfer.Viewer](),
	} {
		for i := range typ.NumMethod() {
			name := typ.Name() + "." + typ.Method(i).Name
			op, ok := ops[name]
			if !ok && !passive[name] {
				t.Errorf("%s is no operation", name)
			}
			if ok {
				covered[op] = true
			}
		}
	}
	names := map[string]bool{}
	for _, op := range Ops() {
		if !covered[op] {
			t.Errorf("operation %s belongs to no method", op)
		}
		if names[op.String()] || op.String() == "" {
			t.Errorf("operation %d has the name %q", op, op)
		}
		names[op.String()] = true
	}
}

// rig is a producer and a consumer on a fabric, with faults on both.
type rig struct {
	t      *testing.T
	plane  *Plane
	reg    transfer.Registration
	peer   transfer.Peer
	token  []byte
	memory []byte
	notes  chan transfer.Notification
}

func newRig(t *testing.T, rules ...Rule) *rig {
	t.Helper()
	var f transfertest.Fabric
	r := &rig{t: t, plane: New(f.Plane(), rules...), memory: bytes.Repeat([]byte{9}, 4096), notes: make(chan transfer.Notification, 10)}
	var err error
	r.reg, err = r.plane.Register(t.Context(), transfer.Memory{Bytes: r.memory}, func(n transfer.Notification) { r.notes <- n })
	if err != nil {
		t.Fatal(err)
	}
	if r.token, err = r.reg.Grant("g", []region.Span{{Length: 4096}}); err != nil {
		t.Fatal(err)
	}
	if r.peer, err = r.plane.AddPeer(t.Context(), r.reg.Metadata()); err != nil {
		t.Fatal(err)
	}
	return r
}

func (r *rig) post() transfer.Read {
	r.t.Helper()
	rd, err := r.peer.Read(r.t.Context(), transfer.ReadRequest{Token: r.token, Remote: []region.Span{{Length: 4096}}, Local: [][]byte{make([]byte, 4096)}})
	if err != nil {
		r.t.Fatal(err)
	}
	return rd
}

func over(rd transfer.Read) bool {
	synctest.Wait()
	select {
	case <-rd.Done():
		return true
	default:
		return false
	}
}

func TestACompletionIsForcedOnItsIndexOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mine := errors.New("mine")
		r := newRig(t, Rule{Op: Complete, Index: 1, Err: mine}, Rule{Op: Complete, Index: 2, Fail: true})
		for i, want := range []error{nil, mine, ErrInjected, nil} {
			rd := r.post()
			<-rd.Done()
			if !errors.Is(rd.Err(), want) {
				t.Errorf("READ %d: %v, want %v", i, rd.Err(), want)
			}
		}
		if n := r.plane.Count(Complete); n != 4 {
			t.Errorf("%d completions counted", n)
		}
	})
}

func TestAHeldCompletionEndsWhenReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold, hit := make(chan struct{}), 0
		r := newRig(t, Rule{Op: Complete, Hold: hold, Hit: func() { hit++ }})
		rd := r.post()
		if over(rd) {
			t.Fatal("a held READ is over")
		}
		close(hold)
		<-rd.Done()
		if rd.Err() != nil || hit != 1 {
			t.Errorf("released READ: %v, %d hits", rd.Err(), hit)
		}
	})
}

func TestADroppedCompletionEndsByCancelOrCloseOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Rule{Op: Complete, Index: Every, Drop: true}, Rule{Op: Cancel, Index: 0, Drop: true})
		first, second := r.post(), r.post()
		first.Cancel() // dropped
		if over(first) || over(second) {
			t.Fatal("a dropped READ is over")
		}
		first.Cancel()
		if !over(first) || !errors.Is(first.Err(), transfer.ErrCanceled) {
			t.Errorf("canceled READ: %v", first.Err())
		}
		if err := r.peer.Close(); err != nil {
			t.Fatal(err)
		}
		if !over(second) || !errors.Is(second.Err(), transfer.ErrClosed) {
			t.Errorf("READ of a closed peer: %v", second.Err())
		}
	})
}

func TestNotificationsAreDroppedHeldAndDuplicated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		r := newRig(t, Rule{Op: Notify, Index: 0, Drop: true}, Rule{Op: Notify, Index: 1, Hold: hold}, Rule{Op: Notify, Index: 2, Duplicate: true})
		for i, want := range []int{0, 0, 2, 3} {
			<-r.post().Done()
			synctest.Wait()
			if len(r.notes) != want {
				t.Errorf("after READ %d: %d notifications, want %d", i, len(r.notes), want)
			}
		}
		close(hold)
		synctest.Wait()
		if len(r.notes) != 4 {
			t.Errorf("in the end %d notifications, want 4", len(r.notes))
		}
	})
}

func TestARevokeThatIsDroppedLeavesTheGrant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Rule{Op: Revoke, Index: 0, Drop: true})
		r.reg.Revoke("g")
		rd := r.post()
		if <-rd.Done(); rd.Err() != nil {
			t.Errorf("READ after a dropped Revoke: %v", rd.Err())
		}
		r.reg.Revoke("g")
		rd = r.post()
		if <-rd.Done(); !errors.Is(rd.Err(), transfer.ErrDenied) {
			t.Errorf("READ after a Revoke: %v", rd.Err())
		}
	})
}

func TestEachFailingOperationFailsOnce(t *testing.T) {
	rules := make([]Rule, 0, len(Ops()))
	for _, op := range Ops() {
		if strings.HasSuffix(op.String(), "Close") || op == Grant || op == AddPeer || op == Register || op == Read || op == View {
			rules = append(rules, Rule{Op: op, Index: 0, Fail: true})
		}
	}
	dir := transfertest.Dir(t)
	p := New(newMapped(t, dir), rules...)
	m, free := transfertest.NewMemory(t, dir, 4096)
	defer free()
	all := []region.Span{{Length: 4096}}
	twice := func(what string, f func() error, second error) {
		t.Helper()
		if err := f(); !errors.Is(err, ErrInjected) {
			t.Errorf("%s, first: %v", what, err)
		}
		if err := f(); !errors.Is(err, second) {
			t.Errorf("%s, second: %v", what, err)
		}
	}
	var reg transfer.Registration
	twice("register", func() (err error) { reg, err = p.Register(t.Context(), m, nil); return err }, nil)
	twice("grant", func() error { _, err := reg.Grant("g", all); return err }, nil)
	var peer transfer.Peer
	twice("add peer", func() (err error) { peer, err = p.AddPeer(t.Context(), reg.Metadata()); return err }, nil)
	twice("read", func() error {
		_, err := peer.Read(t.Context(), transfer.ReadRequest{Remote: all, Local: [][]byte{make([]byte, 4096)}})
		return err
	}, nil)
	twice("view", func() error { _, _, err := peer.(transfer.Viewer).View(nil, all); return err }, nil)
	twice("closing the peer", peer.Close, nil)
	twice("closing the registration", reg.Close, nil)
	twice("closing the plane", p.Close, nil)
}

func TestAHeldOperationEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Rule{Op: Read, Hold: make(chan struct{})})
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error)
		go func() {
			_, err := r.peer.Read(ctx, transfer.ReadRequest{})
			result <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-result; !errors.Is(err, context.Canceled) {
			t.Errorf("held READ: %v", err)
		}
	})
}

func TestRulesAreAddedAndCleared(t *testing.T) {
	r := newRig(t)
	r.plane.Add(Rule{Op: Grant, Index: Every, Fail: true})
	if _, err := r.reg.Grant("h", []region.Span{{Length: 1}}); !errors.Is(err, ErrInjected) {
		t.Errorf("with a rule: %v", err)
	}
	r.plane.Clear()
	if _, err := r.reg.Grant("h", []region.Span{{Length: 1}}); err != nil {
		t.Errorf("after Clear: %v", err)
	}
}
