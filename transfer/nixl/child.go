package nixl

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/fields"
)

// hello is what an agent process is told first.
type hello struct {
	Library string        `json:"library"`
	Engine  engineOptions `json:"engine"`
}

type childOptions struct {
	command []string
	role    role
	hello   hello
	log     *slog.Logger
	environ []string
	says    func(line string) // nil: log
	outlive bool              // it may outlive this process
	died    func(Death)       // called if nobody ended it, before it is over
}

// child is an agent in a process of its own, which ends with this one, whatever ends that, unless it outlives it (see outlive.go).
type child struct {
	facts  facts
	o      childOptions
	wire   *wire
	notify func([]byte)
	pid    int
	proc   *os.Process
	statm  *os.File // the kernel's account of its memory; nil: there is no /proc

	reaped chan struct{} // closed when the process is gone
	death  Death         // if nobody ended it; set before reaped is closed
	isOver chan struct{} // closed when all that waited have been told

	said  chan struct{} // closed when all that the process printed has been read
	dies  Death         // as it said; set before said is closed
	dying bool          // that is set

	mu      sync.Mutex
	ended   bool // by us
	left    bool // to go on without this process
	givenUp bool
	dead    bool
	next    uint64
	pending map[uint64]func(*fields.Reader, error) // called once, without the lock
}

// startChild starts the process and waits until its agent is ready. notify as with newEngine.
func startChild(ctx context.Context, o childOptions, notify func([]byte)) (*child, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("nixl: socket pair for an agent process: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "agent"), os.NewFile(uintptr(fds[1]), "plane")
	w, err := newWire(ours)
	_ = ours.Close() // the connection has its own
	if err != nil {
		_ = theirs.Close()
		return nil, err
	}
	w.stall = writeStall
	c := &child{
		o: o, wire: w, notify: notify, reaped: make(chan struct{}), isOver: make(chan struct{}), said: make(chan struct{}),
		pending: map[uint64]func(*fields.Reader, error){},
	}
	err = c.run(theirs)
	_ = theirs.Close() // the process has it now, and its end is the end of the wire
	if err != nil {
		_ = w.conn.Close()
		return nil, err
	}
	go c.listen()
	r, err := c.call(ctx, frameHello, nil, func(b []byte) []byte {
		text, _ := json.Marshal(o.hello) // a struct of strings and numbers
		return append(b, text...)
	}, nil)
	if err == nil {
		err = json.Unmarshal(r.Bytes(r.Len()), &c.facts)
	}
	if err != nil {
		c.end()
		return nil, fmt.Errorf("nixl: agent process (%s): %w", o.role, err)
	}
	return c, nil
}

// run starts the process. The goroutine that does keeps its thread until the process is gone: the kernel sends the parent-death
// signal when the thread ends that started the child, not the process.
func (c *child) run(socket *os.File) error {
	stderr, pipe, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("nixl: pipe for an agent process: %w", err)
	}
	args := append(slices.Clone(c.o.command[1:]), "--role", string(c.o.role))
	cmd := exec.Command(c.o.command[0], args...)
	cmd.Env = append(os.Environ(), c.o.environ...)
	cmd.ExtraFiles = []*os.File{socket}
	cmd.Stdout, cmd.Stderr = pipe, pipe
	// A session of its own: a terminal's Ctrl-C is for the node, which ends its agents when nothing needs them any more.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if !c.o.outlive {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		_ = pipe.Close()
		if err != nil {
			_ = stderr.Close()
			started <- fmt.Errorf("nixl: start agent process %s: %w", c.o.command[0], err)
			return
		}
		c.pid, c.proc = cmd.Process.Pid, cmd.Process
		c.statm, _ = os.Open(fmt.Sprintf("/proc/%d/statm", c.pid))
		started <- nil
		err = cmd.Wait()
		c.wasReaped(cmd.ProcessState, err)
		close(c.reaped)
	}()
	if err := <-started; err != nil {
		return err
	}
	go c.logLines(stderr)
	return nil
}

// lastWordsWait is for what a dead process printed to be read. Another process that it started may still have its output.
const lastWordsWait = time.Second

// wasReaped says of a process that nobody ended how it died.
func (c *child) wasReaped(s *os.ProcessState, err error) {
	c.mu.Lock()
	ended, givenUp := c.ended, c.givenUp
	c.mu.Unlock()
	if ended {
		return
	}
	d := deathOf(s, givenUp)
	timer := time.NewTimer(lastWordsWait)
	defer timer.Stop()
	select {
	case <-c.said:
		if c.dying && d == DeathExit {
			d = c.dies
		}
	case <-timer.C:
	}
	c.death = d
	c.o.log.Error("nixl: an agent process died", "role", c.o.role, "pid", c.pid, "err", err, "reason", d)
	if c.o.died != nil {
		c.o.died(d)
	}
}

