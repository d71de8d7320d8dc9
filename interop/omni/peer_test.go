package omni

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/transfer/nixl/nixltest"
)

// peer is a process with a real NixlConnector.
type peer struct {
	t      *testing.T
	conn   net.Conn
	lines  *bufio.Reader
	pid    int
	killed bool
	logged int            // bytes that the peers had said before it began
	at     stage.Endpoint // of one that puts
}

// ask is a command of omni_live.py, which describes them.
type ask map[string]any

// reply has the fields of all answers.
type reply struct {
	Pid           int
	Error         string
	OK            bool
	Host          string
	ZMQPort       int `json:"zmq_port"`
	Size          int64
	Metadata      string
	Value         json.RawMessage
	Tries         int
	Good          int
	Pending       map[string][]string // the claims of each key that is published
	Registrations int
	Deferred      int
	Agents        int
	Status        string
	FDs           int
	Closed        bool
}

// tcpOnly makes UCX move bytes by tcp, where both ends have to do something for a READ: those by shared memory are the reader's work
// alone, and go on while the other one is stopped.
var tcpOnly = map[string]string{"UCX_TLS": "tcp,self"}

// unhurried makes a reader wait for an answer for longer than 10 ms, where it has one try only.
var unhurried = ask{"metadata_query_timeout_ms": 5000}

// newPeer forks a process without a connector.
func newPeer(t *testing.T) *peer {
	t.Helper()
	path := python(t)
	peers.once.Do(func() { peers.start(path) })
	must(t, peers.err)
	conn, err := net.Dial("unix", peers.socket)
	must(t, err)
	p := &peer{t: t, conn: conn, lines: bufio.NewReader(conn)}
	p.pid = p.answer().Pid
	p.logged = peers.size()
	t.Cleanup(func() {
		if !p.killed {
			_ = syscall.Kill(p.pid, syscall.SIGKILL) // its connection is open, so the pid is its own
		}
		_ = conn.Close()
		if t.Failed() {
			t.Logf("stderr of the peers, its end:\n%s", peers.said(p.logged))
		}
	})
	return p
}

// newReceiver gives a peer that gets.
func newReceiver(t *testing.T, config ask) *peer {
	t.Helper()
	return newPeer(t).open(ask{"role": "receiver", "stage_id": 1}, config, nil)
}

// newSender gives a peer that puts.
func newSender(t *testing.T, config ask, env map[string]string) *peer {
	t.Helper()
	return newPeer(t).open(ask{"role": "sender", "host": "127.0.0.1", "zmq_port": 0}, config, env)
}

func (p *peer) open(base, config ask, env map[string]string) *peer {
	p.t.Helper()
	for k, v := range config {
		base[k] = v
	}
	p.at = p.do(ask{"op": "open", "config": base, "env": env}).endpoint()
	return p
}

// endpoint is that of a connector which was opened.
func (r reply) endpoint() stage.Endpoint { return stage.Endpoint{Host: r.Host, Port: r.ZMQPort} }

// tell says a command, and answer gives the answer to it.
func (p *peer) tell(q ask) {
	p.t.Helper()
	b, err := json.Marshal(q)
	must(p.t, err)
	_, err = p.conn.Write(append(b, '\n'))
	must(p.t, err)
}

func (p *peer) answer() reply {
	p.t.Helper()
	r, err := p.next()
	if err != nil {
		p.t.Fatalf("peer %d: %v", p.pid, err)
	}
	return r
}

func (p *peer) next() (r reply, err error) {
	p.t.Helper()
	must(p.t, p.conn.SetReadDeadline(time.Now().Add(patience)))
	line, err := p.lines.ReadBytes('\n')
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(line, &r); err != nil {
		p.t.Fatalf("peer %d said %q: %v", p.pid, line, err)
	}
	return r, nil
}

// getFailed wants a get that was begun to give nothing. NIXL 1.3.2 sometimes crashes a reader whose agent to READ from went away when
// it had posted its READ, whoever the producer is; then the peer is started anew. No other end of it passes.
func (p *peer) getFailed(again func() *peer) *peer {
	p.t.Helper()
	r, err := p.next()
	switch {
	case errors.Is(err, io.EOF):
		p.killed = true
		nixltest.Crashed(p.t, "the reader", peers.said(p.logged))
		return again()
	case err != nil:
		p.t.Fatal(err)
	case r.OK || r.Error != "":
		p.t.Errorf("their get: ok %v, %s", r.OK, r.Error)
	}
	return p
}

