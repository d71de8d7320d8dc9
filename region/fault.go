package region

import "runtime/debug"

// guarded calls f, which reads what another process owns. False: a page is not there any more, since somebody cut the file. That is a
// fault of the memory and would end the process. An owner does not guard its own: without its table it can only start anew.
func guarded(f func()) (ok bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		switch p := recover().(type) {
		case nil:
		case interface{ Addr() uintptr }: // of runtime errors, those about a fault
			ok = false
		default:
			panic(p)
		}
	}()
	f()
	return true
}
