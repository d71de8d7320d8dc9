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
	dir string
}

// Start runs a script and waits for its first line, which must be "ready". Its errors go to ours.
func Start(name string, text []byte, args ...string) (s *Script, err error) {
	python := os.Getenv("PEERS_PYTHON")
	if python == "" {
		return nil, ErrNone
	}
	s = &Script{}
	if s.dir, err = os.MkdirTemp("", "ferry-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%s: %w", name, err), os.RemoveAll(s.dir))
		}
	}()
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		return nil, err
	}
	s.cmd = exec.Command(python, append([]string{path}, args...)...)
	s.cmd.Env = append(os.Environ(), "VLLM_LOGGING_LEVEL=ERROR", "VLLM_LOGGING_STREAM=ext://sys.stderr", "VLLM_NO_USAGE_STATS=1", "UCX_LOG_LEVEL=fatal")
	s.cmd.Stderr = os.Stderr
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.out = bufio.NewReaderSize(out, 1<<20)
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	if line, err := s.line(); err != nil || line != "ready" {
		s.end()
		return nil, fmt.Errorf("said %q (%v) where \"ready\" was expected", line, err)
	}
	return s, nil
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
	return errors.Join(s.end(), os.RemoveAll(s.dir))
}

func (s *Script) end() error {
	_ = s.in.Close()
	late := time.AfterFunc(endTimeout, func() { _ = s.cmd.Process.Kill() })
	defer late.Stop()
	return s.cmd.Wait()
}
