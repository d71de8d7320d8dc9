package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"ferry": main})
}

// tooLong bounds every wait of a script.
const tooLong = 60 * time.Second

// Commands of the scripts beside testscript's own:
//
//	start NAME ferry ARG...   starts a process and waits for its first line, which says that it is ready; sets NAME_socket, NAME_port,
//	                          NAME_admin, NAME_region, NAME_url, NAME_metadata. The process is ended with the script, and must end
//	                          cleanly then.
//	done NAME                 waits for its end, and expects exit status 0 (! done: another); what it wrote to stdout after the first
//	                          line is the command's stdout
//	quit NAME [SIGNAL]        ends it now, with SIGTERM if no signal is named, and expects exit status 0 (! quit: another)
//	status N ferry ARG...     runs ferry and expects exit status N; stdout and stderr work as after exec
//	get URL / post URL FILE   an HTTP request; the answer is the command's stdout
//	until URL FILE            posts until the answer's status is 200
//	left GLOB                 fails if a file matches
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("GORACE", "atexit_sleep_ms=0") // else each process takes a second to end
			e.Values[processes{}] = &sync.Map{}
			// Short, since a unix socket's path is: the script's own directory may be deep.
			dir, err := os.MkdirTemp("", "fs")
			if err != nil {
				return err
			}
			e.Setenv("sock", dir)
			e.Defer(func() { os.RemoveAll(dir) })
			// Regions in a directory of the script's own, so that what is left is this script's.
			shm, err := os.MkdirTemp("/dev/shm", "fs")
			if err != nil {
				return err
			}
			e.Setenv("FERRY_SHM_DIR", shm)
			e.Defer(func() { os.RemoveAll(shm) })
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"start": cmdStart, "done": cmdDone, "quit": cmdQuit, "status": cmdStatus, "get": cmdGet, "post": cmdPost, "until": cmdUntil, "left": cmdLeft,
		},
	})
}

type processes struct{}

type background struct {
	cmd    *exec.Cmd
	stderr *bytes.Buffer
	stdout bytes.Buffer  // after the first line; complete once ended is closed
	ended  chan struct{} // stdout was
	once   sync.Once
	err    error
}

// end sends sig, unless that is nil, and waits.
func (b *background) end(sig os.Signal) error {
	b.once.Do(func() {
		if sig != nil {
			b.cmd.Process.Signal(sig)
		}
		kill := time.AfterFunc(tooLong, func() { b.cmd.Process.Kill() })
		defer kill.Stop()
		<-b.ended // Wait closes the pipe
		b.err = b.cmd.Wait()
	})
	return b.err
}

func cmdStart(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 || args[1] != "ferry" {
		ts.Fatalf("usage: start NAME ferry ARG...")
	}
	name := args[0]
	path := pathOf(ts, args[1])
	b := &background{cmd: exec.Command(path, args[2:]...), stderr: new(bytes.Buffer), ended: make(chan struct{})}
	b.cmd.Dir = ts.Getenv("WORK")
	b.cmd.Env = environ(ts)
	b.cmd.Stderr = b.stderr
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := b.cmd.StdoutPipe()
	ts.Check(err)
	ts.Check(b.cmd.Start())
	ts.Value(processes{}).(*sync.Map).Store(name, b)
	ts.Defer(func() {
		err := b.end(syscall.SIGTERM)
		ts.Logf("[stderr of %s]\n%s", name, b.stderr)
		if err != nil {
			ts.Logf("%s did not end cleanly: %v", name, err)
		}
	})
	line := make(chan string, 1)
	go func() {
		defer close(b.ended)
		r := bufio.NewReader(stdout)
		s, _ := r.ReadString('\n')
		line <- s
		io.Copy(&b.stdout, r)
	}()
	var ready struct {
		Event    string `json:"event"`
		Socket   string `json:"socket"`
		PeerPort int    `json:"peer_port"`
		Admin    string `json:"admin"`
		Region   string `json:"region"`
		URL      string `json:"url"`
		Port     int    `json:"port"` // of a put
		Metadata string `json:"metadata"`
	}
	select {
	case s := <-line:
		if err := json.Unmarshal([]byte(s), &ready); err != nil || ready.Event != "ready" && ready.Event != "put" {
			b.end(syscall.SIGTERM)
			ts.Fatalf("%s: first line %q is no ready line\n%s", name, s, b.stderr)
		}
	case <-time.After(tooLong):
		b.end(syscall.SIGKILL)
		ts.Fatalf("%s: no ready line\n%s", name, b.stderr)
	}
	ts.Setenv(name+"_socket", ready.Socket)
	ts.Setenv(name+"_port", strconv.Itoa(max(ready.PeerPort, ready.Port)))
	ts.Setenv(name+"_metadata", ready.Metadata)
	ts.Setenv(name+"_admin", ready.Admin)
	ts.Setenv(name+"_region", ready.Region)
	ts.Setenv(name+"_url", ready.URL)
}

