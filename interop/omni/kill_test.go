package omni

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

// hasty ends claims soon, as a producer does after 330 s if it is not told otherwise. A reader on a busy machine should still be done
// by then: what it says later counts no more, and its payload stays.
var hasty = stage.Options{Transfer: 4 * time.Second, Margin: 100 * time.Millisecond}

func newTCPReceiver(t *testing.T) *peer {
	t.Helper()
	return newPeer(t).open(ask{"role": "receiver"}, unhurried, tcpOnly)
}

// lapsed waits for the end of claims by force: no byte is read under them any more.
func (e *ours) lapsed(n uint64) {
	e.t.Helper()
	eventually(e.t, "the claims end by force", func() bool {
		st := e.Stats().Store
		return st.Lapsed == n && st.Claims == 0 && st.Withdrawing == 0
	})
}

// O2: there the payload is kept for ever.
func TestAKilledRealReaderCostsItsPayloadItsTimeAndNothingElse(t *testing.T) {
	for name, after := range map[string]bool{"before its READ": false, "in its READ": true} {
		t.Run(name, func(t *testing.T) {
			e, r := newOurs(t, settings{store: hasty}), newTCPReceiver(t)
			v := big()
			p := e.put("k", v, stage.PutOptions{})
			r.stopsAt("transfer", after)
			r.tell(getting(p))
			r.stopped()
			r.kill()
			e.lapsed(1)
			next := newReceiver(t, nil)
			next.wants(getting(p), v.Bytes(), describe(v)) // who lapsed did not use it up
			e.ended(p, stage.Read)
		})
	}
}

// A reader that is only slow, such as in a debugger or a suspended machine, comes back to memory that is another payload's by then.
func TestALateReadOfARealReaderFailsAndIsNoHarm(t *testing.T) {
	for name, after := range map[string]bool{"before its READ": false, "in its READ": true} {
		t.Run(name, func(t *testing.T) {
			e, r := newOurs(t, settings{store: hasty}), newTCPReceiver(t)
			v := big()
			p := e.put("k", v, stage.PutOptions{})
			r.stopsAt("transfer", after)
			r.tell(getting(p).with("wait", 0))
			r.stopped()
			e.lapsed(1)
			must(t, e.Cleanup("k"))
			e.ended(p, stage.CleanedUp)
			other := e.put("other", raw(tensor.Uint8, 77, 16<<20), stage.PutOptions{}) // in the same memory
			r.signal(syscall.SIGCONT)
			r = r.getFailed(func() *peer { return newTCPReceiver(t) })
			r.wants(getting(other), v.Bytes(), describe(raw(tensor.Uint8, 77, 16<<20)))
			e.ended(other, stage.Read)
		})
	}
}

// Readers that work are not disturbed by the end of one that does not.
func TestARealReaderGoesOnWhileAnotherOneIsStoppedByForce(t *testing.T) {
	const transfer = 8 * time.Second
	e := newOurs(t, settings{store: stage.Options{Transfer: transfer, Margin: time.Millisecond}})
	dead, slow := newReceiver(t, unhurried), newReceiver(t, unhurried)
	p := e.put("dead", one, stage.PutOptions{})
	dead.stopsAt("transfer", false)
	dead.tell(getting(p))
	dead.stopped()
	claimed := time.Now()
	dead.kill()
	eventually(t, "half of its time is over, so that the other claim ends well after it", func() bool { return time.Since(claimed) > transfer/2 })
	q := e.put("slow", two, stage.PutOptions{})
	slow.stopsAt("transfer", false)
	get := getting(q)
	slow.tell(get)
	slow.stopped()
	eventually(t, "the dead one's claim has ended", func() bool { return e.Stats().Store.Lapsed == 1 })
	slow.signal(syscall.SIGCONT)
	slow.got(get, slow.answer(), bytesOfOne, describe(two))
	e.ended(q, stage.Read)
	e.lapsed(1)
	must(t, e.Cleanup("dead"))
	e.ended(p, stage.CleanedUp)
}

