// Package nixl is a Go binding of NIXL, NVIDIA's library for moving memory between processes and machines, through its C ABI
// (libnixl_capi). It knows nothing of the rest of this module and can be used alone.
//
// The library is opened at run time: a program that imports this package builds without any header and starts without the library;
// Load says what is missing. The shared library ships in the Python wheels nixl-cu12 and nixl-cu13. Versions 1.3 and 1.5 are known
// to work; which calls are there is found out by symbol.
//
// The order of use is Load, NewAgent, CreateBackend, Register, LocalMetadata on the side that is read; the same plus AddPeer, Read,
// Post, Wait, Release on the side that reads. A READ may carry a notification, which Notifications returns at the other side.
//
// # Rules that the C library sets
//
//   - Memory is named by address. What is registered or used as a destination must lie outside the Go heap (mmap, C, a device), and must
//     stay mapped until the registration is closed and every request that writes it has reached a terminal status.
//   - Releasing a request that is in progress does not stop it: its destination may still be written. Only closing the agent stops it.
//   - The source is not protected. Whoever knows an agent's metadata can read, and write, what it registered.
//   - A peer that froze leaves a request in progress for ever: deadlines are the caller's (Request.Wait takes a context).
//   - Some failures of UCX end the process. A program that must live runs its agents in a process of their own.
//
// All methods are safe for concurrent use; agents are created with NIXL's strict thread synchronization. Nothing here keeps a Go
// pointer in C, every C object is freed, and methods called after Close or Release return ErrClosed.
package nixl