// logLines passes on what the library says, which is the only place where it says why something failed.
func (c *child) logLines(from *os.File) {
	defer close(c.said)
	defer from.Close()
	lines := bufio.NewReaderSize(from, 4096)
	for {
		line, _, err := lines.ReadLine()
		if err != nil {
			return
		}
		if d, ok := lastWords(string(line)); ok && !c.dying {
			c.dies, c.dying = d, true
		}
		if c.o.says != nil {
			c.o.says(string(line))
			continue
		}
		c.o.log.Warn("nixl: agent process", "role", c.o.role, "pid", c.pid, "says", string(line))
	}
}

// listen hands out what the process sends, until it is gone.
func (c *child) listen() {
	for {
		f, err := c.wire.next()
		if err != nil {
			if stalled := c.wire.failure(); errors.Is(stalled, os.ErrDeadlineExceeded) {
				err = fmt.Errorf("it read nothing for %v: %w", writeStall, stalled)
			}
			c.wireEnded(err)
			break
		}
		switch f.kind {
		case frameReply:
			c.mu.Lock()
			done := c.pending[f.id]
			delete(c.pending, f.id)
			c.mu.Unlock()
			if done != nil {
				done(parseReply(f.body))
			}
		case frameNotification:
			if c.notify != nil {
				c.notify(slices.Clone(f.body))
			}
		}
	}
	c.mu.Lock()
	left := c.left
	c.mu.Unlock()
	if left {
		c.failPending()
		<-c.reaped
		close(c.isOver)
		return
	}
	c.kill()
	<-c.reaped
	_ = c.wire.conn.Close()
	c.failPending()
	close(c.isOver)
}

// failPending is for what the process was asked and will not answer.
func (c *child) failPending() {
	_ = c.statm.Close() // of nil too
	c.mu.Lock()
	c.dead = true
	pending, why := c.pending, errDied
	if c.ended {
		why = errEnded
	}
	c.pending = nil
	c.mu.Unlock()
	for _, done := range pending {
		done(nil, why)
	}
}

// leave lets the process go on alone, if it can outlive this one: for it this is as if this process were killed.
func (c *child) leave() {
	c.mu.Lock()
	c.ended, c.left = true, true
	c.mu.Unlock()
	_ = c.wire.conn.Close()
}

// exitWait is for a process that has closed its socket to be gone by itself, which says more of its end than a kill.
const exitWait = time.Second

// wireEnded gives the process up, unless it is at its end, or left.
func (c *child) wireEnded(err error) {
	c.mu.Lock()
	left := c.left
	c.mu.Unlock()
	if left {
		return
	}
	if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) || errors.Is(err, unix.ECONNRESET) {
		timer := time.NewTimer(exitWait)
		defer timer.Stop()
		select {
		case <-c.reaped:
			return
		case <-timer.C:
			err = errors.New("it has closed its socket")
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.givenUp = true
	c.o.log.Error("nixl: an agent process is given up", "role", c.o.role, "pid", c.pid, "err", err)
}

// errDied is about what the process was asked, and did not end, when it died of its own.
var errDied = fmt.Errorf("%w: nixl: the agent process died", transfer.ErrPeerLost)

// kill knows when the process has been waited for, after which its pid may be another's.
func (c *child) kill() { _ = c.proc.Kill() }

func (c *child) over() <-chan struct{} { return c.isOver }

func (c *child) died() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead && !c.ended
}

// serving asks the kernel. A process that is killed loses its memory first, and only when all of it is taken apart, which takes 20 to 40
// ms a GiB, its sockets and its pid. One look takes 1 us.
func (c *child) serving() bool {
	if c.statm == nil {
		return true
	}
	var b [1]byte
	n, _ := c.statm.ReadAt(b[:], 0) // fails for a process that has been waited for
	return n == 1 && b[0] != '0'    // the size of its memory, in pages
}

// end kills the process: nothing else is sure to end what a network card still writes. Its sockets and memory go with it.
func (c *child) end() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.kill()
	<-c.isOver
}

