package mapped

import (
	"unsafe"

	"golang.org/x/sys/cpu"
)

// streamBlock is what one round of the assembly copies: four pages.
const streamBlock = 4 * 4096

//go:noescape
func streamBlocks(dst, src *byte, blocks uintptr)

// streamCopy copies src to dst, which is as long, past the caches.
func streamCopy(dst, src []byte) {
	if lead := int(-uintptr(unsafe.Pointer(&dst[0])) & 63); lead > 0 {
		lead = copy(dst[:min(lead, len(dst))], src)
		dst, src = dst[lead:], src[lead:]
	}
	if blocks := len(dst) / streamBlock; blocks > 0 && cpu.X86.HasAVX2 {
		streamBlocks(&dst[0], &src[0], uintptr(blocks))
		dst, src = dst[blocks*streamBlock:], src[blocks*streamBlock:]
	}
	copy(dst, src)
}
