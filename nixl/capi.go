package nixl

import (
	"fmt"
	"runtime"
	"strings"
	"unsafe"

	"github.com/ebitengine/purego"
	"golang.org/x/sys/unix"
)

// capi executes calls by the C library.
type capi struct {
	fn           map[string]uintptr // by name without the prefix nixl_capi_
	free, munmap uintptr            // libc's
}

// symbols of the C ABI that this package calls. Those after the empty name may be missing.
var symbols = []string{
	"create_configured_agent", "destroy_agent", "get_available_plugins", "string_list_size", "string_list_get",
	"destroy_string_list", "create_params", "params_add", "destroy_params", "params_create_iterator",
	"params_iterator_next", "params_destroy_iterator", "create_backend", "get_backend_params", "destroy_backend",
	"destroy_mem_list", "create_opt_args", "destroy_opt_args", "opt_args_add_backend", "opt_args_set_notif_msg",
	"opt_args_set_has_notif", "create_reg_dlist", "destroy_reg_dlist", "reg_dlist_add_desc", "register_mem",
	"deregister_mem", "get_local_md", "load_remote_md", "invalidate_remote_md", "create_xfer_dlist",
	"destroy_xfer_dlist", "xfer_dlist_add_desc", "prep_xfer_dlist", "release_xfer_dlist_handle", "create_xfer_req",
	"make_xfer_req", "post_xfer_req", "get_xfer_status", "release_xfer_req", "destroy_xfer_req",
	"create_notif_map", "destroy_notif_map", "get_notifs", "notif_map_size", "notif_map_get_agent_at",
	"notif_map_get_notifs_size", "notif_map_get_notif", "gen_notif", "is_stub",
	"",
	"get_xfer_telemetry", "create_remote_dlist", "agent_make_connection", "check_remote_md", "query_xfer_backend", "estimate_xfer_cost",
}

func newCAPI(library uintptr, lookup func(library uintptr, name string) (uintptr, error)) (*capi, error) {
	c := &capi{fn: make(map[string]uintptr, len(symbols))}
	optional := false
	for _, name := range symbols {
		if name == "" {
			optional = true
			continue
		}
		address, err := lookup(library, "nixl_capi_"+name)
		switch {
		case err == nil && address != 0:
			c.fn[name] = address
		case !optional:
			return nil, fmt.Errorf("%w: no symbol nixl_capi_%s (a NIXL older than 1.3?)", ErrUnsupported, name)
		}
	}
	for name, address := range map[string]*uintptr{"free": &c.free, "munmap": &c.munmap} {
		var err error
		if *address, err = lookup(purego.RTLD_DEFAULT, name); err != nil {
			return nil, fmt.Errorf("%w: libc's %s: %w", ErrUnsupported, name, err)
		}
	}
	return c, nil
}

func (c *capi) has(name string) bool { return c.fn[name] != 0 }

// call runs one function of the library. Pointers converted in the argument list are kept alive and in place for the call.
//
//go:uintptrescapes
func (c *capi) call(name string, args ...uintptr) Status {
	r, _, _ := purego.SyscallN(c.fn[name], args...)
	return Status(int32(r))
}

// isStub asks for a C bool, of which only the lowest byte counts.
func (c *capi) isStub() bool { return c.call("is_stub")&0xff != 0 }

// cstring is s with a final NUL. s holds no NUL: checked by the callers' validation.
func cstring(s string) *byte {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return &b[0]
}

// pointer converts an address that C gave.
func pointer(address uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&address)) }

func goString(address uintptr) string {
	if address == 0 {
		return ""
	}
	p, n := pointer(address), 0
	for *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}

func goBytes(address, n uintptr) []byte {
	if address == 0 || n == 0 {
		return []byte{}
	}
	return append([]byte(nil), unsafe.Slice((*byte)(pointer(address)), n)...)
}

// agentConfig is nixl_capi_agent_config_t: 40 bytes on 64-bit machines.
type agentConfig struct {
	progress, listen bool
	port             int32
	sync             int32
	workers          uint32 // ignored by the library: use the backend's parameter num_workers
	progressDelayUS  uint64
	listenDelayUS    uint64
	telemetry        bool
}

func (c *capi) createAgent(name string, o AgentConfig) (h handle, s Status) {
	config := agentConfig{
		progress:        !o.NoProgressThread,
		sync:            int32(o.Sync.native()),
		progressDelayUS: uint64(o.ProgressDelay.Microseconds()),
		listenDelayUS:   100_000,
		telemetry:       o.Telemetry,
	}
	s = c.call("create_configured_agent", uintptr(unsafe.Pointer(cstring(name))), uintptr(unsafe.Pointer(&config)), uintptr(unsafe.Pointer(&h)))
	return h, s
}

