package nixl

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
)

// engineOptions are what an agent is made with. They travel to agent processes as JSON, once.
type engineOptions struct {
	Name          string        `json:"name"`
	Backends      []Backend     `json:"backends"`
	ProgressDelay time.Duration `json:"progress_delay"`
	IdlePeers     int           `json:"idle_peers"`
	Deaf          bool          `json:"deaf"` // nobody wants notifications
}

// engine is an agent that runs in this process.
type engine struct {
	o      engineOptions
	agent  *binding.Agent
	notify func([]byte)

	peers peerTable

	mu       sync.Mutex
	closed   bool
	memories map[uint32]*attached
	flying   []*flying
	polling  bool

	attention chan struct{} // capacity 1
	stop      chan struct{}
	work      sync.WaitGroup
	isOver    chan struct{}
	endOnce   sync.Once
}

// attached is registered memory.
type attached struct {
	Place
	registration *binding.Registration
}

// flying is a READ that was in progress when it was posted.
type flying struct {
	request *binding.Request
	remote  *remote
	done    func(error)
}

// newEngine makes the agent and its backends. notify is called with each notification from one goroutine; nil: the engine is deaf.
func newEngine(l *binding.Library, o engineOptions, notify func([]byte)) (*engine, error) {
	a, err := l.NewAgent(o.Name, binding.AgentConfig{ProgressDelay: o.ProgressDelay})
	if err != nil {
		return nil, fmt.Errorf("nixl: %w", err)
	}
	for _, b := range o.Backends {
		if _, err := a.CreateBackend(b.Name, b.Params); err != nil {
			_ = a.Close()
			return nil, fmt.Errorf("nixl: backend %s: %w", b.Name, err)
		}
	}
	o.Deaf = o.Deaf || notify == nil
	e := &engine{
		o: o, agent: a, notify: notify, memories: map[uint32]*attached{},
		attention: make(chan struct{}, 1), stop: make(chan struct{}), isOver: make(chan struct{}),
	}
	e.peers.init(a, o.IdlePeers)
	e.work.Go(e.listen)
	return e, nil
}

func (e *engine) over() <-chan struct{} { return e.isOver }

func (e *engine) died() bool { return false } // it would take this process with it

func (e *engine) serving() bool {
	select {
	case <-e.stop:
		return false
	default:
		return true
	}
}

func (e *engine) end() {
	e.endOnce.Do(func() {
		e.mu.Lock()
		e.closed = true
		e.mu.Unlock()
		close(e.stop)
		_ = e.agent.Close() // its only errors are those of memory that it could not deregister, and the agent is gone all the same
		e.work.Wait()       // the poller has told all READs
		close(e.isOver)
	})
	<-e.isOver
}

func (e *engine) attach(ctx context.Context, m attachment) (place, error) {
	if err := ctx.Err(); err != nil {
		return place{}, err
	}
	return e.register(m.id, m.place)
}

func (e *engine) register(id uint32, at Place) (place, error) {
	registration, err := e.agent.Register(at.Type, []binding.Range{at.memory()})
	if err != nil {
		return place{}, classify(err, transfer.ErrBadRequest)
	}
	md, err := e.agent.LocalMetadata()
	if err != nil {
		_ = registration.Close()
		return place{}, classify(err, transfer.ErrClosed)
	}
	e.mu.Lock()
	e.memories[id] = &attached{at, registration}
	e.mu.Unlock()
	return place{base: at.Addr, metadata: md}, nil
}

func (e *engine) detach(id uint32) {
	e.mu.Lock()
	m := e.memories[id]
	delete(e.memories, id)
	e.mu.Unlock()
	if m != nil {
		_ = m.registration.Close() // fails only with memory that the library does not know any more
	}
}

func (e *engine) addPeer(ctx context.Context, metadata []byte) (uint64, error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return e.peers.add(metadata)
}

func (e *engine) dropPeer(peer uint64) { e.peers.drop(peer) }

// read posts on a goroutine: over shared memory the library copies inside of that call.
func (e *engine) read(r readOp, done func(error)) {
	e.mu.Lock()
	if e.closed {
		e.mu.Unlock()
		done(errEnded)
		return
	}
	e.work.Add(1)
	e.mu.Unlock()
	go func() {
		defer e.work.Done()
		e.post(r, done)
	}()
}

var errEnded = fmt.Errorf("%w: the agent that reads was ended", transfer.ErrPeerLost)

// post starts a READ on this goroutine.
func (e *engine) post(r readOp, done func(error)) {
	remote := e.peers.use(r.peer)
	if remote == nil {
		done(fmt.Errorf("%w: nixl: the peer was given up after a failure", transfer.ErrPeerLost))
		return
	}
	request, err := e.request(r, remote)
	if err != nil {
		e.finish(&flying{remote: remote, done: done}, err)
		return
	}
	f := &flying{request: request, remote: remote, done: done}
	over, err := request.Post()
	for i := 0; i < pollAtOnce && !over && err == nil; i++ {
		over, err = request.Status()
	}
	if over || err != nil {
		e.finish(f, err)
		return
	}
	e.mu.Lock()
	e.flying = append(e.flying, f)
	start := !e.polling
	e.polling = true
	if start {
		e.work.Add(1)
	}
	e.mu.Unlock()
	if start {
		go e.poll()
	}
}

