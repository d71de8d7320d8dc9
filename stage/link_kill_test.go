package stage

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// The environment of a process that gets a payload in place and holds it until it is killed.
const (
	readerDir      = "STAGE_TEST_READER_DIR" // for its slab
	readerMetadata = "STAGE_TEST_READER_METADATA"
)

// TestReaderProcess is no test: it is that process.
func TestReaderProcess(t *testing.T) {
	dir := os.Getenv(readerDir)
	if dir == "" {
		return
	}
	metadata, err := hex.DecodeString(os.Getenv(readerMetadata))
	if err != nil {
		t.Fatal(err)
	}
	l, err := NewLink(t.Context(), LinkOptions{Slab: slabIn(t, dir, "reader", 1<<20)})
	if err != nil {
		t.Fatal(err)
	}
	got := mustGet(t, l, Request{Key: "k", Metadata: metadata, InPlace: true})
	fmt.Println(got.Plane)
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends, if it does not kill this process
}

func TestAKilledReadersClaimEndsAndThePayloadStays(t *testing.T) {
	from := newLink(t, 16<<20)
	v := bytesOf(t, 100_000, 1)
	p := mustPut(t, from, "k", v, PutOptions{})
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestReaderProcess$")
	cmd.Env = append(os.Environ(), readerDir+"="+filepath.Dir(t.TempDir()), readerMetadata+"="+hex.EncodeToString(p.Metadata))
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if plane, err := bufio.NewReader(out).ReadString('\n'); err != nil || plane != "mapped\n" {
		t.Fatalf("it read by %q, %v", plane, err)
	}
	receive(t, p.Claimed())
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	eventually(t, "its claim ends", func() bool { return from.Stats().Store.Lapsed == 1 })
	consume(t, newLink(t, 16<<20, onlyGets), Request{Key: "k", Metadata: p.Metadata}, v)
	if receive(t, p.Released()); p.Outcome() != Read {
		t.Errorf("outcome %d", p.Outcome())
	}
	idle(t, from)
}
