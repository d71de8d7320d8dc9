// Package child runs this program again, in another role and in a process of its own. It says one line of JSON when it is ready, and
// ends at the end of its input.
package child

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

const endTimeout = 30 * time.Second

// Child is such a process.
type Child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

// Start runs this program with args and decodes its first line into ready.
func Start(ready any, args ...string) (*Child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &Child{cmd: exec.Command(self, args...)}
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.out = bufio.NewReader(out)
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := c.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, ready)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%v: %w", args, err), c.Close())
	}
	return c, nil
}

// Ready is what the child calls: it says the line.
func Ready(what any) error { return json.NewEncoder(os.Stdout).Encode(what) }

// PID is the process.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Ask sends a line and waits for one.
func (c *Child) Ask(line string) (string, error) {
	if _, err := fmt.Fprintln(c.in, line); err != nil {
		return "", err
	}
	return c.out.ReadString('\n')
}

// Close ends the child's input and waits for it; it is killed if it does not end.
func (c *Child) Close() error {
	_ = c.in.Close()
	late := time.AfterFunc(endTimeout, func() { _ = c.cmd.Process.Kill() })
	defer late.Stop()
	return c.cmd.Wait()
}
