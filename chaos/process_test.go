package chaos

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// process is one place of a world in which processes follow each other: they are killed, and started again.
type process struct {
	name string
	host *host
	role string
	log  string // what all of them say

	mu      sync.Mutex
	cmd     *exec.Cmd
	lines   chan []byte   // of standard output, closed at its end
	ended   chan struct{} // closed when it has been waited for
	killing bool          // it was told to end: whatever its status is, is meant
	err     error
}

// prefix is a program that the process is started by, such as unshare.
func (p *process) start(config any, prefix ...string) error {
	text, err := json.Marshal(config)
	if err != nil {
		return err
	}
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	args := append(prefix, exe)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), roleEnv+"="+p.role, configEnv+"="+string(text), "GORACE=halt_on_error=1 exitcode=66")
	cmd.Stderr = log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	fmt.Fprintf(log, "---- %s begins\n", p.name)
	if err := p.host.try(cmd.Start); err != nil {
		return err
	}
	lines, ended := make(chan []byte, 16), make(chan struct{})
	p.mu.Lock()
	p.cmd, p.lines, p.ended, p.killing, p.err = cmd, lines, ended, false, nil
	p.mu.Unlock()
	go func() {
		read := bufio.NewReader(out)
		for {
			line, err := read.ReadBytes('\n')
			if line = bytes.TrimSpace(line); len(line) > 0 {
				lines <- line
			}
			if err != nil {
				break
			}
		}
		close(lines)
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(ended)
	}()
	return nil
}

// line is the next line that the process says.
func (p *process) line() ([]byte, error) {
	select {
	case l, ok := <-p.lines:
		if !ok {
			return nil, io.EOF
		}
		return l, nil
	case <-time.After(patience):
		return nil, fmt.Errorf("%s says nothing within %v", p.name, patience)
	}
}

// signal sends to the process if it is there.
func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cmd == nil {
		return
	}
	p.killing = p.killing || s == syscall.SIGKILL || s == syscall.SIGTERM
	_ = p.cmd.Process.Signal(s) // one that has been waited for is an error, and nothing is sent
}

// kill ends the process at whatever instruction it is, and waits until the kernel has taken it down.
func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// end asks it to end, and gives its status.
func (p *process) end() (status int, err error) {
	p.signal(syscall.SIGCONT)
	p.signal(syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.signal(syscall.SIGQUIT) // its goroutines are in the log then
		select {
		case <-p.ended:
		case <-time.After(5 * time.Second):
			p.kill()
		}
		return -1, fmt.Errorf("%s does not end within %v of SIGTERM", p.name, patience)
	}
	return p.status(), nil
}

// status of a process that has ended; -1: by a signal.
func (p *process) status() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.ProcessState.ExitCode()
}

// died says that the process ended and nobody told it to.
func (p *process) died() bool {
	select {
	case <-p.ended:
		p.mu.Lock()
		defer p.mu.Unlock()
		return !p.killing
	default:
		return false
	}
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// files counts the process's descriptors.
func (p *process) files() int {
	d, err := os.ReadDir("/proc/" + strconv.Itoa(p.pid()) + "/fd")
	if err != nil {
		return -1
	}
	return len(d)
}
