//go:build !amd64

package mapped

// streamCopy copies src to dst, which is as long.
func streamCopy(dst, src []byte) { copy(dst, src) }
