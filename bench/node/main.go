// Command node measures what a node costs: its processor time when nothing happens, and its memory and descriptors over a million
// operations of an engine and a thousand peers that come and go. The node is a process of its own.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/child"
	"github.com/tensorferry/tensorferry/bench/internal/measure"
)

const (
	engines    = 2
	peersIdle  = 4
	operations = 1_000_000
	peersGo    = 1000
)

func main() {
	idle := flag.Duration("idle", 20*time.Second, "how long to look at an idle node")
	role := flag.String("role", "", "of a child: node")
	dir := flag.String("dir", "", "of a child")
	flag.Parse()
	var err error
	if *role == "node" {
		err = serve(*dir)
	} else {
		err = run(*idle)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "node:", err)
		os.Exit(1)
	}
}

func run(idle time.Duration) (err error) {
	dir, err := os.MkdirTemp("/dev/shm", "ferry-bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	at := &offer{}
	n, err := child.Start(at, "-role", "node", "-dir", dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	at.pid = n.PID()
	w := os.Stdout
	measure.Title(w, "what a node costs", strings.Join(append([]string{"go run ./bench/node"}, os.Args[1:]...), " "))
	if err := whenIdle(w, at, idle); err != nil {
		return err
	}
	fmt.Fprintf(w, "\n## Under use\n\nMemory is what the process has for itself: the pool is not counted. A reservation that evicts and its commit are two operations.\nEach peer connects, asks for an entry, says that it has read it, and closes its connection.\n\n")
	measure.Table(w, "after", "memory, MiB", "of Go's heap in use, MiB", "descriptors", "threads", "took, s")
	if err := underOperations(w, n, at); err != nil {
		return err
	}
	return underPeers(w, n, at)
}

func whenIdle(w io.Writer, at *offer, d time.Duration) (err error) {
	g, err := connect(at, engines, peersIdle)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	time.Sleep(2 * time.Second) // what follows a connection is over
	before, err := cpuTime(at.pid)
	if err != nil {
		return err
	}
	start := time.Now()
	time.Sleep(d)
	after, err := cpuTime(at.pid)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "## Idle\n\n%d engines and %d peers connected, nothing to do: %.3f%% of a core over %v.\n",
		engines, peersIdle, 100*(after-before).Seconds()/time.Since(start).Seconds(), d)
	return nil
}

// row shows the node as it is now.
func row(w io.Writer, n *child.Child, at *offer, name string, took time.Duration) error {
	u, err := usageOf(n, at.pid)
	if err != nil {
		return err
	}
	measure.Row(w, name, fmt.Sprintf("%.1f", u.anonMiB), fmt.Sprintf("%.1f", u.heapMiB), fmt.Sprint(u.descriptors), fmt.Sprint(u.threads), fmt.Sprintf("%.1f", took.Seconds()))
	return nil
}

func underOperations(w io.Writer, n *child.Child, at *offer) (err error) {
	g, err := connect(at, 1, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	const parts = 5
	for i := range parts {
		start := time.Now()
		if err := g.put(operations / parts / 2); err != nil {
			return err
		}
		if err := row(w, n, at, fmt.Sprintf("%d operations", (i+1)*operations/parts), time.Since(start)); err != nil {
			return err
		}
	}
	return nil
}

func underPeers(w io.Writer, n *child.Child, at *offer) error {
	const parts = 5
	for i := range parts {
		start := time.Now()
		if err := comeAndGo(at, peersGo/parts); err != nil {
			return err
		}
		took := time.Since(start)
		if err := settle(at.pid); err != nil {
			return err
		}
		if err := row(w, n, at, fmt.Sprintf("and %d peers", (i+1)*peersGo/parts), took); err != nil {
			return err
		}
	}
	return nil
}
