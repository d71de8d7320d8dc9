// Package peers runs a script in the Python that has the real peers, driven by lines: one in, one out.
package peers

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// ErrNone says that there is no such Python: its column says "not run".
var ErrNone = errors.New("PEERS_PYTHON names no Python with the peers (interop/peers/setup.sh makes one and prints its path)")

const endTimeout = 20 * time.Second

// Script is one that runs.
type Script struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	dir string // "": nothing to delete
}

// Start runs a script and waits for its first line, which must be "ready". Its errors go to ours.
func Start(name string, text []byte, args ...string) (*Script, error) {
	if os.Getenv("PEERS_PYTHON") == "" {
		return nil, ErrNone
	}
	dir, err := os.MkdirTemp("", "ferry-bench-")
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, name)
	err = os.WriteFile(path, text, 0o600)
	var s *Script
	if err == nil {
		var line string
		if s, line, err = Run(path, args...); err == nil && line != "ready" {
			err = errors.Join(fmt.Errorf("said %q where \"ready\" was expected", line), s.end())
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, err), os.RemoveAll(dir))
	}
	s.dir = dir
	return s, nil
}

// Run runs a script of the repository and gives its first line.
func Run(path string, args ...string) (s *Script, line string, err error) {
	python := os.Getenv("PEERS_PYTHON")
	if python == "" {
		return nil, "", ErrNone
	}
	s = &Script{cmd: exec.Command(python, append([]string{path}, args...)...)}
	s.cmd.Env = append(os.Environ(), "VLLM_LOGGING_LEVEL=ERROR", "VLLM_LOGGING_STREAM=ext://sys.stderr", "VLLM_NO_USAGE_STATS=1", "UCX_LOG_LEVEL=fatal")
	s.cmd.Stderr = os.Stderr
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, "", err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	s.out = bufio.NewReaderSize(out, 1<<20)
	if err := s.cmd.Start(); err != nil {
		return nil, "", err
	}
	if line, err = s.line(); err != nil {
		return nil, "", errors.Join(fmt.Errorf("%s: no first line: %w", filepath.Base(path), err), s.end())
	}
	return s, line, nil
}

func (s *Script) line() (string, error) {
	l, err := s.out.ReadString('\n')
	return strings.TrimSpace(l), err
}

// Ask sends a line and gives the answer.
func (s *Script) Ask(format string, a ...any) (string, error) {
	if _, err := fmt.Fprintf(s.in, format+"\n", a...); err != nil {
		return "", err
	}
	return s.line()
}

// Took asks for something and gives the seconds that the answer says it took.
func (s *Script) Took(format string, a ...any) (time.Duration, error) {
	l, err := s.Ask(format, a...)
	if err != nil {
		return 0, err
	}
	var sec float64
	if _, err := fmt.Sscan(l, &sec); err != nil {
		return 0, fmt.Errorf("answer %q: %w", l, err)
	}
	return time.Duration(sec * float64(time.Second)), nil
}

// Close ends the script's input and waits for it; it is killed if it does not end.
func (s *Script) Close() error {
	err := s.end()
	if s.dir != "" {
		err = errors.Join(err, os.RemoveAll(s.dir))
	}
	return err
}

func (s *Script) end() error {
	_ = s.in.Close()
	late := time.AfterFunc(endTimeout, func() { _ = s.cmd.Process.Kill() })
	defer late.Stop()
	return s.cmd.Wait()
}
