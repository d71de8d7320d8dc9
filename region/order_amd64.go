package region

// orderLoads keeps loads before it from passing loads after it. The processor does not reorder loads, and the compiler moves none
// over an atomic operation.
func orderLoads() {}
