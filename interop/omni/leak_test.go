package omni

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/stage"
	"github.com/tensorferry/tensorferry/tensor"
)

// limitDescriptors is for this process, until the test's end. Agents, which raise their limit to what is allowed, have their own: see
// settings.
func limitDescriptors(t *testing.T, n uint64) {
	t.Helper()
	var old unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: n, Max: old.Max}))
	t.Cleanup(func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old)) })
}

// fewDescriptors is what each of our processes gets by with.
const fewDescriptors = 256

// usage is what one process holds.
type usage struct {
	pid         int
	descriptors int
	rss         int64 // bytes
}

// usages are those of this process and of its agents, by their command lines.
func usages(t *testing.T) map[string]usage {
	t.Helper()
	out := map[string]usage{"test": usageOf(t, os.Getpid())}
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	must(t, err)
	for _, f := range tasks {
		b, _ := os.ReadFile(f) // a thread may be gone
		for _, field := range strings.Fields(string(b)) {
			pid, err := strconv.Atoi(field)
			must(t, err)
			line, err := readProc(pid, "cmdline")
			if err == nil && bytes.Contains(line, []byte("--role")) {
				out[strings.TrimSpace(string(bytes.ReplaceAll(line[bytes.LastIndex(line, []byte("--role")):], []byte{0}, []byte(" "))))] = usageOf(t, pid)
			}
		}
	}
	return out
}

func usageOf(t *testing.T, pid int) usage {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	must(t, err)
	b, err := readProc(pid, "statm")
	must(t, err)
	pages, err := strconv.ParseInt(strings.Fields(string(b))[1], 10, 64)
	must(t, err)
	return usage{pid, len(fds), pages * int64(os.Getpagesize())}
}

const (
	someDescriptors = 8 // such as connections that are kept for the next payload
	someMemory      = 48 << 20
)

// flat compares with what was used before: nothing grows with the number of payloads.
func flat(t *testing.T, before map[string]usage) {
	t.Helper()
	for name, now := range usages(t) {
		was, ok := before[name]
		t.Logf("%s: %d descriptors, then %d; %d KiB, then %d", name, was.descriptors, now.descriptors, was.rss>>10, now.rss>>10)
		if ok && (now.descriptors > was.descriptors+someDescriptors || now.rss > was.rss+someMemory) {
			t.Errorf("%s holds more than it did", name)
		}
	}
}

// same64K is what omni_live.py puts as number i.
func same64K(i int) []byte { return bytes.Repeat([]byte{byte(i % 251)}, 64<<10) }

// O1: there four sockets leak with each get at both ends, and memory is registered anew.
func TestHundredsOfPayloadsFromARealProducerLeaveNothing(t *testing.T) {
	const warm, gets = 20, 300
	s := newSender(t, nil, nil)
	limitDescriptors(t, fewDescriptors)
	e := newOurs(t, settings{getsOnly: true, descriptors: fewDescriptors})
	var before map[string]usage
	for i := range warm + gets {
		if i == warm {
			before = usages(t)
		}
		if i%warm == 0 { // many are pending, so its agent's metadata grows: O11
			if r := s.do(ask{"op": "puts", "key": "k", "first": i, "count": warm, "bytes": 64 << 10}); !r.OK {
				t.Fatal("their put failed")
			}
		}
		got, err := e.Get(patient(t), stage.Request{Key: fmt.Sprint("k", i), From: s.at})
		must(t, err)
		if b := got.Root.(tensor.Tensor).Data(); !bytes.Equal(b, same64K(i)) {
			t.Fatalf("get %d: %d bytes, the first %d", i, len(b), b[0])
		}
		must(t, got.Release())
	}
	e.told()
	flat(t, before)
	s.drained()
}

// A real reader leaves four sockets at our serving agent with each get, for as long as it lives. The agent is replaced before it has
// too many, and what a reader left is gone when the reader is.
func TestAThousandGetsOfRealReadersLeaveNothing(t *testing.T) {
	const (
		readers, gets, batch = 5, 200, 20 // each reader has some 900 descriptors at its end
		enough               = 2500       // for a thousand gets it would take over 4,000
	)
	var all []*peer
	for range readers {
		all = append(all, newReceiver(t, nil))
	}
	limitDescriptors(t, fewDescriptors)
	e := newOurs(t, settings{descriptors: enough})
	before := usages(t)
	at := e.Endpoint()
	for i := 0; i < readers*gets; i += batch {
		var last *stage.Published
		for k := i; k < i+batch; k++ {
			x, err := tensor.New(tensor.Uint8, tensor.Shape{64 << 10}, same64K(k))
			must(t, err)
			last = e.put(fmt.Sprint("k", k), x, stage.PutOptions{})
		}
		g := all[i/gets].do(ask{"op": "gets", "key": "k", "first": i, "count": batch, "endpoint": []any{at.Host, at.Port}})
		if g.Good != batch || g.Size != batch<<16 {
			t.Fatalf("after %d gets: %d of %d came", i, g.Good, batch)
		}
		e.ended(last, stage.Read)
	}
	used := usages(t)
	if serve := used["--role serve"]; serve.pid == before["--role serve"].pid {
		t.Errorf("one agent has served all gets, with %d descriptors", serve.descriptors)
	}
	for _, r := range all {
		r.kill()
	}
	eventually(t, "the agent has let go of the readers", func() bool {
		return usages(t)["--role serve"].descriptors <= before["--role serve"].descriptors+someDescriptors
	})
	flat(t, before)
}

func TestAThousandGetsThatAreCalledOffLeaveNothing(t *testing.T) {
	const (
		warm, aborts = 100, 1000
		longestGet   = 8 * time.Millisecond // more or less
	)
	s := newSender(t, nil, nil)
	limitDescriptors(t, fewDescriptors)
	e := newOurs(t, settings{getsOnly: true, descriptors: fewDescriptors})
	m := s.put("warm", describe(one))
	e.get(stage.Request{Key: "warm", Metadata: m}, describe(one))
	var before map[string]usage
	for i := range warm + aborts {
		if i == warm {
			before = usages(t)
		}
		if i%50 == 0 {
			if r := s.do(ask{"op": "puts", "key": "k", "first": i, "count": 50, "bytes": 4096}); !r.OK {
				t.Fatal("their put failed")
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			got, err := e.Get(ctx, stage.Request{Key: fmt.Sprint("k", i), From: s.at})
			if err == nil {
				err = got.Release()
			}
			done <- err
		}()
		stop := time.AfterFunc(rand.N(longestGet), cancel) // at any step
		<-done
		stop.Stop()
		cancel()
	}
	eventually(t, "nothing is under way", func() bool { return e.Stats().Client.Pending == 0 && e.slab.Used() == 0 })
	st := e.Stats().Client
	t.Logf("%d gets were called off, %d came", st.Canceled, st.OK)
	if st.Canceled < aborts/10 || st.GivenUp > 0 {
		t.Errorf("%d gets were called off; %d claims were given up", st.Canceled, st.GivenUp)
	}
	eventually(t, "no claim is left at the producer", func() bool {
		for _, claims := range s.do(ask{"op": "stat"}).Pending {
			if len(claims) > 0 {
				return false
			}
		}
		return true
	})
	flat(t, before)
	m = s.put("last", describe(two))
	e.get(stage.Request{Key: "last", Metadata: m}, describe(two))
}
