package region

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"

	"github.com/zeebo/xxh3"
	"golang.org/x/sys/unix"
)

// childHold DIR: owns a region, then does what the lines say: "remove" or "keep" close it.
func childHold(args []string) {
	in := bufio.NewScanner(os.Stdin)
	r := must(Create(context.Background(), smallOptions(args[0])))
	fmt.Println(r.Path())
	for in.Scan() {
		must(0, r.Close(in.Text() == "remove"))
		fmt.Println("closed")
	}
}

// childParent DIR: owns a region and starts a child of its own that attaches it and goes on when this process is gone, until
// stdin ends.
func childParent(args []string) {
	r := must(Create(context.Background(), smallOptions(args[0])))
	cmd := exec.Command(os.Args[0], "r")
	cmd.Env = append(os.Environ(), childEnv+"=attach")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.ExtraFiles = []*os.File{must(r.Reopen(true))}
	must(0, cmd.Start())
	must(0, cmd.Wait())
}

// childCreate DIR: stands in the middle of Create until a line comes.
func childCreate(args []string) {
	k := kernelCalls
	k.populate = func([]byte) error {
		fmt.Println("creating")
		_, err := os.Stdin.Read(make([]byte, 1))
		return err
	}
	must(create(context.Background(), smallOptions(args[0]), k))
}

// childRace DIR: a line is the instance to create; then "close" closes it if it was won.
func childRace(args []string) {
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		o := smallOptions(args[0])
		o.Identity.Instance = in.Text()
		r, err := Create(context.Background(), o)
		switch {
		case err == nil:
			fmt.Println("won")
		case errors.Is(err, ErrInUse):
			fmt.Println("in use")
		default:
			fmt.Println(err)
		}
		if !in.Scan() {
			return
		}
		if r != nil {
			must(0, r.Close(true))
		}
		fmt.Println("closed")
	}
}

var entriesGeometry = Geometry{BlockBytes: 256, Blocks: 512, Slots: 64}

func entriesOptions(dir string) Options {
	o := smallOptions(dir)
	o.Geometry = entriesGeometry
	return o
}

// childEntries DIR SEED: fills, readies and frees slots as fast as it can, and writes a byte now and then.
func childEntries(args []string) {
	r := must(Create(context.Background(), entriesOptions(args[0])))
	rnd := rand.New(rand.NewPCG(must(strconv.ParseUint(args[1], 10, 64)), 0))
	table, pool, alloc := r.Slots(), r.Pool(), NewAllocator(r.Geometry().Blocks)
	held := make([][]Extent, table.Len())
	for n := 0; ; n++ {
		i := rnd.IntN(table.Len())
		if held[i] != nil {
			table.Free(i)
			must(0, alloc.Free(held[i]))
			held[i] = nil
		}
		blocks := 1 + rnd.IntN(16)
		e, ok := alloc.Alloc(blocks, MaxExtents)
		if !ok {
			continue
		}
		held[i] = e
		s := Slot{
			Key: fmt.Sprintf("key-%d-%d", n, blocks), Dtype: "torch.bfloat16", Shape: []int64{int64(blocks), 128},
			Bytes: int64(blocks) * 256, Extents: e, Owner: uint64(n),
		}
		gen := must(table.Fill(i, &s))
		for _, x := range e {
			b := pool[int64(x.Start)*256:][:int64(x.Count)*256]
			for k := range b {
				b[k] = byte(gen)
			}
		}
		if n%8 != 0 { // the others stay as they are until their slot is drawn again
			table.Ready(i, extentsSum(pool, e, s.Bytes), true)
		}
		if n%32 == 0 {
			os.Stdout.Write([]byte{'.'})
		}
	}
}

// extentsSum is the checksum of an entry's bytes in childEntries' geometry.
func extentsSum(pool []byte, e []Extent, n int64) uint64 {
	h := xxh3.New()
	for _, x := range e {
		b := pool[int64(x.Start)*256:][:int64(x.Count)*256]
		h.Write(b[:min(int64(len(b)), n)])
		n -= int64(len(b))
	}
	return h.Sum64()
}

// childAttach r|w: attaches descriptor 3. A line "sum" prints the checksum of the pool, any other fills it with its first byte.
func childAttach(args []string) {
	f := os.NewFile(3, "region")
	m := must(Attach(f, args[0] == "w"))
	f.Close()
	fmt.Println("attached")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		if in.Text() != "sum" {
			for i := range m.Pool() {
				m.Pool()[i] = in.Text()[0]
			}
		}
		fmt.Println(xxh3.Hash(m.Pool()))
	}
}

// childRlimit DIR: creates, then only asks, under a limit on file sizes of 64 KiB, whose signal would end it.
func childRlimit(args []string) {
	must(0, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 64 << 10, Max: 64 << 10}))
	_, err := Create(context.Background(), smallOptions(args[0]))
	var space *SpaceError
	fmt.Println(errors.As(err, &space), err)
	_, err = CheckSpace(args[0], smallOptions(args[0]).Geometry)
	fmt.Println(errors.As(err, &space), err)
}
