package nixl

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
)

// selfTestBytes is enough for a READ of the kind that entries are read by.
const selfTestBytes = 1 << 20

// SelfTest has the plane serve random bytes and read them by its own fetch agent, which it starts if there is none. ctx bounds it.
func (p *Plane) SelfTest(ctx context.Context) error {
	m, free, err := testMemory(p.Unmap)
	if err != nil {
		return err
	}
	defer free()
	reg, err := p.Register(ctx, m, nil)
	if err != nil {
		return err
	}
	defer func() { _ = reg.Close() }() // gives nil
	peer, err := p.AddPeer(ctx, reg.Metadata())
	if err != nil {
		return fmt.Errorf("add the agent that serves: %w", err)
	}
	defer func() { _ = peer.Close() }() // gives nil
	got := make([]byte, selfTestBytes)
	rd, err := peer.Read(ctx, transfer.ReadRequest{Remote: []region.Span{{Length: selfTestBytes}}, Local: [][]byte{got}})
	if err != nil {
		return fmt.Errorf("READ: %w", err)
	}
	select {
	case <-rd.Done():
	case <-ctx.Done():
		return fmt.Errorf("READ of %d bytes: %w", selfTestBytes, ctx.Err())
	}
	if err := rd.Err(); err != nil {
		return fmt.Errorf("READ: %w", err)
	}
	if !bytes.Equal(got, m.Bytes) {
		return fmt.Errorf("%w: nixl: a READ of %d bytes that succeeded has other bytes", transfer.ErrPeerLost, selfTestBytes)
	}
	return nil
}

// testMemory is shared memory with random bytes.
func testMemory(unmap func([]byte) error) (m transfer.Memory, free func(), err error) {
	fd, err := unix.MemfdCreate("ferry-nixl-selftest", unix.MFD_CLOEXEC)
	if err != nil {
		return m, nil, fmt.Errorf("nixl: memory for the self-test: %w", err)
	}
	f := os.NewFile(uintptr(fd), "ferry-nixl-selftest")
	if err = unix.Ftruncate(fd, selfTestBytes); err == nil {
		m.Bytes, err = unix.Mmap(fd, 0, selfTestBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		_ = f.Close()
		return m, nil, fmt.Errorf("nixl: memory for the self-test: %w", err)
	}
	_, _ = rand.Read(m.Bytes) // never fails
	m.File, m.Path = f, f.Name()
	return m, func() {
		_ = unmap(m.Bytes)
		_ = f.Close()
	}, nil
}
