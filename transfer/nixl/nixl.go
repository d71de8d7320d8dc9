package nixl

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	binding "github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/transfer"
)

// ErrMissing is wrapped by New's error if there is no NIXL on this machine. The text says how to get it.
var ErrMissing = binding.ErrNotFound

// Backend is one of NIXL's plugins and its parameters.
type Backend struct {
	Name   string            `json:"name"`
	Params map[string]string `json:"params,omitempty"`
}

// Options configure a Plane. Zero values mean the defaults.
type Options struct {
	// Command starts an agent process: the program and its arguments, to which "--role serve" or "--role fetch" is added. The
	// program calls RunAgent with file descriptor 3. Empty: agents run in this process.
	Command []string
	// Library is the path of libnixl_capi.so; "": where the binding finds it (nixl.Find).
	Library string
	// Loaded is an opened library, for agents in this process only; nil: Library is opened.
	Loaded *binding.Library

	Backends []Backend // default: UCX with its defaults
	Name     string    // begins the names of the agents; each gets its role and random digits too; default "ferry"

	// ProgressDelay is how long the library's progress thread sleeps at most between rounds; events wake it. Default 100 ms: an
	// idle agent then takes 0.1% of a core, with NIXL's own default of 0 it takes 20% (1.3.2), and READs are as fast.
	ProgressDelay time.Duration
	StartTimeout  time.Duration // of an agent: library, backends; default 30 s. Mapping and registering memory has a second a GiB more
	Drain         time.Duration // Peer.Close waits so long for its READs before it ends the fetch agent; default 2 s
	IdlePeers     int           // agents that nobody uses and that are still known, for a quick return; default 64

	// Loopback keeps UCX, which listens on every network interface and asks nobody who he is, to the loopback interface, unless the
	// operator has set UCX_NET_DEVICES. Other machines cannot READ then. Other backends know nothing of it.
	Loopback bool

	// Exclusive says that the files registered here are no other plane's destinations: Register waits until the fetch agents of one
	// that was killed are gone, so that what they still wrote cannot land in memory that is used again. Agents in processes of
	// their own only.
	Exclusive bool

	// Outlive says that registered memory is the pool of a region that waits for a restart of its owner (region.Options.Keep), and
	// that the caller owns the region. A serve agent then outlives this process if that is killed: it serves its peers until the next
	// owner's Register takes it over, or until the region waits no more or has lost its name. What the killed process had granted
	// must not change meanwhile, see Registration.Formers. Agents in processes of their own only; other memory's end with the plane.
	Outlive bool

	Log *slog.Logger // default slog.Default()

	environ []string          // of agent processes, beside this one's
	says    func(line string) // gets what agent processes print, in place of Log
}

func (o Options) withDefaults() Options {
	def := func(v *time.Duration, d time.Duration) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&o.ProgressDelay, 100*time.Millisecond)
	def(&o.StartTimeout, 30*time.Second)
	def(&o.Drain, 2*time.Second)
	if len(o.Backends) == 0 {
		o.Backends = []Backend{{Name: "UCX"}}
	}
	if o.Name == "" {
		o.Name = "ferry"
	}
	if o.IdlePeers <= 0 {
		o.IdlePeers = 64
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return o
}

// Plane is the NIXL plane of one process.
type Plane struct {
	o       Options
	library *binding.Library // agents in this process only
	fetch   *fetcher
	leaves  atomic.Bool // see LeaveFormers
	deaths  deathTable

	mu       sync.Mutex
	closed   bool
	nextID   uint32
	memories []*memory // registered, and the bounce buffer
	regs     map[*Registration]struct{}
	peers    map[*peer]struct{}
	facts    facts  // of the last agent that started
	own      []byte // metadata of the last agent that serves
}

// New makes a plane. Without Options.Command it opens the library; with it, it only looks whether there is one. Agents start when
// they are needed first. The caller closes the plane.
func New(o Options) (*Plane, error) {
	o = o.withDefaults()
	if err := o.bind(); err != nil {
		return nil, err
	}
	p := &Plane{o: o, library: o.Loaded, regs: map[*Registration]struct{}{}, peers: map[*peer]struct{}{}}
	switch {
	case len(o.Command) > 0:
		if err := o.findLibrary(); err != nil {
			return nil, err
		}
	case p.library == nil:
		var err error
		if err = o.findLibrary(); err == nil {
			p.library, err = binding.Load(o.libraryOptions()...)
		}
		if err != nil {
			return nil, err
		}
	}
	p.fetch = newFetcher(p)
	return p, nil
}

// findLibrary says whether there is the file that would be opened.
func (o *Options) findLibrary() error {
	if len(binding.Find(o.libraryOptions()...)) > 0 {
		return nil
	}
	for _, named := range []string{o.Library, os.Getenv(binding.LibraryEnv)} {
		if named != "" {
			return fmt.Errorf("%w: there is no %s: %s", ErrMissing, named, howToInstall)
		}
	}
	return fmt.Errorf("%w: %s", ErrMissing, howToInstall)
}

const howToInstall = "install it with `pip install nixl` into the active venv, or name the file libnixl_capi.so by " + binding.LibraryEnv + " or the library's path"

// registerTimeout is of mapping and registering memory: ten times what was seen with memory that nobody had touched, 0.1 s a GiB.
func (p *Plane) registerTimeout(bytes uint64) time.Duration {
	return p.o.StartTimeout + time.Duration(min(bytes>>20, 1<<30))*(time.Second/1024)
}

