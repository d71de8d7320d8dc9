// Package nixl is the data plane over NIXL (UCX and whatever other backends it has: RDMA, NVLink, TCP, shared memory). It is the
// plane that unmodified vLLM engines speak: a registration also serves as the remote agent of such a peer (Agent), and AddPlainPeer
// reads from one.
//
// # Agents
//
// A plane has one agent that reads, the fetch agent, and each registration has one that serves. Each incarnation of an agent has a
// name of its own. With Options.Command the agents run in processes of their own, which the plane starts and supervises; else in
// this process. UCX can crash its process, cannot cancel, and shows the address space of its process to every peer, so a program
// that must live gives them their own.
//
//   - A fetch agent that dies costs the READs in flight, which fail with transfer.ErrPeerLost. The next one starts on demand. Peers that
//     it was adding or reading from are tried one at a time then, and one at which agents die again waits ever longer; others do not.
//   - A READ in several pieces that fails leaves pieces whose end UCX tells nobody. Its Done is closed when its fetch agent is over, which
//     is replaced for that: at once by the next one for new READs, and ended when its other READs have ended, or after Options.Drain.
//   - A serve agent that dies is started again at once, under another name. Agent and Metadata then name the new one.
//   - A serve agent outlives a process that is killed, with Options.Outlive, and serves until the next owner of the memory takes it over.
//   - A READ cannot be canceled. Closing a peer waits Options.Drain for its READs, then ends the fetch agent under them: once its
//     process is reaped (or its agent destroyed) nothing writes their destinations any more, and Done is closed.
//
// # Memory
//
// A destination inside memory that is registered on the same plane is written where it is. Any other destination is filled
// through a bounce buffer in pieces.
//
// With agents in this process (Options.Command empty), whoever maps and unmaps memory that is registered must unmap it by Plane.Unmap, or by
// libc's munmap: the library keeps what it knows of the memory otherwise, and takes another mapping at the same address for the former
// one. Memory that stays mapped, or is unmapped by nobody before the process ends, needs none of that.
//
// The plane has no tokens: whoever knows a registration's metadata can read all of it, for as long as the agent lives.
package nixl
