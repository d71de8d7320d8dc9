package main

import (
	"bufio"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/region"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/tcp"
)

// serve offers a region of the largest size, whose every MiB has another value, and waits for the end of its input.
func serve(host string) error {
	ctx := context.Background()
	dir, err := os.MkdirTemp("/dev/shm", "ferry-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	r, err := region.Create(ctx, region.Options{
		Dir: dir, Identity: region.Identity{Instance: "bench", Group: "0"}, Geometry: region.Geometry{BlockBytes: 1 << 20, Blocks: largest >> 20},
	})
	if err != nil {
		return err
	}
	defer r.Close(true)
	pool := r.Pool()
	for i := range pool {
		pool[i] = value(i)
	}
	f, err := r.Reopen(false)
	if err != nil {
		return err
	}
	defer f.Close()
	plane, err := tcp.New(ctx, tcp.Options{Host: host})
	if err != nil {
		return err
	}
	defer plane.Close()
	offer, err := plane.Register(ctx, transfer.Memory{Bytes: pool, File: f, Path: r.Path(), FileOffset: r.PoolOffset()}, func(transfer.Notification) {})
	if err != nil {
		return err
	}
	defer offer.Close()
	token, err := offer.Grant("bench", []region.Span{{Length: largest}})
	if err != nil {
		return err
	}
	fmt.Println(hex.EncodeToString(offer.Metadata()), hex.EncodeToString(token))
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func value(i int) byte { return byte(i>>20%251) + 1 }

// read takes serve's line, then READs as many bytes as each line says, into shared memory, and prints the seconds that it took.
func read(host string, streams int) error {
	ctx := context.Background()
	in := bufio.NewScanner(os.Stdin)
	in.Scan()
	m, t, _ := strings.Cut(in.Text(), " ")
	metadata, err := hex.DecodeString(m)
	if err != nil {
		return err
	}
	token, err := hex.DecodeString(t)
	if err != nil {
		return err
	}
	dst, err := destination()
	if err != nil {
		return err
	}
	plane, err := tcp.New(ctx, tcp.Options{Host: host, Streams: streams})
	if err != nil {
		return err
	}
	defer plane.Close()
	peer, err := plane.AddPeer(ctx, metadata)
	if err != nil {
		return err
	}
	defer peer.Close()
	fmt.Println("ready")
	for in.Scan() {
		n, err := strconv.ParseInt(in.Text(), 10, 64)
		if err != nil {
			return err
		}
		start := time.Now()
		rd, err := peer.Read(ctx, transfer.ReadRequest{
			Token: token, Remote: []region.Span{{Length: n}}, Local: [][]byte{dst[:n]}, Notification: []byte("done"),
		})
		if err != nil {
			return err
		}
		<-rd.Done()
		took := time.Since(start)
		if rd.Err() != nil {
			return rd.Err()
		}
		for i := 0; i < int(n); i += 4096 {
			if dst[i] != value(i) {
				return fmt.Errorf("byte %d of %d is wrong", i, n)
			}
		}
		fmt.Println(took.Seconds())
	}
	return in.Err()
}

func destination() ([]byte, error) {
	dir, err := os.MkdirTemp("/dev/shm", "ferry-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	f, err := os.Create(filepath.Join(dir, "destination"))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(largest); err != nil {
		return nil, err
	}
	return unix.Mmap(int(f.Fd()), 0, largest, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
}
