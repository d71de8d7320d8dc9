package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/nixl"
	"github.com/tensorferry/tensorferry/region"
)

// The limit of the nixl rows: two processes with an agent each and nothing else. One offers a pool, the other READs of it what it is
// told to: "ENTRIES BYTES" a line, answered by the seconds from making the requests to the last one's end.

// rawEnd is an agent with a pool of the same kind as a node's.
type rawEnd struct {
	agent *nixl.Agent
	pool  []byte
	close func()
}

func newRawEnd(name string, size int64) (*rawEnd, error) {
	library, err := nixl.Load()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("/dev/shm", "ferry-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // the mapping stays
	r, err := region.Create(context.Background(), region.Options{
		Dir: dir, Identity: region.Identity{Instance: name, Group: "0"}, Geometry: region.Geometry{BlockBytes: rowBytes, Blocks: int(size / rowBytes)},
	})
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
	if _, err := agent.Register(nixl.DRAM, []nixl.Range{nixl.RangeOf(r.Pool())}); err != nil {
		return nil, err
	}
	return &rawEnd{agent: agent, pool: r.Pool(), close: func() { _ = agent.Close(); _ = r.Close(true) }}, nil
}

func rawServe(size int64) error {
	e, err := newRawEnd("serve", size)
	if err != nil {
		return err
	}
	defer e.close()
	copy(e.pool, pattern("raw", size))
	md, err := e.agent.LocalMetadata()
	if err != nil {
		return err
	}
	fmt.Println(hex.EncodeToString(md), nixl.RangeOf(e.pool).Addr)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func rawRead(size int64) error {
	e, err := newRawEnd("read", size)
	if err != nil {
		return err
	}
	defer e.close()
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
	for want := pattern("raw", size); in.Scan(); {
		var count, each int64
		if _, err := fmt.Sscan(in.Text(), &count, &each); err != nil {
			return err
		}
		took, err := e.read(peer, uintptr(base), count, each)
		if err != nil {
			return err
		}
		if n := count * each; string(e.pool[:n]) != string(want[:n]) {
			return fmt.Errorf("READ of %d bytes: wrong bytes", n)
		}
		clear(e.pool[:count*each])
		fmt.Println(took.Seconds())
	}
	return in.Err()
}

// read makes and posts all requests, then waits for each.
func (e *rawEnd) read(peer *nixl.Peer, base uintptr, count, each int64) (time.Duration, error) {
	begin := time.Now()
	var waiting []*nixl.Request
	for i := range count {
		at := i * each
		r, err := e.agent.NewRequest(nixl.Read, nixl.Descs{Ranges: []nixl.Range{nixl.RangeOf(e.pool[at : at+each])}},
			nixl.Descs{Ranges: []nixl.Range{{Addr: base + uintptr(at), Len: uint64(each)}}}, peer, nixl.RequestOptions{})
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
