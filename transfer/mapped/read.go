package mapped

import (
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/tensorferry/tensorferry/internal/stream"
	"github.com/tensorferry/tensorferry/transfer"
	"github.com/tensorferry/tensorferry/transfer/internal/span"
)

// Sizes that were measured (bench/results/mapped.md). Up to 4 MiB, waking a goroutine on another core, whose cache is cold for
// these bytes, costs more than copying them here. From 8 MiB on a second copier pays, and so do stores past the caches; at
// 4 MiB they win by a third if the bytes are in no cache and lose by a fifth if they are, where a plain copy loses in neither
// case. Pieces bound how late a cancel is noticed.
const (
	inlineBytes   = 4 << 20
	parallelBytes = 8 << 20
	pieceBytes    = 1 << 20
)

// burst counts the bytes of READs that follow one another without a pause of burstPause. Of many small READs at a time the bytes are
// in no cache either (bench/results/pull.md, 200 x 2 MiB).
type burst struct {
	mu    sync.Mutex
	last  time.Time
	bytes int64
}

const burstPause = 5 * time.Millisecond

// add says whether what was read before this READ, in the same burst, is more than a cache holds.
func (b *burst) add(now time.Time, bytes int64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now.Sub(b.last) > burstPause {
		b.bytes = 0
	}
	past := b.bytes >= parallelBytes
	b.last, b.bytes = now, b.bytes+bytes
	return past
}

// read is a READ: pieces that workers take one by one.
type read struct {
	pieces []span.Piece
	copy   func(dst, src []byte)
	next   atomic.Int64
	failed atomic.Pointer[error] // the first reason to stop
	err    error                 // set before done is closed
	done   chan struct{}
}

// newRead makes a READ that copies past the caches, or through them.
func newRead(pieces []span.Piece, past bool) *read {
	r := &read{pieces: pieces, copy: stream.Copy, done: make(chan struct{})}
	if !past {
		r.copy = func(dst, src []byte) { copy(dst, src) }
	}
	return r
}

// run copies with that many goroutines, this one included, and closes done.
func (r *read) run(workers int) {
	var wg sync.WaitGroup
	for range workers - 1 {
		wg.Go(r.work)
	}
	r.work()
	wg.Wait()
	if err := r.failed.Load(); err != nil {
		r.err = *err
	}
	close(r.done)
}

// work takes pieces until there are none. A page that the file no longer has (its owner truncated it) faults: the READ then fails
// and the process lives.
func (r *read) work() {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }:
			r.stop(fmt.Errorf("%w: mapped: fault at %#x: the file was cut short", transfer.ErrPeerLost, p.Addr()))
		default:
			panic(p)
		}
	}()
	for r.failed.Load() == nil {
		i := int(r.next.Add(1)) - 1
		if i >= len(r.pieces) {
			return
		}
		r.copy(r.pieces[i].Dst, r.pieces[i].Src)
	}
}

func (r *read) stop(err error) { r.failed.CompareAndSwap(nil, &err) }

// Done implements transfer.Read.
func (r *read) Done() <-chan struct{} { return r.done }

// Err implements transfer.Read.
func (r *read) Err() error { return r.err }

// Cancel implements transfer.Read. Pieces that are being copied are still finished.
func (r *read) Cancel() { r.stop(fmt.Errorf("mapped: %w", transfer.ErrCanceled)) }