func cmdQuit(ts *testscript.TestScript, neg bool, args []string) {
	signals := map[string]os.Signal{"SIGTERM": syscall.SIGTERM, "SIGINT": syscall.SIGINT, "SIGKILL": syscall.SIGKILL}
	if len(args) == 1 {
		args = append(args, "SIGTERM")
	}
	if len(args) != 2 || signals[args[1]] == nil {
		ts.Fatalf("usage: quit NAME [SIGTERM|SIGINT|SIGKILL]")
	}
	p, ok := ts.Value(processes{}).(*sync.Map).LoadAndDelete(args[0])
	if !ok {
		ts.Fatalf("no process %s", args[0])
	}
	err := p.(*background).end(signals[args[1]])
	if (err != nil) != neg {
		ts.Fatalf("%s: %v", args[0], err)
	}
}

func cmdDone(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: done NAME")
	}
	p, ok := ts.Value(processes{}).(*sync.Map).LoadAndDelete(args[0])
	if !ok {
		ts.Fatalf("no process %s", args[0])
	}
	b := p.(*background)
	if err := b.end(nil); (err != nil) != neg {
		ts.Fatalf("%s: %v", args[0], err)
	}
	_, err := ts.Stdout().Write(b.stdout.Bytes())
	ts.Check(err)
	_, err = ts.Stderr().Write(b.stderr.Bytes())
	ts.Check(err)
}

func cmdStatus(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: status N ferry ARG...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	if e := (*exec.ExitError)(nil); errors.As(err, &e) {
		got = e.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("exit status %d, want %d", got, want)
	}
}

func cmdGet(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: get URL")
	}
	request(ts, neg, http.MethodGet, args[0], nil)
}

func cmdPost(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 2 {
		ts.Fatalf("usage: post URL FILE")
	}
	request(ts, neg, http.MethodPost, args[0], []byte(ts.ReadFile(args[1])))
}

func cmdUntil(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: until URL FILE")
	}
	body := []byte(ts.ReadFile(args[1]))
	for end := time.Now().Add(tooLong); ; time.Sleep(10 * time.Millisecond) {
		status, answer := send(ts, http.MethodPost, args[0], body)
		if status == http.StatusOK {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("%s: status %d\n%s", args[0], status, answer)
		}
	}
}

// request fails for a status that is not 200, or with neg for one that is.
func request(ts *testscript.TestScript, neg bool, method, url string, body []byte) {
	status, answer := send(ts, method, url, body)
	_, err := ts.Stdout().Write(answer)
	ts.Check(err)
	if (status == http.StatusOK) == neg {
		ts.Fatalf("%s: status %d\n%s", url, status, answer)
	}
}

func send(ts *testscript.TestScript, method, url string, body []byte) (int, []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), tooLong)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	ts.Check(err)
	resp, err := http.DefaultClient.Do(req)
	ts.Check(err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	ts.Check(err)
	return resp.StatusCode, b
}

func cmdLeft(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 {
		ts.Fatalf("usage: left GLOB")
	}
	found, err := filepath.Glob(args[0])
	ts.Check(err)
	if (len(found) > 0) != neg {
		ts.Fatalf("files that match %s: %v", args[0], found)
	}
}

func pathOf(ts *testscript.TestScript, name string) string {
	for _, dir := range filepath.SplitList(ts.Getenv("PATH")) {
		if p := filepath.Join(dir, name); exists(p) {
			return p
		}
	}
	ts.Fatalf("no %s in PATH", name)
	return ""
}

func exists(p string) bool {
	_, err := os.Stat(p)
	return err == nil
}

// environ is the script's environment: testscript keeps it to itself, so the variables that matter are asked for by name.
func environ(ts *testscript.TestScript) []string {
	env := []string{}
	for _, k := range []string{"PATH", "HOME", "TMPDIR", "GORACE"} {
		env = append(env, fmt.Sprintf("%s=%s", k, ts.Getenv(k)))
	}
	for _, e := range os.Environ() {
		if strings.HasPrefix(e, "GOCOVERDIR=") {
			env = append(env, e)
		}
	}
	for _, k := range []string{"FERRY_SHM_DIR", "FERRY_INSTANCE", "FERRY_EC_CPU_BYTES", "VLLM_EC_SIDE_CHANNEL_HOST", "VLLM_EC_SIDE_CHANNEL_PORT"} {
		if v := ts.Getenv(k); v != "" {
			env = append(env, k+"="+v)
		}
	}
	return env
}
