// Package nixl is a Go binding of NIXL, NVIDIA's library for moving memory between processes and machines, through its C ABI
// (libnixl_capi). It knows nothing of the rest of this module and can be used alone.
//
// The library is opened at run time: a program that imports this package builds without any header and starts without the library;
// Load says what is missing. The shared library ships in the Python wheels nixl-cu12 and nixl-cu13. Versions 1.3 and 1.5 are known
// to work; which calls are there is found out by symbol. In a module of its own, on Linux of 64 bits, with or without cgo:
//
//	go get github.com/tensorferry/tensorferry/nixl
//	pip install nixl     # into the venv that is active when the program runs
//
// The order of use is Load, Library.NewAgent, CreateBackend, Register, LocalMetadata on the side that is read; the same plus AddPeer,
// NewRequest, Post, Wait, Release on the side that reads. A READ may carry a notification, which Notifications returns at the other side.
//
// # What travels between the two sides
//
// NIXL has no channel of its own for it: the program sends it by any it has. A reader needs the agent's metadata (LocalMetadata), as bytes that
// it hands to AddPeer, and the place of what it is to read: the MemoryType, and Range.Addr, Len and Device as they are in the process
// that is read. This package gives no address out of metadata. Metadata made before a Register does not cover what that registered: a
// request that names it fails at NewRequest until newer metadata was added.
//
// # Finding the library
//
// Load takes the file that WithPath names, or else the one that the environment variable NIXL_CAPI_LIB names. If neither does, it looks
// in the active Python venv (VIRTUAL_ENV), in the user's site-packages (below HOME/.local), in the system's site-packages and in a few
// system folders, in that order, and takes the first that it can use. Find lists them; Library.Why says which was taken, and why others were not.
//
// # Errors
//
// They wrap one of these, and say what failed: ErrNotFound and ErrUnsupported of Load; ErrBadArgument for what was refused before it reached
// the library, the value in the text; ErrClosed for what is closed or released; ErrStalePeer for what has to be made anew; context errors of
// Request.Wait; or a Status, which is the library's own answer, found by errors.As. A Status tells little (1.3 gives StatusBackend
// for nearly everything): the library prints the reason on stderr. Unless it says otherwise, each method of an agent, and of what belongs to one,
// gives ErrClosed after Agent.Close, ErrUnsupported if the library lacks the call, and else the Status of that call.
//
// # Environment
//
// UCX, below NIXL, is configured by environment variables that it reads when it is loaded. Load sets those of Environment before, unless
// they are set already (to nothing counts too), for the whole process. What an operator sets otherwise, such as UCX_TLS and
// UCX_NET_DEVICES, is UCX's own matter. NIXL_LOG_LEVEL, too, has to be set before Load.
//
// UCX_MODULES, which Load sets on machines without RDMA devices, is "all", or names of modules with commas, or ^ and the names of those that are
// not to be loaded. A module's name is that of its file, libuct_NAME.so in the wheel's folder nixl_cu12.libs/ucx or nixl_cu13.libs/ucx: ib,
// ib_efa, ib_mlx5, rdmacm, cma, cuda and so on.
//
// # Rules that the C library sets
//
//   - Memory is named by address. What is registered or used as a destination must lie outside the Go heap (mmap, C, a device), and must
//     stay mapped until the registration is closed and every request that writes it is settled (Request.Settled).
//   - Memory that was registered is unmapped by Library.Unmap, which is libc's munmap, and not by a plain system call (unix.Munmap,
//     syscall.Munmap): UCX caches what it knows of memory and watches libc for its end.
//   - Releasing a request that is in progress does not stop it: its destination may still be written. Only closing the agent stops it. So
//     it is after an error of a request of several ranges, and after Peer.Close.
//   - A peer that froze leaves a request in progress for ever: deadlines are the caller's (Request.Wait takes a context).
//   - A request or list is bound to what the library knew when it was made. This package refuses to post it once the peer was replaced or
//     lost (ErrStalePeer) or its local memory withdrawn (ErrClosed), where the library would use what it has freed.
//   - Nothing tells of notifications: poll Agent.Notifications, often while one is expected.
//   - Some failures of UCX end the process. A program that must live runs its agents in a process of their own.
//
// # Security
//
// There is none in NIXL. Whoever can reach an agent, or knows its metadata, can read any address of its process, registered or not, and
// write what is mapped for writing: metadata can be forged, and UCX listens on every interface without authentication. A READ of what is not
// mapped can end the process that is read. So an agent belongs in a process that holds nothing but what may be read, on a network that is
// trusted, and memory that must not be written is mapped read-only.
//
// Foreign metadata is checked field by field before the library sees it (see AddPeer): its framing, the counts and lengths of its lists, and
// the lengths in UCX's keys. What cannot be checked is UCX's own: a connection's address, and the content of a key. UCX reads these
// without being told their length, and damaged ones can end the process. Load metadata of strangers only in a process of its own.
//
// # Prepared lists
//
// A transfer of many small ranges costs mostly the making of its request. Agent.Prepare checks a list of ranges once, one of own memory and
// one of a peer's; Agent.NewPreparedRequest makes requests from them by index.
//
// # Device memory
//
// VRAM is registered and read like DRAM, by device address, with Range.Device the CUDA device's number and MemoryType VRAM; UCX needs its
// CUDA modules, which the wheels have. A CUDA context is current for a thread: keep the goroutine that registers and posts on one
// (runtime.LockOSThread), with the context of the memory. Either side may be VRAM.
//
// # Concurrency
//
// Methods are safe for concurrent use with SyncStrict, the default of AgentConfig: a call that runs while what it uses is closed or released
// ends first, and the C object lives until then; later calls return ErrClosed. AddPeer, Peer.Close, Registration.Close and Agent.Close wait
// for calls under way on their agent, and others wait for them. With SyncOneOwner all calls on an agent must come one after the other.
// Nothing here keeps a Go pointer in C, and every C object is freed.
package nixl
