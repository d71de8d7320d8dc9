// Command tcp measures the tcp plane between two network namespaces joined by a veth pair, and NIXL's READ over tcp there in the
// same run if PEERS_PYTHON names a Python that has NIXL. It needs root; what it creates, it deletes.
package main

import (
	_ "embed"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/measure"
	"github.com/tensorferry/tensorferry/bench/internal/netns"
)

//go:embed nixl_read.py
var nixlScript []byte

const largest = 256 << 20

func main() {
	rounds := flag.Int("rounds", 21, "turns that count")
	role := flag.String("role", "", "of a child: serve or read")
	host := flag.String("host", "127.0.0.1", "of a child")
	streams := flag.Int("streams", 0, "connections, 0: the plane's default")
	flag.Parse()
	var err error
	switch *role {
	case "serve":
		err = serve(*host)
	case "read":
		err = read(*host, *streams)
	default:
		err = run(*rounds, *streams)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "tcp:", err)
		os.Exit(1)
	}
}

func run(rounds, streams int) (err error) {
	h, err := netns.New()
	if err != nil {
		return err
	}
	defer func() {
		if e := h.Close(); err == nil {
			err = e
		}
	}()
	self, err := os.Executable()
	if err != nil {
		return err
	}
	ours, end, err := pair(
		func() (*child, error) { return start(h.A, nil, self, "-role", "serve", "-host", h.AddrA) },
		func() (*child, error) {
			return start(h.B, nil, self, "-role", "read", "-host", h.AddrB, "-streams", strconv.Itoa(streams))
		})
	if err != nil {
		return err
	}
	defer end()
	candidates := []struct {
		name  string
		child *child
	}{{"tcp", ours}}
	if python := os.Getenv("PEERS_PYTHON"); python != "" {
		dir, err := os.MkdirTemp("", "ferry-bench-")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		script := filepath.Join(dir, "nixl_read.py")
		if err := os.WriteFile(script, nixlScript, 0o600); err != nil {
			return err
		}
		nixl := func(ns, device, role string) func() (*child, error) {
			env := []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=" + device, "UCX_LOG_FILE=stderr", "UCX_LOG_LEVEL=error", "UCX_MODULES=cma"}
			return func() (*child, error) { return start(ns, env, python, script, role, strconv.Itoa(largest)) }
		}
		theirs, end, err := pair(nixl(h.A, h.DeviceA, "serve"), nixl(h.B, h.DeviceB, "read"))
		if err != nil {
			return fmt.Errorf("NIXL: %w", err)
		}
		defer end()
		candidates = append(candidates, struct {
			name  string
			child *child
		}{"NIXL", theirs})
	}

	w := os.Stdout
	measure.Header(w, "tcp plane over a veth pair between two network namespaces",
		strings.Join(append([]string{"go run ./bench/tcp"}, os.Args[1:]...), " "), rounds)
	measure.Table(w, "bytes", "tcp READ, GB/s", "quartiles in us", "NIXL READ (UCX tcp), GB/s", "ratio")
	for _, n := range []int64{64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20} {
		var cs []measure.Candidate
		for _, c := range candidates {
			cs = append(cs, measure.Candidate{Name: c.name, Run: func() (time.Duration, error) {
				s, err := c.child.ask(strconv.FormatInt(n, 10))
				if err != nil {
					return 0, err
				}
				sec, err := strconv.ParseFloat(s, 64)
				return time.Duration(sec * 1e9), err
			}})
		}
		res, err := measure.Run(3, rounds, cs)
		if err != nil {
			return err
		}
		lo, hi := res[0].Quartiles()
		cells := []string{
			measure.Size(n), fmt.Sprintf("%.2f", measure.GBs(n, res[0].Median())),
			fmt.Sprintf("%d to %d", lo.Microseconds(), hi.Microseconds()), "not run", "",
		}
		if len(res) > 1 {
			cells[3], cells[4] = fmt.Sprintf("%.2f", measure.GBs(n, res[1].Median())), fmt.Sprintf("%.1f", res[0].Faster(res[1]))
		}
		measure.Row(w, cells...)
	}
	return nil
}

// pair starts a server and a reader, and hands the server's offer on.
func pair(server, reader func() (*child, error)) (*child, func(), error) {
	s, err := server()
	if err != nil {
		return nil, nil, err
	}
	offer, err := s.line()
	if err != nil {
		s.close()
		return nil, nil, fmt.Errorf("the server's offer: %w", err)
	}
	r, err := reader()
	if err != nil {
		s.close()
		return nil, nil, err
	}
	end := func() { r.close(); s.close() }
	if ready, err := r.ask(offer); err != nil || ready != "ready" {
		end()
		return nil, nil, fmt.Errorf("the reader said %q (%v)", ready, err)
	}
	return r, end, nil
}
