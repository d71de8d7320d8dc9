//go:build !amd64 || race

package region

import "sync/atomic"

// storeWord stores after everything stored before it, and before everything stored after it.
func storeWord(p *uint64, v uint64) { atomic.StoreUint64(p, v) }

// storeWords stores words, in any order, between what was stored before and what is stored after.
func storeWords(to, from []uint64) {
	for i, v := range from {
		atomic.StoreUint64(&to[i], v)
	}
}
