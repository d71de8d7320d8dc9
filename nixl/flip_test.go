package nixl

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// flipChild, in the environment of this test binary, makes it a process that loads damaged metadata: "FIRST STEP CHECK ADDRESS HEX".
const flipChild = "NIXL_TEST_FLIP"

// flipAll, in the environment of the test, is what it does with each byte of the metadata, not a sample: "checked", or "unchecked" to
// let the library see what this package would refuse.
const flipAll = "NIXL_TEST_FLIP_ALL"

// flipped is metadata with one byte changed, for i from 0; nil past the end. The agent's name is another for each i.
func flipped(md []byte, name string, i int) []byte {
	to := fmt.Sprintf("flipped-%06d", i)
	b := renamed(md, name, to)
	at := len(appendField([]byte(metadataMark), "Agent", []byte(to))) + i/2
	if at >= len(b) {
		return nil
	}
	b[at] ^= [2]byte{0x01, 0xff}[i%2]
	return b
}

func TestFlippedMetadataChild(t *testing.T) {
	var first, step int
	var check string
	var address uintptr
	var text string
	if n, _ := fmt.Sscanf(os.Getenv(flipChild), "%d %d %s %d %s", &first, &step, &check, &address, &text); n != 5 {
		t.Skip("only in a process that TestFlippedMetadataHarmsOnlyItsReader starts")
	}
	md, err := hex.DecodeString(text)
	must(t, err)
	name, err := AgentName(md)
	must(t, err)
	l := realLibrary(t)
	a, err := l.NewAgent(fmt.Sprint("flip-", os.Getpid()), AgentConfig{})
	must(t, err)
	_, err = a.CreateBackend("UCX", nil)
	must(t, err)
	memory := mapped(t, 4096)
	_, err = a.Register(DRAM, []Range{RangeOf(memory)})
	must(t, err)
	if check == "unchecked" {
		a.layout = layout{known: true}
	}
	for i := first; ; i += step {
		bad := flipped(md, name, i)
		if bad == nil {
			fmt.Println("FLIP end")
			os.Exit(0) // the agent has seen too much to be closed
		}
		fmt.Println("FLIP try", i)
		fmt.Println("FLIP", tryFlipped(a, bad, memory, address))
	}
}

func tryFlipped(a *Agent, md, memory []byte, address uintptr) string {
	peer, err := a.AddPeer(md)
	switch {
	case errors.Is(err, ErrBadArgument):
		return "refused"
	case err != nil:
		return "error"
	}
	r, err := a.NewRequest(Read, Descs{DRAM, []Range{RangeOf(memory)}}, Descs{DRAM, []Range{{Addr: address, Len: 4096}}}, peer, RequestOptions{})
	if err != nil {
		return "loaded, no request"
	}
	done, err := r.Post()
	if err == nil && !done {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		err = r.Wait(ctx)
	}
	if err != nil {
		return "loaded, no READ"
	}
	r.Release()
	_ = peer.Close()
	return "read"
}

// Whatever bytes of foreign metadata are damaged, the process that loads it gets an error or ends: the one that it is of goes on.
func TestFlippedMetadataHarmsOnlyItsReader(t *testing.T) {
	l := realLibrary(t)
	p := world{library: l}.pair(t, 4096)
	md, err := p.producer.LocalMetadata()
	must(t, err)
	check, step := os.Getenv(flipAll), 1
	if check == "" {
		check, step = "checked", 23
	}
	outcomes := map[string]int{}
	tried := 0
	for first := 0; first >= 0; {
		first = flipRun(t, fmt.Sprintf("%d %d %s %d %x", first, step, check, RangeOf(p.source).Addr, md), func(outcome string) {
			outcomes[outcome]++
			tried++
		}, step)
	}
	t.Logf("%d flips, %s: %v", tried, check, outcomes)
	if outcomes["refused"] == 0 || outcomes["read"] == 0 {
		t.Errorf("outcomes of %d flips: %v", tried, outcomes)
	}
	r, err := p.read(0, 4096, RequestOptions{})
	must(t, err)
	defer r.Release()
	must(t, run(t, r))
}

// flipRun tries flips in one child until it is through (-1) or ends; then it gives the one to go on with.
func flipRun(t *testing.T, what string, tell func(outcome string), step int) int {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c := exec.CommandContext(ctx, os.Args[0], "-test.run", "^TestFlippedMetadataChild$")
	c.Env = append(os.Environ(), flipChild+"="+what)
	out, err := c.StdoutPipe()
	must(t, err)
	must(t, c.Start())
	hung := time.AfterFunc(20*time.Second, cancel)
	defer hung.Stop()
	at := -2
	for lines := bufio.NewScanner(out); lines.Scan(); {
		text, ok := strings.CutPrefix(lines.Text(), "FLIP ")
		if !ok {
			continue
		}
		hung.Reset(20 * time.Second)
		if n, ok := strings.CutPrefix(text, "try "); ok {
			at, err = strconv.Atoi(n)
			must(t, err)
			continue
		}
		if text == "end" {
			_ = c.Wait()
			return -1
		}
		tell(text)
	}
	if at < 0 {
		t.Fatalf("the child did not begin: %v", c.Wait())
	}
	outcome := "crash"
	if ctx.Err() != nil {
		outcome = "hung"
	}
	tell(outcome)
	t.Logf("flip %d: %s", at, outcome)
	_ = c.Wait()
	return at + step
}
