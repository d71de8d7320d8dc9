package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"github.com/pebbe/zmq4"
	"golang.org/x/sys/unix"

	"github.com/tensorferry/tensorferry/internal/hostname"
	"github.com/tensorferry/tensorferry/node"
	"github.com/tensorferry/tensorferry/region"
)

// checkShm asks what the start of a node would ask. A node's file is more than its pool, and the file system is not the only limit.
func checkShm(c node.Config) finding {
	dir := cmp.Or(c.ShmDir, node.DefaultShmDir)
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return finding{"shm", fail, fmt.Sprintf("%s: %v", dir, err), "name a directory on a tmpfs with --shm-dir"}
	}
	text := dir + ": no limit of its own"
	if st.Blocks > 0 {
		free, total := int64(st.Bavail)*st.Bsize, int64(st.Blocks)*st.Bsize
		text = fmt.Sprintf("%s: %s free of %s (%d of %d bytes)", dir, size(free), size(total), free, total)
	}
	asked, err := region.CheckSpace(dir, geometries(c)...)
	if asked > 0 {
		text += fmt.Sprintf(", %s wanted (%d bytes, pools with their tables)", size(asked), asked)
	}
	var space *region.SpaceError
	switch {
	case errors.As(err, &space):
		return finding{"shm", fail, fmt.Sprintf("%s; %s has %s (%d bytes) left", text, space.Limit, size(space.Free), space.Free), space.Fix}
	case err != nil:
		return finding{"shm", fail, text + ": " + err.Error(), "give --ec-cpu-bytes and --block-bytes as they are to be"}
	case st.Type != unix.TMPFS_MAGIC:
		return finding{"shm", warn, text + ", not a tmpfs", "encodings would be written back to a disk; name a directory on a tmpfs with --shm-dir"}
	}
	return finding{"shm", good, text, ""}
}

// geometries are those of the pools; what cannot be read is left out, checkConfig has said so. Before the bytes of a block are known they
// count as 1 MiB.
func geometries(c node.Config) (all []region.Geometry) {
	for _, p := range c.Pools {
		size, err := node.ParseBytes(p.ECCPUBytes)
		if err != nil || size <= 0 || p.Slots < 0 || p.BlockBytes < 0 {
			continue
		}
		block := cmp.Or(p.BlockBytes, 1<<20)
		all = append(all, region.Geometry{BlockBytes: block, Blocks: int(max(size/block, 1)), Slots: p.Slots})
	}
	return all
}

func checkKernel() finding {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return finding{"kernel", warn, err.Error(), ""}
	}
	return finding{"kernel", good, unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Machine[:]), ""}
}

// checkPopulate tries the call that pre-faults a pool; kernels before 5.14 do not have it.
func checkPopulate() finding {
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return finding{"populate", warn, err.Error(), ""}
	}
	defer func() { _ = unix.Munmap(page) }()
	if err := unix.Madvise(page, unix.MADV_POPULATE_WRITE); err != nil {
		return finding{"populate", warn, fmt.Sprintf("MADV_POPULATE_WRITE: %v", err), "a node starts more slowly: pages are touched one by one; Linux 5.14 has the call"}
	}
	return finding{"populate", good, "MADV_POPULATE_WRITE works", ""}
}

func checkMemlock(c node.Config) finding {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r); err != nil {
		return finding{"memlock", warn, err.Error(), ""}
	}
	text := "RLIMIT_MEMLOCK " + limitText(r.Cur)
	if wanted := wantedBytes(c); r.Cur != unix.RLIM_INFINITY && r.Cur < uint64(wanted) {
		return finding{"memlock", warn, text + fmt.Sprintf(", the pool is %d bytes", wanted),
			"RDMA cannot register the pool (the tcp and mapped planes do not care): ulimit -l unlimited, or docker run --ulimit memlock=-1"}
	}
	return finding{"memlock", good, text, ""}
}

// checkFiles looks at the hard limit: the Go runtime raises the soft one to it.
func checkFiles() finding {
	const few = 4096 // a connection of a peer or an engine is one descriptor or a few
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return finding{"nofile", warn, err.Error(), ""}
	}
	text := "RLIMIT_NOFILE " + limitText(r.Max)
	if r.Max < few {
		return finding{"nofile", warn, text, fmt.Sprintf("many peers need more: ulimit -n %d", few)}
	}
	return finding{"nofile", good, text, ""}
}

func limitText(n uint64) string {
	if n == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return fmt.Sprint(n)
}

