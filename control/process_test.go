package control

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/pebbe/zmq4"
)

// The peers that tests stop and kill are this test binary, run again with peerEnv set.
const peerEnv = "CONTROL_TEST_PEER"

func TestMain(m *testing.M) {
	if role, arg, ok := strings.Cut(os.Getenv(peerEnv), " "); ok {
		if err := playPeer(role, arg); err != nil {
			fmt.Println("error", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// playPeer plays a peer, of plain libzmq without heartbeats of its own or of the local path. It says "ready PORT", or another name of
// where it is, on stdout and ends when stdin does.
func playPeer(role, arg string) error {
	ctx, err := zmq4.NewContext()
	if err != nil {
		return err
	}
	go func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		os.Exit(0)
	}()
	switch role {
	case "echo": // a ROUTER on port arg that gives back what it gets
		s, err := ctx.NewSocket(zmq4.ROUTER)
		if err != nil {
			return err
		}
		if err := s.Bind("tcp://127.0.0.1:" + arg); err != nil {
			return err
		}
		at, err := s.GetLastEndpoint()
		if err != nil {
			return err
		}
		fmt.Println("ready", at[strings.LastIndexByte(at, ':')+1:])
		for {
			m, err := s.RecvMessageBytes(0)
			if err != nil {
				return err
			}
			s.SendMessage(m)
		}
	case "hello": // a DEALER connected to arg that says hello
		s, err := ctx.NewSocket(zmq4.DEALER)
		if err != nil {
			return err
		}
		if err := s.Connect("tcp://" + arg); err != nil {
			return err
		}
		if _, err := s.SendMessage("", "hello"); err != nil {
			return err
		}
		fmt.Println("ready", arg)
		select {}
	case "few-files": // a router of ours that may open arg descriptors
		return serveWithFewFiles(arg)
	}
	return playLocalPeer(role, arg)
}

// process is a peer in a process of its own.
type process struct {
	*exec.Cmd
	port string
}

func startPeer(t testing.TB, role, arg string) *process {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{Cmd: exec.Command(exe)}
	p.Env = append(os.Environ(), peerEnv+"="+role+" "+arg)
	p.Stderr = os.Stderr
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if _, err := p.StdinPipe(); err != nil { // held open until Wait
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if _, err2 := fmt.Sscanf(line, "ready %s", &p.port); err2 != nil {
		t.Fatalf("the peer said %q, %v", line, err)
	}
	return p
}

func (p *process) kill() {
	p.Process.Kill() // SIGKILL; works on a stopped process too
	p.Wait()
}

func (p *process) signal(t *testing.T, sig syscall.Signal) {
	t.Helper()
	if err := p.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// Short heartbeats, with a timeout that a busy machine does not reach by itself.
func lively() Options {
	return Options{HeartbeatInterval: 1e8, HeartbeatTimeout: 1e9, HeartbeatTTL: 3e9}
}

func TestStoppedProducerIsNoticedByHeartbeatAndComesBack(t *testing.T) {
	p := startPeer(t, "echo", "*")
	l, h := newTestLoop(t, lively()), newRecorder()
	d, err := l.Dial(t.Context(), "127.0.0.1:"+p.port, h)
	if err != nil {
		t.Fatal(err)
	}
	h.next(t, "up")
	p.signal(t, syscall.SIGSTOP)
	wantGone(t, h.next(t, "down").err)
	wantGone(t, d.Send([]byte("nobody there")))
	p.signal(t, syscall.SIGCONT)
	h.next(t, "up")
	if err := d.Send([]byte("again")); err != nil {
		t.Fatal(err)
	}
	if m := h.next(t, "message"); m.body != "again" {
		t.Fatalf("got %q: what was refused, or sent before the loss, must not arrive", m.body)
	}
}

func TestKilledProducerIsNoticedAndItsSuccessorOnThePortIsFound(t *testing.T) {
	p := startPeer(t, "echo", "*")
	l, h := newTestLoop(t, lively()), newRecorder()
	d, err := l.Dial(t.Context(), "127.0.0.1:"+p.port, h)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		h.next(t, "up")
		if err := d.Send([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		h.next(t, "message")
		p.kill()
		wantGone(t, h.next(t, "down").err)
		p = startPeer(t, "echo", p.port)
	}
	h.next(t, "up")
}

func TestConsumerThatIsStoppedOrKilledLeaves(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL} {
		t.Run(sig.String(), func(t *testing.T) {
			l, h := newTestLoop(t, lively()), newRecorder()
			r, err := l.Listen(t.Context(), "127.0.0.1", 0, h.asRouter())
			if err != nil {
				t.Fatal(err)
			}
			p := startPeer(t, "hello", hostPort(r))
			m := h.next(t, "message")
			if err := r.Send(m.from.ID, []byte("hi")); err != nil {
				t.Fatal(err)
			}
			p.signal(t, sig)
			if left := h.next(t, "left"); left.from != m.from {
				t.Fatalf("%v left, want %v", left.from, m.from)
			}
			_, _, before := r.Dropped() // the answer may have met a dead peer
			wantGone(t, r.Send(m.from.ID, []byte("hi")))
			if _, _, after := r.Dropped(); after != before+1 {
				t.Fatalf("%d counted as unroutable, want %d", after, before+1)
			}
		})
	}
}
