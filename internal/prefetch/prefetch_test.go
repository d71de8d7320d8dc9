package prefetch

import (
	"testing"
	"unsafe"
)

func TestLinesTouchesNothingAndNeverFaults(t *testing.T) {
	mem := make([]byte, 3*Line)
	for n := -1; n < 5; n++ { // also beyond the end, and nothing
		Lines(unsafe.Pointer(&mem[Line-1]), n)
		Lines(nil, n)
	}
	for i, b := range mem {
		if b != 0 {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
}