func (c *capi) destroyAgent(agent handle) { c.call("destroy_agent", agent) }

func (c *capi) plugins(agent handle) ([]string, Status) {
	var list, size uintptr
	if s := c.call("get_available_plugins", agent, uintptr(unsafe.Pointer(&list))); s != StatusSuccess {
		return nil, s
	}
	defer c.call("destroy_string_list", list)
	if s := c.call("string_list_size", list, uintptr(unsafe.Pointer(&size))); s != StatusSuccess {
		return nil, s
	}
	names := make([]string, 0, size)
	for i := range size {
		var name uintptr
		if s := c.call("string_list_get", list, i, uintptr(unsafe.Pointer(&name))); s != StatusSuccess {
			return nil, s
		}
		names = append(names, goString(name))
	}
	return names, StatusSuccess
}

func (c *capi) createBackend(agent handle, kind string, params map[string]string) (h handle, s Status) {
	var p uintptr
	if s := c.call("create_params", uintptr(unsafe.Pointer(&p))); s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_params", p)
	for key, value := range params {
		if s := c.call("params_add", p, uintptr(unsafe.Pointer(cstring(key))), uintptr(unsafe.Pointer(cstring(value)))); s != StatusSuccess {
			return 0, s
		}
	}
	s = c.call("create_backend", agent, uintptr(unsafe.Pointer(cstring(kind))), p, uintptr(unsafe.Pointer(&h)))
	return h, s
}

func (c *capi) backendParams(agent, backend handle) (map[string]string, Status) {
	var mems, params, it uintptr
	if s := c.call("get_backend_params", agent, backend, uintptr(unsafe.Pointer(&mems)), uintptr(unsafe.Pointer(&params))); s != StatusSuccess {
		return nil, s
	}
	defer c.call("destroy_mem_list", mems)
	defer c.call("destroy_params", params)
	if s := c.call("params_create_iterator", params, uintptr(unsafe.Pointer(&it))); s != StatusSuccess {
		return nil, s
	}
	defer c.call("params_destroy_iterator", it)
	out := map[string]string{}
	for more := true; more; {
		var key, value uintptr
		if s := c.call("params_iterator_next", it, uintptr(unsafe.Pointer(&key)), uintptr(unsafe.Pointer(&value)), uintptr(unsafe.Pointer(&more))); s != StatusSuccess {
			break // an empty map is reported as an error of the first step
		}
		if key != 0 {
			out[goString(key)] = goString(value)
		}
	}
	return out, StatusSuccess
}

func (c *capi) destroyBackend(backend handle) { c.call("destroy_backend", backend) }

// options makes opt_args with backends and, if not nil, a notification. The caller destroys it.
func (c *capi) options(backends []handle, notification []byte) (handle, Status) {
	var o uintptr
	if s := c.call("create_opt_args", uintptr(unsafe.Pointer(&o))); s != StatusSuccess {
		return 0, s
	}
	for _, b := range backends {
		if b == 0 {
			continue
		}
		if s := c.call("opt_args_add_backend", o, b); s != StatusSuccess {
			c.call("destroy_opt_args", o)
			return 0, s
		}
	}
	if notification != nil {
		s := c.call("opt_args_set_notif_msg", o, uintptr(unsafe.Pointer(unsafe.SliceData(notification))), uintptr(len(notification)))
		if s == StatusSuccess {
			s = c.call("opt_args_set_has_notif", o, 1)
		}
		if s != StatusSuccess {
			c.call("destroy_opt_args", o)
			return 0, s
		}
	}
	return o, StatusSuccess
}

func (c *capi) register(agent handle, t MemoryType, ranges []Range, backends []handle) (handle, Status) {
	var list uintptr
	if s := c.call("create_reg_dlist", uintptr(t), uintptr(unsafe.Pointer(&list))); s != StatusSuccess {
		return 0, s
	}
	o, s := c.options(backends, nil)
	if s == StatusSuccess {
		defer c.call("destroy_opt_args", o)
		for _, r := range ranges {
			if s = c.call("reg_dlist_add_desc", list, r.Addr, uintptr(r.Len), uintptr(r.Device), 0, 0); s != StatusSuccess {
				break
			}
		}
		if s == StatusSuccess {
			s = c.call("register_mem", agent, list, o)
		}
	}
	if s != StatusSuccess {
		c.call("destroy_reg_dlist", list)
		return 0, s
	}
	return list, StatusSuccess
}

