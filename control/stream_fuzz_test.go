package control

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"
)

// collector is the user of a stream without a connection.
type collector struct {
	bodies [][]byte
	up     int
}

func (c *collector) message(body []byte) { c.bodies = append(c.bodies, bytes.Clone(body)) }
func (c *collector) accepted()           { c.up++ }
func (c *collector) lost(error)          {}
func (c *collector) over() bool          { return false }

// Whatever bytes come, and however they are cut, they are messages up to the first that is none, in order and whole.
func FuzzStreamHandlesAnyBytes(f *testing.F) {
	f.Add([]byte{}, uint8(1))
	f.Add(localMessage("hello"), uint8(2))
	f.Add(append(word(signReady), localMessage("")...), uint8(3))
	f.Add(bytes.Join([][]byte{word(signReady), word(signPing), localMessage("a"), word(signPong), localMessage("bc")}, nil), uint8(5))
	f.Add(append(word(signReady), word(1<<31)...), uint8(4))
	f.Add(append(word(signReady), word(signReady)...), uint8(9))
	f.Add(append(word(signReady), bytes.Repeat(localMessage(""), 2*turnBudget)...), uint8(255))
	f.Fuzz(func(t *testing.T, data []byte, piece uint8) {
		const limit = 1 << 10
		var want [][]byte
		bad, greeted := false, false
		for rest := data; len(rest) >= wordSize && !bad; {
			w := binary.LittleEndian.Uint32(rest)
			rest = rest[wordSize:]
			switch {
			case w == signReady && !greeted:
				greeted = true
			case greeted && (w == signPing || w == signPong):
			case !greeted || w > limit:
				bad = true
			case len(rest) < int(w):
				rest = nil
			default:
				want = append(want, rest[:w])
				rest = rest[w:]
			}
		}

		c := &collector{}
		s := &stream{l: &Loop{}, user: c, limit: limit, fd: -1}
		var err error
		for step := int(piece) + 1; len(data) > 0 && err == nil; {
			n := min(step, len(data))
			s.in = append(s.in, data[:n]...)
			data = data[n:]
			for s.behind = true; s.behind && err == nil; {
				budget := turnBudget
				var rest []byte
				if rest, err = s.handle(s.in, &budget); err == nil {
					s.keep(s.in, rest)
				}
			}
		}
		if (err != nil) != bad || err != nil && !errors.Is(err, errFrame) {
			t.Fatalf("%v, want an error: %v", err, bad)
		}
		if len(c.bodies) != len(want) || greeted != (c.up == 1) {
			t.Fatalf("%d messages, want %d; %d signs", len(c.bodies), len(want), c.up)
		}
		for i := range want {
			if !bytes.Equal(c.bodies[i], want[i]) {
				t.Fatalf("message %d is %q, want %q", i, c.bodies[i], want[i])
			}
		}
	})
}
