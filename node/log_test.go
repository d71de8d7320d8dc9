package node

import (
	"bytes"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

// logged collects what a node says.
type logged struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestWhatThePeerChannelWarnsOfIsInTheNodesLog(t *testing.T) {
	log := &logged{}
	n, err := Start(testContext(t), testConfig(t, 8), slog.New(slog.NewJSONHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = n.Close(testContext(t)) }()
	peer, err := zmq4.NewSocket(zmq4.DEALER)
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	if err := peer.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	if err := peer.Connect("tcp://" + net.JoinHostPort(n.Ready().PeerHost, strconv.Itoa(n.Ready().PeerPort))); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.SendMessage("one frame, where two belong"); err != nil {
		t.Fatal(err)
	}
	const want = `"msg":"control: dropped messages`
	for end := time.Now().Add(time.Minute); !strings.Contains(log.String(), want); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("no line with %s in the node's log:\n%s", want, log)
		}
	}
}