// O7: there it takes 5 s, and close never returns.
func TestAKilledRealProducerEndsItsReadersByATypedError(t *testing.T) {
	for name, reading := range map[string]bool{"before the READ": false, "in the READ": true} {
		t.Run(name, func(t *testing.T) {
			e, s := newOurs(t, settings{bytes: 64 << 20, getsOnly: true}), newSender(t, nil, tcpOnly)
			g := newGate(t, s.at)
			s.do(ask{"op": "puts", "key": "k", "first": 0, "count": 1, "bytes": 32 << 20})
			g.hold()
			got := make(chan error)
			go func() {
				_, err := e.Get(patient(t), stage.Request{Key: "k0", From: g.at()})
				got <- err
			}()
			eventually(t, "the claim is answered", func() bool { return g.held() == 1 })
			if reading {
				s.signal(syscall.SIGSTOP)
				s.stopped()
				g.release()
				eventually(t, "the READ has its buffer", func() bool { return e.slab.Used() > 0 })
				s.kill()
			} else {
				s.kill()
				g.release()
			}
			if err := <-got; !errors.Is(err, transfer.ErrPeerLost) {
				t.Error(err)
			}
			eventually(t, "the buffer is free", func() bool { return e.slab.Used() == 0 })
			next := newSender(t, ask{"zmq_port": s.at.Port}, nil)
			m := next.put("k0", describe(one))
			e.get(stage.Request{Key: "k0", Metadata: m}, describe(one))
			next.drained()
		})
	}
}

// job is what a process of ours that will be killed does.
type job struct {
	Dir    string
	Python string
	Port   int
	From   stage.Endpoint // to get key k from; else it puts big as k
}

// told is what such a producer says.
type told struct {
	Port     int
	Metadata string
}

func produce(text string) {
	err := func() error {
		var j job
		if err := json.Unmarshal([]byte(text), &j); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		e, err := openOurs(ctx, j.Python, j.Dir, slog.Default(), settings{bytes: 64 << 20, port: j.Port})
		if err != nil {
			return err
		}
		if j.From.Port != 0 {
			_, err := e.Get(ctx, stage.Request{Key: "k", From: j.From})
			return err
		}
		p, err := e.Put(ctx, "k", big(), stage.PutOptions{})
		if err != nil {
			return err
		}
		if err := json.NewEncoder(os.Stdout).Encode(told{e.Endpoint().Port, hex.EncodeToString(p.Metadata)}); err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, os.Stdin)
		return err
	}()
	fmt.Fprintln(os.Stderr, err)
}

func start(t *testing.T, j job) *exec.Cmd {
	t.Helper()
	b, err := json.Marshal(j)
	must(t, err)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), producerEnv+"="+string(b))
	cmd.Stderr = t.Output()
	return cmd
}

func startProducer(t *testing.T, j job) (*exec.Cmd, told) {
	t.Helper()
	cmd := start(t, j)
	out, err := cmd.StdoutPipe()
	must(t, err)
	_, err = cmd.StdinPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { kill(cmd) })
	var say told
	line, err := bufio.NewReader(out).ReadBytes('\n')
	must(t, err)
	must(t, json.Unmarshal(line, &say))
	return cmd, say
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // killed, or a second time
}

func TestARealReaderOutlivesAKilledGoProducer(t *testing.T) {
	for name, after := range map[string]bool{"before its READ": false, "in its READ": true} {
		t.Run(name, func(t *testing.T) {
			j := job{Dir: transfertest.Dir(t), Python: python(t)}
			r := newTCPReceiver(t)
			cmd, say := startProducer(t, j)
			r.stopsAt("transfer", after)
			get := ask{"op": "get", "key": "k", "metadata": say.Metadata, "wait": 0}
			r.tell(get)
			r.stopped()
			kill(cmd)
			r.signal(syscall.SIGCONT)
			r = r.getFailed(func() *peer { return newTCPReceiver(t) })
			j.Port = say.Port
			_, say = startProducer(t, j)
			get["metadata"], get["wait"] = say.Metadata, patience.Seconds()
			r.wants(get, big().Bytes(), describe(big()))
		})
	}
}

func TestARealProducerOutlivesAKilledGoReader(t *testing.T) {
	e, s := newOurs(t, settings{getsOnly: true}), newSender(t, nil, tcpOnly)
	g := newGate(t, s.at)
	s.do(ask{"op": "puts", "key": "k", "first": 0, "count": 1, "bytes": 32 << 20})
	s.put("k", describe(one))
	g.hold()
	cmd := start(t, job{Dir: transfertest.Dir(t), Python: python(t), From: g.at()})
	must(t, cmd.Start())
	t.Cleanup(func() { kill(cmd) })
	eventually(t, "the claim is answered", func() bool { return g.held() == 1 })
	kill(cmd)
	g.release()
	m := s.put("l", describe(two))
	e.get(stage.Request{Key: "l", Metadata: m}, describe(two))
	e.get(stage.Request{Key: "k", From: s.at}, describe(one)) // the dead one's claim is kept there, and is no harm to others
}
