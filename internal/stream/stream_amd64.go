// Package stream copies past the caches: large copies are faster so, and leave in the caches what is there.
package stream

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// blockBytes is what one round of the assembly copies: four pages.
const blockBytes = 4 * 4096

//go:noescape
func copyBlocks(dst, src *byte, blocks uintptr)

// Copy copies src to dst, which is as long, past the caches.
func Copy(dst, src []byte) {
	if lead := int(-uintptr(unsafe.Pointer(&dst[0])) & 63); lead > 0 {
		lead = copy(dst[:min(lead, len(dst))], src)
		dst, src = dst[lead:], src[lead:]
	}
	if blocks := len(dst) / blockBytes; blocks > 0 && cpu.X86.HasAVX2 {
		copyBlocks(&dst[0], &src[0], uintptr(blocks))
		dst, src = dst[blocks*blockBytes:], src[blocks*blockBytes:]
	}
	copy(dst, src)
}