// ask sends a request; done is called once with the reply, or when the process is over. After an error nothing was sent, and done is not
// called. It never calls done itself, and never blocks.
func (c *child) ask(kind frameKind, f *os.File, body func([]byte) []byte, done func(*fields.Reader, error)) error {
	c.mu.Lock()
	if c.dead {
		c.mu.Unlock()
		return errEnded
	}
	c.next++
	id := c.next
	c.pending[id] = done
	c.mu.Unlock()
	err := c.wire.send(kind, id, f, body)
	switch {
	case errors.Is(err, transfer.ErrBadRequest):
	case errors.Is(err, errBacklog):
		err = fmt.Errorf("%w: %w", transfer.ErrPeerLost, err)
	default:
		return nil // after any other error the wire is over, and the process may have got it: then done is called when that is over
	}
	c.mu.Lock()
	_, mine := c.pending[id]
	delete(c.pending, id)
	c.mu.Unlock()
	if !mine {
		return nil // done was called
	}
	return err
}

// call waits for the reply. If ctx ends first, late is called with a reply that comes after all, to undo what it says.
func (c *child) call(ctx context.Context, kind frameKind, f *os.File, body func([]byte) []byte, late func(*fields.Reader)) (*fields.Reader, error) {
	type answer struct {
		r   *fields.Reader
		err error
	}
	answers := make(chan answer, 1)
	var mu sync.Mutex
	gone := false
	err := c.ask(kind, f, body, func(r *fields.Reader, err error) {
		if r != nil {
			r = fields.NewReader(slices.Clone(r.Bytes(r.Len()))) // the buffer is the wire's
		}
		mu.Lock()
		defer mu.Unlock()
		if gone {
			if err == nil && late != nil {
				go late(r)
			}
			return
		}
		answers <- answer{r, err}
	})
	if err != nil {
		return nil, err
	}
	select {
	case a := <-answers:
		return a.r, a.err
	case <-ctx.Done():
	}
	mu.Lock()
	defer mu.Unlock()
	gone = true
	select {
	case a := <-answers:
		return a.r, a.err
	default:
		return nil, fmt.Errorf("nixl: agent process: %w", ctx.Err())
	}
}

// tell sends what is not answered.
func (c *child) tell(kind frameKind, body func([]byte) []byte) {
	c.mu.Lock()
	dead := c.dead
	c.mu.Unlock()
	if !dead {
		_ = c.wire.send(kind, 0, nil, body) // as in ask
	}
}

func (c *child) attach(ctx context.Context, m attachment) (place, error) {
	flags := unix.O_RDONLY
	if m.writable {
		flags = unix.O_RDWR
	}
	// A description of its own: locks belong to descriptions.
	f, err := reopen(m.file, flags)
	if err != nil {
		return place{}, fmt.Errorf("%w: nixl: file of the memory: %w", transfer.ErrBadRequest, err)
	}
	defer f.Close()
	r, err := c.call(ctx, frameAttach, f, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint32(b, m.id)
		b = binary.LittleEndian.AppendUint64(b, uint64(m.offset))
		b = binary.LittleEndian.AppendUint64(b, uint64(len(m.bytes)))
		how := attachRead
		switch {
		case m.writable:
			how = attachWrite
		case m.outlive:
			how = attachOutlive
		}
		return binary.LittleEndian.AppendUint64(append(b, how), m.epoch)
	}, func(*fields.Reader) { c.detach(m.id) })
	if err != nil {
		return place{}, err
	}
	p := place{base: r.Uint64()}
	p.metadata = r.Bytes(r.Len())
	return p, nil
}

// How memory is attached.
const (
	attachRead    byte = iota
	attachWrite        // mapped writable
	attachOutlive      // read, also when the plane is no more
)

func (c *child) detach(id uint32) {
	c.tell(frameDetach, func(b []byte) []byte { return binary.LittleEndian.AppendUint32(b, id) })
}

func (c *child) addPeer(ctx context.Context, metadata []byte) (uint64, error) {
	r, err := c.call(ctx, frameAddPeer, nil, func(b []byte) []byte { return append(b, metadata...) },
		func(r *fields.Reader) { c.dropPeer(r.Uint64()) })
	if err != nil {
		return 0, err
	}
	return r.Uint64(), nil
}

func (c *child) dropPeer(peer uint64) {
	c.tell(frameDropPeer, func(b []byte) []byte { return binary.LittleEndian.AppendUint64(b, peer) })
}

func (c *child) read(r readOp, done func(error)) {
	if err := c.ask(frameRead, nil, func(b []byte) []byte { return appendRead(b, r) }, func(_ *fields.Reader, err error) { done(err) }); err != nil {
		done(err)
	}
}

func (c *child) attend() { go c.tell(frameAttend, nil) }
