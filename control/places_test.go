package control

import (
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/pebbe/zmq4"
)

// One router has some places. Who finds none is turned away, and comes in when another has left.
func TestARouterTurnsAwayConnectionsOverItsPlaces(t *testing.T) {
	var log logBuffer
	r, h := listen(t, Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
	r.l.call(t.Context(), func() error { r.places.far = 3; return nil })
	var in []zmtp
	for range 3 {
		z := dialZMTP(t, hostPort(r))
		z.write(askFrame)
		h.next(t, "message")
		in = append(in, z)
	}
	extra := connect(t, r, func(s *zmq4.Socket) error { return s.SetReconnectIvl(10 * time.Millisecond) })
	say(t, extra, "", "late")
	eventually(t, "it is turned away", func() bool { return r.TurnedAway() > 0 })
	if n := peersOf(t, r); n > 6 {
		t.Errorf("%d peers and connections, want 3 and 3", n)
	}
	if !strings.Contains(log.String(), "connected=3") {
		t.Errorf("the log does not say how many there are: %s", log.String())
	}
	in[0].Close()
	for e := range h.c {
		if e.body == "late" {
			break
		}
	}
}
