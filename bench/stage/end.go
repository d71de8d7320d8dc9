package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/stage/shm"
	"github.com/tensorferry/tensorferry/tensor"
)

// A slab holds the largest payload. The producers get nothing.
const (
	slabBytes   = 288 * mib
	roomForGets = 16 * mib

	// retryGrace is how long a producer remembers that a claim was verified: 30 s if nobody says so.
	retryGrace = time.Second
)

// request is what an end is asked. omni_end.py takes open, put and get.
type request struct {
	Op   string `json:"op"`
	Name string `json:"name,omitempty"` // of the connector

	// of open
	Connector string   `json:"connector,omitempty"` // "link", "shm", "nixl", "limit"
	Host      string   `json:"host,omitempty"`      // to bind
	ToHost    string   `json:"-"`                   // Host of the consumer, if it is another
	Put       bool     `json:"put,omitempty"`
	Planes    []string `json:"planes,omitempty"`
	Inline    int64    `json:"inline,omitempty"` // as in stage.ClientOptions

	// of put, get and abort
	Load     *load    `json:"load,omitempty"`
	Keys     []string `json:"keys,omitempty"`
	InFlight int      `json:"in_flight,omitempty"`
	Metadata [][]byte `json:"metadata,omitempty"` // of get, by key
	InPlace  bool     `json:"in_place,omitempty"`
	Check    bool     `json:"check,omitempty"` // compare what was got, on the clock

	From *stage.Endpoint `json:"from,omitempty"` // of gets that have no metadata
}

type answer struct {
	Error    string   `json:"error,omitempty"`
	Seconds  float64  `json:"seconds,omitempty"`
	Metadata [][]byte `json:"metadata,omitempty"`
	Usage    *usage   `json:"usage,omitempty"`

	Endpoint *stage.Endpoint `json:"endpoint,omitempty"` // of what open opened
}

func (a answer) took() time.Duration { return time.Duration(a.Seconds * float64(time.Second)) }

// end is a process of ours with connectors.
type end struct {
	connectors map[string]stage.Connector
	load       load
	value      tensor.Node // of load
}

// runEnd answers until its input ends.
func runEnd() (err error) {
	e := &end{connectors: map[string]stage.Connector{}}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), endTimeout/2)
		defer cancel()
		for _, c := range e.connectors {
			err = errors.Join(err, c.Close(ctx))
		}
	}()
	in, out := bufio.NewReaderSize(os.Stdin, 1<<20), json.NewEncoder(os.Stdout)
	for {
		line, err := in.ReadBytes('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var q request
		if err := json.Unmarshal(line, &q); err != nil {
			return err
		}
		a, err := e.do(context.Background(), &q)
		if err != nil {
			a.Error = err.Error()
		}
		if err := out.Encode(a); err != nil {
			return err
		}
	}
}

func (e *end) do(ctx context.Context, q *request) (answer, error) {
	if q.Op == "open" {
		at, err := e.open(ctx, q)
		return answer{Endpoint: at}, err
	}
	c := e.connectors[q.Name]
	if c == nil {
		return answer{}, fmt.Errorf("no connector %q", q.Name)
	}
	switch q.Op {
	case "put":
		return e.put(ctx, c, q)
	case "get":
		return e.get(ctx, c, q)
	case "get or give up":
		return e.giveUp(ctx, c, q)
	case "wait for nothing":
		return answer{}, e.waitForNothing(ctx, c, q)
	case "abort":
		for _, key := range q.Keys {
			c.Abort(key, "aborted by the benchmark")
		}
		return answer{}, nil
	case "clean up":
		return answer{}, e.cleanUp(c, q)
	case "usage":
		u, err := usageOf(c)
		return answer{Usage: u}, err
	}
	return answer{}, fmt.Errorf("no request %q", q.Op)
}

func (e *end) open(ctx context.Context, q *request) (at *stage.Endpoint, err error) {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
	if q.Connector == limitConnector {
		if q.Put {
			q.From = nil
		}
		l, at, err := openLimit(q.From)
		if err == nil {
			e.connectors[q.Name] = l
		}
		return at, err
	}
	if q.Connector == "shm" {
		e.connectors[q.Name], err = shm.Open(shm.Options{Log: log})
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	o := connect.Options{
		Planes: q.Planes, AgentCommand: []string{self, agentRole}, Network: !hostname.Loopback(q.Host), Bytes: slabBytes,
		Client: stage.ClientOptions{Inline: q.Inline}, Log: log,
	}
	if q.Put { // a consumer that only gets has no address, and all of its slab for gets
		o.Bind = &stage.Endpoint{Host: q.Host}
		o.Store.MaxBytes, o.Store.RetryGrace = slabBytes-roomForGets, retryGrace
	}
	c, err := connect.Open(ctx, o)
	if err != nil {
		return nil, err
	}
	e.connectors[q.Name] = c
	from := c.Endpoint()
	return &from, nil
}

// each calls f for 0 to n-1, with inFlight at once, and gives how long that took.
func each(n, inFlight int, f func(int) error) (time.Duration, error) {
	begin := time.Now()
	if inFlight <= 1 {
		for i := range n {
			if err := f(i); err != nil {
				return 0, err
			}
		}
		return time.Since(begin), nil
	}
	var next atomic.Int64
	var all sync.WaitGroup
	errs := make([]error, inFlight)
	for w := range inFlight {
		all.Go(func() {
			for i := next.Add(1) - 1; i < int64(n) && errs[w] == nil; i = next.Add(1) - 1 {
				errs[w] = f(int(i))
			}
		})
	}
	all.Wait()
	return time.Since(begin), errors.Join(errs...)
}

func (e *end) put(ctx context.Context, c stage.Connector, q *request) (answer, error) {
	if e.value == nil || e.load != *q.Load {
		v, err := q.Load.value()
		if err != nil {
			return answer{}, err
		}
		e.load, e.value = *q.Load, v
	}
	a := answer{Metadata: make([][]byte, len(q.Keys))}
	took, err := each(len(q.Keys), q.InFlight, func(i int) error {
		p, err := c.Put(ctx, q.Keys[i], e.value, stage.PutOptions{})
		if err == nil {
			a.Metadata[i] = p.Metadata
		}
		return err
	})
	a.Seconds = took.Seconds()
	return a, err
}

func (e *end) get(ctx context.Context, c stage.Connector, q *request) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	took, err := each(len(q.Keys), q.InFlight, func(i int) error {
		if l, ok := c.(*limit); ok {
			return l.copied(q.Load)
		}
		g, err := c.Get(ctx, stage.Request{Key: q.Keys[i], Metadata: q.Metadata[i], InPlace: q.InPlace})
		if err != nil {
			return err
		}
		if q.InPlace {
			look(g.Root)
		}
		if q.Check {
			err = q.Load.check(g.Root)
		}
		return errors.Join(err, g.Release())
	})
	return answer{Seconds: took.Seconds()}, err
}

var seen atomic.Int64 // keeps look from being optimized away

// look reads one byte of each page: what is used in place has to be mapped, too.
func look(n tensor.Node) {
	sum := int64(0)
	eachTensor(n, func(b []byte) {
		for i := 0; i < len(b); i += pageBytes {
			sum += int64(b[i])
		}
	})
	seen.Add(sum)
}

// check compares what was got with what was put.
func (l load) check(got tensor.Node) error {
	want, err := l.value()
	if err != nil {
		return err
	}
	if !tensor.Equal(want, got) {
		return errors.New("another value than was put")
	}
	return nil
}
