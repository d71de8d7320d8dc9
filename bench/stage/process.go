package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/netns"
)

const endTimeout = 30 * time.Second

// process is an end in a process of its own: one line of JSON asks, one answers. It ends with its input.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// start runs a program in a network namespace ("": ours).
func start(ns string, env []string, name string, args ...string) (*process, error) {
	p := &process{cmd: netns.Command(ns, name, args...)}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReaderSize(out, 1<<20)
	return p, p.cmd.Start()
}

// ask decodes the answer to q.
func (p *process) ask(q request) (a answer, err error) {
	line, err := json.Marshal(q)
	if err != nil {
		return a, err
	}
	if _, err := p.in.Write(append(line, '\n')); err != nil {
		return a, fmt.Errorf("%s: %w", q.Op, err)
	}
	if line, err = p.out.ReadBytes('\n'); err != nil {
		return a, fmt.Errorf("%s: no answer: %w", q.Op, err)
	}
	if err := json.Unmarshal(line, &a); err != nil {
		return a, fmt.Errorf("%s: answer %.100q: %w", q.Op, line, err)
	}
	if a.Error != "" {
		err = fmt.Errorf("%s %s: %w", q.Op, q.Name, errors.New(a.Error))
	}
	return a, err
}

// close ends the process's input and waits for it; it is killed if it does not end.
func (p *process) close() error {
	_ = p.in.Close()
	late := time.AfterFunc(endTimeout, func() { _ = p.cmd.Process.Kill() })
	defer late.Stop()
	return p.cmd.Wait()
}

// pair is a producer and a consumer.
type pair struct{ from, to *process }

func startPair(begin func(side int) (*process, error)) (*pair, error) {
	from, err := begin(0)
	if err != nil {
		return nil, err
	}
	to, err := begin(1)
	if err != nil {
		return nil, errors.Join(err, from.close())
	}
	return &pair{from, to}, nil
}

// open opens a connector at both ends, and sets q.From.
func (p *pair) open(q *request) error {
	q.Op, q.Put = "open", true
	a, err := p.from.ask(*q)
	if err != nil {
		return err
	}
	q.Put, q.Host, q.From = false, cmp.Or(q.ToHost, q.Host), a.Endpoint
	_, err = p.to.ask(*q)
	return err
}

func (p *pair) close() error {
	if p == nil {
		return nil
	}
	return errors.Join(p.to.close(), p.from.close())
}
