//go:build !amd64

package region

import "sync/atomic"

// orderLoads keeps loads before it from passing loads after it. sync/atomic has no such fence, and its loads order only what
// follows them; a read-modify-write of a word of our own orders both sides.
func orderLoads() {
	var w uint32
	atomic.AddUint32(&w, 1)
}