func (c *capi) deregister(agent, registration handle) Status {
	o, s := c.options(nil, nil)
	if s == StatusSuccess {
		s = c.call("deregister_mem", agent, registration, o)
		c.call("destroy_opt_args", o)
	}
	c.call("destroy_reg_dlist", registration)
	return s
}

func (c *capi) localMetadata(agent handle) ([]byte, Status) {
	var data, n uintptr
	if s := c.call("get_local_md", agent, uintptr(unsafe.Pointer(&data)), uintptr(unsafe.Pointer(&n))); s != StatusSuccess {
		return nil, s
	}
	defer c.release(data)
	return goBytes(data, n), StatusSuccess
}

// release frees what the library allocated with malloc.
func (c *capi) release(address uintptr) {
	if address != 0 {
		purego.SyscallN(c.free, address)
	}
}

func (c *capi) unmap(b []byte) error {
	r, _, errno := purego.SyscallN(c.munmap, uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	if int32(r) != 0 {
		return unix.Errno(errno)
	}
	return nil
}

func (c *capi) loadPeer(agent handle, metadata []byte) (string, Status) {
	var name uintptr
	s := c.call("load_remote_md", agent, uintptr(unsafe.Pointer(unsafe.SliceData(metadata))), uintptr(len(metadata)), uintptr(unsafe.Pointer(&name)))
	if s != StatusSuccess {
		return "", s
	}
	defer c.release(name)
	return goString(name), StatusSuccess
}

func (c *capi) invalidatePeer(agent handle, name string) Status {
	return c.call("invalidate_remote_md", agent, uintptr(unsafe.Pointer(cstring(name))))
}

func (c *capi) list(t MemoryType, ranges []Range) (handle, Status) {
	var list uintptr
	if s := c.call("create_xfer_dlist", uintptr(t), uintptr(unsafe.Pointer(&list))); s != StatusSuccess {
		return 0, s
	}
	for _, r := range ranges {
		if s := c.call("xfer_dlist_add_desc", list, r.Addr, uintptr(r.Len), uintptr(r.Device)); s != StatusSuccess {
			c.call("destroy_xfer_dlist", list)
			return 0, s
		}
	}
	return list, StatusSuccess
}

// prepareLocal is the name under which NIXL's API takes the agent's own descriptors (NIXL_INIT_AGENT).
const prepareLocal = ""

func (c *capi) prepare(agent handle, peer string, t MemoryType, ranges []Range, backends []handle) (handle, Status) {
	list, s := c.list(t, ranges)
	if s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_xfer_dlist", list)
	o, s := c.options(backends, nil)
	if s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_opt_args", o)
	var h uintptr
	s = c.call("prep_xfer_dlist", agent, uintptr(unsafe.Pointer(cstring(peer))), list, uintptr(unsafe.Pointer(&h)), o)
	return h, s
}

func (c *capi) releasePrepared(agent, prepared handle) {
	c.call("release_xfer_dlist_handle", agent, prepared)
}

func (c *capi) createRequest(agent handle, r requestArgs) (handle, Status) {
	local, s := c.list(r.localType, r.local)
	if s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_xfer_dlist", local)
	remote, s := c.list(r.remoteType, r.remote)
	if s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_xfer_dlist", remote)
	o, s := c.options([]handle{r.backend}, r.notification)
	if s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_opt_args", o)
	var h uintptr
	s = c.call("create_xfer_req", agent, uintptr(r.operation), local, remote, uintptr(unsafe.Pointer(cstring(r.peer))), uintptr(unsafe.Pointer(&h)), o)
	return h, s
}

func (c *capi) makeRequest(agent handle, r preparedArgs) (handle, Status) {
	o, s := c.options([]handle{r.backend}, r.notification)
	if s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_opt_args", o)
	var h uintptr
	s = c.call("make_xfer_req", agent, uintptr(r.operation),
		r.local, uintptr(unsafe.Pointer(unsafe.SliceData(r.localIndices))), uintptr(len(r.localIndices)),
		r.remote, uintptr(unsafe.Pointer(unsafe.SliceData(r.remoteIndices))), uintptr(len(r.remoteIndices)),
		uintptr(unsafe.Pointer(&h)), o)
	return h, s
}

func (c *capi) post(agent, request handle) Status   { return c.call("post_xfer_req", agent, request, 0) }
func (c *capi) status(agent, request handle) Status { return c.call("get_xfer_status", agent, request) }

// releaseRequest gives both halves back: the library's request and the C shell around it, which cannot go before it.
func (c *capi) releaseRequest(agent, request handle) bool {
	if c.call("release_xfer_req", agent, request) != StatusSuccess {
		return false
	}
	c.call("destroy_xfer_req", request) // refuses only a shell that is not empty
	return true
}

func (c *capi) requestBackend(agent, request handle, among []handle) (handle, Status) {
	if !c.has("query_xfer_backend") {
		return 0, statusMissing
	}
	var shell uintptr
	if s := c.call("query_xfer_backend", agent, request, uintptr(unsafe.Pointer(&shell))); s != StatusSuccess {
		return 0, s
	}
	defer c.call("destroy_backend", shell)
	// A backend's handle is a shell that holds one pointer, and this is another shell around the same backend.
	for _, b := range among {
		if *(*uintptr)(pointer(b)) == *(*uintptr)(pointer(shell)) {
			return b, StatusSuccess
		}
	}
	return 0, StatusNotFound
}

func (c *capi) estimate(agent, request handle) (Estimate, Status) {
	if !c.has("estimate_xfer_cost") {
		return Estimate{}, statusMissing
	}
	var duration, margin int64
	var method int32
	s := c.call("estimate_xfer_cost", agent, request, 0, uintptr(unsafe.Pointer(&duration)), uintptr(unsafe.Pointer(&margin)), uintptr(unsafe.Pointer(&method)))
	if s != StatusSuccess {
		return Estimate{}, s
	}
	return Estimate{Duration: microseconds(uint64(max(duration, 0))), Margin: microseconds(uint64(max(margin, 0)))}, s
}

func (c *capi) connect(agent handle, peer string, backends []handle) Status {
	if !c.has("agent_make_connection") {
		return statusMissing
	}
	o, s := c.options(backends, nil)
	if s != StatusSuccess {
		return s
	}
	defer c.call("destroy_opt_args", o)
	return c.call("agent_make_connection", agent, uintptr(unsafe.Pointer(cstring(peer))), o)
}

func (c *capi) knows(agent handle, peer string, t MemoryType, ranges []Range) Status {
	if !c.has("check_remote_md") {
		return statusMissing
	}
	list, s := c.list(t, ranges)
	if s != StatusSuccess {
		return s
	}
	defer c.call("destroy_xfer_dlist", list)
	return c.call("check_remote_md", agent, uintptr(unsafe.Pointer(cstring(peer))), list)
}

func (c *capi) telemetry(agent, request handle) (Telemetry, Status) {
	if !c.has("get_xfer_telemetry") {
		return Telemetry{}, StatusNoTelemetry
	}
	var t struct{ startUS, postUS, transferUS, bytes, descriptors uint64 }
	s := c.call("get_xfer_telemetry", agent, request, uintptr(unsafe.Pointer(&t)))
	return Telemetry{
		Post: microseconds(t.postUS), Transfer: microseconds(t.transferUS), Bytes: t.bytes, Descriptors: t.descriptors,
	}, s
}

func (c *capi) notifications(agent handle) ([]Notification, Status) {
	var m, agents uintptr
	if s := c.call("create_notif_map", uintptr(unsafe.Pointer(&m))); s != StatusSuccess {
		return nil, s
	}
	defer c.call("destroy_notif_map", m)
	if s := c.call("get_notifs", agent, m, 0); s != StatusSuccess {
		return nil, s
	}
	if s := c.call("notif_map_size", m, uintptr(unsafe.Pointer(&agents))); s != StatusSuccess {
		return nil, s
	}
	var out []Notification
	for i := range agents {
		var name, count uintptr
		if s := c.call("notif_map_get_agent_at", m, i, uintptr(unsafe.Pointer(&name))); s != StatusSuccess {
			return out, s
		}
		if s := c.call("notif_map_get_notifs_size", m, name, uintptr(unsafe.Pointer(&count))); s != StatusSuccess {
			return out, s
		}
		peer := strings.Clone(goString(name))
		for j := range count {
			var data, n uintptr
			if s := c.call("notif_map_get_notif", m, name, j, uintptr(unsafe.Pointer(&data)), uintptr(unsafe.Pointer(&n))); s != StatusSuccess {
				return out, s
			}
			out = append(out, Notification{Peer: peer, Message: goBytes(data, n)})
		}
	}
	return out, StatusSuccess
}

func (c *capi) notify(agent handle, peer string, message []byte) Status {
	defer runtime.KeepAlive(message)
	return c.call("gen_notif", agent, uintptr(unsafe.Pointer(cstring(peer))), uintptr(unsafe.Pointer(unsafe.SliceData(message))), uintptr(len(message)), 0)
}
