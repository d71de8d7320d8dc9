package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/tensorferry/tensorferry/bench/internal/child"
)

// cpuTime is the processor time, to the nanosecond, of the threads that a process has now.
func cpuTime(pid int) (time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		return 0, err
	}
	total := time.Duration(0)
	for _, t := range threads {
		b, err := os.ReadFile(t)
		if err != nil {
			return 0, err
		}
		ran, _, _ := strings.Cut(string(b), " ")
		ns, err := strconv.ParseInt(ran, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%s: %q: %w", t, b, err)
		}
		total += time.Duration(ns)
	}
	return total, nil
}

// usage is what a process has.
type usage struct {
	anonMiB, heapMiB     float64
	descriptors, threads int
}

func usageOf(n *child.Child, pid int) (u usage, err error) {
	heap, err := n.Ask("heap")
	if err != nil {
		return u, err
	}
	bytes, err := strconv.ParseUint(strings.TrimSpace(heap), 10, 64)
	if err != nil {
		return u, err
	}
	u.heapMiB = float64(bytes) / (1 << 20)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return u, err
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimSuffix(strings.TrimSpace(value), " kB")
		switch name {
		case "RssAnon":
			kib, _ := strconv.Atoi(value)
			u.anonMiB = float64(kib) / 1024
		case "Threads":
			u.threads, _ = strconv.Atoi(value)
		}
	}
	u.descriptors, err = descriptors(pid)
	return u, err
}

func descriptors(pid int) (int, error) {
	d, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	return len(d), err
}

// settle waits until the node has closed what peers left: its number of descriptors has not changed for a second.
func settle(pid int) error {
	deadline := time.Now().Add(timeout)
	last, since := -1, time.Now()
	for time.Now().Before(deadline) {
		n, err := descriptors(pid)
		if err != nil {
			return err
		}
		if n != last {
			last, since = n, time.Now()
		}
		if time.Since(since) > time.Second {
			return nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	return fmt.Errorf("the node's descriptors do not settle: %d", last)
}
