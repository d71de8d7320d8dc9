// Package memcpy is libc's memcpy, the limit that copies are compared with.
package memcpy

// #include <string.h>
import "C"

import "unsafe"

// Copy copies len(src) bytes into dst, which must be as long.
func Copy(dst, src []byte) {
	_ = dst[:len(src)]
	C.memcpy(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), C.size_t(len(src)))
}
