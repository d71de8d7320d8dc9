package tcp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/transfertest"
)

const childBytes = 24 << 20

// TestMain makes the test binary a producer of its own if it is asked to be one.
func TestMain(m *testing.M) {
	if os.Getenv("TCP_TEST_PRODUCER") != "" {
		if err := produce(); err != nil {
			fmt.Fprintln(os.Stderr, "producer:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// produce offers memory until its input ends.
func produce() error {
	p, err := New(context.Background(), Options{Host: os.Getenv("TCP_TEST_HOST")})
	if err != nil {
		return err
	}
	defer p.Close()
	mem := make([]byte, childBytes)
	transfertest.Fill(mem, 77)
	reg, err := p.Register(context.Background(), transfer.Memory{Bytes: mem}, nil)
	if err != nil {
		return err
	}
	token, err := reg.Grant("all", []region.Span{{Length: childBytes}})
	if err != nil {
		return err
	}
	fmt.Println(hex.EncodeToString(reg.Metadata()), hex.EncodeToString(token))
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// producer is a process that offers memory.
type producer struct {
	cmd      *exec.Cmd
	metadata []byte
	token    []byte
}

func startProducer(t *testing.T, host string, wrap ...string) *producer {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	args := append(wrap, self)
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "TCP_TEST_PRODUCER=1", "TCP_TEST_HOST="+host)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if _, err := cmd.StdinPipe(); err != nil { // ends with this process at the latest
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the producer's offer: %v", err)
	}
	m, tok, _ := strings.Cut(strings.TrimSpace(line), " ")
	p := &producer{cmd: cmd}
	if p.metadata, err = hex.DecodeString(m); err != nil {
		t.Fatal(err)
	}
	if p.token, err = hex.DecodeString(tok); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *producer) signal(t *testing.T, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatal(err)
	}
}

func (p *producer) request(dst []byte) transfer.ReadRequest {
	return transfer.ReadRequest{Token: p.token, Remote: []region.Span{{Length: int64(len(dst))}}, Local: [][]byte{dst}}
}

func TestAKilledProducerFailsItsReads(t *testing.T) {
	want := make([]byte, childBytes)
	transfertest.Fill(want, 77)
	for _, after := range []int{0, 1, 3} { // READs before the kill
		prod := startProducer(t, "127.0.0.1")
		consumer := newPlane(t, Options{})
		p, err := consumer.AddPeer(t.Context(), prod.metadata)
		if err != nil {
			t.Fatal(err)
		}
		dst := make([]byte, childBytes)
		for range after {
			if err := outcome(t, p, prod.request(dst)); err != nil || !bytes.Equal(dst, want) {
				t.Fatalf("READ before: %v or wrong bytes", err)
			}
		}
		clear(dst)
		rd, err := p.Read(t.Context(), prod.request(dst))
		if err != nil {
			t.Fatal(err)
		}
		prod.signal(t, syscall.SIGKILL)
		if err := ended(t, rd); err == nil {
			if !bytes.Equal(dst, want) {
				t.Error("success with wrong bytes")
			}
		} else if !errors.Is(err, transfer.ErrPeerLost) {
			t.Errorf("READ: %v", err)
		}
		if err := outcome(t, p, prod.request(dst)); !errors.Is(err, transfer.ErrPeerLost) {
			t.Errorf("READ of a dead producer: %v", err)
		}
		_ = consumer.Close()
	}
}

func TestAFrozenProducerFailsTheReadAndServesAgainWhenItThaws(t *testing.T) {
	prod := startProducer(t, "127.0.0.1")
	consumer := newPlane(t, Options{ProgressTimeout: 300 * time.Millisecond, DialTimeout: 300 * time.Millisecond})
	defer consumer.Close()
	p, err := consumer.AddPeer(t.Context(), prod.metadata)
	if err != nil {
		t.Fatal(err)
	}
	prod.signal(t, syscall.SIGSTOP)
	dst := make([]byte, childBytes)
	if err := outcome(t, p, prod.request(dst)); !errors.Is(err, transfer.ErrPeerLost) {
		t.Errorf("READ of a frozen producer: %v", err)
	}
	prod.signal(t, syscall.SIGCONT)
	transfertest.Eventually(t, "a READ to succeed", func() bool { return outcome(t, p, prod.request(dst)) == nil })
}
