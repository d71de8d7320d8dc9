package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/nixl"
)

// The limit of the nixl rows: two processes with an agent each and nothing else, which READ the same bytes between the same pages as
// the nodes do: how fast a page is depends on what the host has under it. One maps the pool of the source, the other that of the
// sink, and READs what a line of "CHECK [KEY FROM TO BYTES]..." says, offsets in the pools. The answer is the seconds from making
// the requests to the last one's end. What was read is looked at only if CHECK is true: no more than a node does.

// move is one READ.
type move struct {
	key             string
	from, to, bytes int64
}

func rawLine(check bool, moves []move) string {
	b := strconv.AppendBool(nil, check)
	for _, m := range moves {
		b = fmt.Appendf(b, " %s %d %d %d", m.key, m.from, m.to, m.bytes)
	}
	return string(b)
}

func parseRawLine(line string) (check bool, moves []move, err error) {
	f := strings.Fields(line)
	if len(f)%4 != 1 {
		return false, nil, fmt.Errorf("a line of %d fields", len(f))
	}
	check = f[0] == "true"
	for f = f[1:]; len(f) > 0; f = f[4:] {
		m := move{key: f[0]}
		if _, err := fmt.Sscan(strings.Join(f[1:4], " "), &m.from, &m.to, &m.bytes); err != nil {
			return false, nil, err
		}
		moves = append(moves, m)
	}
	return check, moves, nil
}

// rawEnd is an agent that has registered a node's pool.
type rawEnd struct {
	agent *nixl.Agent
	pool  []byte
}

func newRawEnd(name, path string, writable bool) (*rawEnd, error) {
	library, err := nixl.Load()
	if err != nil {
		return nil, err
	}
	m, err := attach(path, writable)
	if err != nil {
		return nil, err
	}
	// The progress thread's pause is that of the plane's agents.
	agent, err := library.NewAgent(fmt.Sprintf("bench-%s-%d", name, os.Getpid()), nixl.AgentConfig{ProgressDelay: 100 * time.Millisecond})
	if err != nil {
		return nil, err
	}
	if _, err := agent.CreateBackend("UCX", nil); err != nil {
		return nil, err
	}
	_, err = agent.Register(nixl.DRAM, []nixl.Range{nixl.RangeOf(m.Pool())})
	return &rawEnd{agent: agent, pool: m.Pool()}, err
}

func rawServe(path string) error {
	e, err := newRawEnd("serve", path, false)
	if err != nil {
		return err
	}
	defer e.agent.Close()
	md, err := e.agent.LocalMetadata()
	if err != nil {
		return err
	}
	fmt.Println(hex.EncodeToString(md), nixl.RangeOf(e.pool).Addr)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func rawRead(path string) error {
	e, err := newRawEnd("read", path, true)
	if err != nil {
		return err
	}
	defer e.agent.Close()
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<20)
	in.Scan()
	m, b, _ := strings.Cut(in.Text(), " ")
	md, err := hex.DecodeString(m)
	if err != nil {
		return err
	}
	base, err := strconv.ParseUint(b, 10, 64)
	if err != nil {
		return err
	}
	peer, err := e.agent.AddPeer(md)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for in.Scan() {
		check, moves, err := parseRawLine(in.Text())
		if err != nil {
			return err
		}
		for _, m := range moves {
			if check {
				clear(e.pool[m.to : m.to+m.bytes])
			}
		}
		took, err := e.read(peer, uintptr(base), moves)
		if err != nil {
			return err
		}
		for _, m := range moves {
			if check && !bytes.Equal(e.pool[m.to:m.to+m.bytes], pattern(m.key, m.bytes)) {
				return fmt.Errorf("%s: wrong bytes", m.key)
			}
		}
		fmt.Println(took.Seconds())
	}
	return in.Err()
}

// read makes and posts all requests, then waits for each.
func (e *rawEnd) read(peer *nixl.Peer, base uintptr, moves []move) (time.Duration, error) {
	begin := time.Now()
	var waiting []*nixl.Request
	for _, m := range moves {
		r, err := e.agent.NewRequest(nixl.Read, nixl.Descs{Ranges: []nixl.Range{nixl.RangeOf(e.pool[m.to : m.to+m.bytes])}},
			nixl.Descs{Ranges: []nixl.Range{{Addr: base + uintptr(m.from), Len: uint64(m.bytes)}}}, peer, nixl.RequestOptions{})
		if err != nil {
			return 0, err
		}
		done, err := r.Post()
		if err != nil {
			return 0, err
		}
		if done {
			r.Release()
			continue
		}
		waiting = append(waiting, r)
	}
	for _, r := range waiting {
		if err := r.Wait(context.Background()); err != nil {
			return 0, err
		}
		r.Release()
	}
	return time.Since(begin), nil
}
