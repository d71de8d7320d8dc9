package main

import (
	"errors"
	"os"
	"runtime"
	"sync"

	"github.com/tensorferry/tensorferry/bench/internal/memcpy"
	"github.com/tensorferry/tensorferry/region"
)

// copier is the limit of large pulls over mapped: libc's memcpy, one thread a core, between the very pages that the nodes use.
type copier struct {
	from, to *region.Mapping
	work     chan [2][]byte
	done     sync.WaitGroup
}

// copyPiece is what a thread copies at a time.
const copyPiece = mib

func newCopier(from, to string) (c *copier, err error) {
	c = &copier{work: make(chan [2][]byte)}
	if c.from, err = attach(from, false); err != nil {
		return nil, err
	}
	if c.to, err = attach(to, true); err != nil {
		return nil, errors.Join(err, c.from.Close())
	}
	for range runtime.GOMAXPROCS(0) {
		go func() {
			for p := range c.work {
				memcpy.Copy(p[0], p[1])
				c.done.Done()
			}
		}()
	}
	return c, nil
}

func (c *copier) copy(moves []move) {
	to, from := c.to.Pool(), c.from.Pool()
	for _, m := range moves {
		for at := int64(0); at < m.bytes; at += copyPiece {
			n := min(copyPiece, m.bytes-at)
			c.done.Add(1)
			c.work <- [2][]byte{to[m.to+at:][:n], from[m.from+at:][:n]}
		}
	}
	c.done.Wait()
}

func (c *copier) close() error {
	close(c.work)
	return errors.Join(c.from.Close(), c.to.Close())
}

// attach maps a node's region.
func attach(path string, writable bool) (*region.Mapping, error) {
	mode := os.O_RDONLY
	if writable {
		mode = os.O_RDWR
	}
	f, err := os.OpenFile(path, mode, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return region.Attach(f, writable)
}
