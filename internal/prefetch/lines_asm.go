//go:build amd64 || arm64

package prefetch

import "unsafe"

// Lines asks for n lines, the first of them the one that p points into.
//
//go:noescape
func Lines(p unsafe.Pointer, n int)
