//go:build !race

package region

// amd64 makes plain stores visible in program order, and 8 aligned bytes at once; readers load with sync/atomic. The atomic
// stores of Go also wait until other processors have seen them, which nobody here needs, and which takes longer than the rest of
// Fill. The functions are not inlined, so that the compiler neither drops nor moves a store.

// storeWord stores after everything stored before it, and before everything stored after it.
//
//go:noinline
func storeWord(p *uint64, v uint64) { *p = v }

// storeWords stores words, in any order, between what was stored before and what is stored after.
//
// It goes word by word, as from was written: what copy loads in larger pieces the processor can take only from memory, once all
// stores before that are done.
//
//go:noinline
func storeWords(to, from []uint64) {
	to = to[:len(from)]
	for i, w := range from {
		to[i] = w
	}
}
