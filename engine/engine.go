package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/tensorferry/tensorferry/node/client"
)

// Role of an engine, by vLLM's names.
type Role string

const (
	Producer Role = "ec_producer" // encodes and announces, answers no text
	Consumer Role = "ec_consumer" // takes encodings from the pool or a peer, encodes only what it must; announces nothing
	Both     Role = "ec_both"
)

// Dtype is the only one that the dummy weights compute.
const Dtype = "torch.bfloat16"

// Config of an engine. Zero values mean the defaults.
type Config struct {
	Name string // shows in answers
	Role Role
	// Dial connects to the node. It is called again, with a back-off, when the connection is lost.
	Dial func(ctx context.Context) (Pool, error)
	// Model is the model's name; the weights depend on it. It must be the pool's, which is also the default: the pool's entries
	// are shared with every engine of that model.
	Model          string
	Step           time.Duration // least time of a step; 0: as fast as the work is done
	MaxBatch       int           // requests admitted in one step, default 32
	MaxInFlight    int           // requests in the engine; more wait before their body is read. Default 32
	MaxItems       int           // media items of a request, default 16
	MaxBodyBytes   int64         // of a request, default 64 MiB
	MaxImagePixels int           // of one image before it is sized, default 36 Mi (decoding takes 4 to 8 bytes a pixel)
	AllowFiles     string        // directory from which file: URLs are served; "": none
	CallTimeout    time.Duration // one call of the node, default 10 s
	FetchTimeout   time.Duration // one pull, or one wait for another engine's encode, default 60 s
	Log            *slog.Logger
}

func (c Config) withDefaults() Config {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.MaxBatch, 32)
	def(&c.MaxInFlight, 32)
	def(&c.MaxItems, 16)
	def(&c.MaxImagePixels, 36<<20)
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = 64 << 20
	}
	if c.CallTimeout == 0 {
		c.CallTimeout = 10 * time.Second
	}
	if c.FetchTimeout == 0 {
		c.FetchTimeout = 60 * time.Second
	}
	if c.Name == "" {
		c.Name = "ferry-engine"
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c
}

// Engine is a running reference engine. Handler gives its HTTP side.
type Engine struct {
	cfg      Config
	encoder  *encoder
	media    *media
	admitted *semaphore.Weighted
	decoding *semaphore.Weighted
	inbox    inbox
	encodes  atomic.Uint64
	away     atomic.Bool // the node's connection is lost

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup

	// Owned by the step loop.
	pool    Pool
	info    client.Pool
	live    []*request
	flights map[string]*flight
}

// New connects to the node and starts the step loop. ctx bounds the connecting only.
func New(ctx context.Context, c Config) (*Engine, error) {
	e, err := prepare(ctx, c)
	if err != nil {
		return nil, err
	}
	pool := e.pool
	e.tasks.Go(e.run)
	e.tasks.Go(func() { e.watch(pool) })
	return e, nil
}

// prepare makes an engine whose loop does not run yet.
func prepare(ctx context.Context, c Config) (*Engine, error) {
	c = c.withDefaults()
	switch c.Role {
	case Producer, Consumer, Both:
	default:
		return nil, fmt.Errorf("engine: role %q; want %s, %s or %s", c.Role, Producer, Consumer, Both)
	}
	if c.Step < 0 {
		return nil, fmt.Errorf("engine: step time %v is negative", c.Step)
	}
	m, err := newMedia(c.AllowFiles, c.MaxBodyBytes)
	if err != nil {
		return nil, err
	}
	pool, err := c.Dial(ctx)
	if err != nil {
		m.Close()
		return nil, err
	}
	info := pool.Pool()
	if c.Model == "" {
		c.Model = info.Model
	}
	if err := fits(&c, info); err != nil {
		pool.Close()
		m.Close()
		return nil, err
	}
	e := &Engine{
		cfg: c, encoder: newEncoder(c.Model, int(info.BlockBytes/2)), media: m,
		admitted: semaphore.NewWeighted(int64(c.MaxInFlight)),
		decoding: semaphore.NewWeighted(int64(runtime.GOMAXPROCS(0))),
		inbox:    inbox{wake: make(chan struct{}, 1)},
		pool:     pool, info: info, flights: make(map[string]*flight),
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	return e, nil
}

// fits refuses a pool whose entries this engine could not make or use.
func fits(c *Config, info client.Pool) error {
	if info.Dtype != Dtype {
		return fmt.Errorf("engine: the pool is for %s; the dummy weights give %s only: start the node with --dtype %s", info.Dtype, Dtype, Dtype)
	}
	if info.BlockBytes < 2 || info.BlockBytes%2 != 0 || info.BlockBytes > 1<<17 {
		return fmt.Errorf("engine: the pool's block of %d bytes is no row of %s; want an even number up to %d (width x 2)", info.BlockBytes, Dtype, 1<<17)
	}
	if c.Model != info.Model {
		return fmt.Errorf("engine: model %q on a pool for %q: engines of one pool share its entries, so the two must be equal", c.Model, info.Model)
	}
	return nil
}

// Info describes the pool as it was when the engine started.
func (e *Engine) Info() (model string, width int) { return e.cfg.Model, e.encoder.width }

// Close ends the loop; requests that are in it fail. The connection to the node ends last.
func (e *Engine) Close() error {
	e.cancel()
	e.tasks.Wait()
	return e.media.Close()
}

// watch waits for the loss of a connection and makes a new one.
func (e *Engine) watch(pool Pool) {
	for {
		select {
		case <-pool.Done():
		case <-e.ctx.Done():
			return
		}
		e.away.Store(true)
		e.cfg.Log.Warn("the node's connection is lost; requests fail until it is back")
		if pool = e.redial(); pool == nil {
			return
		}
		e.cfg.Log.Info("connected to the node again")
		e.inbox.put(func(b *mail) { b.pool = pool })
		e.away.Store(false)
	}
}

// redial tries until it succeeds, or gives nil when the engine ends.
func (e *Engine) redial() Pool {
	var last string
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		ctx, cancel := context.WithTimeout(e.ctx, e.cfg.CallTimeout)
		pool, err := e.cfg.Dial(ctx)
		cancel()
		if err == nil {
			info := pool.Pool()
			if err = fits(&e.cfg, info); err == nil && int(info.BlockBytes/2) != e.encoder.width {
				err = fmt.Errorf("engine: the pool's rows are now %d wide, were %d: restart the engine", info.BlockBytes/2, e.encoder.width)
			}
			if err == nil {
				return pool
			}
			pool.Close()
		}
		if text := err.Error(); text != last && !errors.Is(err, context.Canceled) {
			e.cfg.Log.Warn("no connection to the node yet", "err", err)
			last = text
		}
		select {
		case <-time.After(wait):
		case <-e.ctx.Done():
			return nil
		}
	}
}

// inbox is what reaches the step loop. Senders never wait for a step.
type inbox struct {
	mu   sync.Mutex
	next mail
	wake chan struct{} // buffered, 1
}

// mail is what came since the last step.
type mail struct {
	arrived []*request
	landed  []landing
	pool    Pool // a new connection
}

func (b *inbox) put(add func(*mail)) {
	b.mu.Lock()
	add(&b.next)
	b.mu.Unlock()
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// take gives the mail, with at most batch requests; the rest stay for the next step.
func (b *inbox) take(batch int) mail {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.next
	b.next = mail{}
	if len(m.arrived) > batch {
		b.next.arrived = m.arrived[batch:]
		m.arrived = m.arrived[:batch:batch]
		select {
		case b.wake <- struct{}{}:
		default:
		}
	}
	return m
}