// netDevices is UCX's variable for the network devices that it uses.
const netDevices = "UCX_NET_DEVICES"

// bind does what Loopback says, by UCX's environment: no parameter of the backend takes the loopback interface (1.3.2).
func (o *Options) bind() error {
	theirs := os.Getenv(netDevices)
	switch {
	case !o.Loopback || theirs == "lo":
		return nil
	case theirs != "":
		o.Log.Warn("nixl: the environment names the devices that UCX listens on, so they need not be loopback's; whoever can connect can read this node's encodings", netDevices, theirs)
		return nil
	case len(o.Command) == 0:
		return os.Setenv(netDevices, "lo")
	}
	o.environ = append(o.environ, netDevices+"=lo")
	return nil
}

func (o *Options) libraryOptions() []binding.Option {
	if o.Library == "" {
		return nil
	}
	return []binding.Option{binding.WithPath(o.Library)}
}

// Name implements transfer.Plane.
func (p *Plane) Name() string { return transfer.NIXL }

// Capabilities implements transfer.Plane.
func (p *Plane) Capabilities() transfer.Capabilities { return transfer.Capabilities{Notify: true} }

// role of an agent.
type role string

const (
	roleServe role = "serve"
	roleFetch role = "fetch"
)

// start makes a new incarnation of an agent, one that may outlive this process if outlive. notify as with newEngine; nil: it is deaf.
func (p *Plane) start(ctx context.Context, r role, outlive bool, notify func([]byte)) (agent, error) {
	o := engineOptions{
		Name: agentName(p.o.Name, r), Backends: p.o.Backends, ProgressDelay: p.o.ProgressDelay, IdlePeers: p.o.IdlePeers, Deaf: notify == nil,
	}
	ctx, cancel := context.WithTimeout(ctx, p.o.StartTimeout)
	defer cancel()
	if len(p.o.Command) > 0 {
		c, err := startChild(ctx, childOptions{
			command: p.o.Command, role: r, hello: hello{Library: p.o.Library, Engine: o}, log: p.o.Log,
			environ: p.o.environ, says: p.o.says, outlive: outlive, died: func(d Death) { p.deaths.add(r, d) },
		}, notify)
		if err != nil {
			return nil, err
		}
		p.learn(c.facts)
		return c, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	e, err := newEngine(p.library, o, notify)
	if err != nil {
		return nil, err
	}
	p.learn(factsOf(p.library, e.agent))
	return e, nil
}

func (p *Plane) learn(f facts) {
	p.mu.Lock()
	p.facts = f
	p.mu.Unlock()
}

// agentName is never given twice: vLLM keys what it knows of its peers by agent name, and NIXL confuses two of one name.
func agentName(prefix string, r role) string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return fmt.Sprintf("%.200s-%s-%s", prefix, r, hex.EncodeToString(b[:]))
}

// Register implements transfer.Plane. It starts the agent that serves m, and makes m a destination that READs write in place. With
// agents in processes of their own, m needs a file; one that this user cannot open for writing is served all the same. notify is
// called with what readers send.
func (p *Plane) Register(ctx context.Context, m transfer.Memory, notify func(transfer.Notification)) (transfer.Registration, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := m.Check(); err != nil {
		return nil, err
	}
	if m.File == nil && len(p.o.Command) > 0 {
		return nil, fmt.Errorf("%w: nixl: agents in processes of their own can serve memory that is a file's only", transfer.ErrBadRequest)
	}
	mem, err := p.addMemory(m)
	if err != nil {
		return nil, err
	}
	var r *Registration
	if p.o.Exclusive && mem.file != nil {
		err = waitForWriters(ctx, mem.file)
	}
	var formers []*former
	if err == nil && p.o.Outlive && mem.file != nil {
		formers, err = takeOver(ctx, mem.file, p.o.Log, func() { p.deaths.add(roleServe, DeathUnknown) })
	}
	if err == nil {
		if r, err = newRegistration(ctx, p, mem, notify, formers); err != nil {
			for _, f := range formers {
				f.leave()
			}
		}
	}
	if err == nil {
		p.mu.Lock()
		if p.closed {
			err = fmt.Errorf("nixl: register: %w", transfer.ErrClosed)
		} else {
			p.regs[r] = struct{}{}
		}
		p.mu.Unlock()
		if err == nil {
			return r, nil
		}
		r.stop()
	}
	p.removeMemory(mem)
	return nil, err
}

// lastFacts are those of the last agent that started; zero before the first did.
func (p *Plane) lastFacts() facts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.facts
}

// Close implements transfer.Plane. READs that are in flight get Options.Drain to end, then their agent is ended.
func (p *Plane) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	peers, regs := maps.Clone(p.peers), maps.Clone(p.regs)
	p.mu.Unlock()
	var errs []error
	var closing sync.WaitGroup
	for c := range peers {
		closing.Go(func() { _ = c.Close() }) // gives nil
	}
	closing.Wait()
	p.fetch.close()
	for r := range regs {
		errs = append(errs, r.Close())
	}
	p.mu.Lock()
	left := slices.Clone(p.memories)
	p.mu.Unlock()
	for _, m := range left { // the bounce buffer
		p.removeMemory(m)
	}
	return errors.Join(errs...)
}