func (e *engine) request(r readOp, remote *remote) (*binding.Request, error) {
	ranges := make([]binding.Range, 2*len(r.pieces))
	local, far := ranges[:len(r.pieces)], ranges[len(r.pieces):]
	var near binding.MemoryType
	e.mu.Lock()
	for i, p := range r.pieces {
		m := e.memories[p.memory]
		if m != nil && i == 0 {
			near = m.Type
		}
		if m == nil || m.Type != near || p.length > m.Bytes || p.offset > m.Bytes-p.length {
			e.mu.Unlock()
			return nil, fmt.Errorf("%w: nixl: [%d +%d] is not in attached memory %d", transfer.ErrBadRequest, p.offset, p.length, p.memory)
		}
		local[i] = binding.Range{Addr: uintptr(m.Addr + p.offset), Len: p.length, Device: m.Device}
		far[i] = binding.Range{Addr: uintptr(p.remote), Len: p.length, Device: p.device}
	}
	e.mu.Unlock()
	var o binding.RequestOptions
	if r.notify {
		o.Notification = append([]byte{}, r.note...) // not nil
	}
	return e.agent.NewRequest(binding.Read, binding.Descs{Type: near, Ranges: local}, binding.Descs{Type: r.far, Ranges: far}, remote.peer, o)
}

// finish is the end of a READ, good or bad.
func (e *engine) finish(f *flying, err error) {
	unsettled := false
	if f.request != nil {
		unsettled = err != nil && !f.request.Settled()
		f.request.Release()
	}
	var status binding.Status
	e.peers.unuse(f.remote, errors.As(err, &status) || errors.Is(err, binding.ErrStalePeer))
	if unsettled && !errors.Is(err, binding.ErrClosed) { // closed: nothing is written any more
		err = fmt.Errorf("%w: %w", errUnsettled, err)
	}
	f.done(classify(err, transfer.ErrPeerLost))
}

// Polling of READs in flight: without a pause while they are young, since small ones end in microseconds, then with pauses of a part
// of the time since the last one began or ended, so that what a pause adds stays a small part of what the READ takes. A READ of a
// frozen peer is looked at every pollSlowest for as long as it takes. The first pollAtOnce looks need no other goroutine: over shared
// memory only the notification is still to go then.
const (
	pollAtOnce  = 20
	pollSpin    = 100 * time.Microsecond
	pollPart    = 50
	pollFirst   = 20 * time.Microsecond
	pollSlowest = 2 * time.Millisecond
)

// poll runs while READs are in flight.
func (e *engine) poll() {
	defer e.work.Done()
	var mine []*flying
	since := time.Now()
	timer := time.NewTimer(pollSlowest)
	defer timer.Stop()
	for {
		e.mu.Lock()
		if len(e.flying) > 0 {
			since = time.Now()
		}
		mine = append(mine, e.flying...)
		e.flying = e.flying[:0]
		if len(mine) == 0 {
			e.polling = false
			e.mu.Unlock()
			return
		}
		e.mu.Unlock()

		left := mine[:0]
		for _, f := range mine {
			if over, err := f.request.Status(); over || err != nil {
				e.finish(f, err)
				continue
			}
			left = append(left, f)
		}
		clear(mine[len(left):])
		if len(left) < len(mine) {
			since = time.Now()
		}
		mine = left
		if len(mine) == 0 {
			continue
		}
		age := time.Since(since)
		if age < pollSpin {
			runtime.Gosched()
			continue
		}
		timer.Reset(min(max(age/pollPart, pollFirst), pollSlowest))
		select {
		case <-e.stop: // the agent is being closed: the next round sees it
			runtime.Gosched()
		case <-timer.C:
		}
	}
}

// Listening for notifications. The library has no event for them, so they are asked for: often for a while after attend or a
// notification, ever less often after that. An engine that is deaf only takes them out of the library, where they would stay.
const (
	listenHot     = 500 * time.Microsecond
	listenHotFor  = 2 * time.Second
	listenSlowest = 100 * time.Millisecond
	listenDeaf    = time.Second
)

func (e *engine) listen() {
	hotUntil := time.Now().Add(listenHotFor)
	pause := listenHot
	if e.o.Deaf {
		pause = listenDeaf
	}
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for {
		select {
		case <-e.stop:
			return
		case <-e.attention:
			hotUntil = time.Now().Add(listenHotFor)
		case <-timer.C:
		}
		ns, err := e.agent.Notifications()
		if errors.Is(err, binding.ErrClosed) {
			return
		}
		if e.o.Deaf {
			timer.Reset(listenDeaf)
			continue
		}
		for _, n := range ns {
			e.notify(n.Message)
		}
		if now := time.Now(); len(ns) > 0 {
			hotUntil = now.Add(listenHotFor)
			pause = listenHot
		} else if now.Before(hotUntil) {
			pause = listenHot
		} else {
			pause = min(2*pause, listenSlowest)
		}
		timer.Reset(pause)
	}
}

func (e *engine) attend() {
	select {
	case e.attention <- struct{}{}:
	default:
	}
}

// classify makes err one of the contract's, other where nothing fits better.
func classify(err, other error) error {
	if err == nil {
		return nil
	}
	for _, known := range []error{
		transfer.ErrUnreachable, transfer.ErrDenied, transfer.ErrBadRequest, transfer.ErrPeerLost, transfer.ErrCanceled, transfer.ErrClosed,
		context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, known) {
			return err
		}
	}
	switch {
	case errors.Is(err, binding.ErrBadArgument):
		other = transfer.ErrBadRequest
	case errors.Is(err, binding.ErrClosed):
		other = errEnded
	}
	return fmt.Errorf("%w: %w", other, err)
}
