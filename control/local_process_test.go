package control

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"
)

// playLocalPeer plays peers of the local path.
func playLocalPeer(role, arg string) error {
	role, nobody := strings.CutSuffix(role, "-of-nobody")
	if nobody {
		if err := syscall.Setuid(65534); err != nil {
			return err
		}
	}
	o := lively()
	if role == "describer" {
		o = Options{TotalBytes: 4 << 30, HeartbeatInterval: time.Hour} // its peers answer no PING
	}
	l, err := NewLoop(o)
	if err != nil {
		return err
	}
	ctx := context.Background()
	switch role {
	case "describer":
		return serveDescriber(l, arg)
	case "local-echo": // a router that gives back what it gets
		r, err := l.Listen(ctx, "127.0.0.1", 0, &echo{})
		if err != nil {
			return err
		}
		name, err := r.ListenLocal(ctx)
		if err != nil {
			return err
		}
		fmt.Println("ready", name)
		<-l.Done()
		return l.Err()
	case "zmq-echo": // the same, without its local socket
		r, err := l.Listen(ctx, "127.0.0.1", 0, &echo{})
		if err != nil {
			return err
		}
		fmt.Println("ready", r.Port())
		<-l.Done()
		return l.Err()
	case "local-hello": // says hello to a router's local socket
		d, err := l.DialLocal(ctx, arg, newRecorder())
		if err != nil {
			return err
		}
		if err := d.Send([]byte("hello")); err != nil && !nobody { // who may be turned away by now
			return err
		}
		fmt.Println("ready", arg)
		<-l.Done()
		return l.Err()
	}
	return fmt.Errorf("no such role: %s", role)
}

func TestLocalRouterThatIsKilledOrStoppedIsDownForGood(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(sig.String(), func(t *testing.T) {
			p := startPeer(t, "local-echo", "")
			d, h := dialLocal(t, lively(), p.port)
			h.next(t, "up")
			if err := d.Send([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			h.next(t, "message")
			p.signal(t, sig)
			wantGone(t, h.next(t, "down").err)
			wantGone(t, d.Send([]byte("nobody there")))
			p.kill()
			_, err := d.s.l.DialLocal(t.Context(), p.port, h)
			wantGone(t, err)
		})
	}
}

func TestLocalPeerThatIsKilledOrStoppedLeaves(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(sig.String(), func(t *testing.T) {
			r, h, name := listenLocal(t, lively())
			p := startPeer(t, "local-hello", name)
			m := h.next(t, "message")
			if err := r.Send(m.from.ID, []byte("hi")); err != nil {
				t.Fatal(err)
			}
			p.signal(t, sig)
			if left := h.next(t, "left"); left.from != m.from {
				t.Fatalf("%v left, want %v", left.from, m.from)
			}
			_, _, before := r.Dropped()
			wantGone(t, r.Send(m.from.ID, []byte("hi")))
			if _, _, after := r.Dropped(); after != before+1 {
				t.Fatalf("%d counted as unroutable, want %d", after, before+1)
			}
		})
	}
}

// A process of another user that has learnt the name is turned away, and does not hear what is sent to its own socket.
func TestLocalPeersOfAnotherUserAreTurnedAway(t *testing.T) {
	if syscall.Geteuid() != 0 {
		t.Skip("needs root, to start a process of another user")
	}
	r, h, name := listenLocal(t, Options{})
	p := startPeer(t, "local-hello-of-nobody", name)
	eventually(t, "it is turned away", func() bool { return r.TurnedAway() == 1 })
	p.kill()
	select {
	case e := <-h.c:
		t.Fatalf("got %v of another user", e)
	default:
	}

	p = startPeer(t, "local-echo-of-nobody", "")
	_, err := r.l.DialLocal(t.Context(), p.port, h)
	wantGone(t, err)
}
