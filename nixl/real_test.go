package nixl

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// library is the real one, from the venv that PEERS_PYTHON belongs to or from where Load finds it; without it the test is skipped.
func library(t testing.TB) *Library {
	t.Helper()
	var opts []Option
	if python := os.Getenv("PEERS_PYTHON"); python != "" {
		if m, _ := filepath.Glob(filepath.Join(filepath.Dir(filepath.Dir(python)), "lib/python3*/site-packages", wheelFile)); len(m) > 0 {
			opts = append(opts, WithPath(m[len(m)-1]))
		}
	}
	l, err := Load(opts...)
	if err != nil {
		t.Skipf("the real NIXL is not here: %v", err)
	}
	return l
}

func mapped(t testing.TB, n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	return b
}

func TestReadMovesBytesAndNotifies(t *testing.T) {
	l := library(t)
	t.Logf("NIXL %s at %s", l.Version, l.Path)
	source, destination := mapped(t, 1<<20), mapped(t, 1<<20)
	for i := range source {
		source[i] = byte(i * 7)
	}
	producer, err := l.NewAgent("producer", AgentConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { producer.Close() })
	consumer, err := l.NewAgent("consumer", AgentConfig{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { consumer.Close() })
	for _, a := range []*Agent{producer, consumer} {
		if _, err := a.CreateBackend("UCX", nil); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := producer.Register(DRAM, []Range{RangeOf(source)}); err != nil {
		t.Fatal(err)
	}
	if _, err := consumer.Register(DRAM, []Range{RangeOf(destination)}); err != nil {
		t.Fatal(err)
	}
	md, err := producer.LocalMetadata()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%q", md)
	peer, err := consumer.AddPeer(md)
	if err != nil {
		t.Fatal(err)
	}
	if peer.Name() != "producer" {
		t.Fatalf("peer is called %q", peer.Name())
	}
	r, err := consumer.NewRequest(Read, Descs{DRAM, []Range{RangeOf(destination)}}, Descs{DRAM, []Range{RangeOf(source)}}, peer, RequestOptions{Notification: []byte("s:h")})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := r.Post(); err != nil {
		t.Fatal(err)
	}
	if err := r.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(source, destination) {
		t.Fatal("bytes differ")
	}
	r.Release()
	r.Release()
	for {
		n, err := producer.Notifications()
		if err != nil {
			t.Fatal(err)
		}
		if len(n) == 1 && n[0].Peer == "consumer" && string(n[0].Message) == "s:h" {
			break
		}
		if ctx.Err() != nil {
			t.Fatalf("notifications: %v", n)
		}
	}
}
