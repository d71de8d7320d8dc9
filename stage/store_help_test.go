package stage

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/tensor"
)

// fakeMemory checks what the store promises to a Memory: it is released once, after every grant was withdrawn.
type fakeMemory struct {
	t  fataler
	mu sync.Mutex
	// offered has the grants that are readable now; ended those withdrawn, with idle as it was said.
	offered  map[string]bool
	ended    map[string]bool
	released bool

	stuck    bool          // Withdraw fails
	refuse   error         // Offer fails
	blocked  chan struct{} // Offer waits for it, if not nil
	entered  chan struct{} // gets a value when Offer is entered, if not nil
	withdraw int           // calls of it
}

type fataler interface {
	Errorf(string, ...any)
	Helper()
}

func newMemory(t fataler) *fakeMemory {
	return &fakeMemory{t: t, offered: make(map[string]bool), ended: make(map[string]bool)}
}

func (m *fakeMemory) Offer(ctx context.Context, grant string, _ *wire.FerryRequest, md *wire.Metadata) error {
	if m.entered != nil {
		m.entered <- struct{}{}
	}
	if m.blocked != nil {
		select {
		case <-m.blocked:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, again := m.ended[grant]; again || m.released {
		m.t.Errorf("grant %s offered after its end, or after the memory's (%v)", grant, m.released)
	}
	if md.Claim.IsZero() || md.Generation.IsZero() {
		m.t.Errorf("descriptors asked for without a claim: %+v", md)
	}
	if m.refuse != nil {
		return m.refuse
	}
	m.offered[grant] = true
	md.AgentMetadata = []byte("agent")
	if md.Ferry != nil {
		md.Ferry.Inline = make([]byte, md.Size)
		return nil
	}
	for i, s := range md.Specs {
		md.Groups = []wire.Group{{MemoryType: "DRAM", Regions: []wire.Region{{Tensor: i, Addr: 4096, Bytes: s.Size}}}}
	}
	return nil
}

func (m *fakeMemory) Withdraw(ctx context.Context, grant string, idle bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.withdraw++
	if m.released {
		m.t.Errorf("grant %s withdrawn after the release", grant)
	}
	if m.stuck && !idle {
		return errors.New("stuck")
	}
	delete(m.offered, grant)
	m.ended[grant] = idle
	return ctx.Err()
}

func (m *fakeMemory) Release() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.released || len(m.offered) > 0 {
		m.t.Errorf("released again (%v), or with %d grants left", m.released, len(m.offered))
	}
	m.released = true
}

func (m *fakeMemory) isReleased() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.released
}

func (m *fakeMemory) unstick() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stuck = false
}

func newStore(t *testing.T, o Options) *Store {
	t.Helper()
	s, err := NewStore(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// closeStore ends a store of which nothing may be left.
func closeStore(t *testing.T, s *Store) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if err := s.Close(ctx, time.Hour); err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.Payloads+st.Claims+st.Withdrawing != 0 || st.Bytes != 0 || st.Puts != st.Released {
		t.Errorf("left behind: %+v", st)
	}
}

func put(t *testing.T, s *Store, key string) (*fakeMemory, wire.ID) {
	t.Helper()
	m := newMemory(t)
	md := wire.Metadata{Kind: wire.Tensors, Specs: []wire.Spec{{DType: tensor.Uint8, Shape: tensor.Shape{8}, Size: 8}}, Size: 8, SenderHost: "h", SenderPort: 1,
		Ferry: &wire.FerryMetadata{Top: wire.TopList, Try: 7}}
	g, err := s.Put(Put{Key: key, Metadata: md, Memory: m})
	if err != nil {
		t.Fatal(err)
	}
	return m, g
}

func claimOf(key string, g wire.ID, id string) Claim {
	return Claim{Key: key, Generation: g, ID: wire.TextID(id)}
}

func mustClaim(t *testing.T, s *Store, c Claim) *wire.Metadata {
	t.Helper()
	m, err := s.Claim(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// closeLate closes a store that still has claims: their readers are stopped.
func closeLate(t *testing.T, s *Store) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Close(ctx, time.Second); err != nil {
		t.Error(err)
	}
}