// checkSocket asks what the start of a node would ask of the engines' socket. inUse is the verdict where a process has it.
func checkSocket(ctx context.Context, c node.Config, inUse string) finding {
	path, err := node.CheckSocket(ctx, c.Socket)
	switch {
	case errors.Is(err, node.ErrSocketInUse):
		return finding{"socket", inUse, path + " is in use: a node runs already, it may be", "a second one needs another path, with --socket"}
	case err != nil:
		return finding{"socket", fail, err.Error(), "give a path in a directory that this user may write to, with --socket"}
	}
	return finding{"socket", good, path + " is free", ""}
}

func checkPorts(c node.Config, inUse string) []finding {
	found := []finding{checkPort("side channel", cmp.Or(c.SideChannel, node.DefaultSideChannel), "--side-channel", inUse)}
	if host, _, err := net.SplitHostPort(c.SideChannel); err == nil && found[0].Verdict == good {
		if hostname.Loopback(host) {
			found[0].Detail += ": peers of this machine only"
		}
	}
	if c.Admin != node.AdminOff {
		found = append(found, checkPort("admin", cmp.Or(c.Admin, node.DefaultAdmin), "--admin", inUse))
	}
	return found
}

func checkPort(check, address, flag, inUse string) finding {
	l, err := net.Listen("tcp", address)
	if err != nil {
		fix := fmt.Sprintf("choose another with %s, port 0 for any free one", flag)
		var name *net.DNSError
		var form *net.AddrError
		switch {
		case errors.As(err, &form):
			return finding{check, fail, err.Error(), fmt.Sprintf("give HOST:PORT with %s", flag)}
		case errors.As(err, &name), errors.Is(err, unix.EADDRNOTAVAIL):
			return finding{check, fail, err.Error(), fmt.Sprintf("give an address of this machine, or a name that stands for one, with %s", flag)}
		case errors.Is(err, unix.EADDRINUSE):
			return finding{check, inUse, address + " is in use", "end the process that listens there (it may be a node that runs already), or " + fix}
		}
		return finding{check, fail, err.Error(), fix}
	}
	if err := l.Close(); err != nil {
		return finding{check, fail, err.Error(), ""}
	}
	return finding{check, good, address + " is free", ""}
}

// checkZMQ wants heartbeats, which came with libzmq 4.2.
func checkZMQ() finding {
	major, minor, _ := zmq4.Version()
	text := "libzmq " + zmqVersion()
	if !zmq4.HasCurve() {
		text += ", without CURVE"
	}
	if major < 4 || major == 4 && minor < 2 {
		return finding{"libzmq", fail, text, "install 4.2 or later: before it there are no heartbeats"}
	}
	return finding{"libzmq", good, text, ""}
}

func checkCongestion() finding {
	read := func(name string) string {
		b, err := os.ReadFile("/proc/sys/net/ipv4/" + name)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	now, there, allowed := read("tcp_congestion_control"), read("tcp_available_congestion_control"), read("tcp_allowed_congestion_control")
	if there == "" {
		return finding{"tcp", warn, "the congestion controls of this kernel cannot be read", ""}
	}
	text := fmt.Sprintf("congestion control %s; available: %s", now, there)
	switch {
	case slices.Contains(strings.Fields(there), "cubic"):
		return finding{"tcp", good, text, ""}
	case now == "bbr":
		return finding{"tcp", warn, text, "between machines bbr reaches about half of what cubic does: modprobe tcp_cubic"}
	}
	if allowed != "" && allowed != there {
		text += "; allowed to us: " + allowed
	}
	return finding{"tcp", good, text, ""}
}

// checkEnv shows what of the environment is in force. Variables that are inherited by accident are a common cause of trouble.
func checkEnv(environ []string) []finding {
	var found []finding
	slices.Sort(environ)
	for _, e := range environ {
		name, value, _ := strings.Cut(e, "=")
		switch {
		case name == "UCX_TLS" && !strings.Contains(value, "rc") && value != "all":
			found = append(found, finding{"env", warn, e, "UCX is kept from RDMA and shared memory; unset it unless that is meant"})
		case strings.HasPrefix(name, "VLLM_EC_"), strings.HasPrefix(name, "UCX_"):
			found = append(found, finding{"env", good, e, ""})
		case strings.HasPrefix(name, "FERRY_"):
			found = append(found, checkFerryVariable(name, e))
		}
	}
	if len(found) == 0 {
		found = append(found, finding{"env", good, "no VLLM_EC_, FERRY_ or UCX_ variable is set", ""})
	}
	return found
}

func checkFerryVariable(name, text string) finding {
	for _, k := range node.Keys() {
		if node.EnvName(k) == name {
			return finding{"env", good, text, ""}
		}
	}
	return finding{"env", warn, text, "no key of the configuration has this variable, so it does nothing"}
}