// do wants a command to go well.
func (p *peer) do(q ask) reply {
	p.t.Helper()
	p.tell(q)
	r := p.answer()
	if r.Error != "" {
		p.t.Fatalf("%v: %s", q["op"], r.Error)
	}
	return r
}

// put gives the payload's metadata. what is a value as describe has it, or the name of one of theirs.
func (p *peer) put(key string, what any) []byte {
	p.t.Helper()
	q := ask{"op": "put", "key": key, "value": what}
	if name, ok := what.(named); ok {
		q = ask{"op": "put", "key": key, "case": string(name)}
	}
	r := p.do(q)
	if !r.OK {
		p.t.Fatalf("their put of %s failed", key)
	}
	b, err := hex.DecodeString(r.Metadata)
	must(p.t, err)
	return b
}

// named is a value that their script makes.
type named string

// getting is a get by metadata, that tries for as long as any test waits.
func getting(p *stage.Published) ask {
	return ask{"op": "get", "key": p.Key, "metadata": hex.EncodeToString(p.Metadata), "wait": patience.Seconds()}
}

func (q ask) with(k string, v any) ask {
	q[k] = v
	return q
}

// at is metadata that names an endpoint only.
func at(e stage.Endpoint) string { return hex.EncodeToString(endpointMap(e)) }

// wants is a get that must give that value, as describe has it.
func (p *peer) wants(q ask, size int64, want any) {
	p.t.Helper()
	p.got(q, p.do(q), size, want)
}

func (p *peer) got(q ask, r reply, size int64, want any) {
	p.t.Helper()
	if !r.OK {
		p.t.Errorf("%v: their get gave nothing after %d tries %s", q["key"], r.Tries, r.Error)
		return
	}
	if r.Size != size {
		p.t.Errorf("%v: %d bytes, want %d", q["key"], r.Size, size)
	}
	same(p.t, q["key"].(string), r.Value, want)
}

// fails is a get that must give nothing.
func (p *peer) fails(q ask) {
	p.t.Helper()
	if r := p.do(q.with("wait", 0)); r.OK {
		p.t.Errorf("%v: their get gave %s", q["key"], r.Value)
	}
}

// drained waits until it has nothing published, and nothing registered.
func (p *peer) drained() {
	p.t.Helper()
	eventually(p.t, "their payloads are released", func() bool {
		s := p.do(ask{"op": "stat"})
		return len(s.Pending) == 0 && s.Registrations == 0
	})
}

// drainedUnlessEnded is drained for one whose reader has gone while it was stopped, which UCX may end. It says whether it goes on.
func (p *peer) drainedUnlessEnded() (lives bool) {
	p.t.Helper()
	eventually(p.t, "their payloads are released", func() bool {
		_, err := p.conn.Write([]byte(`{"op": "stat"}` + "\n"))
		var s reply
		if err == nil {
			s, err = p.next()
		}
		lives = err == nil
		return !lives || len(s.Pending) == 0 && s.Registrations == 0
	})
	if !lives {
		p.killed = true
		nixltest.EndedByUCX(p.t, "the peer", peers.said(p.logged))
	}
	return lives
}

// idle wants nothing to be left of its gets.
func (p *peer) idle() {
	p.t.Helper()
	eventually(p.t, "their gets have left nothing", func() bool {
		s := p.do(ask{"op": "stat"})
		return s.Registrations == 0 && s.Deferred == 0 && s.Agents == 0
	})
}

// stopsAt makes it stop at the next such call of its NIXL agent, before or after it.
func (p *peer) stopsAt(call string, after bool) {
	p.t.Helper()
	p.do(ask{"op": "stop", "at": call, "after": after})
}

// stopped waits until it is.
func (p *peer) stopped() {
	p.t.Helper()
	eventually(p.t, "the peer is stopped", func() bool { return p.state() == "T" })
}

// state is the kernel's letter for it.
func (p *peer) state() string {
	p.t.Helper()
	b, err := readProc(p.pid, "stat")
	must(p.t, err)
	_, rest, _ := strings.Cut(string(b), ") ")
	return rest[:1]
}

func (p *peer) signal(s syscall.Signal) {
	p.t.Helper()
	must(p.t, syscall.Kill(p.pid, s))
}

// kill ends it, and waits for that.
func (p *peer) kill() {
	p.t.Helper()
	p.signal(syscall.SIGKILL)
	p.killed = true
	must(p.t, p.conn.SetReadDeadline(time.Now().Add(patience)))
	for {
		if _, err := p.lines.ReadByte(); err != nil {
			return
		}
	}
}
