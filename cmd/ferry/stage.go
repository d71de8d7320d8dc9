package main

import (
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/stage/connect"
	"github.com/tensorferry/tensorferry/stage/wire"
	"github.com/tensorferry/tensorferry/transfer"
)

// Names of the connectors, after the peers' NixlConnector and SharedMemoryConnector.
const (
	connectorNIXL = "nixl"
	connectorSHM  = "shm"
)

// stageFlags are what put, get and stat share.
type stageFlags struct {
	key       string
	connector string
	planes    []string
	library   string
	shmDir    string
}

// add adds all flags; addCommon those that are not about how bytes move.
func (f *stageFlags) add(cmd *cobra.Command) {
	f.addCommon(cmd)
	cmd.Flags().StringSliceVar(&f.planes, "planes", nil, "data planes by preference, with commas (mapped, nixl, tcp); all that are there if empty")
	cmd.Flags().StringVar(&f.library, "nixl-library", "", "path of libnixl_capi.so; searched for if empty")
}

func (f *stageFlags) addCommon(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.key, "key", "", "key of the payload")
	cmd.Flags().StringVar(&f.connector, "connector", connectorNIXL, "nixl or shm: whose wire is spoken, vLLM-Omni's NixlConnector's or its SharedMemoryConnector's")
	cmd.Flags().StringVar(&f.shmDir, "shm-dir", os.Getenv(node.EnvName("shm_dir")), "directory of the shared memory, "+region.DefaultDir+" if empty ("+node.EnvName("shm_dir")+")")
}

func (f *stageFlags) check() error {
	switch {
	case f.key == "":
		return usage("--key is missing: want the key of the payload")
	case len(f.key) > wire.MaxKey:
		return usage("--key has %d bytes; want at most %d", len(f.key), wire.MaxKey)
	case f.connector != connectorNIXL && f.connector != connectorSHM:
		return usage("--connector %q: want %s or %s", f.connector, connectorNIXL, connectorSHM)
	case f.connector == connectorSHM && (len(f.planes) > 0 || f.library != ""):
		return usage("--planes and --nixl-library are for --connector %s", connectorNIXL)
	}
	for _, p := range f.planes {
		if p != transfer.Mapped && p != transfer.NIXL && p != transfer.TCP {
			return usage("--planes: no plane is called %q; want some of %s, %s, %s", p, transfer.Mapped, transfer.NIXL, transfer.TCP)
		}
	}
	return nil
}

// endpoint reads HOST:PORT; port 0 is allowed where one is bound.
func (f *stageFlags) endpoint(listen string) (*stage.Endpoint, error) {
	if f.connector == connectorSHM {
		if listen != "" {
			return nil, usage("--listen is for --connector %s: shared memory needs no port", connectorNIXL)
		}
		return nil, nil
	}
	if listen == "" {
		return nil, usage("--listen is missing: want HOST:PORT, such as 127.0.0.1:0")
	}
	return parseEndpoint("--listen", listen, 0)
}

func parseEndpoint(flag, text string, least int) (*stage.Endpoint, error) {
	host, port, err := net.SplitHostPort(text)
	n, bad := strconv.Atoi(port)
	if err != nil || bad != nil || n < least || n > 65535 || host == "" {
		return nil, usage("%s %q: want HOST:PORT with a port of %d to 65535", flag, text, least)
	}
	return &stage.Endpoint{Host: host, Port: n}, nil
}

func (f *stageFlags) options(a *app) connect.Options {
	return connect.Options{
		Planes: slices.Clip(f.planes), Dir: f.shmDir, AgentCommand: nixlAgentCommand(), Library: f.library, Sum: true, Log: a.log,
	}
}

// progress is one line on standard error, if that is a terminal, that says what is being waited for and how long already.
type progress struct {
	w    io.Writer // nil: no terminal
	text chan string
	done chan struct{}
	gone chan struct{}
}

// progress begins with a text. The caller ends it.
func (a *app) progress(text string) *progress {
	p := &progress{text: make(chan string), done: make(chan struct{}), gone: make(chan struct{})}
	f, ok := a.stderr.(*os.File)
	if ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		ok = err == nil
	}
	if !ok {
		close(p.gone)
		return p
	}
	p.w = f
	go p.run(text)
	return p
}

func (p *progress) run(text string) {
	defer close(p.gone)
	start := time.Now()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	const clear = "\r\x1b[K"
	for {
		fmt.Fprintf(p.w, "%s%.70s, %.0f s", clear, text, time.Since(start).Seconds())
		select {
		case <-tick.C:
		case text = <-p.text:
			start = time.Now()
		case <-p.done:
			fmt.Fprint(p.w, clear)
			return
		}
	}
}

// now changes the text.
func (p *progress) now(text string) {
	select {
	case p.text <- text:
	case <-p.gone:
	}
}

// end takes the line away.
func (p *progress) end() {
	close(p.done)
	<-p.gone
}

// size is such as "1.5 GiB".
func size(n int64) string {
	const k = 1024
	v, unit := float64(n), 0
	for v >= k && unit < 4 {
		v, unit = v/k, unit+1
	}
	return strconv.FormatFloat(v, 'g', 4, 64) + " " + [...]string{"B", "KiB", "MiB", "GiB", "TiB"}[unit]
}
